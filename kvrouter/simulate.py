"""`python -m kvrouter.simulate`, the earlier spelling of `kvrouter simulate`."""

import sys

from kvrouter.lab.simulate.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
