"""What is shown of compared modes: a section for each cell, and plots over the loads of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kvrouter.errors import counted
from kvrouter.lab.page import Chart, Series
from kvrouter.lab.report import Section
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.compare import Compared, ModeRow
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.workloads import achievable
from kvrouter.settings.declare import number

TITLE = "Simulated routing"
MODELLED = (
    "Modelled: the queue, batch and cache of every engine, the router's real code, and the delays of bookings"
    " and KV events. Not modelled: networks, HTTP, tokenizers, preemption, and the router's own time. So"
    " differences between modes are real, and absolute times are those of the engines' model."
)

_DEFAULT_MODE = "kv"

# Moreh, "Prefix cache-aware routing" (Heimdall), experimental result: 8 pods of two MI250, Qwen3-32B.
HEIMDALL_RANDOM_S = (4.464611, 9.292547, 17.961767)
HEIMDALL_PREFIX_AWARE_S = (0.217383, 0.718785, 1.106871)


class Cached(NamedTuple):
    """Shares of the prompt tokens of a run: cached, and cached on the engine with most of each prompt."""

    real: float
    held: float


@dataclass(frozen=True, slots=True)
class Possible:
    """Shares of the prompt tokens that caches which all engines share would have had."""

    endless: float
    pooled: float
    """In one cache of the size of all engines' together."""

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], room_blocks: int, *, block_size: int) -> Possible:
        """Of all arrivals; `room_blocks`: those of all engines."""
        found = achievable(arrivals, room_blocks, block_size=block_size)
        tokens = sum(arrival.prompt_tokens for arrival in arrivals)
        return cls(found.endless / tokens, found.pooled / tokens)


def cached_line(shares: Mapping[str, Cached], possible: Possible) -> str:
    """`cached: kv 14.8% of 18.3% possible (best engines 15.2%, ...); round-robin 8.3%`, by mode."""
    first, *others = sorted(shares, key=lambda mode: mode.partition(":")[0] != _DEFAULT_MODE)
    rest = "".join(f"; {mode} {shares[mode].real:.1%}" for mode in others)
    bounds = f"best engines {shares[first].held:.1%}, one pooled cache {possible.pooled:.1%}"
    return f"cached: {first} {shares[first].real:.1%} of {possible.endless:.1%} possible ({bounds}){rest}"


def as_json(compared: Compared, *, seeds: int) -> dict[str, Any]:
    """A cell and the figures of its modes, times in seconds."""
    cell = compared.cell
    modes = {
        row.mode: {
            "regret_ttft_p90": row.regret,
            "cached_of_achievable": row.cached_of_achievable,
            "mean": asdict(row.mean),
            "spread": asdict(row.spread),
        }
        for row in compared.rows
    }
    return {
        "workload": cell.workload.name,
        "cache": cell.cache,
        "capacity_blocks": cell.capacity_blocks,
        "load": cell.load,
        "pace": cell.offered_pace,
        "workers": cell.workers,
        "replicas": cell.replicas,
        "model": asdict(cell.model),
        "speeds": cell.speeds,
        "sync": asdict(cell.sync) if cell.sync else None,
        "kv_delay_s": cell.kv_delay_s,
        "leaving": cell.leaving,
        "slo": asdict(cell.slo),
        "roles": asdict(cell.roles) if cell.roles else None,
        "seeds": seeds,
        "modes": modes,
    }


COLUMNS: dict[str, Callable[[ModeRow], str]] = {
    "TTFT s\nmean": lambda row: _s(row.mean.ttft_mean_s),
    "\np50": lambda row: _s(row.mean.ttft_p50_s),
    "\np90": lambda row: f"{_s(row.mean.ttft_p90_s)} ±{_s(row.spread.ttft_p90_s)}",
    "\np99": lambda row: _s(row.mean.ttft_p99_s),
    "regret\np90": lambda row: f"{row.regret:+.1%}",
    "ITL ms\np90": lambda row: f"{1000 * row.mean.itl_p90_s:.1f}",
    "e2e s\nmean": lambda row: f"{row.mean.e2e_mean_s:.2f}",
    "good-\nput": lambda row: f"{row.mean.goodput:.1%} ±{100 * row.spread.goodput:.1f}",
    "cached\ntokens": lambda row: f"{row.mean.cached:.1%}",
    "of pos-\nsible": lambda row: f"{row.cached_of_achievable:.0%}",
    "busiest\n/ mean": lambda row: f"{row.mean.busiest:.2f}",
}
_HANDED: dict[str, Callable[[ModeRow], str]] = {"handed\nover": lambda row: f"{row.mean.handed:.0%}"}
"""Where prefill and decode are apart."""


def _s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"


def sections(compared: Sequence[Compared], *, seeds: int) -> Iterator[Section]:
    """Each cell; ± is half the distance between the least and the greatest seed. Then the plots by load."""
    for one in compared:
        columns = COLUMNS | _HANDED if one.cell.roles else COLUMNS
        rows = [[row.mode, *(value(row) for value in columns.values())] for row in one.rows]
        charts = [
            Chart("Time to first token", [_times(row) for row in one.rows], "percentile", "seconds"),
            Chart(
                "First token against the following ones", _by_weight(one), "TTFT p90, seconds", "ITL p90, ms"
            ),
        ]
        yield Section(title_of(one, seeds), ["mode", *columns], rows, [*_notes(one)], charts=charts)
        if one.cell.workload.name == "heimdall":
            yield _beside_published(one)
    yield from (_ladder(ladder) for ladder in _ladders(compared))


def title_of(compared: Compared, seeds: int) -> str:
    cell = compared.cell
    load = f"load {cell.load:g}, " if cell.load is not None else ""
    sync = f" (sync {1000 * cell.sync.delay_s:g} ms)" if cell.sync else " (sync off)"
    replicas = f", {cell.replicas} replicas{sync}" if cell.replicas > 1 else ""
    roles = f", @: {cell.roles}, {cell.roles.gbps:g} Gb/s" if cell.roles else ""
    return (
        f"{cell.workload.name}: cache {cell.cache:.0%}, {load}pace {cell.offered_pace:.2f}, "
        f"{counted(cell.workers, 'worker')}{roles}{replicas}, {counted(seeds, 'seed')}"
    )


def _notes(compared: Compared) -> Iterator[str]:
    mean = compared.rows[0].mean
    shares = {row.mode: Cached(row.mean.cached, row.mean.held) for row in compared.rows}
    yield cached_line(shares, Possible(mean.achievable, mean.pooled))
    answered = {row.mode: row.mean.completed for row in compared.rows}
    if min(answered.values()) < 1:  # clients have left, or engines failed
        yield "answered: " + "; ".join(f"{mode} {share:.1%}" for mode, share in answered.items())


def _beside_published(compared: Compared) -> Section:
    """TTFT of random and of the other modes beside Heimdall's own, and how many times less it is."""
    ours = {
        row.mode: (row.mean.ttft_p50_s, row.mean.ttft_p75_s, row.mean.ttft_p90_s) for row in compared.rows
    }
    random = ours.pop("random", None)
    groups = [("published", HEIMDALL_RANDOM_S, {"prefix cache-aware": HEIMDALL_PREFIX_AWARE_S})]
    if random is not None:
        groups.append(("here", random, ours))
    rows = []
    for where, base, others in groups:
        rows.append([f"{where}: random", *_ms(base), ""])
        for mode, times in others.items():
            ratios = " / ".join(f"{one / other:.1f}×" for one, other in zip(base, times, strict=True))
            rows.append([f"{where}: {mode}", *_ms(times), ratios])
    return Section("TTFT ms, p50 / p75 / p90", ["", "p50", "p75", "p90", "random / it"], rows)


def _ms(times_s: Sequence[float]) -> list[str]:
    return [f"{1000 * value:,.0f}" for value in times_s]


# --- plots ---


def _times(row: ModeRow) -> Series:
    mean = row.mean
    seconds = [mean.ttft_p50_s, mean.ttft_p75_s, mean.ttft_p90_s, mean.ttft_p99_s]
    return Series(row.mode, (50, 75, 90, 99), seconds, "lines+markers")


def _by_weight(compared: Compared) -> list[Series]:
    """TTFT against ITL. The weights of a mode are a line, in their order."""
    lines: dict[str, list[tuple[float, ModeRow]]] = {}
    for row in compared.rows:
        name, _, text = row.mode.partition(":")
        weight = number(text)
        lines.setdefault(row.mode if weight is None else f"{name}:w", []).append((weight or 0.0, row))
    made = []
    for name, weighted in lines.items():
        rows = [row for _, row in sorted(weighted, key=lambda one: one[0])]
        ttft, itl = [row.mean.ttft_p90_s for row in rows], [1000 * row.mean.itl_p90_s for row in rows]
        made.append(Series(name, ttft, itl, "lines+markers", [row.mode for row in rows]))
    return made


def _ladders(compared: Sequence[Compared]) -> list[list[Compared]]:
    """Cells that differ in their load alone, where there are several; from the least load to the greatest."""
    groups: dict[tuple[str, float], list[Compared]] = {}
    for one in compared:
        groups.setdefault((one.cell.workload.name, one.cell.cache), []).append(one)
    return [sorted(group, key=lambda one: _load(one.cell)) for group in groups.values() if len(group) > 1]


def _ladder(ladder: Sequence[Compared]) -> Section:
    cell = ladder[0].cell
    loads, by_mode = [_load(one.cell) for one in ladder], zip(*(one.rows for one in ladder), strict=True)
    modes = [(rows[0].mode, rows) for rows in by_mode]
    figures: list[tuple[str, str, Callable[[ModeRow], float]]] = [
        ("TTFT p90", "seconds", lambda row: row.mean.ttft_p90_s),
        ("Regret: TTFT p90 above the oracle's", "share", lambda row: row.regret),
        ("Goodput", "share of the requests", lambda row: row.mean.goodput),
    ]
    charts = [
        Chart(
            name,
            [Series(mode, loads, [value(row) for row in rows], "lines+markers") for mode, rows in modes],
            "pace" if cell.load is None else "load",
            unit,
        )
        for name, unit, value in figures
    ]
    return Section(f"{cell.workload.name}, cache {cell.cache:.0%}: by load", charts=charts)


def _load(cell: Cell) -> float:
    return cell.pace if cell.load is None else cell.load
