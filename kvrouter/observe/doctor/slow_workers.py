"""Workers whose answers begin much later than those of the other workers of their pool.

    /fleet of each replica, two looks ──sums over replicas and ranks──> Served by pool and worker ──> findings

What was served between the two looks counts first; where that is too little, all since the replicas' start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median_low
from typing import TypeAlias

from kvrouter.observe.doctor.findings import Finding
from kvrouter.observe.doctor.replicas import Examined
from kvrouter.observe.document import Fleet, TargetRow

# A slow worker gets few requests, so few answers have to do. The fewer, the longer they have to take.
LEAST_ANSWERS = 3
# Between equal workers under load, means of many answers differ by less; a GPU that throttles exceeds it.
MOST_TIMES = 3.0
# Below this difference no client notices.
LEAST_S = 0.05
# A prefill takes a step of the engine, however short it is: about as long as so many tokens.
_STEP_TOKENS = 512


@dataclass(slots=True)
class ServedRequests:
    """Answers of one worker. `ttft_s`, `uncached_tokens`: sums; `uncached_tokens` as predicted."""

    answers: int = 0
    ttft_s: float = 0.0
    uncached_tokens: int = 0

    def add(self, row: TargetRow, sign: int) -> None:
        self.answers += sign * row.ttft_count
        self.ttft_s += sign * row.ttft_sum_s
        self.uncached_tokens += sign * (row.prompt_tokens - row.overlap_tokens)

    @property
    def mean_s(self) -> float:
        return self.ttft_s / self.answers

    @property
    def mean_tokens(self) -> float:
        return self.uncached_tokens / self.answers


_Pool: TypeAlias = Mapping[str, ServedRequests]
"""By worker."""


def check_slow_workers(replicas: Sequence[Examined]) -> Iterator[Finding]:
    """Findings about workers that are slow now, or have been since the replicas' start."""
    looks = [*dict(_looks(replicas)).values()]
    now, ever = _served(looks, since_first=True), _served(looks, since_first=False)
    states = {
        (row.pool, row.worker): f"running {_known(row.running)}, waiting {_known(row.waiting)}, "
        f"KV cache {_known(row.kv_usage, '.0%')}"
        for _, later in looks
        for row in later.targets
        if row.rank == 0
    }
    for pool in ever:
        judged: set[str] = set()
        for workers, when in ((now[pool], "while looking"), (ever[pool], "since the replicas' start")):
            for worker, seen in _slow(workers, judged):
                yield Finding(
                    "engine.slow", worker, f"{pool}: {seen} {when}; {states.get((pool, worker), '')}"
                )


def _looks(replicas: Sequence[Examined]) -> Iterator[tuple[str, tuple[Fleet, Fleet]]]:
    """By router id, both looks if they were at one process: counters begin anew with another one."""
    for one in replicas:
        first, later = one.fleet, one.fleet_later
        if first is not None and later is not None and first.router_id == later.router_id:
            yield first.router_id, (first, later)


def _served(
    looks: Sequence[tuple[Fleet, Fleet]], *, since_first: bool
) -> defaultdict[str, defaultdict[str, ServedRequests]]:
    found: defaultdict[str, defaultdict[str, ServedRequests]] = defaultdict(
        lambda: defaultdict(ServedRequests)
    )
    for first, later in looks:
        for row in later.targets:
            found[row.pool][row.worker].add(row, 1)
        for row in first.targets if since_first else ():
            found[row.pool][row.worker].add(row, -1)
    return found


def _slow(workers: _Pool, judged: set[str]) -> Iterator[tuple[str, str]]:
    """Worker and what was seen. Adds to `judged` those with enough answers, and skips those in it."""
    enough = {worker: served for worker, served in workers.items() if served.answers >= LEAST_ANSWERS}
    for worker, served in enough.items():
        others = [other for name, other in enough.items() if name != worker]
        if worker in judged or not others:
            continue
        judged.add(worker)
        usual_s = median_low(other.mean_s for other in others)
        # Longer prompts, or less of them cached, take longer at any worker.
        usual_tokens = median_low(other.mean_tokens for other in others)
        work = max(1.0, (served.mean_tokens + _STEP_TOKENS) / (usual_tokens + _STEP_TOKENS))
        doubt = sqrt(1 + LEAST_ANSWERS / served.answers)
        if served.mean_s > MOST_TIMES * doubt * work * usual_s and served.mean_s - usual_s > LEAST_S:
            yield (
                worker,
                f"TTFT {served.mean_s:.3f} s, {usual_s:.3f} s at the others ({served.answers} answers)",
            )


def _known(number: float | None, form: str = "") -> str:
    return "unknown" if number is None else format(number, form)
