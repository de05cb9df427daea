"""`python -m scripts.kit`: the demo, with Ctrl-C handled from the first moment."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # nothing runs yet while modules load: end without a traceback
    from scripts.kit.demo import main

    sys.exit(main())
