"""`kvrouter doctor` on the command line."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from kvrouter.observe.doctor.examination import examine
from kvrouter.observe.doctor.report import as_json, as_text
from kvrouter.observe.doctor.settings import COMMAND, DoctorSettings
from kvrouter.observe.output import forget_stdout
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine and print; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[DoctorSettings]) -> int:
    set_up_logs("critical")  # the findings contain what NATS's warnings would report
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of TLS connections that servers end
    report = asyncio.run(examine(loaded.settings))
    text = as_json(report) if loaded.settings.json else as_text(report)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
