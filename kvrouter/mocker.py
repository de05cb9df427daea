"""`python -m kvrouter.mocker`, the earlier spelling of `kvrouter mocker`."""

import sys

from kvrouter.lab.mocker.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
