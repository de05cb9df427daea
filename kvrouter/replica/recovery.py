"""Replay requests: frames or a snapshot that a feed lacks, asked of its source over the bus."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial

import structlog

from kvrouter.bus import Bus, Subjects
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import is_in_group
from kvrouter.core.wire.ops import ReplayRequest
from kvrouter.core.wire.ops import encode as encode_request
from kvrouter.core.wire.senders import Feed, KvSource, name
from kvrouter.errors import KvRouterError
from kvrouter.replica.feed_log import FeedLog

log = structlog.get_logger()

# At a time. An answer may be a snapshot of 512 KB, and after a reconnect every feed lacks frames.
RECOVERIES = 16
ANSWER_TIMEOUT_S = 2.0


class NoAnswerError(KvRouterError):
    """A replay request has got no answer."""


class Recovery:
    """Sends the replay requests that are due, and hands their answers to the replica."""

    def __init__(self, replica: Replica, bus: Bus, subjects: Subjects, feed_log: FeedLog) -> None:
        self._replica = replica
        self._bus = bus
        self._subjects = subjects
        self._log = feed_log
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Feed, asyncio.Task[None]] = {}
        # by the subject of the answer
        self._awaited: dict[str, asyncio.Future[bytes]] = {}
        self._hears_groups = False

    async def subscribe(self) -> None:
        """Receive answers; called once, before `request_due`."""
        await self._bus.subscribe(self._subjects.answers(self._replica.router_id), self._take)

    def request_due(self, now: float, on_answer: Callable[[], None]) -> None:
        """Send what is due. `on_answer` runs after each answer: it may have brought a snapshot to load."""
        for source in self._replica.feeds.take_cancelled():
            task = self._tasks.pop(source, None)
            if task is not None:
                task.cancel()
        for source, request in self._replica.feeds.due(now, RECOVERIES - len(self._tasks)):
            task = self._tasks[source] = asyncio.create_task(self._recover(source, request, on_answer))
            task.add_done_callback(partial(self._forget, source))

    def close(self) -> None:
        """Stop waiting for answers."""
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, source: Feed, task: asyncio.Task[None]) -> None:
        if self._tasks.get(source) is task:  # after a cancellation there may be a newer one
            del self._tasks[source]

    async def _recover(self, source: Feed, request: ReplayRequest, on_answer: Callable[[], None]) -> None:
        try:
            data = await self._ask(source, encode_request(request))
        except Exception as error:  # also a bug in encoding: without `failed` the reader would wait forever
            log.info("feed.no_answer", source=name(source), error=str(error))
            self._replica.feeds.failed(source, self._loop.time())
            return
        receipt = self._replica.feeds.answered(source, data, self._loop.time())
        for failed, bug in self._replica.feeds.take_failures():
            self._log.failed(name(failed), bug)
        if receipt.trouble:
            self._log.malformed(f"answer of {name(source)}", receipt.trouble)
        on_answer()

    async def _ask(self, source: Feed, payload: bytes) -> bytes:
        """The first answer. Raises NoAnswerError without one."""
        if isinstance(source, KvSource) and is_in_group(source.worker_id) and not self._hears_groups:
            self._hears_groups = True
            await self._bus.subscribe(self._subjects.group_answers(self._replica.router_id), self._take)
        reply = self._subjects.answer(source, self._replica.router_id, uuid.uuid4().hex)
        awaited: asyncio.Future[bytes] = self._loop.create_future()
        self._awaited[reply] = awaited
        try:
            if not self._bus.publish(self._subjects.replay(source), payload, reply):
                raise NoAnswerError("NATS is away")
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                data = await awaited
        except TimeoutError:
            raise NoAnswerError(f"nothing within {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            del self._awaited[reply]
        if not data:  # the NATS server's answer: no process has subscribed
            raise NoAnswerError("its owner is not connected to NATS")
        return data

    def _take(self, subject: str, data: bytes, _reply: str) -> None:
        awaited = self._awaited.get(subject)
        if awaited is not None and not awaited.done():
            awaited.set_result(data)
