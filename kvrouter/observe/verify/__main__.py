"""`kvrouter verify`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrouter.observe.verify.command import compare_and_print
from kvrouter.observe.verify.settings import COMMAND, VerifySettings
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[VerifySettings]) -> int:
    set_up_logs("error")  # the printed result already contains what warnings would report
    return compare_and_print(loaded)


if __name__ == "__main__":
    sys.exit(main())
