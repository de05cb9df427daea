"""`kvrouter simulate`: replay a trace in virtual time on simulated engines, once for each mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence

from kvrouter.errors import ConfigError, KvRouterError
from kvrouter.lab.simulate import generated
from kvrouter.lab.simulate.cells import Cell, policy_of
from kvrouter.lab.simulate.compare import compare
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import Fleet, Run, mocker_kind
from kvrouter.lab.simulate.placement import Replicas
from kvrouter.lab.simulate.progress import shown_progress
from kvrouter.lab.simulate.report import Possible, show, show_compared, write_compared, write_json
from kvrouter.lab.simulate.report_html import Page
from kvrouter.lab.simulate.report_page import TITLE, write_cells, write_runs
from kvrouter.lab.simulate.settings import COMMAND, Engines, Options, SimulateSettings
from kvrouter.lab.simulate.traces import TraceRequest, named_blocks, read_trace, scaled, spread
from kvrouter.lab.simulate.workloads import text_of
from kvrouter.policies import CUSTOM
from kvrouter.settings.read import Loaded, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate each mode; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[SimulateSettings]) -> int:
    try:
        options = loaded.settings.options()
        # before the work, so that a missing library does not waste it
        page = Page(TITLE) if options.html is not None else None
        requests = read_trace(options.trace, options.requests)
        if options.compared is not None:
            _compare(options, options.compared, requests, page)
        else:
            _replay(options, requests, page)
    except KvRouterError as error:
        raise ConfigError(str(error)) from None
    return 0


def _replay(options: Options, requests: Sequence[TraceRequest], page: Page | None) -> None:
    """The mocker's engines, at the pace of the trace."""
    arrivals = list(to_arrivals(spread(scaled(requests, options.scaling)), options))
    left_out = len(requests) - len(arrivals)
    if not arrivals:
        raise ConfigError(f"every prompt is longer than --max-model-len {options.engine.max_model_len}")
    runs = {mode: simulate(mode, arrivals, options) for mode in options.modes}
    possible = Possible.of(
        arrivals, options.workers * options.engine.num_blocks, block_size=options.engine.block_size
    )
    show(runs, possible, left_out=left_out)
    if options.json is not None:
        write_json(options.json, runs, possible, left_out=left_out)
    if page is not None and options.html is not None:
        write_runs(page, options.html, runs, possible, left_out=left_out)


def _compare(options: Options, engines: Engines, requests: Sequence[TraceRequest], page: Page | None) -> None:
    """Step models' engines: every mode and the oracle, in every cell."""
    cells = list(cells_of(engines, requests))
    with shown_progress("runs") as on_done:
        compared = compare(
            cells,
            options.modes,
            options.policy,
            seeds=engines.seeds,
            jobs=engines.jobs,
            on_done=on_done,
        )
    show_compared(compared, seeds=engines.seeds)
    if options.json is not None:
        write_compared(options.json, compared, seeds=engines.seeds)
    if page is not None and options.html is not None:
        write_cells(page, options.html, compared, seeds=engines.seeds)


def cells_of(engines: Engines, requests: Sequence[TraceRequest]) -> Iterator[Cell]:
    """Every workload with every cache and load."""
    speeds: list[tuple[float | None, float]] = [(load, 1.0) for load in engines.loads]
    for name in engines.workloads:
        for cache in engines.caches:
            for load, pace in speeds or [(None, pace) for pace in engines.paces]:
                yield Cell(
                    generated.named(name, requests, engines.stages),
                    cache,
                    load=load,
                    pace=pace,
                    workers=engines.workers,
                    model=engines.model,
                    speeds=engines.speeds,
                    replicas=engines.replicas,
                    sync=engines.sync,
                    frontend=engines.frontend,
                    fails=engines.fails,
                    joins=engines.joins,
                    kv_delay_s=engines.kv_delay_s,
                    leaving=engines.leaving,
                    slo=engines.slo,
                )


def simulate(mode: str, arrivals: Sequence[Arrival], options: Options) -> Run:
    """One mode, starting with empty caches."""
    if mode == CUSTOM and options.policy.custom is not None:
        options.policy.custom.begin()
    chance = random.Random(options.seed)
    policy = policy_of(mode, options.policy)
    fleet = Fleet(
        lambda agenda: Replicas(agenda, [policy], chance),
        mocker_kind(options.engine),
        [1.0] * options.workers,
    )
    with shown_progress(mode) as on_done:
        return fleet.run(arrivals, lambda done: on_done(done, len(arrivals)))


def to_arrivals(requests: Sequence[TraceRequest], options: Options) -> Iterator[Arrival]:
    """The requests that fit the model's length. Equal blocks become equal texts of four characters each."""
    block_size = options.engine.block_size
    for request in requests:
        # an engine would reject it; the report counts these
        if request.prompt_tokens >= options.engine.max_model_len:
            continue
        hashes = named_blocks(request, block_size)
        text = text_of(hashes)
        yield Arrival(request.arrival_s, hashes, request.prompt_tokens, max(1, request.output_tokens), text)


if __name__ == "__main__":
    sys.exit(main())
