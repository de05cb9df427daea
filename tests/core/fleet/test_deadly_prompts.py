"""What replicas tell each other about prompts that ended workers."""

from __future__ import annotations

import msgpack
import pytest

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.claimed_losses import JOIN_S
from kvrouter.core.tables.deadly_prompts import DOUBT_S, MOST_DEADLY, SETTLE_S
from kvrouter.core.wire import ops as wire
from kvrouter.core.wire.ids import PromptHash, RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION, DeadlyPrompt, Frame, LostWith, Pardon, decode_frame, encode
from kvrouter.core.wire.senders import SyncSource
from tests.core.fleet.test_replica_sync import carry, pair, recover
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, card

KILLER = PromptHash(b"a deadly prompt.")
W1, W2 = WorkerId("w1"), WorkerId("w2")


def lose(replica: Replica, worker: WorkerId, *others: Replica, sent_at: float) -> None:
    """A worker is lost a second after the killer was sent. It tells the others, which see it, too."""
    lost_at = sent_at + 1.0
    replica.router(POOL).feed.lost_with(KILLER, worker, sent_at=sent_at, lost_at=lost_at, now=lost_at)
    carry(replica, *others, now=lost_at)
    for other in others:
        assert [worker] == list(other.claimed_losses.unproven(9))
        other.claimed_losses.worker_ended(worker, lost_at)


def refusing(*replicas: Replica, at: float = 20.0) -> list[bool]:
    """Which of them refuse the killer."""
    return [replica.deadly.refused(KILLER, at) is not None for replica in replicas]


def deadly_pair() -> tuple[Replica, Replica]:
    """Two replicas of which each has lost a worker with the killer in hand."""
    first, second = pair()
    lose(first, W1, second, sent_at=1.0)
    lose(second, W2, first, sent_at=10.0)
    assert second.router(POOL).feed.judge(KILLER, W2, 11.0 + SETTLE_S)
    carry(second, first, now=11.0 + SETTLE_S)
    return first, second


def test_losses_at_two_replicas() -> None:
    """One loss at each of two replicas is two: both refuse the prompt."""
    first, second = deadly_pair()

    assert [True, True] == refusing(first, second)
    assert [(W1, W2)] == [one.workers for one in first.deadly.entries(POOL)]


def test_other_prompts_at_a_peer() -> None:
    """A replica that sees one suspected prompt at a death knows of its peer's: then neither is to blame."""
    first, second = pair()
    other = PromptHash(b"another prompt..")
    for worker, at in ((W1, 2.0), (W2, 11.0)):
        for replica, prompt in ((first, KILLER), (second, other)):
            replica.router(POOL).feed.lost_with(prompt, worker, sent_at=at - 1, lost_at=at, now=at)
        for replica, peer in ((first, second), (second, first)):
            carry(replica, peer, now=at)

    assert first.router(POOL).feed.judge(KILLER, W2, 11.5) is None
    assert second.router(POOL).feed.judge(other, W2, 11.5) is None


def test_a_replica_that_joins() -> None:
    """A replica that starts later learns what is refused, and what was pardoned."""
    first, second = deadly_pair()
    joiner = new_replica(RouterId("joiner"), incarnation=5000)
    receive_worker(joiner, card("w1"))
    rounds(first, 1, joiner)
    recover(joiner, first)
    assert [True] == refusing(joiner, at=1.0)

    first.router(POOL).feed.pardon(KILLER, 20.0)
    carry(first, second, now=20.0)
    late = new_replica(RouterId("late"), incarnation=6000)
    receive_worker(late, card("w1"))
    rounds(first, 1, late)
    recover(late, first)
    assert [False] == refusing(late, at=1.0)
    assert late.deadly.pardons(POOL, 0.0)


def test_answer_at_one_replica() -> None:
    """A prompt that one replica's worker has answered is suspected at none: a later loss is a first one."""
    first, second = pair()
    lose(first, W1, second, sent_at=1.0)
    assert second.deadly.suspects()

    first.router(POOL).feed.acquit(KILLER)
    carry(first, second, now=4.0)
    assert not first.deadly.suspects() + second.deadly.suspects()
    lose(second, W2, first, sent_at=10.0)

    assert second.router(POOL).feed.judge(KILLER, W2, 11.0 + SETTLE_S) is None


def test_answer_does_not_pardon() -> None:
    """A peer's answer to a prompt that is refused here changes nothing: it may end some engines only."""
    first, second = deadly_pair()
    second.router(POOL).feed.publish(Pardon(KILLER, 0))
    carry(second, first, now=14.0)

    assert [True] == refusing(first)


def test_pardon_everywhere() -> None:
    """A pardon at one replica is one at all, and a peer's older word, repeated, does not undo it."""
    first, second = deadly_pair()
    first.router(POOL).feed.pardon(KILLER, 13.0)
    carry(first, second, now=13.0)
    assert [False, False] == refusing(first, second)

    second.router(POOL).feed.publish(DeadlyPrompt(KILLER, ["w1", "w2"], 600_000))
    carry(second, first, now=14.0)
    assert [False, False] == refusing(first, second)


def test_forged_losses() -> None:
    """A peer's loss counts only at a worker that is known here and has ended, and only if it is recent."""
    first, second = pair()
    router = second.router(POOL)
    router.feed.publish(LostWith(KILLER, "nobody", 1000, 0))
    router.feed.publish(LostWith(KILLER, "w1", 10**9, 10**9))
    router.feed.publish(LostWith(KILLER, "w2", 1000, 0))
    carry(second, first, now=5.0)

    assert [W2] == list(first.claimed_losses.unproven(9))
    assert first.deadly.is_empty
    first.next_round(5.0 + DOUBT_S)
    assert not first.claimed_losses.has_unproven


@pytest.mark.parametrize("workers", [[], ["w1"], ["w1", "w1"], ["w1", "nobody"], ["w1", "w2"]])
def test_forged_verdicts(workers: list[str]) -> None:
    """A peer's word has no prompt refused that was lost at none of its workers, whatever their state."""
    first, second = pair()
    late = JOIN_S + 700.0
    router = second.router(POOL)
    for number in range(MOST_DEADLY + 10):
        router.feed.publish(DeadlyPrompt(number.to_bytes(16, "big"), ["w1", "w2"], 600_000))
    for ttl_ms in (600_000, 1000, 0):
        router.feed.publish(DeadlyPrompt(KILLER, workers, ttl_ms))
        carry(second, first, now=late)
        assert first.deadly.is_empty
        for worker in (W1, W2):
            first.claimed_losses.worker_ended(worker, late)
        assert first.deadly.is_empty


def test_repeated_claims_hold_nothing() -> None:
    """A loss that a peer reports again and again holds the prompt once."""
    first, second = pair()
    lose(second, W1, first, sent_at=1.0)
    for step in range(40):
        second.router(POOL).feed.publish(LostWith(KILLER, W1, 1000, 0))
        carry(second, first, now=2.0 + step / 10)

    assert first.deadly.must_wait(KILLER, 2.0 + SETTLE_S / 2)
    assert not first.deadly.must_wait(KILLER, 2.0 + 2 * SETTLE_S)


@pytest.mark.parametrize("how", ["another process", "down"])
def test_workers_end_as_seen_here(how: str) -> None:
    """What a peer lost counts once the agent reports it, and with it the verdict."""
    first, second = pair()
    late = JOIN_S + 10.0
    for worker, at in ((W1, late - 5.0), (W2, late)):
        second.router(POOL).feed.publish(LostWith(KILLER, worker, 1000, 0))
        carry(second, first, now=at)
    second.router(POOL).feed.publish(DeadlyPrompt(KILLER, [W1, W2], 600_000))
    carry(second, first, now=late)
    assert first.deadly.is_empty
    for worker in (W1, W2):
        receive_worker(first, card(worker), incarnation=101, state="down" if how == "down" else "up")

    assert [True] == refusing(first, at=late)


def test_a_lease_ends() -> None:
    """A worker whose lease ends has ended: what a peer lost there counts."""
    first, second = pair()
    second.router(POOL).feed.publish(LostWith(KILLER, W1, 1000, 0))
    carry(second, first, now=5.0)
    assert not first.deadly.suspects()
    rounds(first, 2 * ROUNDS, second)

    assert [(KILLER, POOL)] == first.deadly.suspects()


def test_a_pardon_forgets_claims() -> None:
    """What peers claimed before a pardon does not count after it."""
    first, second = pair()
    second.router(POOL).feed.publish(DeadlyPrompt(KILLER, ["w1", "w2"], 600_000))
    carry(second, first, now=900.0)
    second.router(POOL).feed.pardon(KILLER, 901.0)
    carry(second, first, now=901.0)
    for worker in (W1, W2):
        first.claimed_losses.worker_ended(worker, 902.0)

    assert first.deadly.is_empty


def test_own_words_do_not_return() -> None:
    """A replica's own frames come back from NATS: the loss in them is not a second one."""
    first, second = pair()
    lose(first, W1, second, sent_at=1.0)

    assert first.router(POOL).feed.judge(KILLER, W1, 3.0) is None


def test_nothing_is_published_unsynced() -> None:
    """Without sync, prompts are refused all the same, by this replica alone."""
    alone = new_replica(synced=False)
    receive_worker(alone, card("w1"))
    receive_worker(alone, card("w2"))
    lose(alone, W1, sent_at=1.0)
    lose(alone, W2, sent_at=10.0)

    assert alone.router(POOL).feed.judge(KILLER, W2, 12.0)
    assert [] == alone.router(POOL).feed.frames()
    assert [True] == refusing(alone)


def test_the_previous_version_ignores_it() -> None:
    """A reader that knows codes up to 24 reads the other ops of the frame, and counts these."""
    words: list[wire.Op] = [LostWith(KILLER, "w1", 1, 1), DeadlyPrompt(KILLER, ["w1"], 1), Pardon(KILLER, 1)]
    data = encode(Frame(VERSION, 1, 1, [wire.Free(7), *words, wire.Free(8)]))
    newer = msgpack.packb([
        VERSION, 1, 1, [[op[0] + 200, *op[1:]] if op[0] > 24 else op for op in msgpack.unpackb(data)[3]]
    ])  # fmt: skip

    decoded = decode_frame(newer)

    assert ([wire.Free(7), wire.Free(8)], 3) == (decoded.ops, decoded.unknown_ops)


def test_the_pool_ends() -> None:
    """What is refused outlasts the pool: its workers may come back."""
    first, _ = deadly_pair()
    first.pools.routers.pop(POOL)

    assert [True] == refusing(first)
    assert first.router(POOL).feed.last_seq()


def test_the_feeds_stay_live() -> None:
    """The new ops break no feed, nor the digests of bookings."""
    first, second = deadly_pair()
    for frame in first.router(POOL).feed.check_frames(30.0):
        second.sync_frame(SyncSource(POOL, ME), frame, 30.0)

    assert "live" == second.readers[SyncSource(POOL, ME)].state.value
    assert PEER in first.peers
