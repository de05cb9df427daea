"""Outcomes of a run as figures, and the CPU load of the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvrouter.lab.simulate.percentiles import Percentiles, percentiles
from scripts.kit.load import Outcome

# Above this CPU load, measured times depend on the machine more than on the program.
BUSY_LIMIT = 0.80


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers."""

    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: Percentiles
    latency_s: Percentiles
    requests_per_worker: dict[str, int]
    # The longest delay of a request's departure. More than a few ms show that the generator lacked CPU time.
    worst_late_s: float

    @property
    def cached_token_rate(self) -> float:
        """Share of prompt tokens that engines found in their caches."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cached_token_rate": self.cached_token_rate}


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """The figures of a run; times and tokens are of successful requests only."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    workers = Counter(outcome.worker or "unknown" for outcome in good)
    return Figures(
        requests=len(outcomes),
        errors=len(outcomes) - len(good),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=sum(outcome.output_tokens for outcome in good),
        ttft_s=percentiles(outcome.ttft_s for outcome in good),
        latency_s=percentiles(outcome.latency_s for outcome in good),
        requests_per_worker=dict(sorted(workers.items())),
        worst_late_s=max((outcome.late_s for outcome in outcomes), default=0.0),
    )


@dataclass(frozen=True, slots=True)
class MachineTime:
    """CPU time of the whole machine since it started, in clock ticks."""

    busy: int
    total: int

    @classmethod
    def now(cls) -> MachineTime | None:
        """From /proc/stat; None on systems without it."""
        try:
            first = Path("/proc/stat").read_text().splitlines()[0]
        except OSError:
            return None
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, first.split()[1:9])
        busy = user + nice + system + irq + softirq + steal
        return cls(busy, busy + idle + iowait)

    def busy_since(self, earlier: MachineTime) -> float:
        """Share of the time of all cores used since `earlier`."""
        return (self.busy - earlier.busy) / max(1, self.total - earlier.total)
