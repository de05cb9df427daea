"""Indexers: by hand, from a namespace, and approximate."""

from __future__ import annotations

import uuid

import pytest

from kvrouter import ApproxKvIndexer, KvIndexer, Target
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import ConfigError, NoWorkersError
from tests.client.hands import Clock, Hand
from tests.e2e.fleet import running_fleet

PROMPT = list(range(12))


@pytest.fixture
def clock() -> Clock:
    """The indexer's."""
    return Clock()


@pytest.fixture
def indexer(clock: Clock) -> KvIndexer:
    """Blocks of four tokens."""
    return KvIndexer(4, clock=clock)


def take(indexer: KvIndexer, frames: list[bytes], worker_id: str = "w1", rank: int = 0) -> None:
    """Carry frames."""
    for frame in frames:
        indexer.apply(frame, worker_id, rank)


def test_best_rank(indexer: KvIndexer) -> None:
    """A worker counts with its deepest rank; the deepest worker comes first."""
    take(indexer, Hand("w1").stores(1, PROMPT[:4]))
    take(indexer, Hand("w2", 1).stores(1, PROMPT), "w2", 1)
    take(indexer, Hand("w2", 0).stores(1, PROMPT[:8]), "w2", 0)

    assert [("w2", 3), ("w1", 1)] == list(indexer.find_matches_for_request(PROMPT).items())
    w1, w2 = WorkerId("w1"), WorkerId("w2")
    found = {Target(w2, 1): 3, Target(w2, 0): 2, Target(w1, 0): 1}
    assert found == indexer.find_matches_by_target(PROMPT)


def test_lora_and_salt_are_other_blocks(indexer: KvIndexer) -> None:
    """The same tokens under an adapter or a salt are found under the same only."""
    take(indexer, Hand().stores(1, PROMPT, lora_name="a", salt="s"))

    assert {"w1": 3} == indexer.find_matches_for_request(PROMPT, "a", "s")
    assert {} == indexer.find_matches_for_request(PROMPT, "a")
    assert {} == indexer.find_matches_for_request(PROMPT)


def test_nothing_is_known(indexer: KvIndexer) -> None:
    """Without a worker nothing matches; a prompt below a block has no match."""
    assert {} == indexer.find_matches_for_request(PROMPT)
    take(indexer, Hand().stores(1, PROMPT))
    assert {} == indexer.find_matches_for_request(PROMPT[:3])


def test_a_worker_leaves_and_comes_back(indexer: KvIndexer) -> None:
    """Its blocks are dropped; a new incarnation of its publisher starts without blocks."""
    take(indexer, Hand().stores(1, PROMPT))
    indexer.remove_worker("w1")
    indexer.remove_worker("never seen")
    assert {} == indexer.find_matches_for_request(PROMPT)

    take(indexer, Hand().stores(1, PROMPT[:4]))
    assert {"w1": 1} == indexer.find_matches_for_request(PROMPT)


def test_late_and_lost(indexer: KvIndexer, clock: Clock) -> None:
    """After a late start or a lost frame `missing` returns a request, and again if no answer comes."""
    hand = Hand()
    hand.stores(1, PROMPT[:4])  # before the indexer applied any
    take(indexer, hand.stores(2, PROMPT[4:8], parent=1))
    ((target, _),) = indexer.missing()
    assert Target(WorkerId("w1")) == target
    assert [] == indexer.missing(), "it has been asked for"
    indexer.replayed(target, None)
    assert [] == indexer.missing(), "not at once"
    clock.now += 10
    ((_, request),) = indexer.missing()
    indexer.replayed(target, hand.publisher.answer(request, 1_000_000, clock.now))
    assert {"w1": 2} == indexer.find_matches_for_request(PROMPT)

    hand.publisher.removed([2])
    hand.frames()  # lost
    take(indexer, hand.stores(9, [7] * 4))
    ((_, request),) = indexer.missing()
    indexer.replayed(target, hand.publisher.answer(request, 1_000_000, clock.now))
    assert {"w1": 1} == indexer.find_matches_for_request(PROMPT)
    assert [] == indexer.missing()


def test_damaged_frame_is_a_lost_one(indexer: KvIndexer) -> None:
    """It changes nothing; the next frame shows the gap."""
    hand = Hand()
    take(indexer, hand.stores(1, PROMPT[:4]))
    (frame,) = hand.stores(2, PROMPT[4:8], parent=1)
    indexer.apply(frame[:-5], "w1")
    assert {"w1": 1} == indexer.find_matches_for_request(PROMPT)

    take(indexer, hand.stores(3, PROMPT[8:], parent=2))
    ((target, request),) = indexer.missing()
    indexer.replayed(target, hand.publisher.answer(request, 1_000_000, 0.0))
    assert {"w1": 3} == indexer.find_matches_for_request(PROMPT)


def test_wrong_arguments(indexer: KvIndexer) -> None:
    """Each error states what to use."""
    with pytest.raises(ConfigError, match="block_size 0"):
        KvIndexer(0)
    with pytest.raises(ConfigError, match="rank 5000: use 0 to 1023"):
        indexer.apply(b"", "w1", 5000)
    with pytest.raises(ConfigError, match=r"worker_id 'a\.b\.c': use 1 to 64"):
        indexer.apply(b"", "a.b.c")
    with pytest.raises(ConfigError, match="ttl_s nan"):
        ApproxKvIndexer(16, ttl_s=float("nan"))
    with pytest.raises(ConfigError, match="ttl_s 0"):
        ApproxKvIndexer(4, 0)


async def test_one_way_of_feeding(indexer: KvIndexer) -> None:
    """By hand or over NATS, not both."""
    take(indexer, Hand().stores(1, PROMPT))
    with pytest.raises(ConfigError, match="fed by hand"):
        async with indexer.subscribe("nats://127.0.0.1:1"):
            pass


async def test_no_worker_in_time(nats_url: str) -> None:
    """It waits until the timeout; the error states what is missing."""
    with pytest.raises(
        NoWorkersError, match=r"not ready after 0\.3 s: .*no worker has been seen: start an agent"
    ):
        async with KvIndexer(16).subscribe(nats_url, uuid.uuid4().hex, ready_timeout_s=0.3):
            pass


async def test_wrong_block_size_or_model(nats_url: str) -> None:
    """An indexer that could never match raises at once."""
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, frontends=1, mockers=1):
        with pytest.raises(ConfigError, match="block_size 32: the workers of 'tiny' have 16"):
            async with KvIndexer(32).subscribe(nats_url, namespace):
                pass
        with pytest.raises(NoWorkersError, match="no worker serves 'big'; there are: tiny"):
            async with KvIndexer(16).subscribe(nats_url, namespace, model="big", ready_timeout_s=0.3):
                pass


def test_assumptions_expire() -> None:
    """Assumed blocks expire `ttl_s` after their last use."""
    clock = Clock()
    indexer = ApproxKvIndexer(4, 120, clock=clock)
    indexer.process_routing_decision_for_request(PROMPT, "w1")
    clock.now += 100
    indexer.process_routing_decision_for_request(PROMPT[:4], "w1", lora_name=None)
    clock.now += 19
    assert {"w1": 3} == indexer.find_matches_for_request(PROMPT)
    clock.now += 2
    assert {"w1": 1} == indexer.find_matches_for_request(PROMPT)
    clock.now += 100
    assert {} == indexer.find_matches_for_request(PROMPT)
