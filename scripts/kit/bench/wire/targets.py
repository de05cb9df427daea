"""The targets of kvrouter's relay, compared with the results of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from scripts.kit.bench.wire.rounds import Results
from scripts.kit.bench.wire.works import Run
from scripts.kit.script import table_of

OURS, OURS_KV = "kvrouter round-robin", "kvrouter kv"
OURS_PAIR = "kvrouter kv, a pair"  # each request goes through a prefill and a decode worker
OURS_ROOM = "kvrouter kv, at once"  # the same, and both get it at the same time
PAIRS = {OURS_PAIR: "example", OURS_ROOM: "sglang"}
"""The connector of each."""
DIRECT = "direct"  # the generator and the fake workers, without a router
NGINX, VLLM, SGLANG, DYNAMO = "nginx", "vllm-router round_robin", "sglang-router round_robin", "dynamo kv"
HAPROXY = "HAProxy, kvrouter router"
_ADDED_MS = {"latency_p50_ms": 0.1, "latency_p99_ms": 0.3}


@dataclass(frozen=True, slots=True)
class Target:
    """One line: `ours` should be at most `limit`, which is computed from the peer's `theirs`."""

    work: str
    figure: str
    target: str
    ours: float
    peer: str
    theirs: float | None  # None: the peer is missing
    limit: float | None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def is_met(self) -> bool | None:
        """None if the peer is missing."""
        return None if self.limit is None else self.ours <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "met": self.is_met}


def targets(results: Results) -> list[Target]:
    """All targets whose own figure was measured."""
    return [*_costs(results), *_streams(results), *_chat(results), *_added(results)]


def _times(
    results: Results, work: str, figure: str, name: str, factor: float, *, ours: str = OURS
) -> Iterator[Target]:
    """At most `factor` of a peer's figure."""
    own, peer = results.get(work, ours), results.get(work, name)
    if own is None:
        return
    value, theirs = float(getattr(own, figure)), _figure(peer, figure)
    program = name.partition(" ")[0]
    words = f"below {program}" if factor == 1 else f"≤ {factor:g} × {program}"
    yield Target(work, figure, words, value, name, theirs, None if theirs is None else factor * theirs)


def _figure(run: Run | None, figure: str) -> float | None:
    return None if run is None else float(getattr(run, figure))


def _costs(results: Results) -> Iterator[Target]:
    yield from _times(results, "short", "cpu_us_per_request", SGLANG, 0.6)
    yield from _times(results, "short", "cpu_us_per_request", VLLM, 1)
    yield from _times(results, "short", "cpu_us_per_request", SGLANG, 0.3)
    yield from _times(results, "long", "cpu_us_per_request", SGLANG, 0.6)


def _streams(results: Results) -> Iterator[Target]:
    for figure in ("cpu_us_per_event", "ttft_p50_ms"):
        for name, factor in ((NGINX, 1.3), (NGINX, 1.1), (VLLM, 1), (SGLANG, 1)):
            yield from _times(results, "paced", figure, name, factor)
    if own := results.get("paced", OURS):
        direct = results.get("paced", DIRECT)
        limit = direct.stalls if direct else 0  # without a router stalls come from other work of the machine
        yield Target("paced", "stalls", "no more than direct", own.stalls, DIRECT, limit, limit)


def _chat(results: Results) -> Iterator[Target]:
    yield from _times(results, "chat", "cpu_us_per_request", DYNAMO, 0.4, ours=OURS_KV)


def _added(results: Results) -> Iterator[Target]:
    own, peer = results.get("alone", OURS), results.get("alone", NGINX)
    if own is None:
        return
    for figure, more in _ADDED_MS.items():
        theirs = _figure(peer, figure)
        limit = None if theirs is None else theirs + more
        words = f"≤ nginx + {more:g} ms"
        yield Target("alone", figure, words, float(getattr(own, figure)), NGINX, theirs, limit)


def target_table(rows: Sequence[Target]) -> Table:
    """Target, ours, the peer's, ratio, met or not."""
    shown = []
    for row in rows:
        theirs = "missing" if row.theirs is None else f"{row.theirs:.2f}"
        met = {True: "[green]yes[/]", False: "[red]no[/]", None: "unknown"}[row.is_met]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        shown.append([row.work, _TITLES[row.figure], row.target, f"{row.ours:.2f}", theirs, ratio, met])
    return table_of("targets", ("work", "figure", "target", "ours", "peer's", "ratio", "met"), shown)


_TITLES = {
    "cpu_us_per_request": "CPU µs / request",
    "cpu_us_per_event": "CPU µs / event",
    "ttft_p50_ms": "TTFT p50, ms",
    "stalls": "waits ≥ 35 ms",
    "latency_p50_ms": "latency p50, ms",
    "latency_p99_ms": "latency p99, ms",
}
