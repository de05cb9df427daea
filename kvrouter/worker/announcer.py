"""Announces a worker to all frontends: heartbeats, its card, the answer to a hello, leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import structlog
from msgspec.structs import replace

from kvrouter.bus.addresses import reachable
from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire.hashes import pool_token
from kvrouter.core.wire.heartbeats import (
    Card,
    RankBeat,
    State,
    WorkerBeat,
    card_trouble,
    decode_hello,
    decode_worker_beat,
    encode,
)
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.errors import ConfigError, KvRouterError, MalformedFrameError

log = structlog.get_logger()

_LOOPBACK = "127.0.0.1"

# The card is the largest part of a heartbeat and rarely changes; a replica that misses it sends a hello.
CARD_EVERY_S = 10.0
# Wait this long after a hello, so that several hellos in a row get one answer (all within 50 ms).
HELLO_DELAY_S = 0.01
# A single heartbeat with a later incarnation may be forged or damaged. The agent gives way only if a second
# one arrives in another of its heartbeat intervals, at most this many later.
SUSPECTED_BEATS = 5


class TakenOverError(KvRouterError):
    """Another agent with the same worker id has started later."""


class BusLike(Protocol):
    """The part of a Bus that an announcer uses."""

    def publish(self, subject: str, payload: bytes) -> bool:
        """Send in order. Returns False, and sends nothing, while NATS is away."""

    async def subscribe(self, subject: str, on_message: Callable[[str, bytes, str], None]) -> None:
        """Call `on_message` for each message."""

    @property
    def local_host(self) -> str:
        """The address of this host on the way to NATS; empty if it is not known."""

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every (re)connection, and now if connected."""


class Announcer:
    """Publishes one worker's heartbeats. It calls `rank_beats` for each of them.

    `worker.up` logs `facts`. `on_shared_names` gets the names that several pools serve, of a hello with some.

    Each heartbeat is decoded before it is sent: a frontend would ignore a malformed one without a trace, and
    the worker would look silent. Raises ConfigError for a card that frontends would reject.
    """

    def __init__(
        self,
        bus: BusLike,
        subjects: Subjects,
        card: Card,
        incarnation: int,
        rank_beats: Callable[[], list[RankBeat]],
        *,
        facts: Mapping[str, str] = MappingProxyType({}),
        on_shared_names: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        if trouble := card_trouble(_with_address(card, bus.local_host)):
            raise ConfigError(f"worker {card.worker_id!r} cannot be announced: {trouble}")
        self.state: State = "up"
        self.incarnation = incarnation
        self.card = card
        self.card_version = 1
        self._bus = bus
        self._subjects = subjects
        self._subject = subjects.live_worker(WorkerId(card.worker_id))
        self._rank_beats = rank_beats
        self._facts = facts
        self._on_shared_names = on_shared_names
        self._card_sent_at = float("-inf")
        self._is_announced = False
        self._hurry = asyncio.Event()
        self._interval_ms: int | None = None
        self._successor = 0
        self._suspect = 0
        self._suspected_beat = 0
        self._beats = 0
        self._warned = ""

    @property
    def heartbeats(self) -> int:
        """How many were made so far."""
        return self._beats

    async def subscribe(self) -> None:
        """Subscribe to hellos, and to heartbeats of another agent with the same worker id."""
        await self._bus.subscribe(self._subjects.hello, self._on_hello)
        await self._bus.subscribe(self._subject, self._on_own_subject)
        self._bus.on_connect(self.hurry)

    def update(self, card: Card) -> None:
        """Announce the card, if it has changed. A card that frontends would reject is not announced."""
        if card == self.card:
            return
        if trouble := card_trouble(_with_address(card, self._bus.local_host)):
            self._warn_once("worker.card_rejected", trouble)
        else:
            self.card = card
            self.card_version += 1
            self.hurry()

    def set_state(self, state: State) -> None:
        """Announce the state at once, if it has changed."""
        if state != self.state:
            self.state = state
            self.hurry()

    def hurry(self) -> None:
        """Send a heartbeat with the card within a few milliseconds."""
        self._card_sent_at = float("-inf")
        self._hurry.set()

    def beat(self, now: float) -> None:
        """Send a heartbeat, with the card every CARD_EVERY_S."""
        self._beats += 1
        card = self.card if now - self._card_sent_at >= CARD_EVERY_S else None
        if not self._send(self.state, card):
            return  # NATS is away: the card stays due
        if card is not None:
            self._card_sent_at = now
        if not self._is_announced:
            self._is_announced = True
            card = self.card
            facts = {**card.part(), **self._facts}
            log.info("worker.up", worker=card.worker_id, model=card.model, ranks=card.ranks, **facts)

    def _on_hello(self, _subject: str, payload: bytes, _reply: str) -> None:
        self.hurry()
        if names := decode_hello(payload).shared_names:
            self._on_shared_names(names)

    def leave(self) -> None:
        """Announce that the worker leaves."""
        self._send("leave", None)

    async def run(self, heartbeat_s: float) -> None:
        """Send heartbeats until cancelled. Raises TakenOverError."""
        self._interval_ms = round(heartbeat_s * 1000)
        while not self._successor:
            self.beat(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await self._hurry.wait()
                await asyncio.sleep(HELLO_DELAY_S)
            self._hurry.clear()
        raise TakenOverError(
            f"worker id {self.card.worker_id!r} is also used by an agent that started later "
            f"({self._successor} > {self.incarnation}); give each engine its own --worker-id"
        )

    def _send(self, state: State, card: Card | None) -> bool:
        ranks = self._rank_beats()
        try:
            payload = self._heartbeat(state, card, ranks)
        except (MalformedFrameError, OverflowError, TypeError, ValueError) as error:
            # without the load: a worker must not fall silent because of an odd number of its engine
            self._warn_once("worker.load_rejected", str(error))
            bare = [RankBeat(rank.rank, rank.incarnation, rank.seq, rank.partial) for rank in ranks]
            payload = self._heartbeat(state, card, bare)
        return self._bus.publish(self._subject, payload)

    def _heartbeat(self, state: State, card: Card | None, ranks: list[RankBeat]) -> bytes:
        """An encoded heartbeat. Raises the errors of a heartbeat that frontends could not decode."""
        pool = pool_token(self.card.model)
        if card is not None:
            card = _with_address(card, self._bus.local_host)
        beat = WorkerBeat(
            version=VERSION,
            incarnation=self.incarnation,
            state=state,
            pool=pool,
            ranks=ranks,
            card_version=self.card_version,
            card=card,
            interval_ms=self._interval_ms,
        )
        payload = encode(beat)
        decode_worker_beat(payload, WorkerId(self.card.worker_id))
        return payload

    def _warn_once(self, event: str, reason: str) -> None:
        if reason != self._warned:
            self._warned = reason
            log.warning(event, worker=self.card.worker_id, reason=reason)

    def _on_own_subject(self, subject: str, payload: bytes, reply: str) -> None:
        """Take a heartbeat of this worker id: this agent's echo, or another agent. The later one stays."""
        with contextlib.suppress(MalformedFrameError):
            incarnation = decode_worker_beat(payload, WorkerId(self.card.worker_id)).incarnation
            if incarnation > self.incarnation:
                self._suspect_successor(incarnation)

    def _suspect_successor(self, incarnation: int) -> None:
        """Give way to a later agent after its second heartbeat, see SUSPECTED_BEATS."""
        beats_ago = self._beats - self._suspected_beat
        if incarnation == self._suspect and 0 < beats_ago <= SUSPECTED_BEATS:
            self._successor = incarnation
            self._hurry.set()
        elif incarnation != self._suspect or beats_ago > SUSPECTED_BEATS:
            self._suspect, self._suspected_beat = incarnation, self._beats


def _with_address(card: Card, host: str) -> Card:
    """The card of an engine on every interface, with this host's address; loopback if that is not known."""
    url = reachable(card.url, host)
    return replace(card, url=reachable(url, _LOOPBACK) if url == card.url else url)
