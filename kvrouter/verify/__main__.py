"""`kvrouter verify`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrouter.telemetry.logs import set_up_logs
from kvrouter.verify.command import main as compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    set_up_logs("error")  # the printed result already contains what warnings would report
    return compare(arguments)


if __name__ == "__main__":
    sys.exit(main())
