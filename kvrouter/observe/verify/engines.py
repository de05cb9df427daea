"""Compares agents with their engines, whose blocks follow from a replay of their events.

    replay ──> EngineStream ──> adapter ──> EngineBlocks ──> TierSets      as in the agent

    look 1        agent asked        look 2
    ──┴───────────────┴─────────────────┴──>  time
      └─ ever: held at some moment between the looks; always: held at every moment

A published block that the engine did not hold at any moment between the looks is one too many. A block that
it held at every moment and that is not published is missing. The agent is asked some time after the first
look, because it needs a moment for each event; while something differs this time is doubled.

A replay that does not begin with the engine's first batch proves less. The engine holds the blocks that the
replay stores; it may hold others from before; and a block that the replay stores and removes may have had a
second copy: that is only a note.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import zmq.asyncio

from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ops import TIERS, Op, Resumable, Stored
from kvrouter.errors import KvRouterError, MalformedFrameError
from kvrouter.observe.engine import EngineAccess
from kvrouter.observe.verify.agents import AgentRank, Agents
from kvrouter.observe.verify.comparison import DIFFERENT, EQUAL, IN_PART, NOT_CHECKED, EngineCheck, FeedKey
from kvrouter.observe.verify.tier_sets import TierSets
from kvrouter.worker.blocks.engine_blocks import EngineBlocks
from kvrouter.worker.engines.discovery import kind_named
from kvrouter.worker.publisher import Sink
from kvrouter.worker.zmq.ordering import Action, Apply, EngineStream, Restarted, Step
from kvrouter.worker.zmq.sockets import ask_replay

REPLAY_TIMEOUT_S = 5.0
# Between two looks at an engine: an agent publishes within some 20 ms unless it is very busy.
FIRST_GAP_S, LONGEST_GAP_S = 0.5, 4.0
# Replays that are read at once: each may take 100 MB until it is applied.
AT_ONCE = 16
_BATCHES_A_TURN = 64
_SHOWN = 3


class EngineHistory(Sink):
    """The blocks of one rank of an engine, from its replay."""

    def __init__(self, endpoint: str, card: Card, rank: int) -> None:
        super().__init__(EngineBlocks(), card.block_size)
        self.endpoint = endpoint
        # All blocks of the engine are known: no batch is missing before the replay.
        self.is_complete = False
        # All blocks stored since the beginning of the replay, whether removed later or not.
        self.seen = TierSets()
        # Blocks held at some moment, and at every moment, since the look before.
        self.ever, self.always = TierSets(), TierSets()
        self._held = TierSets()
        self._rank = rank if card.ranks > 1 else None
        self._adapter = kind_named(card.engine).adapter()
        self._stream = EngineStream(can_replay=True)

    async def look(self, context: zmq.asyncio.Context) -> bool:
        """Read the events since the last look; False, without a change, if the engine does not answer."""
        self.ever, self.always = self._held.copy(), self._held.copy()
        step = self._stream.begin() if self._stream.next_seq is None else self._stream.verify()
        while True:
            await self._perform(step)
            if step.replay_from is None:
                return True
            batches = await ask_replay(context, self.endpoint, step.replay_from, REPLAY_TIMEOUT_S)
            if batches is None:
                self._stream = EngineStream(can_replay=True)
                return False
            step = self._stream.replayed(step.replay_from, batches)

    async def _perform(self, step: Step) -> None:
        for number, action in enumerate(step.actions):
            self._take(action)
            if number % _BATCHES_A_TURN == 0:
                await asyncio.sleep(0)

    def _take(self, action: Action) -> None:
        if isinstance(action, Apply):
            self._apply(action.payload)
        else:
            self._begin(is_complete=isinstance(action, Restarted))

    def _begin(self, *, is_complete: bool) -> None:
        """Begin with empty sets. An incomplete history does not count stores that may only be reports."""
        self.begin_life()
        self._adapter.forget()
        self.seen = TierSets()
        self.is_complete, self.blocks.expects_reports = is_complete, not is_complete

    def _apply(self, payload: bytes) -> None:
        try:
            batch = self._adapter.decode(payload)
            if self._rank is not None and batch.rank not in {None, self._rank}:
                self.is_complete = False
                return
            self._adapter.publish(batch, self)
        except (MalformedFrameError, ValueError):  # the agent loses its history here, too
            self._begin(is_complete=False)
            return
        if batch.clears:
            self.is_complete, self.blocks.expects_reports = True, False

    def _collect(self, ops: list[Op]) -> None:
        for op in ops:
            self._held.apply(op)
            is_gain = isinstance(op, Stored | Resumable)
            for gained in (self.ever, self.seen) if is_gain else ():
                gained.apply(op)
            if not is_gain:
                self.always.apply(op)

    # The comparison with the agent

    def differences(self, published: TierSets, *, is_partial: bool) -> Iterator[str]:
        """Blocks that only the agent publishes, or only the engine holds, since the look before."""
        for tier, name in enumerate(TIERS):
            beyond = published.of(tier) - self.ever.of(tier) if self.is_complete else set[int]()
            missing = set[int]() if is_partial else self.always.of(tier) - published.of(tier)
            if beyond:
                yield f"its agent publishes {_shown(beyond)} on {name} that its engine does not hold"
            if missing:
                yield f"its engine holds {_shown(missing)} on {name} that its agent does not publish"
            if beyond or missing:
                return  # wider tier sets contain the same blocks
        if self.is_complete:  # else the replay may lack a whole KV group, and so allow too much
            yield from self._resume_differences(published.resumable, is_partial=is_partial)

    def _resume_differences(self, published: set[int] | None, *, is_partial: bool) -> Iterator[str]:
        ever, always = self.ever.resumable, self.always.resumable
        if published is None and always is not None and not is_partial:
            yield "its engine has several KV groups, and its agent publishes no resume points"
        if published is not None and (beyond := published - (ever or set())):
            yield f"its agent publishes resume points that its engine does not have: {_shown(beyond)}"
        missing = (always or set()) - (published or set())
        if published is not None and missing and not is_partial:
            yield f"its agent lacks resume points that its engine has: {_shown(missing)}"

    def doubts(self, published: TierSets, *, is_partial: bool) -> Iterator[str]:
        """Texts about blocks that could not be compared."""
        if is_partial:
            yield "its agent is partial: blocks that it may lack are not compared"
        if self.is_complete:
            return
        yield "its engine does not replay its beginning: only blocks in the replay are compared"
        gone = published.of(0) & (self.seen.of(0) - self.ever.of(0))
        if gone:
            yield (
                f"its agent publishes {_shown(gone)} that its engine stored and removed in the replay:"
                " they are gone, unless it has a copy from before"
            )


class _RankCheck:
    """One rank that is being checked."""

    def __init__(self, history: EngineHistory) -> None:
        self.check = EngineCheck(DIFFERENT, ("the time allowed only one look at its engine",))
        self._history = history
        self._looked_at: float | None = None
        self._gap_s = FIRST_GAP_S

    async def look(
        self, context: zmq.asyncio.Context, published: TierSets, asked_at: float, *, is_partial: bool
    ) -> None:
        """Look at the engine, and compare if the agent was asked long enough after the last look."""
        loop, since = asyncio.get_running_loop(), self._looked_at
        if since is not None and asked_at - since < self._gap_s:
            return
        is_answered = await self._history.look(context)
        self._looked_at = loop.time()
        if not is_answered:
            self.check = EngineCheck(NOT_CHECKED, (f"no replay from {self._history.endpoint}",))
        elif since is not None:
            self._gap_s = min(2 * self._gap_s, LONGEST_GAP_S)
            self.check = self._compare(published, is_partial=is_partial)

    def _compare(self, published: TierSets, *, is_partial: bool) -> EngineCheck:
        if differences := tuple(self._history.differences(published, is_partial=is_partial)):
            return EngineCheck(DIFFERENT, differences)
        doubts = tuple(self._history.doubts(published, is_partial=is_partial))
        return EngineCheck(IN_PART if doubts else EQUAL, doubts)


class EngineReplays:
    """The engines behind agents."""

    def __init__(self, access: EngineAccess, context: zmq.asyncio.Context) -> None:
        self._access = access
        self._context = context
        # The rank while it is checked, then the result.
        self._ranks: dict[FeedKey, _RankCheck | EngineCheck] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def look(self, agents: Agents, asked_at: float) -> dict[FeedKey, EngineCheck]:
        """The result for each rank so far. The agents were asked at `asked_at`."""
        ranks = [rank for rank in agents.ranks() if rank.key in agents.feeds]
        looks = [self._look(rank, agents.feeds[rank.key].blocks, asked_at) for rank in ranks]
        checks = await asyncio.gather(*looks)
        return {rank.key: check for rank, check in zip(ranks, checks, strict=True)}

    async def _look(self, rank: AgentRank, published: TierSets, asked_at: float) -> EngineCheck:
        async with self._turns:
            one = self._ranks.get(rank.key) or await self._meet(rank)
            if isinstance(one, _RankCheck):
                await one.look(self._context, published, asked_at, is_partial=rank.is_partial)
        check = one.check if isinstance(one, _RankCheck) else one
        self._ranks[rank.key] = check if check.is_final else one  # a final check frees the history
        return check

    async def _meet(self, rank: AgentRank) -> _RankCheck | EngineCheck:
        card = rank.card
        if rank.is_down:
            return EngineCheck(NOT_CHECKED, ("its agent reports that its engine is down",))
        try:
            replays = await self._access.replays_of(card)
        except KvRouterError as error:
            return EngineCheck(NOT_CHECKED, (f"{card.url}: {error}",))
        if rank.number >= len(replays) or not replays[rank.number]:
            reason = (
                f"{card.url} reports no replay endpoint: give --kv-replay {card.worker_id}=tcp://HOST:PORT"
            )
            return EngineCheck(NOT_CHECKED, (reason,))
        return _RankCheck(EngineHistory(replays[rank.number], card, rank.number))


def _shown(hashes: set[int]) -> str:
    """How many blocks, and a few of them."""
    few = ", ".join(f"{hash_:016x}" for hash_ in sorted(hashes)[:_SHOWN])
    more = ", …" if len(hashes) > _SHOWN else ""
    return f"{len(hashes):,} block{'s'[: len(hashes) > 1]} ({few}{more})"
