"""Cost of hashing a prompt's blocks: block and sequence hashes, new and known, in Python and in C."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrouter.core.native import versions
from kvrouter.core.wire.hashes import block_hashes, block_seed, prompt_hashes, sequence_hashes
from kvrouter.tokens.prefix_hashes import PrefixHashes
from kvrouter.tokens.prefix_tokens import Beginnings
from scripts.kit.bench.index_fixtures import BLOCK_SIZE, microseconds
from scripts.kit.bench.meter import machine

PROMPTS = 200
# Tokens of 256 characters, the default length of a part.
PART_TOKENS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench hashes", description=__doc__)
    parser.add_argument("--tokens", type=int, default=9000, metavar="N", help="number (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
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
    """The versions that are built."""
    return [name for name in versions.CORES if name == versions.PYTHON or not versions.why_not_built]


def measure(tokens: int, core: str) -> dict[str, float]:
    """Each row, with one version."""
    versions.choose(core)
    rng = random.Random(tokens)
    listed = [rng.randrange(150_000) for _ in range(tokens)]
    packed = array("I", listed)
    ways: dict[str, Callable[[], object]] = {
        "lists: block_hashes, sequence_hashes": lambda: sequence_hashes(block_hashes(listed, BLOCK_SIZE)),
        "the request path, from a list": lambda: prompt_hashes(listed, BLOCK_SIZE),
        "the request path, from array('I')": lambda: prompt_hashes(packed, BLOCK_SIZE),
        **known_ways(rng, packed),
    }
    return {name: microseconds(way) for name, way in ways.items()}


def known_ways(rng: random.Random, ids: array[int]) -> dict[str, Callable[[], object]]:
    """Prompts that all end differently, through a full cache that also stores short ones."""
    few, many = min(100, len(ids) // 2), min(1000, len(ids) // 2)
    return {
        f"beginning known, the last {few:,} new": _known_way(rng, ids, len(ids) - few),
        f"beginning known, the last {many:,} new and remembered": _known_way(rng, ids, len(ids) - many),
        "nothing known, all remembered": _known_way(rng, ids, 0),
    }


def _known_way(rng: random.Random, ids: array[int], known_tokens: int) -> Callable[[], object]:
    hashes, seed = PrefixHashes(most=PROMPTS // 2, least_tokens=0), block_seed()
    known = [rng.randbytes(16) for _ in range(known_tokens // PART_TOKENS)]
    prompts = itertools.cycle(
        Beginnings(0, known, known_tokens, rng.randbytes(16), len(ids) - 10) for _ in range(PROMPTS)
    )
    return lambda: hashes.of(ids, next(prompts), BLOCK_SIZE, seed)
