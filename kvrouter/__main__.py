"""`python -m kvrouter COMMAND …`."""

import sys

from kvrouter.cli import main

sys.exit(main())
