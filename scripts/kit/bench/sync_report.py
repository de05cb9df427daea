"""The figures of `bench sync`: medians, tables, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from rich.table import Table

from kvrouter.lab.simulate.percentiles import percentiles
from scripts.kit.bench.meter import Usage
from scripts.kit.bench.visibility import Seen


@dataclass(frozen=True, slots=True)
class Share:
    """The usage of one replica per request, without heartbeats."""

    cpu_us: float
    sent: float
    sent_bytes: float
    received: float
    received_bytes: float


@dataclass(frozen=True, slots=True)
class Cost:
    """One deployment, the median of its runs.

    `serving` is per request at replicas that receive requests: all of them if `spread`, else the first.
    `peer` is per request at the other replicas. If `spread`, a replica serves one of N requests and
    receives the bookings of the rest: its figures are per request of the whole fleet.
    """

    replicas: int
    spread: bool
    synced: bool
    requests: int
    serving: Share
    peer: Share | None


@dataclass(frozen=True, slots=True)
class Visibility:
    """One replica's bookings as seen by the others, without HTTP and KV events; medians of the runs."""

    replicas: int
    # Bookings/s that were achieved.
    rate: float
    samples: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    # CPU time per booking at a peer.
    cpu_us: float

    @classmethod
    def median(cls, replicas: int, seconds: float, runs: Sequence[Seen]) -> Visibility:
        """The medians of the runs, for each figure."""
        times = [percentiles(run.latencies_ms) for run in runs]
        samples = round(median(len(run.latencies_ms) for run in runs))
        return cls(
            replicas,
            samples / (replicas - 1) / seconds,
            samples,
            median(each.p50 for each in times),
            median(each.p90 for each in times),
            median(each.p99 for each in times),
            median(run.cpu_us for run in runs),
        )


def median_cost(
    runs: Sequence[tuple[int, list[Usage]]], *, replicas: int, spread: bool, synced: bool
) -> Cost:
    """The median of each figure over the runs; a run's figure is the mean over equal replicas."""
    serving = replicas if spread else 1
    peers = range(serving, replicas)
    return Cost(
        replicas,
        spread,
        synced,
        round(median(requests for requests, _ in runs)),
        _median_share(runs, range(serving)),
        _median_share(runs, peers) if peers else None,
    )


def _median_share(runs: Sequence[tuple[int, list[Usage]]], numbers: range) -> Share:
    def figure(name: str, scale: float = 1.0) -> float:
        means = (
            mean(float(getattr(used[number], name)) for number in numbers) * scale / requests
            for requests, used in runs
        )
        return float(median(means))

    return Share(
        figure("cpu_ns", 1e-3),
        figure("sent"),
        figure("sent_bytes"),
        figure("received"),
        figure("received_bytes"),
    )


def tables(costs: Sequence[Cost], visibilities: Sequence[Visibility]) -> list[Table]:
    """For people."""
    per_request = Table("replicas", "load to", "sync", title="per request of the fleet, at one replica")
    for name in ("which", "CPU µs", "messages sent", "bytes sent", "received", "bytes received"):
        per_request.add_column(name, justify="right" if name != "which" else "left")
    for cost in costs:
        where = ("all" if cost.spread else "one", "on" if cost.synced else "off")
        which = "each" if cost.spread else "serving"
        per_request.add_row(str(cost.replicas), *where, which, *_cells(cost.serving))
        if cost.peer is not None:
            per_request.add_row(str(cost.replicas), *where, "peer", *_cells(cost.peer))
    seen = Table(title="a booking at another replica")
    for name in ("replicas", "bookings/s", "visible after p50", "p90", "p99", "CPU µs at a peer", "samples"):
        seen.add_column(name, justify="right")
    for each in visibilities:
        times = (f"{value:.2f} ms" for value in (each.p50_ms, each.p90_ms, each.p99_ms))
        seen.add_row(str(each.replicas), f"{each.rate:.0f}", *times, f"{each.cpu_us:.0f}", str(each.samples))
    return [per_request, seen]


def _cells(share: Share) -> list[str]:
    return [
        f"{share.cpu_us:,.0f}",
        f"{share.sent:.1f}",
        f"{share.sent_bytes:,.0f}",
        f"{share.received:.1f}",
        f"{share.received_bytes:,.0f}",
    ]


def summary(costs: Sequence[Cost], visibilities: Sequence[Visibility]) -> dict[str, Any]:
    """For machines."""
    return {
        "costs": [asdict(cost) for cost in costs],
        "visibility": [asdict(each) for each in visibilities],
    }
