"""The flags of filters, circuit breakers, sessions and kept decisions."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field

from kvrouter.config import positive, positive_int, share
from kvrouter.core.routing.breaker import BreakerSettings
from kvrouter.core.routing.filters import FilterSettings
from kvrouter.core.tables.sessions import DEFAULT_TTL_S

DEFAULT_DECISIONS = 1000
MOST_DECISIONS = 100_000
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_BREAKER = BreakerSettings()


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """`breaker` None: no circuits. `decisions` 0: no decisions are kept."""

    filters: FilterSettings = field(default_factory=FilterSettings)
    breaker: BreakerSettings | None = None
    session_header: str = "x-session-id"
    session_ttl_s: float = DEFAULT_TTL_S
    decisions: int = DEFAULT_DECISIONS
    log_decisions: bool = False


def add_rule_flags(group: argparse._ArgumentGroup) -> None:
    """The flags of filters come in the order in which the filters apply."""
    add, switch = group.add_argument, argparse.BooleanOptionalAction
    add(
        "--session-affinity",
        choices=("off", "soft", "hard"),
        default="off",
        help="keep a session on one worker; soft: while the worker takes requests; hard: even if it is full",
    )
    add("--session-header", type=header_name, default="x-session-id", help="header that names the session")
    add(
        "--session-ttl-s",
        type=positive,
        default=DEFAULT_TTL_S,
        help="seconds without a request after which a session expires",
    )
    add(
        "--circuit-breaker",
        action=switch,
        default=False,
        help="skip a worker that keeps failing, for --circuit-breaker-open-s",
    )
    add(
        "--circuit-breaker-failures",
        type=positive_int,
        default=_BREAKER.failures,
        help="consecutive failed attempts after which a worker is skipped",
    )
    add("--circuit-breaker-open-s", type=positive, default=_BREAKER.open_s, help="seconds that it is skipped")
    add(
        "--circuit-breaker-successes",
        type=positive_int,
        default=_BREAKER.successes,
        help="consecutive answered requests, sent one at a time, until it takes all requests again",
    )
    _add_load_and_place_flags(group)


def _add_load_and_place_flags(group: argparse._ArgumentGroup) -> None:
    add, switch = group.add_argument, argparse.BooleanOptionalAction
    add(
        "--active-decode-blocks-threshold",
        type=share,
        default=None,
        metavar="SHARE",
        help="skip workers with more than this share of their KV blocks active; see POST /busy_threshold",
    )
    add(
        "--active-prefill-tokens-threshold",
        type=positive_int,
        default=None,
        metavar="TOKENS",
        help="skip workers with more prefill tokens charged",
    )
    add(
        "--max-ongoing-requests",
        type=positive_int,
        default=0,
        metavar="N",
        help="skip targets with N requests in flight; 0: no limit",
    )
    add(
        "--lora-multiplex",
        action=switch,
        default=False,
        help="engines load adapters on demand: prefer workers that have it, else those with the fewest",
    )
    add("--locality-node", default="", metavar="NODE", help="node of this frontend: prefer its workers")
    add("--locality-zone", default="", metavar="ZONE", help="zone of this frontend: prefer its workers")
    add(
        "--decisions",
        type=_decisions,
        default=DEFAULT_DECISIONS,
        metavar="N",
        help=f"decisions kept for GET /decisions/REQUEST_ID: 0 to {MOST_DECISIONS}, at most 64 MiB",
    )
    add(
        "--log-decisions",
        action=switch,
        default=False,
        help="log each decision with the terms of every candidate",
    )


def rule_options(flags: argparse.Namespace) -> RuleOptions:
    filters = FilterSettings(
        active_decode_blocks_threshold=flags.active_decode_blocks_threshold,
        active_prefill_tokens_threshold=flags.active_prefill_tokens_threshold,
        max_ongoing_requests=flags.max_ongoing_requests,
        session_affinity=flags.session_affinity,
        multiplex=flags.lora_multiplex,
        node=flags.locality_node,
        zone=flags.locality_zone,
    )
    breaker = BreakerSettings(
        flags.circuit_breaker_failures, flags.circuit_breaker_successes, flags.circuit_breaker_open_s
    )
    return RuleOptions(
        filters,
        breaker if flags.circuit_breaker else None,
        flags.session_header.lower(),  # requests have their headers in lower case
        flags.session_ttl_s,
        flags.decisions,
        flags.log_decisions,
    )


def header_name(text: str) -> str:
    """An argparse type: the name of a header."""
    if not _HEADER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a header")
    return text


def _decisions(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_DECISIONS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 0 to {MOST_DECISIONS}")
    return int(text)
