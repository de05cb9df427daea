"""`python -m scripts.kit MODULE …` runs its `main`, with Ctrl-C handled from the first moment."""

from __future__ import annotations

import importlib
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load nothing runs yet
    module, *words = sys.argv[1:]
    sys.exit(importlib.import_module(f"scripts.kit.{module}").main(words))
