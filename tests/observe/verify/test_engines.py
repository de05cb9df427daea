"""The blocks of an engine, from the batches that a simulated one still replays."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from kvrouter.core.wire.hashes import block_hashes, pack_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import SequenceHash
from kvrouter.core.wire.ops import DEVICE, Stored
from kvrouter.observe.verify import engines
from kvrouter.observe.verify.engines import EngineHistory
from kvrouter.observe.verify.tier_sets import TierSets
from kvrouter.worker.zmq.ordering import Numbered

BLOCK_SIZE = 16
TOKENS = list(range(4 * BLOCK_SIZE))
A, B, C, D = sequence_hashes(block_hashes(TOKENS, BLOCK_SIZE))
CARD = Card(worker_id="w", url="http://w", model="m", block_size=BLOCK_SIZE, engine="vllm")
Event = list[Any]


def store(first: int, count: int = 1) -> Event:
    """Blocks of one chain, with the engine hashes 100, 101 and so on."""
    tokens = TOKENS[BLOCK_SIZE * first : BLOCK_SIZE * (first + count)]
    parent = 99 + first if first else None
    return ["BlockStored", [*range(100 + first, 100 + first + count)], parent, tokens, BLOCK_SIZE]


def remove(*blocks: int) -> Event:
    """Remove blocks from the device."""
    return ["BlockRemoved", [100 + block for block in blocks]]


CLEAR: Event = ["AllBlocksCleared"]


class Engine:
    """Batches by number; the oldest may be gone."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.oldest = 0
        self.answers = True

    def publish(self, *events: Event) -> None:
        """Publish one batch."""
        self.batches.append(msgspec.msgpack.encode([time.time(), list(events)]))

    def forget(self) -> None:
        """Remove all batches so far from the replay."""
        self.oldest = len(self.batches)

    async def replay(
        self, _context: object, _endpoint: str, from_seq: int, _timeout_s: float
    ) -> list[Numbered] | None:
        """The answer of `ask_replay`."""
        numbered = list(enumerate(self.batches))
        return numbered[max(from_seq, self.oldest) :] if self.answers else None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine behind every endpoint."""
    scripted = Engine()
    monkeypatch.setattr(engines, "ask_replay", scripted.replay)
    return scripted


class Checked:
    """An engine's history, compared with an agent that publishes some blocks."""

    def __init__(self) -> None:
        self.history = EngineHistory("tcp://e", CARD, 0)

    async def look(self) -> bool:
        """Take one more look."""
        with zmq.asyncio.Context() as context:
            return await self.history.look(context)

    def differences(self, *blocks: SequenceHash, is_partial: bool = False) -> list[str]:
        """The differences if these blocks are published."""
        return list(self.history.differences(published(blocks), is_partial=is_partial))

    def doubts(self, *blocks: SequenceHash, is_partial: bool = False) -> list[str]:
        """The doubts if these blocks are published."""
        return list(self.history.doubts(published(blocks), is_partial=is_partial))


def published(blocks: Iterable[SequenceHash]) -> TierSets:
    """Published blocks on the device."""
    sets = TierSets()
    sets.apply(Stored(DEVICE, None, pack_hashes(list(blocks))))
    return sets


async def test_equal(engine: Engine) -> None:
    """The blocks that were stored and not removed, counted per copy."""
    checked = Checked()
    engine.publish(store(0, 3), store(0))
    engine.publish(remove(2), remove(0))
    await checked.look()
    await checked.look()

    assert [] == checked.differences(A, B)
    assert [] == checked.doubts(A, B)


async def test_published_and_gone(engine: Engine) -> None:
    """A block that the engine has removed, or never had, is one too many."""
    checked = Checked()
    engine.publish(store(0, 3))
    engine.publish(remove(2))
    await checked.look()
    await checked.look()

    (text,) = checked.differences(A, B, C)
    assert f"its agent publishes 1 block ({C:016x}) on device that its engine does not hold" == text
    assert 1 == len(checked.differences(A, B, D))
    assert 1 == len(checked.differences(A, B, C, is_partial=True))


async def test_held_and_not_published(engine: Engine) -> None:
    """A block that the engine holds and the agent lacks is missing, unless the agent is partial."""
    checked = Checked()
    engine.publish(store(0, 3))
    await checked.look()
    await checked.look()

    (text,) = checked.differences(A)
    assert text.startswith("its engine holds 2 blocks (")
    assert [] == checked.differences(A, is_partial=True)
    assert ["its agent is partial: blocks that it may lack are not compared"] == checked.doubts(
        A, is_partial=True
    )


def grouped(group: int, kind: str, event: Event) -> Event:
    """The same store in a KV group, whose window is two blocks."""
    window = None if kind == "full_attention" else BLOCK_SIZE + 2
    return [*event, None, "GPU", None, None, group, kind, window]


async def test_resume_points(engine: Engine) -> None:
    """The places where an engine with several KV groups can resume are compared, too."""
    checked = Checked()
    engine.publish(grouped(0, "full_attention", store(0, 4)), grouped(1, "sliding_window", store(0, 4)))
    await checked.look()
    engine.publish(["BlockRemoved", [100], "GPU", 1])
    await checked.look()

    held = published([A, B, C, D])

    def differences(*points: SequenceHash, is_partial: bool = False) -> list[str]:
        held.resumable = set(points)
        return list(checked.history.differences(held, is_partial=is_partial))

    # without A the window does not allow B either; both were allowed before the second look
    assert [] == differences(C, D) == differences(A, B, C, D)
    (text,) = differences(C)
    assert f"its agent lacks resume points that its engine has: 1 block ({D:016x})" == text
    assert [] == differences(C, is_partial=True)
    await checked.look()
    (text,) = differences(B, C, D)
    assert f"its agent publishes resume points that its engine does not have: 1 block ({B:016x})" == text
    assert 1 == len(checked.differences(A, B, C, D))
    assert [] == checked.differences(A, B, C, D, is_partial=True)


async def test_between_two_looks(engine: Engine) -> None:
    """A block that came or went between the looks may be published or not; later it counts."""
    checked = Checked()
    engine.publish(store(0, 2))
    await checked.look()
    engine.publish(remove(1), store(2))
    engine.publish(store(1), remove(2))
    await checked.look()

    for blocks in ((A,), (A, B), (A, B, C)):
        assert [] == checked.differences(*blocks)
    await checked.look()
    assert [1, 0, 1] == [len(checked.differences(*blocks)) for blocks in ((A,), (A, B), (A, B, C))]


async def test_replay_that_does_not_reach_back(engine: Engine) -> None:
    """Blocks from before are unknown; blocks that the replay stores must be published."""
    checked = Checked()
    engine.publish(store(0))
    engine.forget()
    engine.publish(remove(0))
    engine.publish(store(0, 3), remove(2))
    await checked.look()
    await checked.look()

    assert [] == checked.differences(A, B, D)
    assert 1 == len(checked.differences(B))
    assert 1 == len(checked.doubts(A, B, D))
    (_, gone) = checked.doubts(A, B, C)
    assert f"its agent publishes 1 block ({C:016x}) that its engine stored and removed" in gone


async def test_reports_are_not_stores(engine: Engine) -> None:
    """While the beginning is unknown a store at the root may be a report: one copy counts."""
    checked = Checked()
    engine.publish(store(0))
    engine.forget()
    engine.publish(store(0), store(0))
    engine.publish(remove(0))
    await checked.look()
    await checked.look()

    assert [] == checked.differences()


async def test_emptied_cache(engine: Engine) -> None:
    """After it every block is known, also if the replay is incomplete."""
    checked = Checked()
    engine.publish(store(3))
    engine.forget()
    engine.publish(store(0), CLEAR, store(0))
    await checked.look()
    await checked.look()

    assert [] == checked.doubts(A)
    assert 1 == len(checked.differences(A, B))


async def test_engine_that_restarts(engine: Engine) -> None:
    """A restarted engine numbers its batches from 0, and has no earlier blocks."""
    checked = Checked()
    engine.publish(store(0, 2))
    await checked.look()
    engine.batches.clear()
    engine.publish(store(2))
    engine.publish(store(0))
    await checked.look()
    await checked.look()

    assert [] == checked.differences(A)
    assert 1 == len(checked.differences(A, B))


async def test_malformed_removal(engine: Engine) -> None:
    """After a malformed removal no block counts as removed for certain."""
    checked = Checked()
    engine.publish(store(0, 2))
    engine.publish(["BlockRemoved", "?"])
    await checked.look()
    await checked.look()

    assert [] == checked.differences(A, B, C)
    assert 1 == len(checked.doubts(A, B, C))


async def test_no_answer(engine: Engine) -> None:
    """A missing answer is reported; the next look begins from the start."""
    checked = Checked()
    engine.publish(store(0))
    engine.answers = False
    assert not await checked.look()

    engine.answers = True
    assert await checked.look()
    await checked.look()
    assert [] == checked.differences(A)
