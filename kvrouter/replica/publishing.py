"""What a replica publishes: its bookings, heartbeats and hellos, and its answers to those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import lru_cache

from kvrouter.bus import Bus, Subjects
from kvrouter.bus.addresses import reachable
from kvrouter.core.feeds.trust import ANSWERS_A_SECOND, PerSecond
from kvrouter.core.fleet.pools import POOLS_MOST
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import State, Traffic, encode
from kvrouter.core.wire.ids import PoolId
from kvrouter.core.wire.ops import decode_request
from kvrouter.errors import MalformedFrameError
from kvrouter.replica.feed_log import FeedLog

# All replicas and agents answer a joiner's hello, and the joiner is ready when they have. Hellos that arrive
# within this time get one answer: it names every worker, so one answer for each of a flood would cost much.
HELLO_DELAY_S = 0.03
# To send a frame, and to get it back, takes as long as ten of the calls that it tells of.
SPACED_S = 0.002


class Publishing:
    """Publishes for one replica. `on_change` runs after each flush.

    `address` (of the admin listener), `clients_url`, and what `traffic` returns, go into its heartbeats.
    `own_urls`: further URLs by which it can be reached.
    """

    def __init__(
        self,
        replica: Replica,
        bus: Bus,
        subjects: Subjects,
        feed_log: FeedLog,
        *,
        address: str,
        clients_url: str = "",
        own_urls: Collection[str] = (),
        on_change: Callable[[], None] | None,
        traffic: Callable[[], Traffic] | None,
    ) -> None:
        self.state: State = "up"
        self.replica = replica
        self._bus = bus
        self._subjects = subjects
        self._log = feed_log
        self._address, self._clients_url, self._own_urls = address, clients_url, own_urls
        self._on_change = on_change
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._is_flush_due = self._is_hello_due = False
        self._flushed_at = float("-inf")
        self._answers = PerSecond(ANSWERS_A_SECOND)
        # Every booking needs the subject several times; it never changes for a pool.
        self._sync_subject = lru_cache(POOLS_MOST)(self._new_sync_subject)

    # Bookings

    def flush_soon(self) -> None:
        """Publish at the end of this turn of the event loop: what happens in one turn shares a frame."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush_spaced(self) -> None:
        """`flush_soon`, but not within SPACED_S of the last time."""
        left_s = self._flushed_at + SPACED_S - self._loop.time()
        if left_s <= 0:
            self.flush_soon()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_later(left_s, self.flush)

    def flush(self) -> None:
        """Publish what happened to own bookings: afterwards each pool is at its feed's seq."""
        self._is_flush_due, self._flushed_at = False, self._loop.time()
        for pool_id, router in self.replica.routers.items():
            self._publish(pool_id, router.feed.frames())
        if self._on_change is not None:
            self._on_change()

    def answer_replay(self, _subject: str, data: bytes, reply: str) -> None:
        """Answer a peer that asks for frames or a snapshot of this replica's bookings."""
        try:
            request = decode_request(data)
        except MalformedFrameError as error:
            self._log.malformed("a replay request", str(error))
            return
        router = self.replica.routers.get(PoolId(str(request.part)))
        now = self._loop.time()
        if router is None or not reply or not self._answers.allows(now):
            return
        # A snapshot carries the feed's seq. Without a flush it would contain bookings of later frames.
        self.flush()
        self._bus.publish(reply, router.feed.source.answer(request, self._bus.max_payload, now))

    def _publish(self, pool_id: PoolId, frames: list[bytes]) -> None:
        for frame in frames:
            self._bus.publish(self._sync_subject(pool_id), frame)

    def _new_sync_subject(self, pool_id: PoolId) -> str:
        return self._subjects.live_sync(pool_id, self.replica.router_id)

    # Presence

    def begin_round(self) -> None:
        """Once per heartbeat interval: a round of the leases begins, and its heartbeat is published."""
        now = self._loop.time()
        self.replica.next_round(now)
        for pool_id, router in self.replica.routers.items():
            self._publish(pool_id, router.feed.check_frames(now))
        if (hello := self.replica.hello()) is not None:
            self._bus.publish(self._subjects.hello, hello)
        self._publish_heartbeat()

    def hello(self) -> None:
        """Ask all replicas and agents for a heartbeat, after every connection to NATS."""
        self._bus.publish(self._subjects.hello, b"")
        self.replica.hello_sent(self._loop.time())
        self._publish_heartbeat()

    def answer_hello(self, _subject: str, _data: bytes, _reply: str) -> None:
        """Answer after HELLO_DELAY_S, once for all hellos until then."""
        if not self._is_hello_due:
            self._is_hello_due = True
            self._loop.call_later(HELLO_DELAY_S, self._answer_hellos)

    def heartbeat_soon(self) -> None:
        """Publish a heartbeat now: something in it has changed that peers should know before the next one."""
        if self.state != "leave":
            self._publish_heartbeat()

    def drain(self) -> None:
        """Heartbeats state from now on that this replica takes no new requests."""
        self.state = "draining"

    def leave(self) -> None:
        """Publish what is left and the last heartbeat: peers drop this replica's bookings at once."""
        self.flush()
        self.state = "leave"
        self._publish_heartbeat()

    def _answer_hellos(self) -> None:
        self._is_hello_due = False
        if self.state == "leave":
            return  # a heartbeat after the last one would bring the replica back for a lease
        self.flush()
        self._publish_heartbeat(names_workers=True)

    def _publish_heartbeat(self, *, names_workers: bool = False) -> None:
        host = self._bus.local_host  # another one after a reconnect over another network
        address, clients_url = reachable(self._address, host), reachable(self._clients_url, host)
        self.replica.listen_at((address, clients_url, *self._own_urls))
        traffic = self._traffic() if self._traffic is not None else None
        beat = self.replica.heartbeat(
            self.state, address, names_workers=names_workers, traffic=traffic, clients_url=clients_url
        )
        self._bus.publish(self._subjects.live_router(self.replica.router_id), encode(beat))
