"""Growth of cost with targets, length of a prompt, and resident blocks, as plots and figures."""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrouter.core.native import versions
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import prompt_hashes
from scripts.kit.bench.hashes import built
from scripts.kit.bench.index import MOST_BLOCKS, decision, overlap, resident
from scripts.kit.bench.index_fixtures import BLOCK_SIZE, HOLDERS, microseconds, new_targets
from scripts.kit.bench.meter import machine
from scripts.kit.bench.plot import Point, write_plot

TARGETS = (8, 16, 32, 64, 128, 256, 512, 1000)
TOKENS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000)
RESIDENT = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)

PLOTS = Path("docs/plots")
FIGURES = "index-growth.json"

Series = dict[str, list[Point]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and draw."""
    parser = argparse.ArgumentParser(prog="scripts/bench growth", description=__doc__)
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help=f"directory for plots and figures ({FIGURES}); default: {PLOTS}, required with --quick",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes only, as a test; needs --plots")
    flags = parser.parse_args(arguments)
    if flags.plots is None and flags.quick:
        parser.error(f"--quick needs --plots DIR: its plots must not replace those of {PLOTS}")
    flags.plots = flags.plots or PLOTS
    flags.plots.mkdir(parents=True, exist_ok=True)
    figures = [over_targets(flags), over_tokens(flags), over_blocks(flags)]
    report = {**machine(), **{name: series for each in figures for name, series in each.items()}}
    (flags.plots / FIGURES).write_text(json.dumps(report, indent=1) + "\n")
    print(f"plots and {FIGURES} are in {flags.plots}")
    return 0


def over_targets(flags: argparse.Namespace) -> dict[str, Series]:
    """Decisions and look-ups, 8 to 1,000 targets."""
    sizes = TARGETS[:2] if flags.quick else TARGETS
    decisions, look_ups = Series(), Series()
    for core in built():
        rows = [(count, decision(core, count), overlap(core, count)) for count in sizes]
        for name, key in (("4 hold a part", "route_and_free_us"), ("all hold a part", "all_hold_some_us")):
            decisions[f"{core}, {name}"] = [(count, float(row[key])) for count, row, _ in rows]
        for name, key in (("4 hold a part", "four_hold_it_us"), ("all hold a part", "all_differ_us")):
            look_ups[f"{core}, {name}"] = [(count, float(row[key])) for count, _, row in rows]
    draw = plotter(flags.plots, "targets")
    draw("decision-targets", "A decision in mode kv, booked and freed", "CPU µs", decisions)
    draw("overlap-targets", "Overlap of a 562-block prompt", "CPU µs", look_ups)
    return {"decision-targets": decisions, "overlap-targets": look_ups}


def over_tokens(flags: argparse.Namespace) -> dict[str, Series]:
    """Hashes and overlap of one prompt, 1,000 to 128,000 tokens."""
    sizes = TOKENS[:2] if flags.quick else TOKENS
    series = Series()
    for core in built():
        for name, kind in (("a list", list), ("array('I')", lambda ids: array("I", ids))):
            series[f"{core}, from {name}"] = [(count, hashed_and_found(core, count, kind)) for count in sizes]
    plotter(flags.plots, "tokens of the prompt")(
        "prompt-tokens", "Hashes and overlap of a prompt, 64 targets", "CPU µs", series
    )
    return {"prompt-tokens": series}


def hashed_and_found(core: str, tokens: int, kind: Callable[[list[int]], Sequence[int]]) -> float:
    """Hash a prompt's blocks and look them up; four of 64 targets hold a beginning."""
    versions.choose(core)
    rng = random.Random(tokens)
    ids = kind([rng.randrange(150_000) for _ in range(tokens)])
    index, chain = BlockIndex(), prompt_hashes(ids, BLOCK_SIZE)
    for target in new_targets(64)[:HOLDERS]:
        index.store(target, chain[: rng.randrange(1, len(chain))])
    return microseconds(lambda: index.overlap(prompt_hashes(ids, BLOCK_SIZE)))


def over_blocks(flags: argparse.Namespace) -> dict[str, Series]:
    """Events and memory, 10,000 to 10,000,000 blocks resident."""
    sizes = RESIDENT[:2] if flags.quick else RESIDENT
    events, memory = Series(), Series()
    for core in built():
        rows = [resident(core, count, 1000) for count in sizes if count <= MOST_BLOCKS[core]]
        at = [float(row["blocks"]) for row in rows]
        for name in ("store", "remove"):
            cost = [1e3 / float(row[f"{name}_m_per_s"]) for row in rows]
            events[f"{core}, {name}"] = list(zip(at, cost, strict=True))
        taken = [float(row["table_bytes_per_block"]) for row in rows]
        memory[f"{core}"] = list(zip(at, taken, strict=True))
        most = [float(row["most_table_bytes_per_block"]) for row in rows]
        memory[f"{core}, at most on the way"] = list(zip(at, most, strict=True))
    draw = plotter(flags.plots, "blocks resident")
    draw("store-blocks", "Events of 8 blocks, 1,000 targets", "CPU ns per block", events)
    draw("memory-blocks", "Memory of the table, 1,000 targets", "bytes per block", memory)
    return {"store-blocks": events, "memory-blocks": memory}


def plotter(folder: Path, x_label: str) -> Callable[[str, str, str, Series], None]:
    """Draws one plot after the other, both axes logarithmic."""

    def draw(name: str, title: str, y_label: str, series: Series) -> None:
        write_plot(folder / f"{name}.svg", title, x_label, y_label, series, log_x=True, log_y=True)

    return draw
