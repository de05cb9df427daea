"""What naming a prompt's blocks costs: block and sequence hashes, in Python and in C."""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrouter.core import twins
from kvrouter.core.blocks import block_hashes, prompt_hashes, sequence_hashes
from scripts.kit.bench.index_fixtures import BLOCK_SIZE, microseconds
from scripts.kit.bench.machine import machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench hashes", description=__doc__)
    parser.add_argument("--tokens", type=int, default=9000, metavar="N", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    flags = parser.parse_args(arguments)
    rows = {name: measure(flags.tokens, name) for name in built()}
    table = Table(title=f"CPU µs for {flags.tokens:,} tokens, blocks of {BLOCK_SIZE}")
    table.add_column("from tokens to …")
    for name in rows:
        table.add_column(name, justify="right")
    for what in next(iter(rows.values())):
        table.add_row(what, *(f"{row[what]:,.1f}" for row in rows.values()))
    Console().print(table)
    if flags.json is not None:
        flags.json.write_text(json.dumps({**machine(), "tokens": flags.tokens, "us": rows}, indent=2) + "\n")
    return 0


def built() -> list[str]:
    """The versions that are there."""
    return [name for name in twins.CORES if name == twins.PYTHON or not twins.why_not_built]


def measure(tokens: int, core: str) -> dict[str, float]:
    """Each way, with one version."""
    twins.choose(core)
    rng = random.Random(tokens)
    listed = [rng.randrange(150_000) for _ in range(tokens)]
    packed = array("I", listed)
    ways: dict[str, Callable[[], object]] = {
        "lists: block_hashes, sequence_hashes": lambda: sequence_hashes(block_hashes(listed, BLOCK_SIZE)),
        "the request path, from a list": lambda: prompt_hashes(listed, BLOCK_SIZE),
        "the request path, from array('I')": lambda: prompt_hashes(packed, BLOCK_SIZE),
    }
    return {name: microseconds(way) for name, way in ways.items()}
