"""One event socket for several engines, which are told apart by topic.

    engine a ──kv@a@m──┐                 ┌──> feed of a
    engine b ──kv@b@m──┼──> SUB ──topic──┼──> feed of b
    engine x ──kv@x@m──┘                 └──> nobody's: counted, said once, shown on the workers' cards

A topic names an engine if it is the engine's, or begins with it where that ends in `@`: so that
`kv@10.0.0.1@` is not taken for a part of `kv@10.0.0.12@m`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterator

import structlog
import zmq
import zmq.asyncio

from kvrouter.worker.engines.adapter import Reasons
from kvrouter.worker.zmq.sockets import FeedOptions, ZmqFeed, open_sub, show_topic

log = structlog.get_logger()

_TURN_MESSAGES = 64
"""Messages between two turns of other tasks: pyzmq's futures are done at once while messages wait."""
_MAX_CACHED_TOPICS = 4096


class SharedSocket:
    """A SUB socket whose messages go to the feed of their topic. `run` it in a task."""

    def __init__(
        self, endpoint: str, topics: Collection[str], context: zmq.asyncio.Context, sub: zmq.asyncio.Socket
    ) -> None:
        self.malformed = 0
        self.unknown = Reasons()
        """Messages of topics that are nobody's, by topic."""
        self._endpoint = endpoint
        self._topics = {topic.encode() for topic in topics}
        self._context = context
        self._sub = sub
        self._feeds: dict[bytes, SharedFeed] = {}
        self._owners: dict[bytes, bytes | None] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, endpoint: str, topics: Collection[str], topic_filter: str
    ) -> AsyncIterator[SharedSocket]:
        """Bind or connect; `topics` are the engines' own. Raises ConfigError."""
        with open_sub(endpoint, topic_filter) as (context, sub):
            yield cls(endpoint, topics, context, sub)

    @property
    def notes(self) -> list[str]:
        """What an operator is to know about the endpoint."""
        return [f"unknown topic on {self._endpoint}: {topic}; add it to --engines" for topic in self.unknown]

    @contextlib.contextmanager
    def feed(self, options: FeedOptions) -> Iterator[ZmqFeed]:
        """The feed of one engine's topic, for as long as it is open."""
        topic = options.topic.encode()
        feed = self._feeds[topic] = SharedFeed(self, options, self._context)
        try:
            yield feed
        finally:
            del self._feeds[topic]

    async def run(self) -> None:
        """Hand out messages for ever."""
        count = 0
        while True:
            self._dispatch(await self._sub.recv_multipart())
            count += 1
            if count % _TURN_MESSAGES == 0:
                await asyncio.sleep(0)

    def _dispatch(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self.malformed += 1
            if self.malformed == 1:
                log.warning("engine.malformed_message", endpoint=self._endpoint, frames=len(frames))
            return
        owner = self._owner(frames[0])
        if owner is None:
            self._count_unknown(frames[0])
        elif owner in self._feeds:  # else its engine is about to be tried again
            self._feeds[owner].deliver(frames[1], frames[2])

    def _owner(self, topic: bytes) -> bytes | None:
        """The engine's topic that this one is, or begins with."""
        if topic in self._topics:
            return topic
        if topic not in self._owners and len(self._owners) < _MAX_CACHED_TOPICS:
            self._owners[topic] = self._search(topic)
        return self._owners[topic] if topic in self._owners else self._search(topic)

    def _search(self, topic: bytes) -> bytes | None:
        fitting = [own for own in self._topics if own.endswith(b"@") and topic.startswith(own)]
        return max(fitting, key=len, default=None)

    def _count_unknown(self, topic: bytes) -> None:
        shown = show_topic(topic)
        is_new = shown not in self.unknown
        known = len(self.unknown)
        self.unknown.note(shown)
        if is_new and len(self.unknown) > known:
            log.warning("engine.unknown_topic", endpoint=self._endpoint, topic=shown, ignored=True)


class SharedFeed(ZmqFeed):
    """One engine's feed on a shared socket."""

    def __init__(self, socket: SharedSocket, options: FeedOptions, context: zmq.asyncio.Context) -> None:
        super().__init__(options, context)
        self._socket = socket

    @property
    def notes(self) -> list[str]:
        """What an operator is to know about the endpoint."""
        return self._socket.notes
