"""One index with many blocks, in its own process: cost of events and memory of a block.

Chains of 512 blocks, each held by four of the targets: completely by one, in part by three. Events are
made just before they are stored, a thousand at a time, so that they are in the CPU's cache, like events
that were just decoded. The rows of the index are not.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrouter.core.native import versions
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.ids import Target, WorkerId

CHAIN_BLOCKS, EVENT_BLOCKS, LOAD_BLOCKS = 512, 8, 64
ROUND_EVENTS, ROUNDS = 1000, 40
PAGE_BYTES = 4096
# Targets that hold something of a chain or prompt.
HOLDERS = 4


def new_targets(count: int) -> list[Target]:
    """Workers of one rank each."""
    return [Target(WorkerId(f"w{number:04d}")) for number in range(count)]


def random_hashes(rng: random.Random, count: int) -> array[int]:
    """Random 64-bit numbers, which are distributed like sequence hashes."""
    return array("Q", rng.randbytes(8 * count))


class Growing:
    """An index while it is filled: durations of calls, and the maximum of memory per block."""

    def __init__(self, targets: Sequence[Target], rng: random.Random) -> None:
        self.index = BlockIndex()
        self.calls_ns: list[int] = []
        self.most_bytes = 0.0
        self._targets = targets
        self._rng = rng

    def fill(self, blocks: int) -> None:
        """Store chains up to this number of blocks."""
        while len(self.index) < blocks:
            chain = random_hashes(self._rng, min(CHAIN_BLOCKS, blocks - len(self.index)))
            whole, *others = self._rng.sample(self._targets, min(HOLDERS, len(self._targets)))
            self._store(whole, chain.tobytes())
            for target in others:
                self._store(target, chain[: self._rng.randrange(1, len(chain) + 1)].tobytes())
            if 10 * len(self.index) > blocks:
                self.most_bytes = max(self.most_bytes, self.index.size_bytes() / len(self.index))

    def _store(self, target: Target, hashes: bytes) -> None:
        for start in range(0, len(hashes), LOAD_BLOCKS * 8):
            event = hashes[start : start + LOAD_BLOCKS * 8]
            began = time.thread_time_ns()
            self.index.store(target, event)
            self.calls_ns.append(time.thread_time_ns() - began)


def measure(core: str, blocks: int, targets: int) -> dict[str, float | str]:
    """Fill an index and measure it."""
    versions.choose(core)
    gc.disable()  # its collections would count as stalls of the index
    rng, names = random.Random(blocks), new_targets(targets)
    before = resident_bytes()
    growing = Growing(names, rng)
    growing.fill(blocks)
    taken = resident_bytes() - before
    index = growing.index
    table_bytes = index.size_bytes() / len(index)  # before the events, which make it grow once more
    stored, removed = _events(index, names, rng)
    return {
        "core": core,
        "blocks": blocks,
        "targets": targets,
        "store_m_per_s": 1 / stored,
        "remove_m_per_s": 1 / removed,
        "table_bytes_per_block": table_bytes,
        "most_table_bytes_per_block": growing.most_bytes,
        "resident_bytes_per_block": taken / blocks,
        **_tail("store", growing.calls_ns),
        **_tail("sweep", _sweep_ns(index, names[0])),
    }


def _events(index: BlockIndex, targets: Sequence[Target], rng: random.Random) -> tuple[float, float]:
    """Microseconds per block, stored and removed."""
    stored, removed = [], []
    for number in range(ROUNDS):
        events = [random_hashes(rng, EVENT_BLOCKS).tobytes() for _ in range(ROUND_EVENTS)]
        order = [targets[(number + place) % len(targets)] for place in range(ROUND_EVENTS)]
        stored.append(_round(index.store, order, events))
        removed.append(_round(index.remove, order, events))
    return statistics.median(stored), statistics.median(removed)


def _round(act: Callable[[Target, bytes], None], order: Sequence[Target], events: Sequence[bytes]) -> float:
    began = time.process_time()
    for target, event in zip(order, events, strict=True):
        act(target, event)
    return (time.process_time() - began) * 1e6 / (len(events) * EVENT_BLOCKS)


def _sweep_ns(index: BlockIndex, gone: Target) -> list[int]:
    """Duration of each step that sweeps the blocks of a target that left."""
    index.drop(gone)
    steps, more = [], True
    while more:
        began = time.thread_time_ns()
        more = index.sweep()
        steps.append(time.thread_time_ns() - began)
    return steps


def _tail(name: str, calls_ns: list[int]) -> dict[str, float]:
    """The 99.9th percentile and the maximum; on a shared machine, the maximum is due to the machine."""
    ordered = sorted(calls_ns)
    return {
        f"{name}_p999_us": ordered[-1 - len(ordered) // 1000] / 1e3,
        f"{name}_longest_us": ordered[-1] / 1e3,
    }


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main() -> None:
    """Print what was measured, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("core", choices=versions.CORES)
    parser.add_argument("blocks", type=int)
    parser.add_argument("targets", type=int)
    flags = parser.parse_args()
    print(json.dumps(measure(flags.core, flags.blocks, flags.targets)))


if __name__ == "__main__":
    main()
