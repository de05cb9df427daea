"""`kvrouter simulate`: requests in virtual time on simulated engines, once for each mode and the oracle."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrouter.errors import ConfigError, KvRouterError
from kvrouter.lab.report import LabReport
from kvrouter.lab.simulate.compare import compare
from kvrouter.lab.simulate.progress import shown_progress
from kvrouter.lab.simulate.report import MODELLED, TITLE, as_json, sections
from kvrouter.lab.simulate.settings import COMMAND, SimulateSettings
from kvrouter.lab.simulate.traces import read_trace
from kvrouter.settings.read import Loaded, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate each mode; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[SimulateSettings]) -> int:
    settings = loaded.settings
    try:
        modes, policy = settings.modes()
        report = LabReport(TITLE, settings.json, settings.html)
        cells = list(settings.cells(read_trace(settings.trace, settings.requests)))
        with shown_progress("runs") as on_done:
            compared = compare(
                cells, modes, policy, seeds=settings.seeds, jobs=settings.jobs, on_done=on_done
            )
    except KvRouterError as error:
        raise ConfigError(str(error)) from None
    figures = [as_json(one, seeds=settings.seeds) for one in compared]
    report.deliver(list(sections(compared, seeds=settings.seeds)), {"cells": figures}, about=MODELLED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
