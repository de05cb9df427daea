"""The access log: one event for a served request, and one for each that failed.

    serve ──begin──> Entry ──first byte, answer──> Entry ──end──> log: request.served
                └──> None: not logged, nothing is noted       └──> log: request.failed, always

`--access-log sampled` logs one request in a hundred, chosen by chance; failures are logged in every mode.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from msgspec import Struct

from kvrouter.core.fleet.router import Placement
from kvrouter.core.tables.predictions import Usage
from kvrouter.frontend.accept import Work
from kvrouter.frontend.settings import AccessMode
from kvrouter.relay.request import Request

log = structlog.get_logger()

SAMPLED = 0.01
CLIENT_LEFT = 499
# A client's path and model are as long as it likes.
_MOST_CHARACTERS = 200
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


class Entry(Struct):
    """What is noted of a request that is logged, while it is served. Times in seconds from its arrival on."""

    routed_s: float | None = None
    """After tokens and the queue."""
    first_byte_s: float | None = None
    usage: Usage | None = None
    output_tokens: int | None = None


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
        work: Work | None,
        tried: Sequence[Placement] = (),
        why: str = "",
    ) -> None:
        """Log a request that is logged, or has failed.

        `work`: None if it was not accepted. `why`: the error; empty: there was none.
        """
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
        if work is not None:
            facts |= _routed(work, tried)
        if entry is not None:
            facts |= _noted(entry)
        level = logging.WARNING if status >= 500 else logging.INFO
        log.log(level, "request.failed" if is_failure else "request.served", **facts)


def _routed(work: Work, tried: Sequence[Placement]) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": work.router.pool.model[:_MOST_CHARACTERS], "stream": work.stream}
    if mode := work.route.mode or work.router.selection.mode:
        facts["mode"] = mode
    if work.route.isl:  # its tokens are known
        facts["prompt_tokens"] = work.route.isl
    if tried:
        choice, target = tried[-1].choice, tried[-1].target
        facts |= {"worker": str(target.worker_id), "rank": target.rank, "retries": len(tried) - 1}
        if work.route.isl:
            facts["predicted_cached_tokens"] = choice.overlap_blocks * work.router.pool.block_size
    return facts


def _noted(entry: Entry) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if entry.usage is not None and entry.usage.cached_tokens is not None:
        facts["cached_tokens"] = entry.usage.cached_tokens
    if entry.output_tokens is not None:
        facts["output_tokens"] = entry.output_tokens
    for name in ("routed_s", "first_byte_s"):
        seconds = getattr(entry, name)
        if seconds is not None:
            facts[name] = round(seconds, 4)
    return facts


def _trace_id(traceparent: str) -> str:
    """Of a W3C trace context: 32 hexadecimal digits, not all zero; empty if it is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found is not None and found[1].strip("0") else ""
