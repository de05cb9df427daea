"""The settings of `python -m kvrouter.lab.simulate`, and the options that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvrouter.core.routing.policy import AUTO
from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.engine import EngineConfig, speed_up
from kvrouter.lab.simulate.generated import STAGED, WORKLOADS, Stage, stages_of, workload_name
from kvrouter.lab.simulate.measures import Slo
from kvrouter.lab.simulate.placement import Frontend, Sync
from kvrouter.lab.simulate.step_model import ORDERS, STEP_MODELS, StepModel
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, SHORT_EXCERPT, Scaling
from kvrouter.policies import CUSTOM, SERVED_MODES, PolicySettings
from kvrouter.policies.files import PolicyFiles
from kvrouter.settings.declare import Command, Settings, declared, did_you_mean, number, setting

DEFAULT_MODES = ("round-robin", "kv")
MOCKER = "mocker"
TRACE = "trace"
_UNSERVED = "direct"  # needs a header in each request, which a trace does not have


@dataclass(frozen=True, slots=True)
class Engines:
    """The step models' engines: how many, how fast, and what they are offered."""

    model: StepModel
    workers: int
    speeds: tuple[float, ...]
    workloads: tuple[str, ...]
    stages: tuple[Stage, ...]
    caches: tuple[float, ...]
    loads: tuple[float, ...]
    """Shares of saturation; empty: `paces`."""
    paces: tuple[float, ...]
    replicas: int
    sync: Sync | None
    frontend: Frontend
    fails: tuple[tuple[str, float], ...]
    joins: tuple[float, ...]
    kv_delay_s: float
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
    html: Path | None


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
class MockerEngines(Settings):
    heading = "With --timing mocker"

    duration: float | None = setting(
        None, "seconds from first to last request", above=0, default_text="as in the trace"
    )
    tokens_per_id: int | None = setting(
        None, "fewer: shorter prompts", least=1, default_text="as in the trace: 512, or 16 of Qwen-Bailian"
    )
    output_divisor: int = setting(1, "divide the output lengths by this", least=1)
    seed: int = setting(1, "seed of the random numbers")
    num_blocks: int = setting(27_000, "KV blocks of each engine", least=1)
    block_size: int = setting(16, "tokens of a block", least=1)
    max_num_seqs: int = setting(64, "requests in a batch", least=1)
    max_model_len: int = setting(131_072, "tokens", least=1)
    speedup: float = setting(1.0, "relative to Llama-3-8B on an H100", above=0)


@dataclass(frozen=True, slots=True)
class StepModelEngines(Settings):
    heading = "With another --timing: cells with the oracle, over seeds"

    workload: tuple[str, ...] = setting(
        (),
        f"what is asked: {', '.join(WORKLOADS)} (docs/simulate.md)",
        metavar="NAME[:KEY=N,...]",
        read=_workload,
        is_repeated=True,
        default_text=TRACE,
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
    speeds: tuple[float, ...] = _numbers("relative speeds of the engines, repeated", "S,S")
    order: str = setting(ORDERS[0], "which prompt an engine takes next", choices=tuple(ORDERS))
    parallel_prefill: int = setting(1, "prompts in prefill at a time in an engine", least=1)
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
    step_tokens: int | None = setting(
        None, "prompt tokens of a step, at most", least=1, default_text="those of --timing"
    )
    kv_delay_ms: float = setting(0.0, "until a KV event reaches the routers", least=0)
    slo_ttft_s: float = setting(Slo().ttft_s, "goodput: most seconds to the first token", above=0)
    slo_itl_ms: float = setting(1000 * Slo().itl_s, "goodput: most ms between tokens, mean", above=0)
    seeds: int = setting(1, "runs with other arrivals; the mean and spread are shown", least=1, is_top=True)
    jobs: int = setting(1, "processes", least=1)

    def given(self) -> list[str]:
        """What only step models have, as flags, if it is not the default."""
        return [one.flag for one in declared(type(self)) if one.value_in(self) != one.default]


@dataclass(frozen=True, slots=True)
class SimulateSettings(Settings):
    heading = "Simulation"

    trace: Path = setting(
        CONVERSATION_EXCERPT,
        "requests in JSON lines as Mooncake's or Qwen-Bailian's, also .gz",
        default_text="the excerpt that comes with kvrouter",
        is_top=True,
    )
    requests: int | None = setting(
        None, "read only the first ones", least=1, default_text="700 for mocker, else all", is_top=True
    )
    json: Path | None = setting(None, "also write the figures to this file", is_top=True)
    html: Path | None = setting(
        None, "also write a page with plots to this file (needs kvrouter[report])", is_top=True
    )
    workers: int = setting(8, "number of engines", least=1, is_top=True)
    timing: str = setting(
        MOCKER,
        "the engines' model: the mocker's, or a step model (docs/simulate.md)",
        choices=(MOCKER, *STEP_MODELS),
        is_top=True,
    )
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
    mocker: MockerEngines = field(default_factory=MockerEngines)
    step_model: StepModelEngines = field(default_factory=StepModelEngines)

    def options(self) -> Options:
        """Raises ConfigError."""
        policy, _ = self.files.loaded(self.policy, "")
        modes = self.router_mode or DEFAULT_MODES
        if policy.custom is not None:
            modes = (*modes, CUSTOM)
        mocker = self.mocker
        if mocker.tokens_per_id is not None and mocker.tokens_per_id % mocker.block_size:
            raise ConfigError(
                f"--tokens-per-id {mocker.tokens_per_id} must be a multiple of "
                f"--block-size {mocker.block_size}"
            )
        engine = EngineConfig(
            num_blocks=mocker.num_blocks,
            block_size=mocker.block_size,
            max_num_seqs=mocker.max_num_seqs,
            max_model_len=mocker.max_model_len,
        )
        return Options(
            trace=self.trace,
            requests=self.requests or self._few(),
            workers=self.workers,
            scaling=Scaling(mocker.tokens_per_id, mocker.output_divisor, mocker.duration),
            engine=speed_up(engine, mocker.speedup),
            compared=self._engines(),
            modes=tuple(dict.fromkeys(modes)),
            policy=policy,
            seed=mocker.seed,
            json=self.json,
            html=self.html,
        )

    def _few(self) -> int | None:
        """The mocker's engines take a second for ten requests, so they get a part of the excerpt."""
        return SHORT_EXCERPT if (self.trace, self.timing) == (CONVERSATION_EXCERPT, MOCKER) else None

    def _engines(self) -> Engines | None:
        given = self.step_model
        if self.timing == MOCKER:
            if given.given():
                raise ConfigError(f"{given.given()[0]} needs --timing {' or '.join(STEP_MODELS)}")
            return None
        unknown = [name for name, _ in given.fail if int(name[1:]) > self.workers]
        if unknown or len(given.fail) >= self.workers:
            what = f"there is no {unknown[0]}" if unknown else "one must be left"
            raise ConfigError(f"--fail: {what}, with --workers {self.workers}")
        if given.load and given.pace:
            raise ConfigError("--load and --pace both say how fast requests come: use one of them")
        return Engines(
            model=self._model(),
            workers=self.workers,
            speeds=given.speeds or (1.0,),
            workloads=given.workload or (TRACE,),
            stages=given.stages,
            caches=given.cache or (1.0,),
            loads=given.load,
            paces=given.pace or (1.0,),
            replicas=given.replicas,
            sync=Sync(given.sync_ms / 1000, given.sync_loss) if given.sync_ms is not None else None,
            frontend=Frontend(given.queue_threshold, given.session_affinity, given.use_kv_events),
            fails=given.fail,
            joins=given.join,
            kv_delay_s=given.kv_delay_ms / 1000,
            leaving=given.cancel,
            slo=Slo(given.slo_ttft_s, given.slo_itl_ms / 1000),
            seeds=given.seeds,
            jobs=given.jobs,
        )

    def _model(self) -> StepModel:
        given, model = self.step_model, STEP_MODELS[self.timing]
        model = model.served(given.order, given.parallel_prefill)
        return replace(model, step_tokens=given.step_tokens) if given.step_tokens is not None else model


COMMAND = Command(
    "simulate",
    SimulateSettings,
    "Replay a trace in virtual time on simulated engines, once for each mode.",
    removed=dict.fromkeys(
        (
            "text-block-chars",
            "do-eviction",
            "eviction-threshold-chars",
            "eviction-target-chars",
            "eviction-interval-secs",
        ),
        "it had no effect: the simulator keeps all texts; leave it out",
    ),
)
