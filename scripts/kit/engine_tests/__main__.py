"""`python -m scripts.kit.engine_tests`, with Ctrl-C handled from the first moment."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load nothing runs yet
    from scripts.kit.engine_tests.script import main

    sys.exit(main())
