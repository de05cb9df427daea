"""Cost of hashing a prompt's blocks: block and sequence hashes, new and known, in Python and in C."""

from __future__ import annotations

import argparse
import itertools
import random
from array import array
from collections.abc import Callable

from kvrouter.core.native import versions
from kvrouter.core.wire.hashes import block_hashes, block_seed, prompt_hashes, sequence_hashes
from kvrouter.tokens.prefix_hashes import PrefixHashes
from kvrouter.tokens.prefix_tokens import Beginnings
from scripts.kit.bench.meter import built, conclude, machine, microseconds
from scripts.kit.script import table_of

BLOCK_SIZE = 16

PROMPTS = 200
# Tokens of 256 characters, the default length of a part.
PART_TOKENS = 60


def run(flags: argparse.Namespace) -> int:
    """Measure; returns the exit code."""
    cores = {core: measure(flags.tokens, core) for core in built()}
    rows = [[what, *(f"{us[what]:,.1f}" for us in cores.values())] for what in next(iter(cores.values()))]
    title = f"CPU µs for {flags.tokens:,} tokens, blocks of {BLOCK_SIZE}"
    table = table_of(title, ["from tokens to …", *cores], rows)
    conclude(flags, [table], machine() | {"tokens": flags.tokens}, us=cores)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=9000, metavar="N", help="number (%(default)s)")


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
