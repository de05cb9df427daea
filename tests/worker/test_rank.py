"""One rank: when its table can be trusted, and when it begins again."""

from __future__ import annotations

import msgpack
import pytest

from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.stream import Apply, Lost, Restarted
from tests.worker.fakes import FakeBus


@pytest.fixture
def rank() -> EngineRank:
    """A rank with room for two blocks of one token, told about by a first frame."""
    publisher = KvPublisher(FakeBus(), "w", 1, model="m", incarnation=5)
    publisher.stored([1], [1])
    publisher.flush(0.0)
    return EngineRank(publisher, capacity_blocks=2)


def apply(*events: object, ts: float = 100.0) -> Apply:
    """A batch of events."""
    return Apply(msgpack.packb([ts, events, 0]))


def store(*hashes: int) -> dict[str, object]:
    """A chain of blocks of one token."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": hashes,
        "block_size": 1,
    }


def test_apply(rank: EngineRank) -> None:
    """Batches reach the table; with all of them nothing is missing."""
    rank.on_action(apply(store(1, 2)))

    assert 2 == rank.publisher.blocks.count()
    assert not rank.is_partial(has_all_batches=True)
    assert rank.is_partial(has_all_batches=False)


def test_restart(rank: EngineRank) -> None:
    """A restarted engine holds nothing; the feed's life goes on."""
    rank.on_action(Restarted())

    assert (0, 5) == (rank.publisher.blocks.count(), rank.publisher.incarnation)


@pytest.mark.parametrize(
    ("action", "reason"),
    [(Lost(), "gap"), (Apply(b"\xc1"), "malformed"), (apply(store(1, 2, 3)), "overfull")],
)
def test_lost(rank: EngineRank, action: Lost | Apply, reason: str) -> None:
    """A gap, an unreadable batch or more blocks than fit begin a new life, marked partial."""
    rank.on_action(action)

    assert {reason: 1} == rank.losses
    assert 0 == rank.publisher.blocks.count()
    assert rank.publisher.incarnation > 5
    assert rank.is_partial(has_all_batches=True)


def test_cleared_after_loss(rank: EngineRank) -> None:
    """Once the engine has emptied its cache, what was lost no longer matters."""
    rank.on_action(Lost())
    rank.on_action(apply({"type": "AllBlocksCleared"}, store(1)))

    assert not rank.is_partial(has_all_batches=False)


def test_age(rank: EngineRank) -> None:
    """A table with batches from before the engine's process is older than it."""
    assert not rank.is_older_than(200.0)

    rank.on_action(apply(ts=100.0))

    assert rank.is_older_than(100.5)
    assert not rank.is_older_than(99.5)


def test_skipped(rank: EngineRank) -> None:
    """What is skipped is counted."""
    rank.on_action(apply({"type": "Novelty"}))
    rank.on_action(apply({"type": "Novelty"}))

    assert {"Novelty": 2} == rank.skipped
