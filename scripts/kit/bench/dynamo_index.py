"""The work of `scripts/bench index` and `hashes` with NVIDIA Dynamo's binding, for a Python that has it.

    python3 -m venv DIR && DIR/bin/pip install ai-dynamo-runtime
    DIR/bin/python scripts/kit/bench/dynamo_index.py

Its tree runs in its own thread, so two times are printed: the time of a call, and CPU time of the process.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

GROUPS, BLOCKS, SYSTEM_BLOCKS, HOLDERS, BLOCK_SIZE = 230, 562, 500, 4, 16
EVENTS = 20_000


def main() -> None:
    """Print the figures as JSON."""
    from dynamo import _core  # type: ignore[import-not-found]

    rng = random.Random(1)
    tokens = [rng.randrange(150_000) for _ in range(9000)]
    figures: dict[str, Any] = {
        "hashes_us": timed(lambda: _core.compute_block_hash_for_seq(tokens, BLOCK_SIZE))
    }
    for targets in (8, 64, 512):
        figures[f"overlap_{targets}_us"] = overlap(_core.RadixTree(), targets, rng)
    figures["store_m_per_s"], figures["remove_m_per_s"] = events(_core.RadixTree(), rng)
    print(json.dumps(figures))


def overlap(tree: Any, targets: int, rng: random.Random) -> tuple[float, float]:
    """Look-ups of prompts in groups."""
    prompts = [[rng.getrandbits(63) for _ in range(BLOCKS)] for _ in range(GROUPS)]
    for number, prompt in enumerate(prompts):
        whole, *others = rng.sample(range(targets), HOLDERS)
        tree.apply_event(whole, stored(number, prompt))
        for other in others:
            tree.apply_event(other, stored(number, prompt[:SYSTEM_BLOCKS]))
    asked = iter(prompts * 1000)
    return timed(lambda: tree.find_matches(next(asked)))


def events(tree: Any, rng: random.Random) -> tuple[float, float]:
    """Millions of blocks per second, in events of 8 new blocks: stored, then removed."""
    chains = [[rng.getrandbits(63) for _ in range(8)] for _ in range(EVENTS)]
    into = [stored(number, chain) for number, chain in enumerate(chains)]
    out = [removed(number, chain) for number, chain in enumerate(chains)]
    return tuple(8 * EVENTS / _all(tree, each) / 1e6 for each in (into, out))  # type: ignore[return-value]


def _all(tree: Any, events: list[bytes]) -> float:
    began = time.perf_counter()
    for place, event in enumerate(events):
        tree.apply_event(place % 64, event)
    tree.find_matches([1])  # answered after all events were applied
    return time.perf_counter() - began


def stored(number: int, hashes: list[int]) -> bytes:
    """A stored event in the binding's format."""
    blocks = [{"block_hash": hash_, "tokens_hash": hash_} for hash_ in hashes]
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    ).encode()


def removed(number: int, hashes: list[int]) -> bytes:
    """A removed event."""
    return json.dumps({"event_id": number, "data": {"removed": {"block_hashes": hashes}}}).encode()


def timed(act: Callable[[], object], calls: int = 400, runs: int = 7) -> tuple[float, float]:
    """Median over the runs, microseconds of one call: wall clock, CPU time."""
    found = []
    for _ in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            act()
        found.append(((time.perf_counter() - wall) / calls * 1e6, (time.process_time() - cpu) / calls * 1e6))
    return statistics.median(one[0] for one in found), statistics.median(one[1] for one in found)


if __name__ == "__main__":
    main()
