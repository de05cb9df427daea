"""Random forests of chains, and a block index written for clarity, without regard to speed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from kvrouter.core.wire.ids import Target
from kvrouter.core.wire.ops import TIERS

MASK64 = 2**64 - 1


class Forest:
    """Blocks with parents; `chain(n)` leads from a root to block n. Hashes are spread over 64 bits."""

    def __init__(self, seed: int, size: int) -> None:
        rng = random.Random(seed)
        self.hashes = [rng.getrandbits(64) for _ in range(size)]
        self.parents: list[int | None] = [
            rng.randrange(max(0, n - 4), n) if n and rng.random() < 0.9 else None for n in range(size)
        ]

    def chain(self, node: int) -> list[int]:
        """Sequence hashes from the root to this block."""
        chain = []
        at: int | None = node % len(self.hashes)
        while at is not None:
            chain.append(self.hashes[at])
            at = self.parents[at]
        return chain[::-1]

    def subtree(self, node: int) -> list[int]:
        """Sequence hashes of this block and all below it, deepest first."""
        below = {node % len(self.hashes)}
        for child, parent in enumerate(self.parents):  # a parent's number is below its child's
            if parent in below:
                below.add(child)
        return [self.hashes[n] for n in sorted(below, reverse=True)]

    def is_closed(self, held: set[int]) -> bool:
        """Whether every block held has its parent held too."""
        numbers = [n for n, hash_ in enumerate(self.hashes) if hash_ in held]
        parents = [self.parents[n] for n in numbers]
        return all(parent is None or self.hashes[parent] in held for parent in parents)


class NaiveIndex:
    """Per target a list of plain sets: device, device ∪ host, device ∪ host ∪ disk; and its resume points."""

    def __init__(self) -> None:
        self.sets: dict[Target, list[set[int]]] = {}
        self.resumable: dict[Target, set[int]] = {}

    def store(self, target: Target, hashes: Iterable[int], tier: str) -> None:
        """Add to that set and all wider ones."""
        sets = self.sets.setdefault(target, [set() for _ in range(TIERS.index(tier) + 1)])
        while len(sets) <= TIERS.index(tier):
            sets.append(set(sets[-1]))
        add_to(sets, hashes, tier)

    def remove(self, target: Target, hashes: Iterable[int], tier: str) -> None:
        """Remove from that set and all narrower ones."""
        for held in self.sets.get(target, [])[: TIERS.index(tier) + 1]:
            held.difference_update(hashes)

    def clear(self, target: Target) -> None:
        for held in self.sets.get(target, []):
            held.clear()
        self.resumable.pop(target, None)

    def drop(self, target: Target) -> None:
        self.sets.pop(target, None)
        self.resumable.pop(target, None)

    def overlap_by_tier(self, chain: Sequence[int], most: int) -> dict[Target, list[int]]:
        """Walk along the chain, for every set of every target, and back to a resume point."""
        depths = {target: [walk(chain, held) for held in sets] for target, sets in self.sets.items()}
        for target, points in self.resumable.items():
            depths[target][0] = walk_back(chain, min(most, depths[target][0]), points)
        return {target: found for target, found in depths.items() if any(found)}

    def digest(self, target: Target, tier: str) -> tuple[int, int]:
        """Count and sum of one set."""
        sets = self.sets.get(target, [])
        held = sets[TIERS.index(tier)] if TIERS.index(tier) < len(sets) else set()
        return digest_of(held)


def add_to(sets: list[set[int]], hashes: Iterable[int], tier: str) -> None:
    """Add to the tier's set and all wider ones that exist."""
    for held in sets[TIERS.index(tier) :]:
        held.update(hashes)


def walk(chain: Sequence[int], held: set[int]) -> int:
    """Leading hashes of the chain that are held."""
    for depth, hash_ in enumerate(chain):
        if hash_ not in held:
            return depth
    return len(chain)


def walk_back(chain: Sequence[int], depth: int, points: set[int]) -> int:
    """The greatest depth, from this one on, behind whose last hash a resume point is."""
    while depth and chain[depth - 1] not in points:
        depth -= 1
    return depth


def digest_of(held: Iterable[int]) -> tuple[int, int]:
    """Count and digest that a Check of these hashes has."""
    listed = list(held)
    return len(listed), sum(listed) & MASK64
