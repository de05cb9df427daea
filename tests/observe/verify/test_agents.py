"""The frames of an agent, requested one by one, from a real publisher or with forged answers."""

from __future__ import annotations

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import (
    VERSION,
    Check,
    CheckResumable,
    Frame,
    ReplayFrames,
    ReplayRequest,
    Resumable,
    Stored,
    encode,
)
from kvrouter.core.wire.ops import decode_answer as decode
from kvrouter.observe.verify.agents import RankFeed
from kvrouter.observe.verify.comparison import Content, Copy
from kvrouter.worker.publisher import KvPublisher
from tests.worker.fakes import FakeBus

BLOCK_SIZE = 4


class Agent:
    """One rank's publisher, which answers as its agent does, after the answers in `forged`."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.publisher = KvPublisher(FakeBus(), "w", BLOCK_SIZE, model="m", incarnation=7)
        self.forged: list[bytes] = []
        self.asked: list[ReplayRequest] = []
        self._max_bytes = max_bytes
        self._now = 0.0

    async def ask(self, request: ReplayRequest) -> bytes:
        """One answer."""
        self.asked.append(request)
        return (
            self.forged.pop() if self.forged else self.publisher.answer(request, self._max_bytes, self._now)
        )

    def store(self, *engine_hashes: int, tier: str = "device", parent: int | None = None) -> None:
        """Store a chain, in a separate frame."""
        tokens = [token for each in engine_hashes for token in [each] * BLOCK_SIZE]
        self.publisher.stored(engine_hashes, tokens, parent, tier=tier)
        self.flush()

    def remove(self, *engine_hashes: int, tier: str = "device") -> None:
        """Remove blocks, in a separate frame."""
        self.publisher.removed(engine_hashes, tier)
        self.flush()

    def flush(self) -> None:
        """Send a frame, with a digest each time."""
        self._now += 100.0
        self.publisher.flush(self._now)

    @property
    def content(self) -> Content:
        """The published blocks, computed separately."""
        names = ("device", "host", "disk")
        checks = self.publisher.blocks.check_ops()
        return tuple(
            (names[op.tier], op.count, f"{op.digest:016x}") for op in checks if isinstance(op, Check)
        )


async def look(feed: RankFeed, agent: Agent) -> list[Copy]:
    """One look."""
    return await feed.look(agent.ask, 1)


async def test_every_frame() -> None:
    """From the first snapshot on, the content at each frame is known."""
    agent, feed = Agent(), RankFeed(0)
    agent.store(1, 2)
    assert [Copy(7, 1, agent.content)] == await look(feed, agent)

    held = []
    for step in (3, 4):
        agent.store(step)
        held.append(Copy(7, agent.publisher.seq, agent.content))
    agent.remove(1)
    held.append(Copy(7, agent.publisher.seq, agent.content))

    assert [*held, held[-1]] == await look(feed, agent)
    assert [held[-1]] == await look(feed, agent)
    assert not feed.bad_digest


async def test_nothing_yet() -> None:
    """A feed without a frame is shown as such."""
    agent = Agent()

    assert [Copy(7, 0, agent.content)] == await look(RankFeed(0), agent)


async def test_tiers() -> None:
    """Each tier set is the agent's own; a wider one that adds no block is shown if the card has it."""
    agent, feed = Agent(), RankFeed(0)
    agent.store(1, 2, 3)
    assert 2 == len((await feed.look(agent.ask, 2))[-1].content)

    agent.store(1, 2, tier="host")
    agent.remove(2, 3)
    assert 2 == len(agent.content)
    assert agent.content == (await look(feed, agent))[-1].content
    assert agent.content == (await look(RankFeed(0), agent))[-1].content
    agent.remove(2, 1, tier="host")
    agent.publisher.cleared()
    agent.flush()
    assert 0 == (await look(feed, agent))[-1].content[-1][1]
    assert not feed.bad_digest


async def test_resume_points() -> None:
    """The blocks behind which an engine with several KV groups can resume, from frames and a snapshot."""
    agent, feed = Agent(), RankFeed(0)
    agent.publisher.group_stored(1, 1, [2, 3], is_root=False)
    agent.store(1, 2, 3)
    first = (await look(feed, agent))[-1].content
    agent.publisher.group_removed(1, [2])
    agent.flush()
    then = (await look(feed, agent))[-1].content

    assert [("device", 3), ("resume points", 2)] == [row[:2] for row in first]
    assert [("device", 3), ("resume points", 1)] == [row[:2] for row in then]
    assert then == (await look(RankFeed(0), agent))[-1].content
    assert not feed.bad_digest
    agent.publisher.cleared()
    agent.flush()
    assert [("device", 0)] == [row[:2] for row in (await look(feed, agent))[-1].content]


async def test_wrong_digest_of_resume_points() -> None:
    """An agent whose count of resume points does not fit its own frames is at fault."""
    agent, feed = Agent(), RankFeed(0)
    agent.store(1)
    await look(feed, agent)
    wrong = Frame(VERSION, 7, 2, [Resumable(pack_hashes([1])), CheckResumable(1, 2)])
    agent.forged.append(encode(ReplayFrames([encode(wrong)], 2)))

    await look(feed, agent)

    assert "as of frame 7:2" == feed.bad_digest

    feed = RankFeed(0)
    await look(feed, agent)
    unnamed = Frame(VERSION, 7, 2, [CheckResumable(0, 0)])  # of resume points that no op has named
    agent.forged.append(encode(ReplayFrames([encode(unnamed)], 2)))
    await look(feed, agent)
    assert "as of frame 7:2" == feed.bad_digest


async def test_snapshot_in_chunks() -> None:
    """There are as many requests as chunks."""
    agent = Agent(max_bytes=200)
    for number in range(40):
        agent.store(number)

    (copy,) = await look(RankFeed(0), agent)

    assert agent.content == copy.content
    assert len(agent.asked) > 3


async def test_new_life() -> None:
    """A new life of the agent is read from its beginning."""
    agent, feed = Agent(), RankFeed(0)
    agent.store(1)
    await look(feed, agent)
    agent.publisher.lose_history(9)
    agent.store(2)

    assert Copy(9, agent.publisher.seq, agent.content) == (await look(feed, agent))[-1]


async def test_wrong_digest() -> None:
    """A digest that does not fit the frames: the agent is wrong, or another process has answered."""
    agent, feed = Agent(), RankFeed(0)
    agent.store(1)
    await look(feed, agent)
    agent.forged = [encode(ReplayFrames([encode(Frame(VERSION, 7, 2, [Check(900, 0)]))], 2))]
    await look(feed, agent)

    assert "as of frame 7:2" == feed.bad_digest


async def test_other_frames_than_requested() -> None:
    """Other frames are an error, and the next look begins with a snapshot."""
    agent, feed = Agent(), RankFeed(0)
    agent.store(1)
    await look(feed, agent)
    hashes = (5).to_bytes(8, "little")
    agent.forged = [encode(ReplayFrames([encode(Frame(VERSION, 7, 9, [Stored(0, None, hashes)]))], 9))]

    assert "sent frame 7:9 instead of the requested one" == (await look(feed, agent))[-1].problem
    assert [Copy(7, 1, agent.content)] == await look(feed, agent)


async def test_malformed_answer() -> None:
    """A malformed answer is an error of this look; the next one begins with a snapshot."""
    agent, feed = Agent(), RankFeed(0)
    agent.forged = [b"?"]

    assert (await look(feed, agent))[-1].problem.startswith("not a replay answer")
    assert not (await look(feed, agent))[-1].problem
    assert decode(await agent.ask(ReplayRequest(VERSION, 0, 7, 1)))
