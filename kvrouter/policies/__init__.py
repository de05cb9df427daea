"""Policies pick one of the candidates they are shown. They own no tables, tasks or caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.core.routing.policy import Policy
from kvrouter.policies.importing import OwnPolicies
from kvrouter.policies.kv import Kv
from kvrouter.policies.kv_score import KvScore
from kvrouter.policies.load import LeastLoaded, PowerOfTwo
from kvrouter.policies.plain import Direct, Random, RoundRobin
from kvrouter.policies.prefix_affinity import PrefixAffinity
from kvrouter.policies.scored import Scored
from kvrouter.policies.sticky import Sticky
from kvrouter.policies.two_stage import ROUND_ROBIN, TwoStage

POLICIES: dict[str, type[Policy]] = {
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
"""By `--router-mode`."""

OWN = "own"
"""The mode's name where `--router-policy` gives a class instead."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What an operator sets about the modes; each mode reads its own. Defaults are the published ones."""

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
    own: OwnPolicies | None = None
    """Makes the policies of `--router-policy`; mode `own` then."""


def new_policy(mode: str, settings: PolicySettings) -> Policy:
    """The policy of a mode with these settings."""
    if mode == OWN and settings.own is not None:
        return settings.own()
    make = _WITH_SETTINGS.get(mode)
    return make(settings) if make is not None else POLICIES[mode]()


def _kv(settings: PolicySettings) -> Kv:
    return Kv(settings.overlap_decay, settings.active_request_weight)


_WITH_SETTINGS: dict[str, Callable[[PolicySettings], Policy]] = {
    "kv": _kv,
    "kv-score": lambda s: KvScore(s.gpu_cache_usage_weight, s.waiting_requests_weight),
    "prefix-affinity": lambda s: PrefixAffinity(s.imbalanced_threshold, s.match_rate_threshold),
    "scored": lambda s: s.scored or Scored(),
    "sticky": lambda s: Sticky(s.sticky_hit_rate, s.sticky_penalty_s),
    "two-stage": lambda s: TwoStage(s.stage_one, s.stage_one_blocks, s.group_label, _kv(s)),
}
