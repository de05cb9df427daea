"""The access log: one event for a served request, and one for each that failed.

    serve ──begin──> Entry ──placed, first byte, answer──> Entry ──end──> log: request.served
                └──> None: not logged, and nothing is kept            └──> log: request.failed, always

`--access-log sampled` logs one request in a hundred, chosen by chance; failures are logged in every mode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import structlog
from msgspec import Struct

from kvrouter.core.fleet.router import Placement
from kvrouter.core.tables.predictions import Usage
from kvrouter.frontend.settings import AccessMode
from kvrouter.relay.request import Request

log = structlog.get_logger()

SAMPLED = 0.01
CLIENT_LEFT = 499
# A client's path and model are as long as it likes.
_MOST_CHARACTERS = 200
_TRACEPARENT_PARTS = 4


class Entry(Struct):
    """What is known of a request that is logged. Times in seconds, from its arrival on."""

    model: str = ""
    mode: str = ""
    is_streamed: bool = False
    routed_s: float | None = None
    """After tokens and the queue."""
    placement: Placement | None = None
    attempts: int = 0
    isl: int = 0
    block_size: int = 0
    first_byte_s: float | None = None
    usage: Usage | None = None
    output_tokens: int | None = None

    def placed(self, placement: Placement, isl: int, block_size: int) -> None:
        """One more attempt."""
        self.placement, self.isl, self.block_size = placement, isl, block_size
        self.attempts += 1


class AccessLog:
    """`chance()` returns a number in [0, 1)."""

    def __init__(self, mode: AccessMode, chance: Callable[[], float]) -> None:
        self._share = {"off": 0.0, "sampled": SAMPLED, "all": 1.0}[mode]
        self._chance = chance

    def begin(self) -> Entry | None:
        """The entry of a new request; None if it is not logged."""
        return Entry() if self._share and self._chance() < self._share else None

    def end(
        self,
        request: Request,
        request_id: str,
        status: int,
        duration_s: float,
        *,
        entry: Entry | None,
        why: str = "",
    ) -> None:
        """Log a request that is logged, or has failed. `why`: the error; empty: there was none."""
        is_failure = bool(why) or status >= 400
        if entry is None and not is_failure:
            return
        facts: dict[str, Any] = {
            "request": request_id,
            "method": request.head.method,
            "path": request.head.route[:_MOST_CHARACTERS],
            "status": status,
            "duration_s": round(duration_s, 4),
        }
        if trace := _trace_id(request.headers.get("traceparent", "")):
            facts["trace"] = trace
        if why:
            facts["error"] = why[:_MOST_CHARACTERS]
        if entry is not None:
            facts |= _facts(entry)
        level = logging.WARNING if status >= 500 else logging.INFO
        log.log(level, "request.failed" if is_failure else "request.served", **facts)


def _facts(entry: Entry) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": entry.model[:_MOST_CHARACTERS], "stream": entry.is_streamed}
    if entry.mode:
        facts["mode"] = entry.mode
    if entry.routed_s is not None:
        facts["routed_s"] = round(entry.routed_s, 4)
    if entry.placement is not None:
        choice = entry.placement.choice
        facts |= {
            "worker": str(choice.target.worker_id),
            "rank": choice.target.rank,
            "retries": entry.attempts - 1,
        }
        if entry.isl:  # its tokens are known
            facts["prompt_tokens"] = entry.isl
            facts["predicted_cached_tokens"] = choice.overlap_blocks * entry.block_size
    if entry.usage is not None and entry.usage.cached_tokens is not None:
        facts["cached_tokens"] = entry.usage.cached_tokens
    if entry.output_tokens is not None:
        facts["output_tokens"] = entry.output_tokens
    if entry.first_byte_s is not None:
        facts["first_byte_s"] = round(entry.first_byte_s, 4)
    return facts


def _trace_id(traceparent: str) -> str:
    """Of a W3C trace context, version 00; empty if it is none."""
    parts = traceparent.split("-")
    is_one = len(parts) == _TRACEPARENT_PARTS and len(parts[1]) == 32  # hex digits
    return parts[1] if is_one and parts[1].isalnum() and parts[1].isascii() else ""
