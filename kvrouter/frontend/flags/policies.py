"""The flags of the routing modes (docs/policies.md). Each mode ignores the flags of the others."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvrouter.config import not_negative, positive, positive_int, share
from kvrouter.core.tables.text_index import TextIndexSettings
from kvrouter.errors import ConfigError
from kvrouter.policies import POLICIES, PolicySettings
from kvrouter.policies.endpoint_picker import EndpointPicker, load_endpoint_picker
from kvrouter.policies.importing import GuardedPolicies, load_custom_policy
from kvrouter.policies.two_stage import TwoStage, read_header_name

SERVED_MODES = sorted(POLICIES)
"""The choices of `--router-mode`."""

_DEFAULTS, _TEXTS = PolicySettings(), TextIndexSettings()


def add_policy_flags(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, _DEFAULTS
    add(
        "--router-kv-overlap-score-credit-decay",
        type=not_negative,
        default=default.overlap_decay,
        help="kv: how fast overlap loses credit on a worker with more prefill charged than the least",
    )
    add(
        "--router-active-request-weight",
        type=not_negative,
        default=default.active_request_weight,
        help="kv: cost of each request in flight, in blocks",
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
    _add_other_mode_flags(group)


def _add_other_mode_flags(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, _DEFAULTS
    add(
        "--sticky-hit-rate",
        type=share,
        default=default.sticky_hit_rate,
        help="sticky: share of the prompt that must be cached",
    )
    add(
        "--sticky-penalty-s",
        type=not_negative,
        default=default.sticky_penalty_s,
        help="sticky: most seconds of additional waiting for a worker that has the prefix",
    )
    add(
        "--stage-one",
        type=_stage_one,
        default=default.stage_one,
        metavar="round-robin|hash|header:NAME",
        help="two-stage: how to choose the group",
    )
    add(
        "--stage-one-blocks",
        type=positive_int,
        default=default.stage_one_blocks,
        help="two-stage: leading blocks that --stage-one hash uses",
    )
    add(
        "--router-policy",
        metavar="MODULE:CLASS",
        help="a custom policy instead of a mode: its class or its entry point (docs/writing-a-policy.md)",
    )
    add(
        "--router-policy-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the custom policy's constructor; may be repeated",
    )
    add("--group-label", default=default.group_label, help="two-stage: the card label that names a group")
    _add_text_flags(group)


def _add_text_flags(group: argparse._ArgumentGroup) -> None:
    """Mode prefix-affinity. Names and defaults are those of Ray Serve."""
    add, switch = group.add_argument, argparse.BooleanOptionalAction
    texts = {
        "--imbalanced-threshold": (
            _or_infinite,
            _DEFAULTS.imbalanced_threshold,
            "difference of requests between the most and the least loaded worker",
        ),
        "--match-rate-threshold": (
            share,
            _DEFAULTS.match_rate_threshold,
            "share of the text that must match",
        ),
        "--text-block-chars": (
            positive_int,
            _TEXTS.block_chars,
            "characters per block of text",
        ),
        "--eviction-threshold-chars": (
            positive_int,
            _TEXTS.eviction_threshold_chars,
            "characters of a worker above which its oldest texts are evicted",
        ),
        "--eviction-target-chars": (
            positive_int,
            _TEXTS.eviction_target_chars,
            "characters that remain after an eviction",
        ),
        "--eviction-interval-s": (
            positive,
            _TEXTS.eviction_interval_secs,
            "seconds between two evictions",
        ),
    }
    for flag, (kind, value, text) in texts.items():
        add(flag, type=kind, default=value, help=f"prefix-affinity: {text}")
    add("--do-eviction", action=switch, default=_TEXTS.do_eviction, help="prefix-affinity: evict old texts")


def policy_settings(flags: argparse.Namespace) -> tuple[PolicySettings, tuple[str, ...]]:
    """The settings, and notes about parts of --router-config without effect. Raises ConfigError."""
    picker = _endpoint_picker(flags.router_config) if flags.router_config is not None else None
    settings = PolicySettings(
        overlap_decay=flags.router_kv_overlap_score_credit_decay,
        active_request_weight=flags.router_active_request_weight,
        gpu_cache_usage_weight=flags.kv_gpu_cache_usage_weight,
        waiting_requests_weight=flags.kv_waiting_requests_weight,
        imbalanced_threshold=flags.imbalanced_threshold,
        match_rate_threshold=flags.match_rate_threshold,
        sticky_hit_rate=flags.sticky_hit_rate,
        sticky_penalty_s=flags.sticky_penalty_s,
        stage_one=flags.stage_one,
        stage_one_blocks=flags.stage_one_blocks,
        group_label=flags.group_label,
        scored=picker.policy if picker is not None else None,
        custom=_custom_policies(flags),
        overlap_weight=flags.kv_overlap_score_weight,
        temperature=flags.router_temperature,
    )
    return settings, _config_notes(picker, flags)


def text_settings(flags: argparse.Namespace) -> TextIndexSettings:
    """Raises ConfigError."""
    # Else a worker between the two would be above the threshold and lose nothing.
    if flags.eviction_target_chars > flags.eviction_threshold_chars:
        raise ConfigError("--eviction-target-chars must not be above --eviction-threshold-chars")
    return TextIndexSettings(
        flags.text_block_chars,
        flags.do_eviction,
        flags.eviction_threshold_chars,
        flags.eviction_target_chars,
        flags.eviction_interval_secs,
    )


def bucket_header(settings: PolicySettings) -> str:
    """The request header that names the bucket of mode two-stage; empty if --stage-one names no header."""
    return TwoStage(settings.stage_one).header.lower()


def _custom_policies(flags: argparse.Namespace) -> GuardedPolicies | None:
    if flags.router_policy is not None:
        return load_custom_policy(flags.router_policy, flags.router_policy_arg)
    if flags.router_policy_arg:
        raise ConfigError("--router-policy-arg needs --router-policy")
    return None


def _endpoint_picker(path: Path) -> EndpointPicker:
    try:
        return load_endpoint_picker(path.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--router-config {path}: {error}") from error


def _config_notes(picker: EndpointPicker | None, flags: argparse.Namespace) -> tuple[str, ...]:
    if picker is None:
        return ()
    if flags.router_mode == "scored" and flags.router_policy is None:
        return picker.notes
    # Not an error: one request may still name mode scored.
    own = flags.router_policy or flags.router_mode
    return (*picker.notes, f"the mode is {own}: only requests with mode scored use this file")


def _stage_one(text: str) -> str:
    try:
        header = TwoStage(text).header
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if header:
        read_header_name(header)
    return text


def _or_infinite(text: str) -> float:
    return float("inf") if text == "inf" else not_negative(text)
