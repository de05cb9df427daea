"""Simulated engines that store and remove blocks like real ones, and their agents.

The agent is made of the real parts (KvPublisher, Announcer), driven in virtual time as `agent.py`
drives them in real time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator

from kvrouter.bus.subjects import Subjects
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.wire.hashes import block_hashes, pool_token, sequence_hashes
from kvrouter.core.wire.heartbeats import Card, RankBeat
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import TIERS, decode_request
from kvrouter.core.wire.senders import KvSource
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.announcer import Announcer
from kvrouter.worker.publisher import CHECK_EVERY_S, KvPublisher
from tests.convergence.bus import Agenda, Line, Net, Process
from tests.convergence.truth import Histories, published_facts, published_sets

BLOCK_SIZE = 2
NAMESPACE = "sim"
HEARTBEAT_S = 1.0
LIBRARY_SIZE = 42

Event = Callable[[KvPublisher], None]
"""An engine's event for its agent."""


class Library:
    """The prompts that all clients send: a forest of blocks, shared by all engines."""

    def __init__(self) -> None:
        self.parents = [None if n % 14 == 0 else max(n - n % 14, n - 1 - n % 3) for n in range(LIBRARY_SIZE)]
        self.sequences = [self._hashes(n)[-1] for n in range(LIBRARY_SIZE)]

    def chain(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        chain: list[int] = []
        at: int | None = node
        while at is not None:
            chain.append(at)
            at = self.parents[at]
        return chain[::-1]

    def hashes(self, node: int) -> list[int]:
        """Sequence hashes from the root to this one."""
        return [self.sequences[n] for n in self.chain(node)]

    def tokens(self, nodes: list[int]) -> list[int]:
        """The tokens of these blocks, one after the other."""
        return [token for node in nodes for token in (2 * node, 2 * node + 1)]

    def _hashes(self, node: int) -> list[int]:
        return list(map(int, sequence_hashes(block_hashes(self.tokens(self.chain(node)), BLOCK_SIZE))))


LIBRARY = Library()


class Engine:
    """One rank's cache. It counts copies per block and tier, and evicts in any order."""

    def __init__(self, tiers: int) -> None:
        self.held: Counter[tuple[int, int]] = Counter()
        self._tiers = tiers

    def act(self, rng: random.Random) -> Event | None:
        """Store or remove some blocks; None if there was nothing to do."""
        chance = rng.random()
        if chance < 0.55:
            return self._store(rng.randrange(LIBRARY_SIZE), is_copy=rng.random() < 0.2)
        if chance < 0.7 and self._tiers > 1:
            return self._offload(rng)
        if chance < 0.98:
            return self._remove(rng)
        return self.clear()

    def clear(self) -> Event:
        """Clear the cache."""
        self.held.clear()
        return lambda publisher: publisher.cleared()

    def replay(self) -> Iterator[Event]:
        """Events for the whole contents, parents first."""
        for node, tier in sorted(self.held):
            for _ in range(self.held[node, tier]):
                yield self._stored([node], tier)

    def _store(self, node: int, *, is_copy: bool) -> Event | None:
        chain = LIBRARY.chain(node)
        while chain and not is_copy and self.held[chain[0], 0]:
            del chain[0]
        self.held.update((block, 0) for block in chain)
        return self._stored(chain, 0) if chain else None

    def _offload(self, rng: random.Random) -> Event | None:
        nodes = sorted(node for node, tier in self.held if tier == 0)
        if not nodes:
            return None
        node, tier = rng.choice(nodes), rng.randrange(1, self._tiers)
        self.held[node, tier] += 1
        return self._stored([node], tier)

    def _remove(self, rng: random.Random) -> Event | None:
        if not self.held:
            return None
        node, tier = rng.choice(sorted(self.held))
        self.held[node, tier] -= 1
        self.held += Counter()  # drops zero counts
        return lambda publisher: publisher.removed([_engine_hash(node), 7], TIERS[tier])

    @staticmethod
    def _stored(nodes: list[int], tier: int) -> Event:
        parent = LIBRARY.parents[nodes[0]]
        above = None if parent is None else _engine_hash(parent)
        hashes, tokens = [_engine_hash(node) for node in nodes], LIBRARY.tokens(nodes)
        return lambda publisher: publisher.stored(hashes, tokens, parent=above, tier=TIERS[tier])


def _engine_hash(node: int) -> int:
    return 1000 + node


class WatchedPublisher(KvPublisher):
    """A publisher with a small ring; the state after each frame is recorded."""

    def __init__(self, line: Line, card: Card, rank: int, incarnation: int, histories: Histories, ring: int):
        self._ring_frames = ring
        self._histories = histories
        self._source = KvSource(PoolId(pool_token(card.model)), WorkerId(card.worker_id), rank)
        super().__init__(
            line, card.worker_id, BLOCK_SIZE, rank,
            model=card.model, namespace=NAMESPACE, incarnation=incarnation,
        )  # fmt: skip

    @property
    def owes(self) -> bool:
        """Whether frames, or a digest for them, are still to be published."""
        return bool(self._pending) or self._is_unchecked

    @property
    def source(self) -> KvSource:
        """The source of this feed."""
        return self._source

    def flush(self, now: float) -> None:
        """Publish, and record the state after the last frame."""
        super().flush(now)
        self._histories.note(self._source, self.incarnation, self.seq, published_facts(self.blocks))

    def _new_feed(self, incarnation: int) -> FeedSource:
        return FeedSource(incarnation, lambda _now: self.blocks.state_ops(), ring_frames=self._ring_frames)


class SimAgent(Process):
    """An agent, from start to end."""

    def __init__(
        self,
        agenda: Agenda,
        net: Net,
        rng: random.Random,
        number: int,
        card: Card,
        *,
        incarnation: int,
        histories: Histories,
        ring: int,
    ) -> None:
        super().__init__(agenda, skew_s=rng.uniform(-1e4, 1e6))
        self.line = Line(net, self, number)
        self.card = card
        self.incarnation = incarnation
        self.publishers = [
            WatchedPublisher(self.line, card, rank, incarnation, histories, ring)
            for rank in range(card.ranks)
        ]
        self._rng = rng
        self._subjects = Subjects(NAMESPACE)
        self._announcer = Announcer(self.line, self._subjects, card, incarnation, self._rank_beats)
        self._beat_turn = 0
        self._is_hurried = False
        self._is_flush_due = False
        self._is_check_due = False

    def start(self) -> None:
        """Subscribe, connect, publish the first heartbeat."""
        worker_id = WorkerId(self.card.worker_id)
        self.line.listen(self._subjects.kv_replay(worker_id), self._answer_replay)
        _run_plain(self._announcer.subscribe())
        self.line.listen(self._subjects.hello, lambda *_: self._hurry())
        self.line.listen(self._subjects.live_worker(worker_id), lambda *_: self._look_for_successor())
        self.line.on_connect(self._hurry)
        self._beat(self._beat_turn)
        self.line.connect()

    def hear(self, rank: int, event: Event) -> None:
        """An event of the engine arrives."""
        event(self.publishers[rank])
        self._flush_soon(self._rng.uniform(0.0, 0.01))

    def lose_history(self, rank: int, incarnation: int) -> None:
        """Batches of the engine's events are lost for good."""
        self.publishers[rank].lose_history(incarnation)

    def go(self, state: str) -> None:
        """The engine goes `down` and loses its cache, or is `up` again."""
        if state == "down":
            for publisher in self.publishers:
                publisher.cleared()
        self._flush_soon(0.0)
        self._announcer.set_state("down" if state == "down" else "up")
        self._hurry()

    @property
    def pool_id(self) -> PoolId:
        """Its pool."""
        return PoolId(pool_token(self.card.model))

    def blocks(self, pool_id: PoolId) -> set[int]:
        """Blocks that its ranks have published in any tier, if it belongs to that pool."""
        if pool_id != self.pool_id:
            return set()
        return {hash_ for publisher in self.publishers for hash_ in published_sets(publisher.blocks)[-1]}

    @property
    def state(self) -> str:
        """Its card."""
        return self._announcer.state

    def leave(self) -> None:
        """Leave and end."""
        self._announcer.leave()
        self.kill()

    def _rank_beats(self) -> list[RankBeat]:
        return [RankBeat(p.rank, p.incarnation, p.seq) for p in self.publishers]

    def _hurry(self) -> None:
        """As Announcer.run does: one heartbeat 10 ms later, however often it is requested."""
        self._announcer.hurry()
        if not self._is_hurried:
            self._is_hurried = True
            self._beat_turn += 1
            turn = self._beat_turn
            self.after(0.01, lambda: self._beat(turn))

    def _beat(self, turn: int) -> None:
        if turn != self._beat_turn:
            return  # an early heartbeat was published before
        self._is_hurried = False
        self._announcer.beat(self.now())
        self.after(HEARTBEAT_S, lambda: self._beat(turn))

    def _look_for_successor(self) -> None:
        if self._announcer._successor:  # where `run` ends with TakenOverError
            self.kill()

    def _flush_soon(self, seconds: float) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self.after(seconds, self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        for publisher in self.publishers:
            publisher.flush(self.now())
        if any(publisher.owes for publisher in self.publishers) and not self._is_check_due:
            self._is_check_due = True
            self.after(CHECK_EVERY_S, self._flush_check)

    def _flush_check(self) -> None:
        """Publish the digest that frames within a second of the last digest still lack."""
        self._is_check_due = False
        self._flush()

    def _answer_replay(self, _subject: str, payload: bytes, reply: str) -> None:
        try:
            request = decode_request(payload)
        except MalformedFrameError:
            return
        if isinstance(request.part, int) and 0 <= request.part < len(self.publishers):
            publisher = self.publishers[request.part]
            self.line.publish(reply, publisher.answer(request, self.line.max_payload, self.now()))


def _run_plain(coroutine: Coroutine[object, None, None]) -> None:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")
