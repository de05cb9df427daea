"""The feeds of agents, requested from each of them over NATS.

    hello ──> heartbeats, each with the card ──> the ranks that exist
    request to an agent ──> a snapshot, then all frames after it ──> one Copy per frame

Replicas follow live frames; this module requests each frame by its number. So it knows the content at every
frame that a replica may have applied, however fast frames come. Frames that another program sends on a live
subject do not reach it.

In core NATS any program may answer a request, and a reader takes the first answer. Here every answer is
counted: more than one answer to a request is reported as an error.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, TypeAlias

from kvrouter.bus import Bus, Subjects
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import WorkerId, is_in_group
from kvrouter.core.wire.ops import (
    VERSION,
    Check,
    CheckResumable,
    Decoded,
    ReplayRequest,
    SnapshotChunk,
    decode_answer,
    decode_frame,
    encode,
)
from kvrouter.errors import MalformedFrameError
from kvrouter.observe.listening import Listener
from kvrouter.observe.verify.comparison import Copy, FeedKey, VerifyError
from kvrouter.observe.verify.tier_sets import TierSets

ANSWER_TIMEOUT_S = 2.0
# For all requests to one rank in a look: a large snapshot takes several.
LOOK_TIMEOUT_S = 20.0
# Ranks that are read at once: a fleet of thousands must not fill NATS's buffers with snapshots.
AT_ONCE = 64

Ask: TypeAlias = Callable[[ReplayRequest], Awaitable[bytes]]


class AgentError(VerifyError):
    """An agent does not answer, or its answer is wrong."""


class Requests:
    """Requests over NATS whose answers are all counted."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        # Workers of which a request had more than one answer.
        self.answered_twice: set[WorkerId] = set()
        self._bus = bus
        self._subjects = subjects
        self._asker = uuid.uuid4().hex
        # The subject of the answers -> the worker that was asked.
        self._asked: dict[str, WorkerId] = {}
        self._answered: set[str] = set()
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._hears_groups = False

    async def begin(self) -> None:
        """Subscribe to answers, until the bus is closed."""
        await self._bus.subscribe(self._subjects.answers(self._asker), self._take)

    async def ask(self, worker_id: WorkerId, payload: bytes) -> bytes:
        """The first answer. Raises AgentError without an answer."""
        if is_in_group(worker_id) and not self._hears_groups:  # users of earlier versions may not
            self._hears_groups = True
            await self._bus.subscribe(self._subjects.group_answers(self._asker), self._take)
        reply = self._subjects.kv_answer(worker_id, self._asker, str(len(self._asked)))
        self._asked[reply] = worker_id
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = waiting
        self._bus.publish(self._subjects.kv_replay(worker_id), payload, reply)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await waiting
        except TimeoutError:
            raise AgentError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            del self._waiting[reply]
        if not answer:  # the NATS server's answer: no process has subscribed
            raise AgentError("not connected to NATS")
        return answer

    def _take(self, reply: str, data: bytes, _reply: str) -> None:
        if reply in self._answered:
            self.answered_twice.add(self._asked[reply])
        elif reply in self._asked:
            self._answered.add(reply)
        waiting = self._waiting.get(reply)
        if waiting is not None and not waiting.done():
            waiting.set_result(data)


class RankFeed:
    """One rank's feed, from the answers of its agent."""

    def __init__(self, rank: int) -> None:
        self.blocks = TierSets()
        # The frame at which the agent's digest did not fit its frames; empty if there was none.
        self.bad_digest = ""
        self._rank = rank
        self._incarnation = self._seq = 0
        self._loading: TierSets | None = None
        self._next = ReplayRequest(VERSION, rank, 0, 0)

    async def look(self, ask: Ask, tiers: int = 1) -> list[Copy]:
        """The content at each frame since the look before. The last copy has the error, if there is one.

        `tiers`: the number of tier sets in each copy, also if the wider ones add no block.
        """
        copies: list[Copy] = []
        problem, is_last = "", False
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                while not is_last:
                    is_last = self._take(await ask(self._next), tiers, copies)
        except (AgentError, MalformedFrameError, TimeoutError) as error:
            problem = str(error) or f"no end of its answers within {LOOK_TIMEOUT_S:g} s"
            self._next = ReplayRequest(VERSION, self._rank, 0, 0)
        return [*copies, self._copy(tiers, problem)]

    def _take(self, data: bytes, tiers: int, copies: list[Copy]) -> bool:
        """Take one answer. Returns whether it was the last one: no published frame is missing."""
        answer = decode_answer(data)
        if isinstance(answer, SnapshotChunk):
            self._take_chunk(answer)
            return False
        for frame in map(decode_frame, answer.frames):
            self._take_frame(frame)
            copies.append(self._copy(tiers))
        return not answer.frames or self._seq == answer.seq

    def _take_chunk(self, chunk: SnapshotChunk) -> None:
        if chunk.chunk == 0:
            self._loading = TierSets()
        place = (self._next.snapshot_id, self._next.chunk)
        if self._loading is None or (chunk.chunk and (chunk.snapshot_id, chunk.chunk) != place):
            raise AgentError(f"sent chunk {chunk.chunk} of a snapshot instead of the requested one")
        for op in chunk.ops:
            self._loading.apply(op)
        part, following = (VERSION, self._rank, chunk.incarnation), chunk.chunk + 1
        self._next = ReplayRequest(*part, 0, chunk.snapshot_id, following)
        if following == chunk.chunks:
            self.blocks, self._loading = self._loading, None
            self._incarnation, self._seq = chunk.incarnation, chunk.as_of_seq
            self._next = ReplayRequest(*part, self._seq + 1)

    def _take_frame(self, frame: Decoded) -> None:
        if frame.ops is None or (frame.incarnation, frame.seq) != (self._incarnation, self._seq + 1):
            sent = f"{frame.incarnation}:{frame.seq}"
            raise AgentError(f"sent frame {sent} instead of the requested one")
        for op in frame.ops:
            if not self.blocks.apply(op) and isinstance(op, Check | CheckResumable):
                self.bad_digest = f"as of frame {frame.incarnation}:{frame.seq}"
        self._seq = frame.seq
        self._next = ReplayRequest(VERSION, self._rank, self._incarnation, self._seq + 1)

    def _copy(self, tiers: int, problem: str = "") -> Copy:
        return Copy(self._incarnation, self._seq, self.blocks.content(tiers), problem=problem)


class AgentRank(NamedTuple):
    """A rank, from its agent's heartbeat and card."""

    key: FeedKey
    card: Card
    number: int
    is_down: bool
    is_partial: bool


class Agents:
    """All agents of a namespace, as `listener` hears them. Replicas do not notice this process."""

    def __init__(self, bus: Bus, subjects: Subjects, listener: Listener) -> None:
        self.feeds: dict[FeedKey, RankFeed] = {}
        self._bus = bus
        self._subjects = subjects
        self._listener = listener
        self._requests = Requests(bus, subjects)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def begin(self) -> None:
        """Subscribe to answers, and ask all agents for a heartbeat at each connection."""
        await self._requests.begin()
        self._bus.on_connect(self._say_hello)

    async def look(self) -> list[tuple[FeedKey, Copy]]:
        """The content of every rank at each frame since the look before."""
        ranks = list(self.ranks())
        self.feeds = {rank.key: self.feeds.get(rank.key) or RankFeed(rank.number) for rank in ranks}
        looks = await asyncio.gather(*map(self._look, ranks))
        return [(rank.key, copy) for rank, copies in zip(ranks, looks, strict=True) for copy in copies]

    def ranks(self) -> Iterator[AgentRank]:
        """Every rank that publishes events, from heartbeats and cards."""
        for worker_id, card in self._listener.cards().items():
            beat = self._listener.workers[worker_id].beat
            for rank in beat.ranks if card.publishes_events else ():
                if rank.rank < card.ranks:
                    key = FeedKey("kv", beat.pool, f"{worker_id}/{rank.rank}")
                    yield AgentRank(key, card, rank.rank, beat.state == "down", rank.partial)

    def errors(self) -> Iterator[str]:
        """Behaviour that no correct agent shows."""
        for worker_id in sorted(self._requests.answered_twice):
            yield (
                f"agent {worker_id}: a request to it had two answers: another process answers in its name,"
                " or two agents use its id"
            )
        for key, feed in self.feeds.items():
            if feed.bad_digest:
                yield f"{key}, {feed.bad_digest}: the agent's digest does not fit its own frames"

    async def _look(self, rank: AgentRank) -> list[Copy]:
        worker_id = WorkerId(rank.card.worker_id)

        async def ask(request: ReplayRequest) -> bytes:
            return await self._requests.ask(worker_id, encode(request))

        async with self._turns:
            return await self.feeds[rank.key].look(ask, len(rank.card.tiers))

    def _say_hello(self) -> None:
        self._bus.publish(self._subjects.hello, b"")
