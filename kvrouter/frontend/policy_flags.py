"""The flags of the routing modes (docs/policies.md). Each mode reads its own, and ignores the others'."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvrouter.config import not_negative, positive_int
from kvrouter.errors import ConfigError
from kvrouter.policies import POLICIES, PolicySettings
from kvrouter.policies.endpoint_picker import EndpointPicker, load_endpoint_picker
from kvrouter.policies.loading import OwnPolicies, load_own_policy
from kvrouter.policies.two_stage import HASH, ROUND_ROBIN

_NEEDS_MORE_OF_A_REQUEST = {"direct", "prefix-affinity"}
"""A target, a text: the request path does not hand them over yet."""

SERVED_MODES = sorted(set(POLICIES) - _NEEDS_MORE_OF_A_REQUEST)
"""The choices of `--router-mode`."""

_DEFAULTS = PolicySettings()


def add_policy_flags(group: argparse._ArgumentGroup) -> None:
    """What the modes can be told."""
    add, default = group.add_argument, _DEFAULTS
    add(
        "--router-kv-overlap-score-credit-decay",
        type=not_negative,
        default=default.overlap_decay,
        help="kv: how fast overlap loses worth on a worker with more prefill charged than the least",
    )
    add(
        "--router-active-request-weight",
        type=not_negative,
        default=default.active_request_weight,
        help="kv: blocks that each request in flight costs",
    )
    add(
        "--kv-gpu-cache-usage-weight",
        type=not_negative,
        default=default.gpu_cache_usage_weight,
        help="kv-score: weight of the engine's KV usage",
    )
    add(
        "--kv-waiting-requests-weight",
        type=not_negative,
        default=default.waiting_requests_weight,
        help="kv-score: weight of the engine's queue",
    )
    add(
        "--router-config",
        type=Path,
        metavar="FILE",
        help="scored: an EndpointPickerConfig (YAML); default: queue 2, kv-cache-utilization 2, prefix 3",
    )
    add(
        "--sticky-hit-rate",
        type=_share,
        default=default.sticky_hit_rate,
        help="sticky: part of the prompt that has to be cached",
    )
    add(
        "--sticky-penalty-s",
        type=not_negative,
        default=default.sticky_penalty_s,
        help="sticky: seconds that a request waits longer for its cache",
    )
    add(
        "--stage-one",
        choices=(ROUND_ROBIN, HASH),
        default=default.stage_one,
        help="two-stage: how the group is chosen",
    )
    add(
        "--stage-one-blocks",
        type=positive_int,
        default=default.stage_one_blocks,
        help="two-stage: leading blocks that --stage-one hash looks at",
    )
    add(
        "--router-policy",
        metavar="MODULE:CLASS",
        help="your own policy instead of a mode, or the name of an installed one (docs/writing-a-policy.md)",
    )
    add(
        "--router-policy-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument for its constructor; may be repeated",
    )
    add("--group-label", default=default.group_label, help="two-stage: the card label that names a group")


def policy_settings(flags: argparse.Namespace) -> tuple[PolicySettings, tuple[str, ...]]:
    """What the flags say, and what of the config file is not needed here. Raises ConfigError."""
    picker = _endpoint_picker(flags.router_config) if flags.router_config is not None else None
    settings = PolicySettings(
        overlap_decay=flags.router_kv_overlap_score_credit_decay,
        active_request_weight=flags.router_active_request_weight,
        gpu_cache_usage_weight=flags.kv_gpu_cache_usage_weight,
        waiting_requests_weight=flags.kv_waiting_requests_weight,
        sticky_hit_rate=flags.sticky_hit_rate,
        sticky_penalty_s=flags.sticky_penalty_s,
        stage_one=flags.stage_one,
        stage_one_blocks=flags.stage_one_blocks,
        group_label=flags.group_label,
        scored=picker.policy if picker is not None else None,
        own=_own_policies(flags),
    )
    return settings, picker.notes if picker is not None else ()


def _own_policies(flags: argparse.Namespace) -> OwnPolicies | None:
    if flags.router_policy is not None:
        return load_own_policy(flags.router_policy, flags.router_policy_arg)
    if flags.router_policy_arg:
        raise ConfigError("--router-policy-arg is for a --router-policy")
    return None


def _endpoint_picker(path: Path) -> EndpointPicker:
    try:
        return load_endpoint_picker(path.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--router-config {path}: {error}") from error


def _share(text: str) -> float:
    value = not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be from 0 to 1")
    return value
