"""Route and book in one step; what happens to own bookings is published in order."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.ids import RouterId, Target
from kvrouter.core.wire.ops import (
    MAX_BOOKING_HASHES,
    MAX_FRAME_BYTES,
    AddRequest,
    ApproxEntry,
    Check,
    FirstByte,
    Free,
    MarkPrefillCompleted,
    Op,
    Progress,
    ReplayRequest,
    SnapshotChunk,
    decode_answer,
    decode_frame,
)
from kvrouter.errors import NoWorkersError
from kvrouter.policies.baseline import RoundRobin
from kvrouter.policies.kv import Kv
from tests.core.worlds import POOL, T1, T2, W1, card, chain_from, new_pool, prompt, request, worker_beat

pytestmark = pytest.mark.usefixtures("core")

CHAIN = chain_from(1000, 10)
ME = RouterId("me")


def new_router(pool: Pool, *, synced: bool = True, router_id: RouterId = ME) -> Router:
    """A router in mode kv with a seeded chance."""
    rules = RouterRules(Kv(), random.Random(1).random)
    return Router(pool, rules, router_id=router_id, incarnation=1000, synced=synced)


@pytest.fixture
def pool() -> Pool:
    """Two workers that are up."""
    return new_pool(card("w1"), card("w2", rank_header="X-data-parallel-rank"))


@pytest.fixture
def router(pool: Pool) -> Router:
    """A router that publishes its bookings."""
    return new_router(pool)


class Listening(RoundRobin):
    """Records the answers that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[Target, int]] = []

    def on_request_routed(self, _request: RouteRequest, target: Target, status: int) -> None:
        """Record the call."""
        self.answers.append((target, status))


def published(router: Router) -> list[list[Op]]:
    """The ops of each frame that is published now."""
    return [decode_frame(frame).ops or [] for frame in router.feed.frames()]


def test_route_books_what_it_chose(router: Router, pool: Pool) -> None:
    """The choice is in the table at once, with the request's blocks and tokens, and is published."""
    pool.index.store(T2, CHAIN[:4])

    placed, candidates = router.route_among(request(prompt(CHAIN, 165)), 0.0)

    assert (T2, "http://w2:9000", "X-data-parallel-rank") == (placed.target, placed.url, placed.rank_header)
    assert (10, 101, 1) == (pool.active.blocks(T2), pool.active.charged_tokens(T2), pool.active.requests(T2))
    assert [T1, T2] == candidates.targets()
    [[add]] = published(router)
    assert isinstance(add, AddRequest)
    assert (1, "req", "w2", 165, 4, 101) == (
        add.number, add.request_id, add.worker_id, add.isl, add.overlap_blocks, add.prefill_tokens
    )  # fmt: skip


def test_no_worker_is_a_503(router: Router, pool: Pool) -> None:
    """No worker is up, or all were tried: NoWorkersError states which."""
    with pytest.raises(NoWorkersError, match="w1/0") as failed:
        router.route(request(), 0.0, exclude=frozenset({T1, T2}))
    assert 503 == failed.value.status
    for worker in ("w1", "w2"):
        pool.update(W1 if worker == "w1" else T2.worker_id, worker_beat(state="down"))

    with pytest.raises(NoWorkersError, match="known: w1, w2"):
        router.route(request(), 0.0)
    assert [] == published(router), "nothing was booked"


def test_concurrent_siblings_share_blocks(router: Router) -> None:
    """As booking is immediate, the second of two equal requests finds the blocks of the first."""
    first = router.route(request(prompt(CHAIN)), 0.0)
    second = router.route(request(prompt(chain_from(9000, 10))), 0.0)

    assert first.target != second.target


def test_retry_is_one_frame(router: Router) -> None:
    """A Free and the new AddRequest travel together, in this order."""
    first = router.route(request(prompt(CHAIN)), 0.0)
    published(router)

    router.bookings.free(first.key)
    second = router.route(request(prompt(CHAIN)), 0.0, exclude=frozenset({first.target}))

    [[free, add]] = published(router)
    assert free == Free(first.key.number)
    assert isinstance(add, AddRequest)
    assert add.number == second.key.number != first.key.number
    assert first.target != second.target


def test_free_twice_is_published_once(router: Router, pool: Pool) -> None:
    """A second free, or a mark after it, changes and publishes nothing."""
    key = router.route(request(prompt(CHAIN)), 0.0).key
    published(router)

    router.bookings.free(key)
    router.bookings.free(key)
    router.bookings.mark_prefill_completed(key, 0.0)
    router.bookings.first_byte(key, 0.0)
    router.bookings.progress(key, 1000)

    assert [[Free(key.number)]] == published(router)
    assert {} == pool.active.owners()


def test_first_byte_completes_prefill_and_is_a_sample(router: Router, pool: Pool) -> None:
    """The charge ends, the op is published once, and the prefill's duration counts as a sample."""
    placed = router.route(request(prompt(CHAIN)), 10.0)
    published(router)

    router.bookings.first_byte(placed.key, 12.0)
    router.bookings.first_byte(placed.key, 99.0)

    number = placed.key.number
    assert [[FirstByte(number, 2_000_000), MarkPrefillCompleted(number)]] == published(router)
    assert 0 == pool.active.charged_tokens(placed.target)
    assert 1.0 == router.tables.rates.seconds(placed.target, 80)


def test_policy_receives_the_status_of_each_attempt(pool: Pool) -> None:
    """It receives the first status, once, or 499 if the request is freed before."""
    policy = Listening()
    router = Router(pool, RouterRules(policy, lambda: 0.5), router_id=ME, incarnation=1, synced=False)
    streamed, refused, left = [router.route(request(), 0.0) for _ in range(3)]

    router.bookings.first_byte(streamed.key, 1.0)
    router.bookings.answered(refused.key, 503)
    router.bookings.answered(refused.key, 200)
    for placed in (streamed, refused, left, left):
        router.bookings.free(placed.key)

    assert [(streamed.target, 200), (refused.target, 503), (left.target, 499)] == policy.answers


def test_unstreamed_request_is_predicted(router: Router) -> None:
    """The pool's rate and the tokens charged before it predict the end of its prefill."""
    streamed = router.route(request(prompt(CHAIN)), 0.0)
    router.bookings.first_byte(streamed.key, 1.0)
    other = router.route(request(prompt(chain_from(5000, 20))), 1.0, streamed=False)

    assert [] == router.bookings.due(2.99)
    assert [other.key] == router.bookings.due(3.0)
    assert [] == router.bookings.due(9.0), "once"


def test_unstreamed_request_without_samples(router: Router) -> None:
    """Without any rate the charge stays until the response ends."""
    router.route(request(prompt(CHAIN)), 0.0, streamed=False)

    assert [] == router.bookings.due(1e9)


def test_unstreamed_request_that_ended_is_not_due(router: Router) -> None:
    """A response before the predicted end needs no mark."""
    router.bookings.first_byte(router.route(request(prompt(CHAIN)), 0.0).key, 1.0)
    key = router.route(request(prompt(CHAIN)), 1.0, streamed=False).key

    router.bookings.free(key)

    assert [] == router.bookings.due(1e9)


def test_predictions_of_ended_requests_are_dropped(router: Router) -> None:
    """A worker was slow once, so an hour is predicted, and every request ends at once."""
    router.bookings.first_byte(router.route(request(prompt(CHAIN)), 0.0).key, 3600.0)
    waiting = [router.route(request(prompt(CHAIN)), 3600.0, streamed=False).key for _ in range(3)]

    for _ in range(300):
        router.bookings.free(router.route(request(prompt(CHAIN)), 3600.0, streamed=False).key)

    assert len(router.bookings._predicted) <= 100
    assert set(waiting) == set(router.bookings.due(1e9)), "those in flight are still due"


def test_output_blocks(router: Router, pool: Pool) -> None:
    """(isl + tokens) // size − isl // size, published when a boundary is crossed and not before."""
    placed = router.route(request(prompt(CHAIN, 165)), 0.0)
    published(router)

    for tokens in (1, 10, 11, 26, 27):
        router.bookings.progress(placed.key, tokens)

    assert [[Progress(1, 1), Progress(1, 2)]] == published(router)
    assert 10 + 2 == pool.active.blocks(placed.target)


def test_several_prompts_are_booked_as_their_union(router: Router, pool: Pool) -> None:
    """Shared blocks count once, tokens of both prompts count, and one free ends all."""
    placed = router.route(request(prompt(CHAIN), prompt(CHAIN[:4] + chain_from(7000, 2))), 0.0)

    assert 12 == pool.active.blocks(placed.target)
    assert 160 + 96 == pool.active.charged_tokens(placed.target)
    router.bookings.free(placed.key)
    assert 0 == pool.active.blocks(placed.target)
    pool.active.check()


def test_booking_of_60_001_blocks(router: Router, pool: Pool) -> None:
    """The first 60,000 hashes and a count of the others fit one frame below 512 KiB, and peers agree."""
    router.route(request(prompt(range(2**63, 2**63 + MAX_BOOKING_HASHES + 1))), 0.0)

    (frame,) = router.feed.frames()

    assert len(frame) < MAX_FRAME_BYTES
    (add,) = decode_frame(frame).ops or []
    assert isinstance(add, AddRequest)
    assert (MAX_BOOKING_HASHES * 8, 1) == (len(add.hashes), add.anonymous_blocks)
    peer = new_pool(card("w1"), card("w2"))
    reader = FeedReader(POOL, new_router(peer).feed.copy_sink(ME), lambda: 0.5)
    reader.frame(frame, 0.0)
    assert pool.active.digest(ME) == peer.active.digest(ME)


@pytest.mark.parametrize("prompts", [1, 2])
def test_blocks_without_a_hash(router: Router, pool: Pool, prompts: int) -> None:
    """A prompt whose end was not tokenized is charged and booked with all its blocks."""
    chains = [chain_from(100 * number, 3) for number in range(prompts)]

    placement = router.route(request(*(prompt(chain, isl=160) for chain in chains)), now=0)

    assert (160 * prompts, 10 * prompts) == (
        placement.choice.own_prefill_tokens,
        placement.choice.own_decode_blocks,
    )
    assert 10 * prompts == pool.active.blocks(placement.target)
    (frame,) = published(router)
    assert isinstance(frame[0], AddRequest)
    assert 7 * prompts == frame[0].anonymous_blocks


def test_check_follows_frames(router: Router, pool: Pool) -> None:
    """One Check after the last frame, then nothing until the next op."""
    router.route(request(prompt(CHAIN)), 0.0)

    (frame,) = router.feed.check_frames(0.0)

    assert Check(*pool.active.digest(ME)) == (decode_frame(frame).ops or [])[-1]
    assert [] == router.feed.check_frames(0.0)
    router.route(request(), 0.0)
    assert 1 == len(router.feed.frames())
    assert 1 == len(router.feed.check_frames(0.0))
    assert [] == router.feed.check_frames(0.0)


def test_unsynced_router_publishes_nothing(pool: Pool) -> None:
    """Without --router-replica-sync no frame is published, and bookings work."""
    router = new_router(pool, synced=False)

    key = router.route(request(prompt(CHAIN)), 0.0).key
    router.bookings.progress(key, 100)
    router.bookings.mark_prefill_completed(key, 0.0)
    router.bookings.free(key)

    assert [] == router.feed.frames() == router.feed.check_frames(0.0)
    assert 0 == router.feed.source.seq


def test_snapshot_ahead_of_the_outbox() -> None:
    """A snapshot taken while ops wait in the outbox, and those ops after it, make the same copies."""
    pool, peer = new_pool(card("w1"), card("w2")), new_pool(card("w1"), card("w2"))
    router = new_router(pool)
    keys = [router.route(request(prompt(chain_from(100 * n, 3))), 0.0).key for n in range(1, 5)]
    router.feed.frames()
    router.bookings.mark_prefill_completed(keys[0], 0.0)
    router.bookings.progress(keys[1], 40)
    router.bookings.free(keys[2])
    router.route(request(prompt(CHAIN)), 0.0)
    reader = FeedReader(POOL, new_router(peer).feed.copy_sink(ME), lambda: 0.5)
    reader.heartbeat(1000, router.feed.source.seq, 0.0)
    wanted = reader.due(0.0)
    assert isinstance(wanted, ReplayRequest)
    reader.answer(router.feed.source.answer(wanted, 10**6, 0.0), 0.0)
    reader.work(10**6, 0.0)

    for frame in router.feed.check_frames(0.0):
        reader.frame(frame, 0.0)

    assert (FeedState.LIVE, 0) == (reader.state, reader.counters.digest_mismatches)
    assert pool.active.digest(ME) == peer.active.digest(ME)
    peer.active.check()


@pytest.mark.parametrize("own", [True, False])
def test_assumptions_without_kv_events(own: bool) -> None:
    """After prefill, owner and peer assume that the blocks are cached, for the TTL."""
    pool, peer = new_pool(card(), use_kv_events=False, ttl_s=5.0), new_pool(card(), use_kv_events=False)
    router = new_router(pool)
    reader = FeedReader(POOL, new_router(peer).feed.copy_sink(ME), lambda: 0.5)
    placed = router.route(request(prompt(CHAIN)), 0.0)
    errored = router.route(request(prompt(chain_from(500, 2))), 0.0)
    router.bookings.free(errored.key)
    router.bookings.first_byte(placed.key, 1.0)
    for frame in router.feed.frames():
        reader.frame(frame, 1.0)

    index = pool.index if own else peer.index
    assert {T1: 10} == index.overlap(CHAIN)
    assert {} == index.overlap(chain_from(500, 2)), "a booking that an error ends leaves no assumed blocks"
    answer = decode_answer(router.feed.source.answer(ReplayRequest(1, POOL, 1000, 0), 10**6, 0.0))
    assert isinstance(answer, SnapshotChunk)
    assert [6000] == [op.ttl_ms for op in answer.ops if isinstance(op, ApproxEntry)]


@pytest.mark.parametrize(("caches", "found"), [(False, {}), (None, {T1: 10}), (True, {T1: 10})])
def test_no_assumptions_about_engines_without_a_cache(caches: bool | None, found: dict[Target, int]) -> None:
    """Without KV events a worker without prefix caching is assumed to hold nothing, here and at peers."""
    facts = card(prefix_caching=caches)
    pool, peer = new_pool(facts, use_kv_events=False), new_pool(facts, use_kv_events=False)
    router = new_router(pool)
    reader = FeedReader(POOL, new_router(peer).feed.copy_sink(ME), lambda: 0.5)
    placed = router.route(request(prompt(CHAIN)), 0.0)
    again = router.route(request(prompt(CHAIN)), 0.5)
    router.bookings.first_byte(placed.key, 1.0)
    for frame in router.feed.frames():
        reader.frame(frame, 1.0)

    assert (found, found) == (pool.index.overlap(CHAIN), peer.index.overlap(CHAIN))
    assert (0 if caches is False else 9) == again.choice.overlap_blocks, "nor do requests in flight help it"


def test_reuse_is_counted_once_for_each_request(pool: Pool, router: Router) -> None:
    """Prompt tokens count at the first attempt, next to what the chosen and the best target did not hold."""
    chain = chain_from(100, 10)
    pool.index.store(T1, chain)

    router.route(request(prompt(chain)), 0.0, exclude=frozenset({T2}))
    assert 0 == router.reuse.prompt_tokens  # a retry
    round_robin = Router(
        pool, RouterRules(RoundRobin(turn=1), random.random), router_id=ME, incarnation=1, synced=False
    )
    for _ in range(2):
        round_robin.route(request(prompt(chain)), 0.0)

    reuse = round_robin.reuse
    # w2 first, which holds nothing; w1 computes the last block only
    assert (320, 176, 32) == (reuse.prompt_tokens, reuse.chosen, reuse.best)


def test_ghost_caches_contain_the_prompts_of_peers() -> None:
    """A prompt that a peer has routed is cached in one endless cache: only its last block is computed."""
    chain = list(range(8, 8 * 401, 8))
    sender, pool = new_router(new_pool(card("w1"))), new_pool(card("w1"))
    here = new_router(pool, router_id=RouterId("peer"))
    sender.route(request(prompt(chain)), 0.0)
    reader = FeedReader(POOL, here.feed.copy_sink(ME), lambda: 0.5)
    for frame in sender.feed.frames():
        reader.frame(frame, 0.0)

    here.route(request(prompt(chain)), 0.0)

    assert sender.reuse.endless > 0
    assert 16 == here.reuse.endless
