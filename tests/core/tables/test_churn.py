"""A long random history of one table: blocks are stored, removed and looked up, and compared with a model.

A block operation is one block stored, removed or looked up. In the long form the number of rows varies
between 2 and 1,000,000, so that shards of every size grow, shrink and are swept. The model has, for each
slot, the depth to which it holds each chain: that describes a prefix-closed set completely.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from kvrouter.core.tables.table import FlatTable, new_table
from tests.long import IS_LONG

OPERATIONS, MOST_ROWS = (20_000_000, 1_000_000) if IS_LONG else (20_000, 3000)
CHAIN_BLOCKS = 512
# A phase ends after this many operations or calls: calls with few rows each would take too long.
PHASE_OPERATIONS, PHASE_CALLS = OPERATIONS // 4, 100_000
SLOTS = (1, 3, 70)
BOOKINGS = 50


class Forgetful(FlatTable):
    """A table that does not sweep one of its shards."""

    def sweep(self, slots: Sequence[int], shard_number: int) -> None:
        if shard_number != 5:
            super().sweep(slots, shard_number)


@pytest.mark.usefixtures("core")
@pytest.mark.timeout(1800)
def test_equals_the_model() -> None:
    """After every phase, with operations of every kind."""
    churn = Churn(new_table(1))

    churn.run(OPERATIONS)

    assert {"stored", "removed", "looked up"} == {*churn.done}


def test_wrong_table_is_noticed() -> None:
    """A few blocks too many make the history fail."""
    churn = Churn(Forgetful(1))

    with pytest.raises(AssertionError):
        churn.run(40 * PHASE_OPERATIONS)


class Churn:
    """One table and the model. Invariant: `depths[slot][chain]` blocks of a chain are in a slot."""

    def __init__(self, table: FlatTable) -> None:
        self._rng = random.Random(1)
        self._table = table
        # Blocks stored, removed, looked up.
        self.done: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        while self.done.total() < operations:
            self._phase()

    def _phase(self) -> None:
        """Fill the table to a random size, store and remove blocks at that size, check, and empty it."""
        self._begin()
        acts = (self._store, self._store, self._remove, self._remove, self._look_up, self._book)
        stop = self.done.total() + PHASE_OPERATIONS
        for _ in range(PHASE_CALLS):
            if self.done.total() >= stop:
                break
            self._rng.choice(acts)()
        self._check()
        self._empty()
        self._check()

    def _begin(self) -> None:
        rng = self._rng
        rows = round(2 * (MOST_ROWS / 2) ** rng.random())
        length = rng.randint(1, min(CHAIN_BLOCKS, rows))
        hashes = array("Q", rng.randbytes(8 * length * (rows // length)))
        self._chains = [hashes[at : at + length] for at in range(0, len(hashes), length)]
        self._sets = [self._table.slot_set(slot) for slot in range(rng.choice(SLOTS))]
        self._depths = [[0] * len(self._chains) for _ in self._sets]
        self._booked = self._table.counted_set(len(self._sets))
        self._bookings: list[tuple[int, int]] = []
        for slot in range(len(self._sets) + 1):
            self._table.label(slot, slot)

    def _pick(self) -> tuple[int, int, array[int], int]:
        slot, number = self._rng.randrange(len(self._sets)), self._rng.randrange(len(self._chains))
        return slot, number, self._chains[number], self._depths[slot][number]

    def _store(self) -> None:
        slot, number, chain, depth = self._pick()
        deeper = self._rng.randint(depth, len(chain))
        assert deeper - depth == self._sets[slot].add(chain[depth:deeper])
        self._depths[slot][number] = deeper
        self.done["stored"] += deeper - depth

    def _remove(self) -> None:
        slot, number, chain, depth = self._pick()
        left = self._rng.randint(0, depth)
        assert depth - left == self._sets[slot].discard(chain[left:depth])
        self._depths[slot][number] = left
        self.done["removed"] += depth - left

    def _look_up(self) -> None:
        """Look up every block of a chain, whether a slot holds it or not."""
        _, number, chain, _ = self._pick()
        deepest, room = self._deepest(number), self._rng.randint(0, len(chain))
        assert min(len(chain), deepest + room) == self._table.accepted(0, chain, room, 0, 0)
        held = {slot: depths[number] for slot, depths in enumerate(self._depths)}
        held[self._booked.slot] = max((depth for one, depth in self._bookings if one == number), default=0)
        assert {slot: depth for slot, depth in held.items() if depth} == self._table.depths(chain)
        self.done["looked up"] += min(len(chain), deepest + room)

    def _book(self) -> None:
        """Add or remove one booking."""
        if len(self._bookings) < self._rng.randint(0, BOOKINGS):
            _, number, chain, _ = self._pick()
            depth = self._rng.randint(0, len(chain))
            self._booked.add(chain[:depth])
            self._bookings.append((number, depth))
            self.done["stored"] += depth
        elif self._bookings:
            number, depth = self._bookings.pop(self._rng.randrange(len(self._bookings)))
            self._booked.discard(self._chains[number][:depth])
            self.done["removed"] += depth

    def _deepest(self, number: int) -> int:
        booked = (depth for one, depth in self._bookings if one == number)
        return max(*(depths[number] for depths in self._depths), *booked, 0)

    def _empty(self) -> None:
        """Empty the slots by sweeps, as for a lost worker, and free the bookings."""
        slots = list(range(len(self._sets)))
        for shard in range(self._table.shards):
            self._table.sweep(slots, shard)
        self._sets = [self._table.slot_set(slot) for slot in slots]
        self._depths = [[0] * len(self._chains) for _ in slots]
        while self._bookings:
            number, depth = self._bookings.pop()
            self._booked.discard(self._chains[number][:depth])

    def _check(self) -> None:
        """Check the table's invariants, its size, and count and digest of every slot."""
        self._table.check()
        rows = sum(map(self._deepest, range(len(self._chains))))
        assert rows == len(self._table)
        for held, depths in zip(self._sets, self._depths, strict=True):
            total = sum(sum(chain[:depth]) for chain, depth in zip(self._chains, depths, strict=True))
            assert (sum(depths), total % 2**64) == (held.count, held.digest)
        booked = Counter(hash_ for one, depth in self._bookings for hash_ in self._chains[one][:depth])
        assert booked == self._booked.counts()
