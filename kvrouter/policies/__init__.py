"""The built-in policies, one for each `--router-mode`. They own no tables, tasks or caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.policy import AUTO
from kvrouter.errors import ConfigError
from kvrouter.policies.baseline import Direct, LeastLoaded, PowerOfTwo, Random, RoundRobin
from kvrouter.policies.importing import GuardedPolicies
from kvrouter.policies.kv import Kv
from kvrouter.policies.kv_score import OVERLAP_WEIGHT as KV_SCORE_WEIGHT
from kvrouter.policies.kv_score import KvScore
from kvrouter.policies.prefix_affinity import PrefixAffinity
from kvrouter.policies.scored import Scored
from kvrouter.policies.sticky import Sticky
from kvrouter.policies.two_stage import ROUND_ROBIN, TwoStage, read_header_name
from kvrouter.settings import declare
from kvrouter.settings.declare import Settings, setting

POLICIES: dict[str, type[BuiltInPolicy]] = {
    "kv": Kv,
    "kv-score": KvScore,
    "prefix-affinity": PrefixAffinity,
    "scored": Scored,
    "sticky": Sticky,
    "two-stage": TwoStage,
    "p2c": PowerOfTwo,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "random": Random,
    "direct": Direct,
}

# The mode's name in decisions if `--router-policy` names a class.
CUSTOM = "own"


SERVED_MODES = tuple(sorted(POLICIES))
"""The choices of `--router-mode`."""


def _read_imbalance(text: str) -> float:
    value = float("inf") if text == "inf" else declare.number(text)  # number() reads finite ones only
    if value is None or value < 0:
        raise ValueError("must be inf or a number of at least 0")
    return value


def _read_stage_one(text: str) -> str:
    try:
        header = TwoStage(text).header
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text if not header else text.removesuffix(header) + read_header_name(header)


@dataclass(frozen=True, slots=True)
class PolicySettings(Settings):
    """What an operator sets about the modes; each mode reads its part. Defaults: the published values."""

    heading = "Routing modes (each mode ignores the settings of the others)"

    overlap_decay: float = setting(
        0.0,
        "kv, with a number as the weight: how fast overlap loses credit where more prefill is charged",
        name="router-kv-overlap-score-credit-decay",
        least=0,
        reloadable=True,
    )
    active_request_weight: float = setting(
        0.0,
        "kv, with a number as the weight: cost of each request in flight, in blocks",
        name="router-active-request-weight",
        least=0,
        reloadable=True,
    )
    gpu_cache_usage_weight: float = setting(
        1.0,
        "kv-score: weight of the engine's KV usage",
        name="kv-gpu-cache-usage-weight",
        least=0,
        reloadable=True,
    )
    waiting_requests_weight: float = setting(
        1.0,
        "kv-score: weight of the engine's queue",
        name="kv-waiting-requests-weight",
        least=0,
        reloadable=True,
    )
    imbalanced_threshold: float = setting(
        10.0,
        "prefix-affinity: difference of requests between the most and the least loaded worker; or inf",
        read=_read_imbalance,
        reloadable=True,
    )
    match_rate_threshold: float = setting(
        0.1, "prefix-affinity: share of the text that must match", least=0, most=1, reloadable=True
    )
    sticky_hit_rate: float = setting(
        0.8, "sticky: share of the prompt that must be cached", least=0, most=1, reloadable=True
    )
    sticky_penalty_s: float = setting(
        1.0,
        "sticky: most seconds of additional waiting for a worker that has the prefix",
        least=0,
        reloadable=True,
    )
    stage_one: str = setting(
        ROUND_ROBIN,
        "two-stage: how to choose the group",
        metavar="round-robin|hash|header:NAME",
        read=_read_stage_one,
    )
    stage_one_blocks: int = setting(4, "two-stage: leading blocks that --stage-one hash uses", least=1)
    group_label: str = setting("group", "two-stage: the card label that names a group", metavar="LABEL")
    scored: Scored | None = None
    """What an EndpointPickerConfig asks for; None: Heimdall's published weights."""
    custom: GuardedPolicies | None = None
    """Makes the policies of `--router-policy`; the mode is `own` then."""
    overlap_weight: float | Literal["auto"] | None = setting(
        None,
        "w in cost = w*prefill + decode; auto compares seconds of prefill, 1 is the published default",
        name="kv-overlap-score-weight",
        least=0,
        default_text="auto; for kv-score 2",
        heading="Routing",
        is_top=True,
        reloadable=True,
    )
    """None: the mode's own default."""
    temperature: float = setting(
        0.0,
        "0: lowest cost; above: softmax over costs",
        name="router-temperature",
        least=0,
        heading="Routing",
        is_top=True,
        reloadable=True,
    )


def new_policy(mode: str, settings: PolicySettings, turn: int = 0) -> BuiltInPolicy:
    """The policy of a mode with these settings. `turn`: where modes that count turns begin."""
    if mode == CUSTOM and settings.custom is not None:
        return settings.custom()
    make = _WITH_SETTINGS.get(mode)
    return make(settings, turn) if make is not None else POLICIES[mode]()


def _kv(settings: PolicySettings) -> Kv:
    weight = settings.overlap_weight
    return Kv(
        settings.overlap_decay,
        settings.active_request_weight,
        AUTO if weight is None else weight,
        settings.temperature,
    )


def _kv_score(settings: PolicySettings, _turn: int) -> KvScore:
    weight = settings.overlap_weight
    return KvScore(
        settings.gpu_cache_usage_weight,
        settings.waiting_requests_weight,
        KV_SCORE_WEIGHT if weight is None or weight == AUTO else weight,
        settings.temperature,
    )


def _two_stage(settings: PolicySettings, turn: int) -> TwoStage:
    within = _kv(settings)
    return TwoStage(settings.stage_one, settings.stage_one_blocks, settings.group_label, within, turn)


_WITH_SETTINGS: dict[str, Callable[[PolicySettings, int], BuiltInPolicy]] = {
    "kv": lambda s, _: _kv(s),
    "kv-score": _kv_score,
    "prefix-affinity": lambda s, _: PrefixAffinity(s.imbalanced_threshold, s.match_rate_threshold),
    "scored": lambda s, _: s.scored or Scored(),  # frozen, so that all pools may share one
    "sticky": lambda s, _: Sticky(s.sticky_hit_rate, s.sticky_penalty_s),
    "two-stage": _two_stage,
    "round-robin": lambda _, turn: RoundRobin(turn),
}
