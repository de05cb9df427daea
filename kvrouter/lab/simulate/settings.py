"""The settings of `kvrouter simulate`, and the cells that they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvrouter.core.routing.policy import AUTO
from kvrouter.errors import ConfigError
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.generated import STAGED, WORKLOADS, Stage, named, stages_of, workload_name
from kvrouter.lab.simulate.measures import Slo
from kvrouter.lab.simulate.placement import Frontend, Sync
from kvrouter.lab.simulate.split import GBPS, KV_BYTES_PER_TOKEN, PEERS, RULE, RULES, Roles
from kvrouter.lab.simulate.step_model import ORDERS, STEP_MODELS, StepModel
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, TraceRequest
from kvrouter.lab.simulate.workloads import cache_of
from kvrouter.policies import CUSTOM, SERVED_MODES, PolicySettings
from kvrouter.policies.files import PolicyFiles
from kvrouter.settings.declare import Command, Settings, did_you_mean, number, setting

DEFAULT_MODES = ("round-robin", "kv")
_UNSERVED = "direct"  # needs a header in each request, which a trace does not have
_MODES = sorted(set(SERVED_MODES) - {_UNSERVED})


def mode_name(text: str) -> str:
    """A mode, perhaps with an overlap weight: `kv:8`, `kv:auto`."""
    name, _, weight = text.partition(":")
    if name not in _MODES:
        raise ValueError(f"must be one of {', '.join(_MODES)}{did_you_mean(name, _MODES)}")
    if weight and weight != AUTO:
        _above(weight, least=0)
    return text


def _workload(text: str) -> str:
    workload_name(text)
    return text


def _above(text: str, *, least: float | None = None) -> float:
    """A number above 0, or of at least `least`."""
    value = number(text)
    if value is None or (value <= 0 if least is None else value < least):
        raise ValueError("must be a number above 0" if least is None else f"must be at least {least:g}")
    return value


def _list(text: str) -> tuple[float, ...]:
    return tuple(_above(one) for one in text.split(","))


def _list_text(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _failures(text: str) -> tuple[tuple[str, float], ...]:
    found = {}
    for one in text.split(","):
        name, _, at = one.partition("@")
        if not (name[:1] == "w" and name[1:].isdecimal() and int(name[1:])):
            raise ValueError("must be engines and seconds, as w3@60,w4@90; engines are w1, w2, ...")
        found[name] = _above(at, least=0)
    return tuple(found.items())


def _sync_ms(text: str) -> float | None:
    return None if text == "off" else _above(text)


def _numbers(help_: str, metavar: str, **more: Any) -> Any:
    """Numbers above 0, separated by commas."""
    return setting((), help_, metavar=metavar, read=_list, text=_list_text, is_repeated=False, **more)


@dataclass(frozen=True, slots=True)
class CellSettings(Settings):
    """What stands behind the routers and in front of them. Those with several values make several cells."""

    heading = "Cells"

    workload: tuple[str, ...] = setting(
        (),
        f"what is asked: {', '.join(WORKLOADS)} (docs/simulate.md)",
        metavar="NAME[:KEY=N,...]",
        read=_workload,
        is_repeated=True,
        default_text="trace",
        is_top=True,
    )
    stages: tuple[Stage, ...] = setting(
        (),
        f"rates of {', '.join(STAGED)}, requests/s for seconds; ! first: warm-up",
        metavar="RxS!,RxS",
        read=stages_of,
        text=lambda stages: ",".join(str(stage) for stage in stages),
        is_repeated=False,
        default_text="their own",
    )
    load: tuple[float, ...] = _numbers("shares of the measured saturation", "L,L", is_top=True)
    pace: tuple[float, ...] = _numbers("instead of --load: times the workload's own pace", "P,P")
    cache: tuple[float, ...] = _numbers(
        "all engines' blocks / distinct blocks", "C,C", default_text="1", is_top=True
    )
    kv_tokens: int | None = setting(
        None, "instead of --cache: tokens in the KV cache of each engine", least=1, default_text="--cache"
    )
    speeds: tuple[float, ...] = _numbers("relative speeds of the engines, repeated", "S,S")
    order: str = setting(ORDERS[0], "which prompt an engine takes next", choices=tuple(ORDERS))
    parallel_prefill: int = setting(1, "prompts in prefill at a time in an engine", least=1)
    step_tokens: int | None = setting(
        None, "prompt tokens of a step, at most", least=1, default_text="those of --timing"
    )
    max_num_seqs: int | None = setting(None, "requests in a batch", least=1, default_text="those of --timing")
    cancel: float = setting(0.0, "share of the clients that leave within 5 s", least=0, most=1)
    replicas: int = setting(1, "routers; a request comes through one at random", least=1, is_top=True)
    sync_ms: float | None = setting(
        5.0, "until a booking reaches the others", metavar="MS|off", read=_sync_ms, is_top=True
    )
    sync_loss: float = setting(0.0, "share of the sync frames that are lost, then repaired", least=0, most=1)
    queue_threshold: float = setting(
        0.0, "as the frontend's; here no request waits in vain", name="router-queue-threshold", least=0
    )
    session_affinity: Literal["off", "soft", "hard"] = setting(
        "off", "as the frontend's, for workloads with sessions: multi-turn, agents"
    )
    use_kv_events: bool = setting(
        True, "as the frontend's; without, prompts are taken for cached where they went"
    )
    fail: tuple[tuple[str, float], ...] = setting(
        (),
        "an engine that fails, and when: w3@60 is the third, after 60 s",
        metavar="wN@S,…",
        read=_failures,
        text=lambda fails: ",".join(f"{name}@{at:g}" for name, at in fails),
        is_repeated=False,
    )
    join: tuple[float, ...] = _numbers("seconds after which one more engine joins, each", "S,S")
    prefill_workers: int = setting(
        0,
        "of --workers, engines that only compute prompts; modes have a row for each --pd-rule, too",
        least=0,
    )
    decode_workers: int = setting(0, "of --workers, engines that generate what these hand over", least=0)
    pd_rule: tuple[str, ...] = setting(
        (),
        "which prompts are handed over; auto is the router's own rule (docs/simulate.md)",
        choices=RULES,
        metavar="RULE",
        is_repeated=True,
        default_text="all",
    )
    kv_from_peers: bool = setting(
        False, "whole engines read blocks of each other; modes have a row with this, too"
    )
    transfer_gbps: float = setting(GBPS, "Gb/s at which each engine sends, and receives, KV", least=0.01)
    kv_bytes_per_token: int = setting(KV_BYTES_PER_TOKEN, "bytes of a token's KV", least=1)
    kv_delay_ms: float = setting(0.0, "until a KV event reaches the routers", least=0)
    slo_ttft_s: float = setting(Slo().ttft_s, "goodput: most seconds to the first token", above=0)
    slo_itl_ms: float = setting(1000 * Slo().itl_s, "goodput: most ms between tokens, mean", above=0)

    def model(self, timing: str) -> StepModel:
        """The step model of that name, with what is set otherwise."""
        set_ = {"step_tokens": self.step_tokens, "max_num_seqs": self.max_num_seqs}
        changed: dict[str, Any] = {name: value for name, value in set_.items() if value is not None}
        return replace(STEP_MODELS[timing], order=self.order, parallel=self.parallel_prefill, **changed)

    @property
    def roles(self) -> Roles | None:
        """Of the engines; None: they serve whole requests."""
        if not (self.prefill_workers or self.kv_from_peers):
            return None
        return Roles(self.prefill_workers, self.decode_workers, self.transfer_gbps, self.kv_bytes_per_token)

    def checked(self) -> CellSettings:
        if bool(self.prefill_workers) != bool(self.decode_workers):
            raise ConfigError("give --prefill-workers and --decode-workers together")
        if self.roles is not None and (self.fail or self.cancel):
            raise ConfigError(
                "--fail and --cancel are for whole engines: leave out --prefill-workers, or --kv-from-peers"
            )
        if self.prefill_workers and self.kv_from_peers:
            raise ConfigError("--kv-from-peers is for whole engines: leave out --prefill-workers")
        if self.pd_rule and not self.prefill_workers:
            raise ConfigError("--pd-rule needs --prefill-workers and --decode-workers")
        if self.load and self.pace:
            raise ConfigError("--load and --pace both say how fast requests come: use one of them")
        if self.kv_tokens is not None and self.cache:
            raise ConfigError("--kv-tokens and --cache both say how large the caches are: use one of them")
        return self


@dataclass(frozen=True, slots=True)
class SimulateSettings(Settings):
    heading = "Simulation"

    trace: Path = setting(
        CONVERSATION_EXCERPT,
        "requests in JSON lines as Mooncake's or Qwen-Bailian's, also .gz",
        default_text="the excerpt that comes with kvrouter",
        is_top=True,
    )
    requests: int | None = setting(None, "read only the first ones", least=1, default_text="all", is_top=True)
    json: Path | None = setting(None, "also write the figures to this file", is_top=True)
    html: Path | None = setting(
        None, "also write a page with plots to this file (needs kvrouter[report])", is_top=True
    )
    workers: int = setting(8, "number of engines", least=1, is_top=True)
    timing: str = setting(
        "h100",
        "the engines' step model (docs/simulate.md)",
        choices=tuple(STEP_MODELS),
        former={"mocker": "use h100, which has the mocker's times, or leave --timing out"},
        is_top=True,
    )
    seeds: int = setting(1, "runs with other arrivals; the mean and spread are shown", least=1, is_top=True)
    jobs: int = setting(1, "processes", least=1)
    router_mode: tuple[str, ...] = setting(
        (),
        f"{', '.join(_MODES)}; with :8 that overlap weight",
        metavar="MODE[:WEIGHT]",
        read=mode_name,
        is_repeated=True,
        default_text=" and ".join(DEFAULT_MODES),
        heading="Routing",
        is_top=True,
    )
    policy: PolicySettings = field(default_factory=PolicySettings)
    files: PolicyFiles = field(default_factory=PolicyFiles)
    cell: CellSettings = field(default_factory=CellSettings)

    def checked(self) -> SimulateSettings:
        fails = self.cell.fail
        unknown = [name for name, _ in fails if int(name[1:]) > self.workers]
        if unknown or len(fails) >= self.workers:
            what = f"there is no {unknown[0]}" if unknown else "one must be left"
            raise ConfigError(f"--fail: {what}, with --workers {self.workers}")
        apart = self.cell.prefill_workers + self.cell.decode_workers
        if apart > self.workers:
            raise ConfigError(
                f"--prefill-workers and --decode-workers: {apart}, more than --workers {self.workers}"
            )
        return self

    def modes(self) -> tuple[Sequence[str], PolicySettings]:
        """The modes, a custom policy last, and what they are set to. Raises ConfigError.

        With prefill and decode apart each mode follows with each rule: `kv@auto`.
        """
        policy, _ = self.files.loaded(self.policy, "")
        modes = self.router_mode or (DEFAULT_MODES if self.cell.roles is None else DEFAULT_MODES[-1:])
        modes = (*modes, *([CUSTOM] if policy.custom is not None else ()))
        rules = () if self.cell.roles is None else self.cell.pd_rule or RULES
        if self.cell.kv_from_peers:
            rules = (PEERS,)
            if {"kv", "kv:auto"}.isdisjoint(modes):
                raise ConfigError("--kv-from-peers compares seconds: give --router-mode kv, or drop the flag")
        return (*modes, *(f"{mode}{RULE}{rule}" for mode in modes for rule in rules)), policy

    def cells(self, requests: Sequence[TraceRequest]) -> Iterator[Cell]:
        """Every workload with every cache and load. Raises ConfigError."""
        given = self.cell
        speeds: list[tuple[float | None, float]] = [(load, 1.0) for load in given.load]
        for name in given.workload or ("trace",):
            workload = named(name, requests, given.stages)
            caches = given.cache or (1.0,)
            if given.kv_tokens is not None:
                caches = (cache_of(workload, given.kv_tokens, self.workers),)
            for cache in caches:
                for load, pace in speeds or [(None, pace) for pace in given.pace or (1.0,)]:
                    yield Cell(
                        workload,
                        cache,
                        load=load,
                        pace=pace,
                        workers=self.workers,
                        model=given.model(self.timing),
                        speeds=given.speeds or (1.0,),
                        replicas=given.replicas,
                        sync=None if given.sync_ms is None else Sync(given.sync_ms / 1000, given.sync_loss),
                        frontend=Frontend(given.queue_threshold, given.session_affinity, given.use_kv_events),
                        fails=given.fail,
                        joins=given.join,
                        kv_delay_s=given.kv_delay_ms / 1000,
                        leaving=given.cancel,
                        slo=Slo(given.slo_ttft_s, given.slo_itl_ms / 1000),
                        roles=given.roles,
                    )


COMMAND = Command(
    "simulate",
    SimulateSettings,
    "Replay requests in virtual time on simulated engines, once for each mode and for an oracle.",
    removed={
        "duration": "use --pace, the times of the trace's own pace, or --load",
        "seed": "use --seeds N: the mean of runs with N seeds, and their spread",
        "speedup": "use --speeds: --speeds 2 makes all engines twice as fast",
        "num-blocks": "use --kv-tokens, or --cache",
        "block-size": "use --kv-tokens for the size of the cache: blocks have 512 tokens",
        **dict.fromkeys(
            ("tokens-per-id", "output-divisor", "max-model-len"),
            "it was for --timing mocker: step models serve the trace's prompts as they are, in blocks of 512"
            " tokens; leave it out",
        ),
        **dict.fromkeys(
            (
                "text-block-chars",
                "do-eviction",
                "eviction-threshold-chars",
                "eviction-target-chars",
                "eviction-interval-secs",
            ),
            "it had no effect: the simulator keeps all texts; leave it out",
        ),
    },
)
