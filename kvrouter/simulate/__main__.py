"""`python -m kvrouter.simulate`: replay a trace in virtual time on simulated engines, once for each mode."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvrouter.config import FlagHelp, not_negative, positive, positive_int
from kvrouter.errors import ConfigError, KvRouterError
from kvrouter.frontend.flags.policies import SERVED_MODES, add_policy_flags, policy_settings
from kvrouter.mocker.engine import EngineConfig, speed_up
from kvrouter.policies import CUSTOM, PolicySettings, new_policy
from kvrouter.simulate.fleet import Arrival, Fleet, Run
from kvrouter.simulate.report import show, write_json
from kvrouter.simulate.traces import (
    CONVERSATION_EXCERPT,
    TRACE_ID_TOKENS,
    Scaling,
    TraceRequest,
    named_blocks,
    read_mooncake,
    scaled,
    spread,
)

DEFAULT_MODES = ("round-robin", "kv")
_UNSERVED = "direct"  # needs a header in each request, which a trace does not have


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    trace: Path
    requests: int | None
    workers: int
    scaling: Scaling
    engine: EngineConfig
    modes: tuple[str, ...]
    policy: PolicySettings
    seed: int
    json: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate each mode; returns the exit code."""
    try:
        options = parse_options(arguments)
        requests = read_mooncake(options.trace, options.requests)
        arrivals = list(to_arrivals(spread(scaled(requests, options.scaling)), options))
        left_out = len(requests) - len(arrivals)
        if not arrivals:
            raise ConfigError(f"every prompt is longer than --max-model-len {options.engine.max_model_len}")
        runs = {mode: simulate(mode, arrivals, options) for mode in options.modes}
        show(runs, left_out=left_out)
        if options.json is not None:
            write_json(options.json, runs, left_out=left_out)
    except KvRouterError as error:
        print(f"kvrouter.simulate: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def simulate(mode: str, arrivals: Sequence[Arrival], options: Options) -> Run:
    """One mode, starting with empty caches."""
    if mode == CUSTOM and options.policy.custom is not None:
        options.policy.custom.begin()
    policy, chance = new_policy(mode, options.policy), random.Random(options.seed).random
    fleet = Fleet(policy, chance, options.workers, engine=options.engine)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(mode, total=len(arrivals))
        return fleet.run(arrivals, lambda done: progress.update(task, completed=done))


def to_arrivals(requests: Sequence[TraceRequest], options: Options) -> Iterator[Arrival]:
    """The requests that fit the model's length. Equal blocks become equal texts of four characters each."""
    block_size, tokens_per_id = options.engine.block_size, options.scaling.tokens_per_id
    for request in requests:
        # an engine would reject it; the report counts these
        if request.prompt_tokens >= options.engine.max_model_len:
            continue
        hashes = named_blocks(request, tokens_per_id=tokens_per_id, block_size=block_size)
        text = "".join(chr(0x4E00 + hash_ % 20_000) * 4 for hash_ in hashes)
        yield Arrival(request.arrival_s, hashes, request.prompt_tokens, max(1, request.output_tokens), text)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises ConfigError."""
    flags = _parser().parse_args(arguments)
    policy, _ = policy_settings(flags)
    modes = tuple(flags.router_mode or DEFAULT_MODES)
    if policy.custom is not None:
        modes = (*(flags.router_mode or DEFAULT_MODES), CUSTOM)
    if flags.tokens_per_id % flags.block_size:
        raise ConfigError(
            f"--tokens-per-id {flags.tokens_per_id} must be a multiple of --block-size {flags.block_size}"
        )
    engine = EngineConfig(
        num_blocks=flags.num_blocks,
        block_size=flags.block_size,
        max_num_seqs=flags.max_num_seqs,
        max_model_len=flags.max_model_len,
    )
    return Options(
        trace=flags.trace,
        requests=flags.requests,
        workers=flags.workers,
        scaling=Scaling(flags.tokens_per_id, flags.output_divisor, flags.duration),
        engine=speed_up(engine, flags.speedup),
        modes=tuple(dict.fromkeys(modes)),
        policy=policy,
        seed=flags.seed,
        json=flags.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvrouter.simulate",
        description=__doc__,
        formatter_class=FlagHelp,
    )
    add = parser.add_argument
    add("--trace", type=Path, default=CONVERSATION_EXCERPT, help="requests in Mooncake's JSON lines")
    add("--requests", type=positive_int, help="read only the first ones")
    add("--duration", type=positive, help="seconds from first to last request; default: as in the trace")
    add("--tokens-per-id", type=positive_int, default=TRACE_ID_TOKENS, help="fewer: shorter prompts")
    add("--output-divisor", type=positive_int, default=1, help="divide the output lengths by this")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--seed", type=int, default=1, help="seed of the random numbers")
    engine = parser.add_argument_group("engines")
    engine.add_argument("--workers", type=positive_int, default=8, help="number of engines")
    engine.add_argument("--num-blocks", type=positive_int, default=27_000, help="KV blocks of each engine")
    engine.add_argument("--block-size", type=positive_int, default=16, help="tokens of a block")
    engine.add_argument("--max-num-seqs", type=positive_int, default=64, help="requests in a batch")
    engine.add_argument("--max-model-len", type=positive_int, default=131_072, help="tokens")
    engine.add_argument("--speedup", type=positive, default=1.0, help="relative to Llama-3-8B on an H100")
    routing = parser.add_argument_group("routing")
    routing.add_argument(
        "--router-mode",
        action="append",
        choices=sorted(set(SERVED_MODES) - {_UNSERVED}),
        help=f"repeatable; default: {' and '.join(DEFAULT_MODES)}",
    )
    routing.add_argument("--kv-overlap-score-weight", type=not_negative, help="default: that of the mode")
    routing.add_argument("--router-temperature", type=not_negative, default=0.0, help="above 0: softmax")
    add_policy_flags(routing)
    return parser


if __name__ == "__main__":
    sys.exit(main())
