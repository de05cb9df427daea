"""The block size of a pool whose engines differ, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.filters import Busy
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.wire.hashes import prompt_hashes
from kvrouter.core.wire.heartbeats import State, encode
from kvrouter.core.wire.ids import RouterId, Target, WorkerId
from kvrouter.policies.kv import Kv
from tests.core.replicas import ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import (
    POOL,
    T1,
    T2,
    W1,
    W2,
    W3,
    book,
    card,
    chain_from,
    new_pool,
    prompt,
    request,
    worker_beat,
)
from tests.long import examples
from tests.policies.tables import moment

pytestmark = pytest.mark.usefixtures("core")
CHAIN = chain_from(1000, 10)


def pass_rounds(pool: Pool, count: int) -> list[int]:
    """The pool's size after each of `count` rounds."""
    sizes = []
    for _ in range(count):
        pool.next_round(ROUNDS)
        sizes.append(pool.block_size)
    return sizes


def hashed(tokens: Sequence[int], size: int) -> RouteRequest:
    """A request for these tokens, as a frontend hashes it."""
    return request(Prompt(prompt_hashes(tokens, size), len(tokens), block_size=size))


def of_three(*sizes: int) -> Pool:
    """A pool of up to three workers whose size is settled."""
    pool = new_pool(*[card(f"w{n}", block_size=size) for n, size in enumerate(sizes, 1)])
    pass_rounds(pool, ROUNDS)
    return pool


def test_most_targets_decide() -> None:
    """Targets count, not workers: two ranks of one engine outweigh one rank of another engine."""
    assert 16 == of_three(32, 16, 16).block_size
    assert 16 == new_pool(card("w1", block_size=32), card("w2", ranks=2)).block_size


def test_smallest_start_decides_a_tie_of_new_workers() -> None:
    """The smallest (started_at, worker_id) decides, in any order of the cards."""
    cards = [
        card("w2", started_at_us=5),
        card("w1", block_size=32, started_at_us=5),
        card("w3", block_size=64),
    ]

    assert [64, 64] == [new_pool(*order).block_size for order in (cards, cards[::-1])]
    assert [32, 32] == [new_pool(*order).block_size for order in (cards[:2], cards[1::-1])]


def test_new_pool_follows_its_cards_at_once() -> None:
    """Before a lease has passed the size may change with each card, as cards arrive one by one."""
    pool = new_pool(card("w1", block_size=32))
    assert 32 == pool.block_size

    pool.update(W2, worker_beat(card("w2")))
    pool.update(W3, worker_beat(card("w3")))

    assert 16 == pool.block_size


def test_change_needs_a_lease() -> None:
    """Once settled, the size changes when most targets have had another one for a lease without a break."""
    pool = of_three(16, 16, 32)
    pool.update(W1, worker_beat(card("w1", block_size=32)))
    assert [16] * (ROUNDS - 1) == pass_rounds(pool, ROUNDS - 1)

    pool.update(W1, worker_beat(card("w1")))  # just in time
    pool.update(W1, worker_beat(card("w1", block_size=32)))

    assert [16] * (ROUNDS - 1) + [32] == pass_rounds(pool, ROUNDS)


def test_present_size_stays_in_a_tie() -> None:
    """It stays even if the eldest worker has another size."""
    pool = of_three(16, 16, 32)

    pool.remove(W1)

    assert [16] * 9 == pass_rounds(pool, 9)
    pool.remove(W2)
    assert [16] * (ROUNDS - 1) + [32] == pass_rounds(pool, ROUNDS)


def test_eldest_replica_decides_a_tie() -> None:
    """A replica that joins in a tie takes the eldest replica's size, if that is one of the tied sizes."""
    pool = new_pool(card("w1", block_size=32), card("w2"))
    assert 32 == pool.block_size

    for elder_size in (16,) * ROUNDS + (64,) * ROUNDS:
        pool.next_round(ROUNDS, elder_size)
        assert 16 == pool.block_size


def test_only_workers_that_take_requests_count() -> None:
    """Workers that are down or draining do not count, nor silent ones if there are others."""
    pool = of_three(16, 16, 32)
    pool.update(W1, worker_beat(card("w1"), state="down"))
    pool.silence({W2})
    assert 32 == pass_rounds(pool, ROUNDS)[-1]

    pool.silence({W3})

    assert [32] * 9 == pass_rounds(pool, 9)


def test_operator_decides() -> None:
    """`--kv-cache-block-size` overrides every card; all workers are candidates."""
    pool = new_pool(card("w1", block_size=32), card("w2"), block_size=64)

    assert [64] * 9 == pass_rounds(pool, 9)
    assert [T1, T2] == list(pool.targets)


# What it means for a worker


def test_worker_of_another_size_is_a_candidate() -> None:
    """It has overlap 0, and its load counts in tokens and the pool's blocks."""
    pool = of_three(16, 16, 32)
    odd = Target(W3)
    pool.index.store(odd, chain_from(5000, 5))  # its own blocks have other names
    book(pool, odd, CHAIN[:6], prefill_tokens=96)

    found = {one.target: one for one in pool.candidates(request(prompt(CHAIN)))}

    assert {T1, T2, odd} == found.keys()
    assert (0, 160, 160 + 96) == (
        found[odd].overlap_blocks, found[odd].own_prefill_tokens, found[odd].prefill_tokens
    )  # fmt: skip
    assert (6, 10, 1) == (found[odd].active_blocks, found[odd].decode_blocks, found[odd].requests)


def test_blocks_of_another_size_count_after_the_change() -> None:
    """Blocks known from its events are found as soon as prompts are hashed in its size."""
    pool, tokens = of_three(32, 32, 16), range(161)
    pool.index.store(Target(W3), prompt_hashes(tokens, 16))

    def overlaps() -> list[int]:
        asked = hashed(tokens, pool.block_size)
        return [one.overlap_blocks for one in pool.candidates(asked)]

    assert [0, 0, 0] == overlaps()
    pool.update(W1, worker_beat(card("w1")))
    pass_rounds(pool, ROUNDS)

    assert (16, [0, 0, 10]) == (pool.block_size, overlaps())


def test_assumed_blocks_are_dropped_with_the_size() -> None:
    """Without events, blocks assumed in the former size, or of an engine with another size, are dropped."""
    pool = new_pool(card("w1"), card("w2"), card("w3"), use_kv_events=False)
    pass_rounds(pool, ROUNDS)
    for target in (T1, T2, Target(W3)):
        pool.approx.insert(target, CHAIN, 0.0)

    pool.update(W1, worker_beat(card("w1", block_size=32)))
    assert {T2, Target(W3)} == pool.index.overlap(CHAIN).keys()
    assert [False, True] == [pool.may_assume(target) for target in (T1, T2)]

    pool.update(W2, worker_beat(card("w2", block_size=32)))
    assert 32 == pass_rounds(pool, ROUNDS)[-1]
    assert {} == pool.index.overlap(CHAIN)
    assert [True, False] == [pool.may_assume(target) for target in (T1, Target(W3))]


def test_lookahead_of_most() -> None:
    """A pool takes the look-ahead of most targets, in any order; the others have a note, and no overlap."""
    workers = [card("w1", lookahead=1), card("w2", ranks=3), card("w3", lookahead=1), card("w4", lookahead=2)]
    for order in permutations(workers):
        pool = new_pool(*order)
        assert 0 == pool.lookahead
        note = "look-ahead of 1 token, pool has 0: no overlap is predicted"
        assert note == pool.size_note(pool.workers[W1])
        pool.update(W2, worker_beat(card("w2", ranks=3), state="draining"))
        assert 1 == pool.lookahead
        assert "" == pool.size_note(pool.workers[W1])


def test_lookahead_that_is_not_known() -> None:
    """Engines that speculate and hold no block yet have no say and no note; with blocks they have both."""
    pool = new_pool(*(card(name, speculates=True) for name in ("w1", "w2", "w3")))
    assert 0 == pool.lookahead
    pool.update(W1, worker_beat(card("w1", lookahead=1)))
    assert (1, "") == (pool.lookahead, pool.size_note(pool.workers[W2]))

    for target in (T2, Target(W3)):
        pool.index.store(target, CHAIN)
    pool.update(W1, worker_beat(card("w1", lookahead=1), state="draining"))
    pool.update(W1, worker_beat(card("w1", lookahead=1)))
    assert (0, "") == (pool.lookahead, pool.size_note(pool.workers[W2]))
    assert pool.size_note(pool.workers[W1])


def test_notes_about_sizes() -> None:
    """One note for each worker, and one sentence for all of them that names a few."""
    pool = of_three(16, 16, 32)
    assert "block size 32, pool has 16: no overlap is predicted" == pool.size_note(pool.workers[W3])
    assert "" == pool.size_note(pool.workers[W1])
    assert pool.sizes_note() == (
        "1 of 3 workers have another block size than 16: no overlap is predicted there (w3: 32)"
    )

    crowd = new_pool(*[card(f"w{n}", block_size=8 + n) for n in range(9)], block_size=16)
    assert "8 of 9" in crowd.sizes_note()
    assert crowd.sizes_note().endswith("(w0: 8, w1: 9, w2: 10, w3: 11, w4: 12, …)")
    assert "" == of_three(16).sizes_note()


# Requests on their way while the size changes


def turned(pool: Pool) -> Pool:
    """Its workers come back with blocks of 32 tokens, and the pool follows."""
    for worker_id in pool.workers:
        pool.update(worker_id, worker_beat(card(worker_id, block_size=32)))
    pass_rounds(pool, ROUNDS)
    return pool


def of(pool: Pool, *, synced: bool = False) -> Router:
    """A router of the pool, in mode kv."""
    rules = RouterRules(Kv(), random.Random(1).random)
    return Router(pool, rules, router_id=RouterId("me"), incarnation=1000, synced=synced)


def test_request_hashed_before_the_change() -> None:
    """It has no overlap, shares no block, and is booked by its length in blocks of the present size."""
    pool = of_three(16, 16)
    asked = hashed(range(330), 16)
    pool.index.store(T1, asked.prompts[0].hashes)
    book(pool, T2, asked.prompts[0].hashes)
    router = of(turned(pool))

    placed = router.route(asked, 0.0)

    assert (0, 330, 10, 32) == (
        placed.choice.overlap_blocks, placed.choice.own_prefill_tokens, placed.choice.own_decode_blocks,
        placed.block_size,
    )  # fmt: skip
    booking = pool.active.booking(placed.key)
    assert booking is not None
    assert ((), 10, 330) == (booking.hashes, booking.anonymous_blocks, booking.isl)
    verdicts = router.decide(asked, 0.0).verdicts
    assert {0} == {one.candidate.overlap_blocks for one in verdicts if one.candidate is not None}
    pool.active.check()


def test_several_prompts_hashed_before_the_change() -> None:
    """Each is booked by its own length; if one has another size, no block has a name."""
    pool = turned(of_three(16))
    old, new = hashed(range(100), 16).prompts, hashed(range(70), 32).prompts

    placed = of(pool).route(request(*old, *new), 0.0)

    booking = pool.active.booking(placed.key)
    assert booking is not None
    assert ([], 3 + 2) == ([*booking.hashes], booking.anonymous_blocks)


def test_request_hashed_in_the_present_size_is_not_changed() -> None:
    """Nor is a request without a block size."""
    pool = of_three(16)

    for asked in (hashed(range(100), 16), request(prompt(CHAIN)), request()):
        assert asked is pool.in_present_size(asked)


def test_answer_counts_in_the_block_size_of_its_booking() -> None:
    """Its output blocks count in the size of its booking until it ends."""
    pool = of_three(16)
    router = of(pool)
    placed = router.route(hashed(range(160), 16), 0.0)
    router.bookings.progress(placed.key, 32)
    turned(pool)

    router.bookings.progress(placed.key, 48)

    assert 10 + 3 == pool.active.blocks(placed.target)
    router.bookings.free(placed.key)
    assert 0 == pool.active.blocks(placed.target)


def test_blocks_of_the_former_size_are_not_assumed() -> None:
    """Without events, a request booked before the change leaves no assumed blocks after it."""
    pool = new_pool(card("w1"), use_kv_events=False)
    pass_rounds(pool, ROUNDS)
    router, asked = of(pool), hashed(range(160), 16)
    placed = router.route(asked, 0.0)
    turned(pool)

    router.bookings.mark_prefill_completed(placed.key, 1.0)

    assert {} == pool.index.overlap(asked.prompts[0].hashes)


def test_busy_compares_tokens() -> None:
    """A card counts in its engine's blocks, the active table in the pool's."""
    pool = of_three(16, 16, 32)
    for worker_id, size in ((W2, 16), (W3, 32)):
        shown = card(worker_id, block_size=size, tiers={"device": 10})
        pool.update(worker_id, worker_beat(shown))
        book(pool, Target(worker_id), CHAIN)

    def free() -> list[WorkerId]:
        candidates = pool.candidates(request())
        kept = Busy(active_decode_blocks=0.6).keep(request(), candidates, moment())
        return [target.worker_id for target in kept.targets()]

    assert [W1, W3] == free()
    book(pool, Target(W3), chain_from(5000, 3))
    assert [W1] == free()


# A rolling change of all engines, seen by several replicas


@dataclass
class Namespace:
    """Replicas that receive the same heartbeats, each in a different order."""

    rng: random.Random
    replicas: list[Replica] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    seen: dict[RouterId, list[int]] = field(default_factory=dict)
    """The sizes each replica has had, one after the other."""

    def join(self) -> None:
        """One more replica, without workers."""
        router_id = RouterId(f"r{len(self.replicas)}")
        replica = new_replica(router_id, incarnation=1000 + len(self.replicas))
        self.replicas.append(replica)
        self.seen[router_id] = []

    def pass_rounds(self, count: int) -> None:
        """All receive the heartbeats of all workers, then of each other."""
        for _ in range(count):
            for replica in self.replicas:
                for worker_id in self.rng.sample(sorted(self.sizes), len(self.sizes)):
                    self._receive_heartbeat(replica, worker_id)
                replica.readiness.not_ready(1.0)
            rounds(self.replicas[0], 1, *self.replicas[1:])
            self._look()

    def _receive_heartbeat(self, replica: Replica, worker_id: str) -> None:
        shown = card(worker_id, block_size=self.sizes[worker_id], started_at_us=int(worker_id[1:]))
        receive_worker(replica, shown, state=self.states[worker_id])

    def _look(self) -> None:
        up = sorted(Target(WorkerId(name)) for name, state in self.states.items() if state == "up")
        for replica in self.replicas:
            pool = replica.router(POOL).pool
            assert up == list(pool.targets), "every worker that is up takes requests"
            sizes = self.seen[replica.router_id]
            if sizes[-1:] != [pool.block_size]:
                sizes.append(pool.block_size)
            if up:
                replica.router(POOL).route(request(prompt(CHAIN)), 0.0)

    def now(self) -> set[int]:
        """The sizes that the replicas have."""
        return {replica.router(POOL).pool.block_size for replica in self.replicas}


def roll(space: Namespace, order: Sequence[str], *, away: int, pause: int, joins_at: int) -> Iterable[None]:
    """Each engine stops, comes back with blocks of 32 tokens, and serves for some rounds."""
    for number, worker_id in enumerate(order):
        space.states[worker_id] = "down"
        space.pass_rounds(away)
        space.states[worker_id], space.sizes[worker_id] = "up", 32
        space.pass_rounds(pause)
        if number == joins_at:
            space.join()
            space.pass_rounds(1)
        yield


@examples(60)
@given(
    order=st.integers(3, 4).flatmap(lambda count: st.permutations([f"w{n}" for n in range(count)])),
    away=st.integers(1, 8),
    pause=st.integers(1, 8),
    joins_at=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_rolling_change_of_all_engines(
    order: Sequence[str], away: int, pause: int, joins_at: int, seed: int
) -> None:
    """In any order all workers serve throughout, all replicas agree, and the size changes once."""
    space = Namespace(random.Random(seed))
    for worker_id in order:
        space.sizes[worker_id], space.states[worker_id] = 16, "up"
    space.join()
    space.join()
    space.pass_rounds(ROUNDS + 1)

    for _ in roll(space, order, away=away, pause=pause, joins_at=joins_at):
        assert 1 == len(space.now()) or pause < ROUNDS

    space.pass_rounds(ROUNDS + 1)
    assert {32} == space.now()
    assert {(16, 32)} == {tuple(space.seen[RouterId(name)]) for name in ("r0", "r1")}
    for replica in space.replicas:
        assert "" == replica.router(POOL).pool.sizes_note()


@examples(60)
@given(
    sizes=st.lists(st.sampled_from((16, 32, 64)), min_size=1, max_size=5),
    later=st.lists(st.tuples(st.integers(0, 4), st.sampled_from((16, 32, 64))), max_size=6),
    pause=st.integers(0, ROUNDS + 2),
    seed=st.integers(0, 1000),
)
def test_replicas_agree(sizes: list[int], later: list[tuple[int, int]], pause: int, seed: int) -> None:
    """With cards in any order and replicas that join at any time, all end with the size of most targets."""
    space = Namespace(random.Random(seed))
    for number, size in enumerate(sizes):
        space.sizes[f"w{number}"], space.states[f"w{number}"] = size, "up"
    space.join()
    for number, size in later:
        space.sizes[f"w{number % len(sizes)}"] = size
        space.pass_rounds(pause)
        if len(space.replicas) < 3:
            space.join()

    space.pass_rounds(2 * ROUNDS + 1)

    (size,) = space.now()
    counts = [list(space.sizes.values()).count(one) for one in set(space.sizes.values())]
    assert max(counts) == list(space.sizes.values()).count(size)


def test_replica_that_is_cut_off_changes_nothing() -> None:
    """Only its own heartbeats that came back are rounds."""
    replica = new_replica()
    for name in ("w1", "w2"):
        receive_worker(replica, card(name))
    rounds(replica, ROUNDS + 1)
    for name in ("w1", "w2"):
        receive_worker(replica, card(name, block_size=32))

    for _ in range(3 * ROUNDS):
        replica.next_round(0.0)

    assert 16 == replica.router(POOL).pool.block_size


def test_size_counts_once_a_round() -> None:
    """An own heartbeat that the bus repeats does not count as another round."""
    replica = new_replica()
    receive_worker(replica, card("w1"))
    rounds(replica, ROUNDS)
    receive_worker(replica, card("w1", block_size=32))

    beat = encode(replica.heartbeat("up", ""))
    for _ in range(3 * ROUNDS):
        replica.router_heartbeat(replica.router_id, beat, 0.0)

    assert 16 == replica.router(POOL).pool.block_size
