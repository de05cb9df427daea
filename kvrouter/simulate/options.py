"""The command line of `python -m kvrouter.simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrouter.config import FlagHelp, not_negative, positive, positive_int, share
from kvrouter.errors import ConfigError
from kvrouter.frontend.flags.policies import SERVED_MODES, add_policy_flags, policy_settings
from kvrouter.mocker.engine import EngineConfig, speed_up
from kvrouter.policies import CUSTOM, PolicySettings
from kvrouter.simulate.measures import Slo
from kvrouter.simulate.placement import Sync
from kvrouter.simulate.step_model import ORDERS, STEP_MODELS, StepModel
from kvrouter.simulate.traces import CONVERSATION_EXCERPT, SHORT_EXCERPT, TRACE_ID_TOKENS, Scaling

DEFAULT_MODES = ("round-robin", "kv")
MOCKER = "mocker"
TRACE = "trace"
WORKLOADS = (TRACE, "docs", "hot", "hot-3", "hot-10", "hot-40", "zero", "groups", "siblings")
_UNSERVED = "direct"  # needs a header in each request, which a trace does not have


@dataclass(frozen=True, slots=True)
class Engines:
    """The step models' engines: how many, how fast, and what they are offered."""

    model: StepModel
    workers: int
    speeds: tuple[float, ...]
    workloads: tuple[str, ...]
    caches: tuple[float, ...]
    loads: tuple[float, ...]
    """Shares of saturation; empty: `paces`."""
    paces: tuple[float, ...]
    replicas: int
    sync: Sync | None
    leaving: float
    slo: Slo
    seeds: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `compared` None: the mocker's engines, at the trace's pace."""

    trace: Path
    requests: int | None
    """Read only the first ones."""
    workers: int
    scaling: Scaling
    engine: EngineConfig
    compared: Engines | None
    modes: tuple[str, ...]
    policy: PolicySettings
    seed: int
    json: Path | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises ConfigError."""
    flags = _parser().parse_args(arguments)
    policy, _ = policy_settings(flags)
    modes = tuple(flags.router_mode or DEFAULT_MODES)
    if policy.custom is not None:
        modes = (*modes, CUSTOM)
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
        requests=flags.requests or _few(flags),
        workers=flags.workers,
        scaling=Scaling(flags.tokens_per_id, flags.output_divisor, flags.duration),
        engine=speed_up(engine, flags.speedup),
        compared=_engines(flags),
        modes=tuple(dict.fromkeys(modes)),
        policy=policy,
        seed=flags.seed,
        json=flags.json,
    )


def _few(flags: argparse.Namespace) -> int | None:
    """The mocker's engines take a second for ten requests, so they get a part of the excerpt."""
    return SHORT_EXCERPT if (flags.trace, flags.timing) == (CONVERSATION_EXCERPT, MOCKER) else None


def _engines(flags: argparse.Namespace) -> Engines | None:
    if flags.timing == MOCKER:
        for name in ("workload", "cache", "load", "pace", "speeds"):
            if getattr(flags, name):
                raise ConfigError(f"--{name} needs --timing {' or '.join(STEP_MODELS)}")
        return None
    if flags.load and flags.pace:
        raise ConfigError("--load and --pace both say how fast requests come: use one of them")
    chosen = STEP_MODELS[flags.timing]
    return Engines(
        model=chosen.served(flags.order, flags.parallel_prefill),
        workers=flags.workers,
        speeds=flags.speeds or (1.0,),
        workloads=tuple(flags.workload or [TRACE]),
        caches=flags.cache or (1.0,),
        loads=flags.load or (),
        paces=flags.pace or (1.0,),
        replicas=flags.replicas,
        sync=flags.sync_ms and Sync(flags.sync_ms / 1000, flags.sync_loss),
        leaving=flags.cancel,
        slo=Slo(flags.slo_ttft_s, flags.slo_itl_ms / 1000),
        seeds=flags.seeds,
        jobs=flags.jobs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvrouter.simulate",
        description="Replay a trace in virtual time on simulated engines, once for each mode.",
        formatter_class=FlagHelp,
    )
    add = parser.add_argument
    add(
        "--trace", type=Path, default=CONVERSATION_EXCERPT, help="requests in Mooncake's JSON lines, also .gz"
    )
    add(
        "--requests",
        type=positive_int,
        help="read only the first ones; default: 700 for mocker, else all",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--workers", type=positive_int, default=8, help="number of engines")
    add(
        "--timing",
        choices=[MOCKER, *STEP_MODELS],
        default=MOCKER,
        help="the engines' model: the mocker's, or a step model (docs/simulate.md)",
    )
    _add_mocker_flags(parser)
    _add_step_model_flags(parser)
    routing = parser.add_argument_group("routing")
    routing.add_argument(
        "--router-mode",
        action="append",
        type=mode_name,
        metavar="MODE[:WEIGHT]",
        help=f"{', '.join(_MODES)}; with :8 that overlap weight; repeatable;"
        f" default: {' and '.join(DEFAULT_MODES)}",
    )
    routing.add_argument("--kv-overlap-score-weight", type=not_negative, help="default: that of the mode")
    routing.add_argument("--router-temperature", type=not_negative, default=0.0, help="above 0: softmax")
    add_policy_flags(routing)
    return parser


def _add_mocker_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--timing mocker")
    add = group.add_argument
    add("--duration", type=positive, help="seconds from first to last request; default: as in the trace")
    add("--tokens-per-id", type=positive_int, default=TRACE_ID_TOKENS, help="fewer: shorter prompts")
    add("--output-divisor", type=positive_int, default=1, help="divide the output lengths by this")
    add("--seed", type=int, default=1, help="seed of the random numbers")
    add("--num-blocks", type=positive_int, default=27_000, help="KV blocks of each engine")
    add("--block-size", type=positive_int, default=16, help="tokens of a block")
    add("--max-num-seqs", type=positive_int, default=64, help="requests in a batch")
    add("--max-model-len", type=positive_int, default=131_072, help="tokens")
    add("--speedup", type=positive, default=1.0, help="relative to Llama-3-8B on an H100")


def _add_step_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other timings: cells with the oracle, over seeds")
    add = group.add_argument
    add("--workload", action="append", choices=WORKLOADS, help=f"repeatable; default: {TRACE}")
    add("--load", type=_list_of(positive), metavar="L,L", help="shares of the measured saturation")
    add(
        "--pace",
        type=_list_of(positive),
        metavar="P,P",
        help="instead of --load: times the workload's own pace",
    )
    add(
        "--cache",
        type=_list_of(positive),
        metavar="C,C",
        help="all engines' blocks / distinct blocks; default: 1",
    )
    add("--speeds", type=_list_of(positive), metavar="S,S", help="relative speeds of the engines, repeated")
    add("--order", choices=ORDERS, default=ORDERS[0], help="which prompt an engine takes next")
    add("--parallel-prefill", type=positive_int, default=1, help="prompts in prefill at a time in an engine")
    add("--cancel", type=share, default=0.0, help="share of the clients that leave within 5 s")
    add("--replicas", type=positive_int, default=1, help="routers; a request comes through one at random")
    add("--sync-ms", type=_sync_ms, default=5.0, metavar="MS|off", help="until a booking reaches the others")
    add("--sync-loss", type=share, default=0.0, help="share of the sync frames that are lost, then repaired")
    add("--slo-ttft-s", type=positive, default=Slo().ttft_s, help="goodput: most seconds to the first token")
    add(
        "--slo-itl-ms",
        type=positive,
        default=1000 * Slo().itl_s,
        help="goodput: most ms between tokens, mean",
    )
    add(
        "--seeds",
        type=positive_int,
        default=1,
        help="runs with other arrivals; the mean and spread are shown",
    )
    add("--jobs", type=positive_int, default=1, help="processes")


_MODES = sorted(set(SERVED_MODES) - {_UNSERVED})


def mode_name(text: str) -> str:
    """A mode, perhaps with an overlap weight: `kv:8`."""
    name, _, weight = text.partition(":")
    if name not in _MODES:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(_MODES)})")
    if weight:
        not_negative(weight)
    return text


def _list_of(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def read(text: str) -> tuple[float, ...]:
        return tuple(kind(one) for one in text.split(","))

    return read


def _sync_ms(text: str) -> float | None:
    return None if text == "off" else positive(text)
