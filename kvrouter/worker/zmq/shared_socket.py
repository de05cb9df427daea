"""One event socket for several engines. The topic of a message identifies its engine.

    engine a ──kv@a@m──┐                 ┌──> events of a
    engine b ──kv@b@m──┼──> SUB ──topic──┼──> events of b
    engine x ──kv@x@m──┘                 └──> unknown topic: counted, logged once, noted on the workers' cards

A message belongs to an engine if its topic equals the engine's topic, or begins with it and the engine's
topic ends in `@`. Because of the `@`, `kv@10.0.0.1@` does not match `kv@10.0.0.12@m`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterator

import structlog
import zmq
import zmq.asyncio

from kvrouter.worker.engines.adapter import Reasons
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints, open_sub, show_topic

log = structlog.get_logger()

# Messages between two turns of other tasks: pyzmq's futures are done at once while messages wait, so the loop
# below would never yield to the other tasks.
_TURN_MESSAGES = 64
# Topics come from outside: any program can connect to a bound endpoint and invent new ones.
_MAX_CACHED_TOPICS = 4096


class SharedSocket:
    """A SUB socket whose messages go to the engine of their topic. `run` it in a task."""

    def __init__(
        self, endpoint: str, topics: Collection[str], context: zmq.asyncio.Context, sub: zmq.asyncio.Socket
    ) -> None:
        self.malformed = 0
        # Messages of topics that belong to no engine, by topic.
        self.unknown = Reasons()
        self._endpoint = endpoint
        self._topics = {topic.encode() for topic in topics}
        self._context = context
        self._sub = sub
        self._events: dict[bytes, SharedEvents] = {}
        self._owners: dict[bytes, bytes | None] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, endpoint: str, topics: Collection[str], topic_filter: str
    ) -> AsyncIterator[SharedSocket]:
        """Bind or connect; `topics` are those of the engines. Raises ConfigError."""
        with open_sub(endpoint, topic_filter) as (context, sub):
            yield cls(endpoint, topics, context, sub)

    @property
    def notes(self) -> list[str]:
        """What an operator should know about the endpoint."""
        return [f"unknown topic on {self._endpoint}: {topic}; add it to --engines" for topic in self.unknown]

    @contextlib.contextmanager
    def events(self, options: EventEndpoints) -> Iterator[EngineEvents]:
        """The events of one engine's topic, until the block ends."""
        topic = options.topic.encode()
        events = self._events[topic] = SharedEvents(self, options, self._context)
        try:
            yield events
        finally:
            del self._events[topic]

    async def run(self) -> None:
        """Pass each message to its engine, until cancelled."""
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
        elif owner in self._events:  # otherwise its agent has failed and waits for its next attempt
            self._events[owner].deliver(frames[1], frames[2])

    def _owner(self, topic: bytes) -> bytes | None:
        """The topic of the engine to which a message of this topic belongs; None: it is unknown."""
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


class SharedEvents(EngineEvents):
    """One engine's events on a shared socket."""

    def __init__(self, socket: SharedSocket, options: EventEndpoints, context: zmq.asyncio.Context) -> None:
        super().__init__(options, context)
        self._socket = socket

    @property
    def notes(self) -> list[str]:
        """What an operator should know about the endpoint."""
        return self._socket.notes
