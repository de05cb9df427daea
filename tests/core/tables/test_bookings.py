"""Bookings: the blocks that requests in flight hold, and the tokens that they are charged."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from xxhash import xxh3_64_intdigest

from kvrouter.core.tables.bookings import Booking, BookingTable
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from tests.core.forest import Forest, walk
from tests.long import examples

pytestmark = pytest.mark.usefixtures("core")

R1, R2 = RouterId("r1"), RouterId("r2")
T1, T2 = Target(WorkerId("w1")), Target(WorkerId("w2"), 3)
B1, B2 = BookingKey(R1, 1), BookingKey(R1, 2)
CHAIN = [11, 22, 33, 44]


def booking(
    key: BookingKey = B1,
    target: Target = T1,
    hashes: list[int] | None = None,
    prefill_tokens: int = 48,
    anonymous_blocks: int = 0,
) -> Booking:
    """A booking of CHAIN on T1 by default."""
    named = CHAIN if hashes is None else hashes
    return Booking(key, "req", target, named, 64, 1, prefill_tokens, anonymous_blocks)


@pytest.fixture
def active() -> BookingTable:
    return BookingTable()


def test_free_twice(active: BookingTable) -> None:
    """A request freed twice is counted once."""
    active.book(booking(B1))
    active.book(booking(B2))

    assert B1 == getattr(active.free(B1), "key", None)
    assert active.free(B1) is None

    assert (4, 48, 1) == (active.blocks(T1), active.charged_tokens(T1), active.requests(T1))
    active.check()


def test_shared_blocks_count_once(active: BookingTable) -> None:
    """Two requests with a common prefix hold it once, until both have ended."""
    active.book(booking(B1, hashes=[11, 22, 33]))
    active.book(booking(B2, hashes=[11, 22, 44]))
    assert 4 == active.blocks(T1)

    active.free(B1)

    assert 3 == active.blocks(T1)
    assert {T1: 2} == active.depths([11, 22, 33])


def test_depths_are_per_target(active: BookingTable) -> None:
    """Blocks in flight on one target are not in flight on another."""
    active.book(booking(B1, T1, CHAIN[:1]))
    active.book(booking(B2, T2, CHAIN[:3]))

    assert {T1: 1, T2: 3} == active.depths(CHAIN)
    assert {} == active.depths([99])


def test_prefill_completed(active: BookingTable) -> None:
    """The charge ends and the blocks stay; a second mark changes nothing."""
    active.book(booking())

    assert active.mark_prefill_completed(B1) is not None
    assert active.mark_prefill_completed(B1) is None

    assert (0, 4, 1) == (active.charged_tokens(T1), active.blocks(T1), active.requests(T1))
    active.check()


def test_free_implies_prefill_completed(active: BookingTable) -> None:
    """The rest of the charge ends with the booking; a later mark changes nothing."""
    active.book(booking())

    active.free(B1)

    assert active.mark_prefill_completed(B1) is None
    assert (0, 0, 0) == (active.charged_tokens(T1), active.blocks(T1), active.requests(T1))
    active.check()


def test_free_after_mark_does_not_charge_twice(active: BookingTable) -> None:
    """Mark, then free: the charge ends once."""
    active.book(booking(B1))
    active.book(booking(B2))
    active.mark_prefill_completed(B1)

    active.free(B1)

    assert 48 == active.charged_tokens(T1)


def test_output_blocks_are_never_shared(active: BookingTable) -> None:
    """Output blocks of requests with the same prompt add up; a lower number is ignored."""
    active.book(booking(B1))
    active.book(booking(B2))
    active.progress(B1, 3)
    active.progress(B2, 2)
    active.progress(B1, 1)
    active.progress(BookingKey(R2, 9), 5)

    assert 4 + 3 + 2 == active.blocks(T1)
    active.free(B1)
    assert 4 + 2 == active.blocks(T1)
    active.check()


def test_anonymous_blocks_count(active: BookingTable) -> None:
    """Blocks with unknown hashes are active too."""
    active.book(booking(anonymous_blocks=7))

    assert 11 == active.blocks(T1)
    active.free(B1)
    assert 0 == active.blocks(T1)


def test_booked_again_under_the_same_key(active: BookingTable) -> None:
    """The later booking replaces the earlier one, also if its target differs."""
    active.book(booking(B1, T1))

    active.book(booking(B1, T2, CHAIN[:1], prefill_tokens=5))

    assert (0, 0) == (active.blocks(T1), active.requests(T1))
    assert (1, 5, 1) == (active.blocks(T2), active.charged_tokens(T2), active.requests(T2))
    active.check()


def test_same_number_of_two_replicas(active: BookingTable) -> None:
    """Numbers are per replica: one's Free does not end the other's booking."""
    active.book(booking(BookingKey(R1, 1)))
    active.book(booking(BookingKey(R2, 1)))

    active.free(BookingKey(R1, 1))

    assert {R2: 1} == active.owners()
    assert 1 == active.requests(T1)


def test_a_replica_dies(active: BookingTable) -> None:
    """All its bookings end, and only its own."""
    for number in range(5):
        active.book(booking(BookingKey(R1, number), T2 if number % 2 else T1))
    active.book(booking(BookingKey(R2, 1), hashes=[99]))

    active.drop_owner(R1)
    active.drop_owner(R1)

    assert {R2: 1} == active.owners()
    assert not active.sweep()
    assert (1, 0) == (active.blocks(T1), active.blocks(T2))
    active.check()


def test_many_bookings_go_in_slices(active: BookingTable) -> None:
    """A dead replica's bookings end at once; slices release their hashes, deepest first."""
    chain = list(range(1000, 1100))
    for number in range(20):
        active.book(booking(BookingKey(R1, number), hashes=chain, prefill_tokens=10))

    active.drop_owner(R1)
    assert ({}, (0, 0)) == (active.owners(), active.digest(R1))
    steps = 1
    while active.sweep(50):
        active.check()
        steps += 1

    assert 20 * 2 <= steps <= 20 * 3
    assert active.is_empty
    active.check()


def test_owner_comes_back_while_its_past_is_swept(active: BookingTable) -> None:
    """The same numbers in a later snapshot are new bookings, and only the old ones are released."""
    for number in range(3):
        active.book(booking(BookingKey(R1, number), hashes=[11, 22, 33]))
    active.drop_owner(R1)
    active.sweep(2)

    active.book(booking(BookingKey(R1, 0), hashes=[11, 22], prefill_tokens=7))
    while active.sweep(2):
        active.check()

    assert {R1: 1} == active.owners()
    assert (2, 7, 1) == (active.blocks(T1), active.charged_tokens(T1), active.requests(T1))
    active.check()


def test_request_without_blocks(active: BookingTable) -> None:
    """A prompt shorter than a block counts as a request in flight."""
    active.book(booking(hashes=[], prefill_tokens=3))

    assert (0, 3, 1) == (active.blocks(T1), active.charged_tokens(T1), active.requests(T1))
    active.check()


def test_hash_named_twice_in_one_booking(active: BookingTable) -> None:
    """A block that a peer names twice in one booking counts once, and goes when the booking ends."""
    active.book(booking(hashes=[11, 11, 22]))
    active.check()
    assert 2 == active.blocks(T1)

    active.free(B1)

    assert 0 == active.blocks(T1)
    active.check()


def test_digest_covers_all_that_a_copy_holds(active: BookingTable) -> None:
    """Count, and the sum of xxh3_64 over MessagePack of each booking; its hashes are hashed first."""
    active.book(booking(B1, T2, anonymous_blocks=2))
    active.book(booking(B2, T1))
    active.mark_prefill_completed(B1)
    active.progress(B1, 7)

    hashes = xxh3_64_intdigest(pack_hashes(CHAIN))
    facts = [
        (1, "req", "w2", 3, hashes, 64, 1, 48, 2, True, 7),
        (2, "req", "w1", 0, hashes, 64, 1, 48, 0, False, 0),
    ]
    total = sum(xxh3_64_intdigest(msgpack.packb(fact)) for fact in facts)
    assert (2, total % 2**64) == active.digest(R1)
    assert (0, 0) == active.digest(R2)


def test_a_load_is_kept_while_its_target_is_lined_up(active: BookingTable) -> None:
    """A target without requests has a load of 0 in its column, and is forgotten after it has left."""
    active.line_up([T2, T1])
    for number in range(3):
        active.book(booking(BookingKey(R1, number)))
        assert ([0, 48], [0, 4], [0, 1]) == tuple(map(list, active.lined_up()))
        active.free(BookingKey(R1, number))
        assert ([0, 0], [0, 0], [0, 0]) == tuple(map(list, active.lined_up()))
        assert {} == active.depths(CHAIN)
        active.check()
    assert active.is_empty

    active.line_up([T2])

    active.check()


def test_columns_are_copies(active: BookingTable) -> None:
    """Columns that were read do not change later."""
    active.line_up([T1])
    active.book(booking())
    seen = active.lined_up()

    active.mark_prefill_completed(B1)
    active.progress(B1, 2)

    assert ([48], [4], [1]) == tuple(map(list, seen))
    assert ([0], [6], [1]) == tuple(map(list, active.lined_up()))


def test_check_notices_a_wrong_charge(active: BookingTable) -> None:
    """`check` raises for a charge that is too high."""
    active.book(booking())
    active._loads[T1].charged_tokens += 1

    with pytest.raises(AssertionError, match="does not add up"):
        active.check()


KEYS = [BookingKey(router, number) for router in (R1, R2) for number in range(4)]
keys = st.sampled_from(KEYS)


class ActiveHistory(RuleBasedStateMachine):
    """Any order of moments, also of bookings that are not there, leaves the sums right."""

    def __init__(self) -> None:
        super().__init__()
        self.active = BookingTable()
        self.model: dict[BookingKey, Booking] = {}
        self.dropped: list[Booking] = []

    @initialize(seed=st.integers(0, 2**32))
    def grow(self, seed: int) -> None:
        """A forest of prompts that share prefixes."""
        self.forest = Forest(seed, 24)

    @rule(key=keys, node=st.integers(0, 23), on=st.sampled_from([T1, T2]), tokens=st.integers(0, 9))
    def book(self, key: BookingKey, node: int, on: Target, tokens: int) -> None:
        """A request, or another one with the same key."""
        chain = self.forest.chain(node)
        self.active.book(booking(key, on, chain, tokens, anonymous_blocks=tokens % 3))
        self.model[key] = booking(key, on, chain, tokens, anonymous_blocks=tokens % 3)

    @rule(key=keys)
    def mark(self, key: BookingKey) -> None:
        """Its first byte arrives."""
        news = key in self.model and not self.model[key].prefill_completed
        assert news == (self.active.mark_prefill_completed(key) is not None)
        if key in self.model:
            self.model[key].prefill_completed = True

    @rule(key=keys, blocks=st.integers(0, 9))
    def progress(self, key: BookingKey, blocks: int) -> None:
        """Its output grows."""
        self.active.progress(key, blocks)
        if key in self.model:
            self.model[key].output_blocks = max(blocks, self.model[key].output_blocks)

    @rule(key=keys)
    def free(self, key: BookingKey) -> None:
        """It ends."""
        assert (self.model.pop(key, None) is not None) == (self.active.free(key) is not None)

    @rule(router_id=st.sampled_from([R1, R2]))
    def drop_owner(self, router_id: RouterId) -> None:
        """Its replica dies."""
        self.active.drop_owner(router_id)
        for key in [key for key in self.model if key.router_id == router_id]:
            self.dropped.append(self.model.pop(key))

    @rule(key=keys)
    def drop(self, key: BookingKey) -> None:
        """A snapshot shows that it has ended."""
        self.active.drop(key)
        if key in self.model:
            self.dropped.append(self.model.pop(key))

    @rule(hashes=st.integers(1, 20))
    def sweep(self, hashes: int) -> None:
        """Release a slice of the dropped bookings, deepest blocks of each first."""
        if not self.active.sweep(hashes):
            self.dropped = []
        elif self.dropped:
            gone = len(self.dropped) - len(self.active._dropped)
            self.dropped = self.dropped[gone:]

    @rule(those=st.sampled_from([(), (T1,), (T2, T1)]))
    def line_up(self, those: tuple[Target, ...]) -> None:
        """Workers come and go."""
        self.active.line_up(those)

    @rule(block_size=st.sampled_from([16, 32]))
    def use_block_size(self, block_size: int) -> None:
        """The pool's block size changes: no target is lined up again."""
        self.active.use_block_size(block_size)

    @invariant()
    def agrees(self) -> None:
        """Sums, depths and digests equal the bookings'."""
        self.active.check()
        for target in (T1, T2):
            here = [one for one in self.model.values() if one.target == target]
            if self.dropped:
                self._holds_at_least(target, here)
            else:
                self._agrees_on(target, here)
        for router_id in (R1, R2):
            own = [one.digest() for key, one in self.model.items() if key.router_id == router_id]
            assert (len(own), sum(own) % 2**64) == self.active.digest(router_id)

    def _holds_at_least(self, target: Target, here: list[Booking]) -> None:
        """Blocks that are being swept may still count; blocks in flight do."""
        held = {hash_ for one in here for hash_ in one.hashes}
        for node in range(24):
            chain = self.forest.chain(node)
            assert walk(chain, held) <= self.active.depths(chain).get(target, 0)
            depth = self.active.depths(chain).get(target, 0)
            loads = self.active._loads
            slot = loads[target].held.slot if target in loads else 0
            still = [self.active._table.holds(slot, hash_) for hash_ in chain]
            assert [True] * depth == still[:depth], "a hole in a chain that is being swept"

    def _agrees_on(self, target: Target, here: list[Booking]) -> None:
        held = {hash_ for one in here for hash_ in one.hashes}
        nameless = sum(one.anonymous_blocks + one.output_blocks for one in here)
        assert len(held) + nameless == self.active.blocks(target)
        charged = sum(one.prefill_tokens for one in here if not one.prefill_completed)
        assert (charged, len(here)) == (self.active.charged_tokens(target), self.active.requests(target))
        for node in range(24):
            chain = self.forest.chain(node)
            assert walk(chain, held) == self.active.depths(chain).get(target, 0)

    def teardown(self) -> None:
        """When all bookings are freed, nothing is left."""
        for key in KEYS:
            self.active.free(key)
        while self.active.sweep(7):
            self.active.check()
        self.active.check()
        assert {} == self.active.owners()
        assert self.active.is_empty
        self.active.line_up([])
        self.active.check()


def test_any_history() -> None:
    """After any bookings, marks, frees and drops in any order, the table equals the bookings in flight."""
    run_state_machine_as_test(ActiveHistory, settings=examples(60, stateful_step_count=30))
