"""Rounds in which every router does every work in turn, so that a disturbance meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import NamedTuple

from scripts.kit.bench.meter import group_cpu_ns
from scripts.kit.bench.wire.load import Report, run_load
from scripts.kit.bench.wire.works import Run, Work
from scripts.kit.fleet import FleetError

WARM_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class Contender:
    """A router that is measured: its port, and the process group whose CPU time counts."""

    name: str
    port: int
    group: int


def other(name: str) -> str:
    """The name of the contender that is the same router of another checkout."""
    return f"{name}, other"


class Ratio(NamedTuple):
    """Over the rounds: CPU time of a router over another router's in the same round."""

    lower: float
    """The lower quartile."""
    median: float
    upper: float


@dataclass(frozen=True, slots=True)
class Results:
    """The median of the runs, for each work and contender."""

    runs: int
    medians: dict[tuple[str, str], Run]
    ratios: dict[tuple[str, str], Ratio] = field(default_factory=dict)
    """To the same router of another checkout. A disturbance of the machine meets both: it shows smaller
    differences than the medians."""

    def get(self, work: str, name: str) -> Run | None:
        """The median, or None if it was not measured."""
        return self.medians.get((work, name))


async def warm(contenders: Sequence[Contender], works: Sequence[Work], directory: Path) -> None:
    """Open connections, fill caches, and load code that is compiled at first use."""
    for work in works:
        few = replace(work, requests=min(work.requests, WARM_REQUESTS), ramp_ms=0)
        for contender in contenders:
            await measure(few, contender, directory)


async def run_rounds(
    contenders: Sequence[Contender],
    make_works: Callable[[], Sequence[Work]],
    runs: int,
    directory: Path,
) -> Results:
    """Measure. Each round calls `make_works`; each work has another order, by chance.

    With orders in rotation a contender mostly comes after the same other one, and so may find the machine's
    caches and clock rate as that one left them: a program seemed to take 6 % more than itself.
    """
    seen: dict[tuple[str, str], list[Run]] = {}
    chance = Random()
    for number in range(runs):
        print(f"round {number + 1} of {runs}", flush=True)
        for work in make_works():
            order = chance.sample(contenders, len(contenders))
            found = {one.name: await measure(work, one, directory) for one in order}
            for one in contenders:
                seen.setdefault((work.name, one.name), []).append(found[one.name])
    return Results(runs, {key: Run.median(each) for key, each in seen.items()}, _ratios(seen))


def _ratios(seen: Mapping[tuple[str, str], Sequence[Run]]) -> dict[tuple[str, str], Ratio]:
    found = {}
    for (work, name), runs in seen.items():
        of_other = seen.get((work, other(name)), ())
        ratios = [one.cpu_us / two.cpu_us for one, two in zip(runs, of_other, strict=False)]
        if len(ratios) > 1:
            found[work, name] = Ratio(*quantiles(ratios, n=4, method="inclusive"))
    return found


async def measure(work: Work, contender: Contender, directory: Path) -> Run:
    """One run. Raises FleetError if a request fails: a router that fails is not compared."""
    before = group_cpu_ns(contender.group)
    report = await send(work, contender, directory)
    return Run.of(report, group_cpu_ns(contender.group) - before)


async def send(work: Work, contender: Contender, directory: Path) -> Report:
    """Send the requests of one run. Raises FleetError if one fails."""
    report = await run_load(work.load(contender.port), directory)
    if report.errors or not report.requests:
        raise FleetError(
            f"{contender.name}, {work.name}: {report.errors} of {work.requests} requests failed:"
            f" {report.first_error}"
        )
    return report
