"""`kvrouter analyze`: what a trace, or live traffic, holds for a router."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from kvrouter.errors import ConfigError, KvRouterError
from kvrouter.lab.analyze.analysis import Analysis, FleetSize, analyze
from kvrouter.lab.analyze.apart import apart_of, sentences
from kvrouter.lab.analyze.guide import advice_of
from kvrouter.lab.analyze.live import Live, read_live
from kvrouter.lab.analyze.report import as_json, sections
from kvrouter.lab.analyze.settings import COMMAND, AnalyzeSettings
from kvrouter.lab.report import LabReport, Section
from kvrouter.lab.simulate.progress import shown_progress
from kvrouter.lab.simulate.step_model import STEP_MODELS, StepModel
from kvrouter.lab.simulate.traces import trace_requests, write_trace
from kvrouter.settings.read import Loaded, run

WORKERS, BLOCKS_EACH, BLOCK_SIZE = 8, 27_000, 16
"""The fleet if neither flags nor workers say: as in `kvrouter simulate`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Analyze and print; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[AnalyzeSettings]) -> int:
    settings = loaded.settings
    report = LabReport("What a trace holds for a router", settings.json, settings.html)
    try:
        found, model = _analysis(settings)
    except KvRouterError as error:
        raise ConfigError(str(error)) from None
    advice, apart = advice_of(found), apart_of(found, model, settings.pace)
    more = [Section("Prefill and decode apart", notes=[*sentences(found, apart, model)])]
    report.deliver([*sections(found, advice), *more], as_json(found, advice, apart))
    return 0


def _analysis(settings: AnalyzeSettings) -> tuple[Analysis, StepModel]:
    """The figures, and the engines' step model."""
    model = STEP_MODELS[settings.timing]
    if settings.live is not None:
        live = asyncio.run(read_live(settings.live, settings.access, settings.model))
        kept = live.requests[-settings.requests :] if settings.requests else live.requests
        if settings.output_tokens is not None:
            kept = [replace(one, output_tokens=settings.output_tokens) for one in kept]
        if settings.save_trace is not None:
            write_trace(settings.save_trace, kept)
        if live.prefill_tokens_per_s:
            model = replace(model, prefill_token_s=1 / live.prefill_tokens_per_s)
        return analyze(kept, _fleet(settings, live), source=live.source), model
    path = settings.trace
    assert path is not None
    with shown_progress(f"percent of {path.name}") as on_done:
        requests = trace_requests(path, settings.requests, lambda share: on_done(int(100 * share), 100))
        return analyze(requests, _fleet(settings), source=path.name), model


def _fleet(settings: AnalyzeSettings, live: Live | None = None) -> FleetSize:
    """Flags, then what the workers report, then the defaults."""
    reported = (live.workers, live.blocks_each, live.block_size) if live is not None else (0, 0, 0)
    return FleetSize(
        settings.workers or reported[0] or WORKERS,
        settings.num_blocks or reported[1] or BLOCKS_EACH,
        settings.block_size or reported[2] or BLOCK_SIZE,
    )


if __name__ == "__main__":
    sys.exit(main())
