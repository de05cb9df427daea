"""GET /tenants: what each tenant has used here, by day, for bills; as JSON or CSV.

request of a tenant that has ended ──count──> day ──> tenant ──> TenantDay      days of UTC, DAYS of them

Each replica has its own requests since it started: add those of all replicas, by tenant and day, and read
them before midnight ends or a replica does. Tenants are those of the keys file, so they are labels, too.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from datetime import date, datetime

import msgspec
from msgspec import Struct

from kvrouter.errors import BadRequestError
from kvrouter.frontend.records.record import Ending, Record
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.telemetry.metrics import Count

DAYS = 32


class TenantDay(Struct):
    """Of requests that ended on this day. `seconds`: from their arrival to their end, summed."""

    tenant: str
    requests: int = 0
    refused: int = 0
    """4xx, those above a limit included."""
    failed: int = 0
    """5xx, or broken off."""
    left: int = 0
    """The client ended the connection."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these, not computed: as the engine reports, else as predicted."""
    computed_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


class TenantsView(Struct, frozen=True):
    """`since`: when this replica began to count; `day`: of UTC."""

    since: datetime
    day: date
    tenants: list[TenantDay]


class TenantTotals:
    """Counts for one replica. `now()` is the time of day, in UTC."""

    def __init__(self, tokens: Count, now: Callable[[], datetime]) -> None:
        self._tokens = tokens
        self._now = now
        self._since = now()
        self._days: dict[date, dict[str, TenantDay]] = {}

    def count(self, tenant: str, record: Record, ending: Ending) -> None:
        """A request of the tenant is over."""
        today = self._now().date()
        day = self._days.get(today)
        if day is None:
            day = self._days[today] = {}
            while len(self._days) > DAYS:
                del self._days[min(self._days)]
        total = day.get(tenant)
        if total is None:
            total = day[tenant] = TenantDay(tenant)
        total.requests += 1
        total.seconds += record.lasted_s
        if ending != "ok":
            total.failed += ending in {"failed", "broken"}
            total.refused += ending == "refused"
            total.left += ending == "left"
        if record.attempts:
            self._count_tokens(total, record)

    def _count_tokens(self, total: TenantDay, record: Record) -> None:
        last = record.asked or record.attempts[-1]
        usage = (last.prefill or last).usage
        known = usage is not None and usage.prompt_tokens is not None
        prompt = usage.prompt_tokens if usage is not None and known else last.prompt_tokens
        cached = usage.cached_tokens if usage is not None and known else last.overlap_tokens
        prompt, cached, output = prompt or 0, min(cached or 0, prompt or 0), record.output_tokens
        total.prompt_tokens += prompt
        total.cached_tokens += cached
        total.computed_tokens += prompt - cached
        total.output_tokens += output
        for kind, tokens in (
            ("prompt", prompt),
            ("cached", cached),
            ("computed", prompt - cached),
            ("output", output),
        ):
            self._tokens.values[total.tenant, kind] += tokens

    async def view(self, request: Request) -> Answer:
        """`day`: the last DAYS are kept; `format`: json or csv. Raises BadRequestError."""
        given, kind = request.in_query("day"), request.in_query("format") or "json"
        try:
            day = date.fromisoformat(given) if given else self._now().date()
        except ValueError:
            raise BadRequestError(f"day {given!r}: give one as in 2027-01-31", param="day") from None
        if kind not in {"json", "csv"}:
            raise BadRequestError(f"format {kind!r}: json or csv", param="format")
        totals = sorted(self._days.get(day, {}).values(), key=lambda one: one.tenant)
        if kind == "json":
            return Answer(200, msgspec.json.encode(TenantsView(self._since, day, totals)) + b"\n", {})
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("day", *TenantDay.__struct_fields__))
        writer.writerows((day, *msgspec.structs.astuple(one)) for one in totals)
        return Answer(200, lines.getvalue().encode(), {"content-type": "text/csv; charset=utf-8"})
