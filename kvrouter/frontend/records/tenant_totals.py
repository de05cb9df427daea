"""GET /tenants: what each tenant has used here, by day, for bills; as JSON or CSV.

request of a tenant that has ended ──count──> day ──> tenant ──> TenantDay      days of UTC, DAYS of them

Each replica has its own requests since it started: add those of all replicas, by tenant and day, and read
them before midnight ends or a replica does. Tenants are those of the keys file, so they are labels, too.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime

import msgspec
from msgspec import Struct

from kvrouter.core.tables.predictions import Usage
from kvrouter.errors import BadRequestError
from kvrouter.frontend.records.record import AttemptRecord, Ending
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.telemetry.metrics import Sample

DAYS = 32
_DAY_S = 24 * 3600
_KINDS = "prompt", "cached", "computed", "output"


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
    """The others. Worked out when it is shown: `count` is on the path of every request."""
    output_tokens: int = 0
    seconds: float = 0.0


class TenantsView(Struct, frozen=True):
    """`since`: when this replica began to count; `day`: of UTC."""

    since: datetime
    day: date
    tenants: list[TenantDay]


class TenantTotals:
    """Counts for one replica. `clock()` returns seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = datetime.fromtimestamp(clock(), UTC)
        self._days: dict[date, dict[str, TenantDay]] = {}
        self._today: dict[str, TenantDay] = {}
        self._before = Counter[tuple[str, str]]()
        """Tokens of all days before it."""
        self._day_ends = float("-inf")

    def count(
        self, tenant: str, last: AttemptRecord | None, output_tokens: int, ending: Ending, seconds: float
    ) -> None:
        """Add a request that has ended after so long. `last`: its last attempt; None: it had none."""
        if self._clock() >= self._day_ends:
            self._begin_day()
        total = self._today.get(tenant) or self._today.setdefault(tenant, TenantDay(tenant))
        total.requests += 1
        total.seconds += seconds
        if last is not None:
            usage = (last.prefill or last).usage
            if usage is None or usage.prompt_tokens is None:
                usage = Usage(last.prompt_tokens, last.overlap_tokens)
            total.prompt_tokens += (prompt_tokens := usage.prompt_tokens or 0)
            if usage.cached_tokens:
                total.cached_tokens += min(usage.cached_tokens, prompt_tokens)
            total.output_tokens += output_tokens
        if ending != "ok":
            total.failed += ending in {"failed", "broken"}
            total.refused += ending == "refused"
            total.left += ending == "left"

    def _begin_day(self) -> None:
        self._before, now = self._tokens(), self._clock()
        self._day_ends = now - now % _DAY_S + _DAY_S
        self._days[datetime.fromtimestamp(now, UTC).date()] = self._today = {}
        while len(self._days) > DAYS:
            del self._days[min(self._days)]

    def _tokens(self) -> Counter[tuple[str, str]]:
        """Of all days, by tenant and kind."""
        counts = Counter(self._before)
        for tenant, total in self._today.items():
            prompt, cached = total.prompt_tokens, total.cached_tokens
            tokens = prompt, cached, prompt - cached, total.output_tokens
            counts.update({(tenant, kind): count for kind, count in zip(_KINDS, tokens, strict=True)})
        return counts

    def samples(self) -> Iterator[Sample]:
        for (tenant, kind), tokens in self._tokens().items():
            yield "kvrouter_tenant_tokens_total", {"tenant": tenant, "kind": kind}, tokens

    async def view(self, request: Request) -> Answer:
        """`day`: the last DAYS are kept; `format`: json or csv. Raises BadRequestError."""
        given, kind = request.in_query("day"), request.in_query("format") or "json"
        try:
            day = date.fromisoformat(given) if given else datetime.fromtimestamp(self._clock(), UTC).date()
        except ValueError:
            raise BadRequestError(f"day {given!r}: give one as in 2027-01-31", param="day") from None
        if kind not in {"json", "csv"}:
            raise BadRequestError(f"format {kind!r}: json or csv", param="format")
        totals = sorted(self._days.get(day, {}).values(), key=lambda one: one.tenant)
        for one in totals:
            one.computed_tokens = one.prompt_tokens - one.cached_tokens
        if kind == "json":
            return Answer(200, msgspec.json.encode(TenantsView(self._since, day, totals)) + b"\n", {})
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("day", *TenantDay.__struct_fields__))
        writer.writerows((day, *msgspec.structs.astuple(one)) for one in totals)
        return Answer(200, lines.getvalue().encode(), {"content-type": "text/csv; charset=utf-8"})
