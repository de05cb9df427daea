"""What all replicas serve together, and the last hour of it: the page may be opened after an incident began.

own counters ──────┐
peers' heartbeats ─┴──growth since the last look──> total ──each 10 s──> the last hour ──> FleetStream
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.ghosts import Reuse
from kvrouter.core.wire.heartbeats import Times, Traffic
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.values import MOST_NUMBER
from kvrouter.telemetry.metrics import RequestMetrics, Spread

LOOK_EACH_S = 1.0
KEPT_EACH_S = 10.0
MOST_KEPT = 360
MOST_KNOWN = 4_096
# What no replica serves between two looks, in requests, tokens or seconds: it is not counted.
MOST_GROWN = 1_000_000_000
# Outcomes of requests (docs/metrics.md) that are a failure of the fleet, not of the client.
FAILED = ("failed", "broken")
# Fields of Traffic that only grow.
_COUNTS = (
    "requests", "failed", "refused", "prompt_tokens", "overlap_tokens", "output_tokens", "reusable_tokens",
    "ttft_decisions",
)  # fmt: skip


class Sample(Struct, frozen=True):
    """Fields of a snapshot (`Fleet`) that are kept."""

    time: float
    started_s: float
    fleet_traffic: Traffic


class FleetTraffic:
    """Adds up what the replicas count, from this replica's start on.

    `own` returns what this replica has served. A peer that started later counts from its start, another one
    from the first look on that finds it. One that leaves takes nothing away; what it serves while it is not
    heard does not count.
    """

    def __init__(self, replica: Replica, own: Callable[[], Traffic]) -> None:
        self.own = own
        self.started_s = time.time()
        self._replica = replica
        self._total = own()
        self._last: dict[RouterId, Traffic] = {replica.router_id: self._total}
        self._known: dict[RouterId, None] = {}  # all that were ever found: the newest MOST_KNOWN
        self._kept: deque[bytes] = deque(maxlen=MOST_KEPT)

    def total(self) -> Traffic:
        """Of all replicas, as of now and of their last heartbeats. `queued` is what waits at all of them."""
        now = {one: beat.traffic for one, beat in self._replica.peers.items() if beat.traffic is not None}
        now[self._replica.router_id] = self.own()
        for router_id, traffic in now.items():
            before = self._last.get(router_id)
            if before is None:
                before = self._begun(router_id, traffic)
            if before is not traffic:  # as it is between two heartbeats
                self._total = _grown(self._total, traffic, before)
        self._last = now
        queued = sum([one.queued for one in now.values()])
        return replace(self._total, queued=min(MOST_NUMBER, queued))

    def _begun(self, router_id: RouterId, traffic: Traffic) -> Traffic:
        """What a peer that was not heard at the last look counts from."""
        is_new = router_id not in self._known
        self._known[router_id] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        started_later = self._replica.peers[router_id].incarnation > self._replica.incarnation
        return _nothing_like(traffic) if is_new and started_later else traffic

    def history(self) -> bytes:
        """The samples of the last hour, oldest first, as JSON."""
        return b"[" + b",".join(self._kept) + b"]"

    def keep(self) -> None:
        """Keep a sample as of now."""
        sample = Sample(round(time.time(), 3), round(self.started_s, 3), self.total())
        self._kept.append(msgspec.json.encode(sample))

    async def run(self) -> None:
        """Keep a sample each KEPT_EACH_S."""
        while True:
            self.keep()
            for _ in range(round(KEPT_EACH_S / LOOK_EACH_S)):
                await asyncio.sleep(LOOK_EACH_S)
                self.total()


def served(replica: Replica, metrics: RequestMetrics, queued: int) -> Traffic:
    """What this replica has served. `queued`: the requests that wait now."""
    requests, routers = metrics.requests.values, list(replica.routers.values())
    counted = Counter[str | int]()
    for (_, kind), count in metrics.tokens.values.items():
        counted[kind] += count
    uncached = Reuse().uncached()
    for router in routers:
        for cache, tokens in router.reuse.uncached().items():
            uncached[cache] += tokens
    return Traffic(
        requests=sum(requests.values()),
        failed=sum([count for labels, count in requests.items() if labels[-1] in FAILED]),
        prompt_tokens=counted["prompt"],
        overlap_tokens=counted["overlap"],
        output_tokens=counted["output"],
        ttft=_times(metrics.first_byte),
        inter_token=_times(metrics.between),
        queued=queued,
        reusable_tokens=sum([router.reuse.prompt_tokens for router in routers]),
        uncached_tokens=uncached,
        ttft_decisions=sum([router.bookings.calibration.decisions for router in routers]),
        later_s=round(sum([router.bookings.calibration.later_s for router in routers]), 6),
        refused=sum([count for labels, count in requests.items() if labels[-1] == "refused"]),
    )


def _times(spread: Spread) -> Times:
    return Times(spread.bounds, spread.counts())


def _grown(total: Traffic, now: Traffic, before: Traffic) -> Traffic:
    """`total`, and what was counted from `before` until `now`."""
    counts = {
        name: _added(getattr(total, name), getattr(now, name), getattr(before, name)) for name in _COUNTS
    }
    later_s, uncached = now.later_s - before.later_s, total.uncached_tokens
    return Traffic(
        **counts,
        ttft=_grown_times(total.ttft, now.ttft, before.ttft),
        inter_token=_grown_times(total.inter_token, now.inter_token, before.inter_token),
        uncached_tokens={
            cache: _added(tokens, now.uncached_tokens.get(cache, 0), before.uncached_tokens.get(cache, 0))
            for cache, tokens in uncached.items()
        },
        later_s=total.later_s + later_s if 0 < later_s <= MOST_GROWN else total.later_s,
    )


def _added(base: int, now: int, before: int) -> int:
    grown = now - before
    return min(MOST_NUMBER, base + grown) if 0 < grown <= MOST_GROWN else base


def _nothing_like(traffic: Traffic) -> Traffic:
    """The totals of a start, with the bounds of this one."""
    return Traffic(0, 0, 0, 0, 0, _no_times(traffic.ttft), _no_times(traffic.inter_token))


def _no_times(times: Times) -> Times:
    return Times(times.bounds_s, [0] * len(times.counts))


def _grown_times(total: Times, now: Times, before: Times) -> Times:
    """Counts of other bounds, as of another version, cannot be added: `total` stays."""
    shapes = {(one.bounds_s, len(one.counts)) for one in (total, now, before)}
    if len(shapes) > 1:
        return total
    columns = zip(total.counts, now.counts, before.counts, strict=True)
    return Times(total.bounds_s, [_added(*column) for column in columns])
