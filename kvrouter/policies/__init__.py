"""The built-in policies, one for each `--router-mode`. They own no tables, tasks or caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.policies.baseline import Direct, LeastLoaded, PowerOfTwo, Random, RoundRobin
from kvrouter.policies.importing import GuardedPolicies
from kvrouter.policies.kv import OVERLAP_WEIGHT as KV_WEIGHT
from kvrouter.policies.kv import Kv
from kvrouter.policies.kv_score import OVERLAP_WEIGHT as KV_SCORE_WEIGHT
from kvrouter.policies.kv_score import KvScore
from kvrouter.policies.prefix_affinity import PrefixAffinity
from kvrouter.policies.scored import Scored
from kvrouter.policies.sticky import Sticky
from kvrouter.policies.two_stage import ROUND_ROBIN, TwoStage

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


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What an operator sets about the modes; each mode reads its part. Defaults: the published values."""

    overlap_decay: float = 0.0
    active_request_weight: float = 0.0
    gpu_cache_usage_weight: float = 1.0
    waiting_requests_weight: float = 1.0
    imbalanced_threshold: float = 10.0
    match_rate_threshold: float = 0.1
    sticky_hit_rate: float = 0.8
    sticky_penalty_s: float = 1.0
    stage_one: str = ROUND_ROBIN
    stage_one_blocks: int = 4
    group_label: str = "group"
    scored: Scored | None = None
    """What an EndpointPickerConfig asks for; None: Heimdall's published weights."""
    custom: GuardedPolicies | None = None
    """Makes the policies of `--router-policy`; the mode is `own` then."""
    overlap_weight: float | None = None
    """None: the mode's own default."""
    temperature: float = 0.0


def new_policy(mode: str, settings: PolicySettings, turn: int = 0) -> BuiltInPolicy:
    """The policy of a mode with these settings. `turn`: where modes that count turns begin."""
    if mode == CUSTOM and settings.custom is not None:
        return settings.custom()
    make = _WITH_SETTINGS.get(mode)
    return make(settings, turn) if make is not None else POLICIES[mode]()


def _kv(settings: PolicySettings, turn: int) -> Kv:
    weight = settings.overlap_weight
    return Kv(
        settings.overlap_decay,
        settings.active_request_weight,
        KV_WEIGHT if weight is None else weight,
        settings.temperature,
        turn,
    )


def _kv_score(settings: PolicySettings, _turn: int) -> KvScore:
    weight = settings.overlap_weight
    return KvScore(
        settings.gpu_cache_usage_weight,
        settings.waiting_requests_weight,
        KV_SCORE_WEIGHT if weight is None else weight,
        settings.temperature,
    )


def _two_stage(settings: PolicySettings, turn: int) -> TwoStage:
    within = _kv(settings, turn)
    return TwoStage(settings.stage_one, settings.stage_one_blocks, settings.group_label, within, turn)


_WITH_SETTINGS: dict[str, Callable[[PolicySettings, int], BuiltInPolicy]] = {
    "kv": _kv,
    "kv-score": _kv_score,
    "prefix-affinity": lambda s, _: PrefixAffinity(s.imbalanced_threshold, s.match_rate_threshold),
    "scored": lambda s, _: s.scored or Scored(),  # frozen, so that all pools may share one
    "sticky": lambda s, _: Sticky(s.sticky_hit_rate, s.sticky_penalty_s),
    "two-stage": _two_stage,
    "round-robin": lambda _, turn: RoundRobin(turn),
}
