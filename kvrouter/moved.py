"""Packages by the names that they had before they moved, for imports and for `python -m`."""

import sys
from importlib import import_module


def moved(name: str, to: str) -> None:
    """Let the module `name`, which is being imported or run, be the package `to`."""
    if name == "__main__":
        sys.exit(import_module(f"{to}.__main__").main())
    # its modules are found by the package's path: `from kvrouter.mocker.answers import Answer`
    sys.modules[name] = import_module(to)
