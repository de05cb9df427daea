"""One data-parallel rank: an engine that runs in real time, its publisher, and the mailboxes of requests.

One turn of the loop serves all requests of an engine step: the rank computes the step, waits for its
duration, then publishes its events and puts its outputs into mailboxes. An idle rank waits for an Event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import structlog

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import Engine, EngineConfig, EngineOutput, EngineRequest, StepResult, speed_up
from kvrouter.lab.mocker.events import BatchEncoder
from kvrouter.lab.mocker.publisher import Publisher, rank_endpoint

log = structlog.get_logger(__name__)

# uvloop's timers have a resolution of 1 ms: a shorter wait is added to that of the next step.
SHORTEST_SLEEP_S = 0.5e-3

# If the event loop was blocked for longer, the engine does not catch up with the rest.
LARGEST_LAG_S = 0.05


class Mailbox:
    """The outputs of one HTTP request's prompts, in order."""

    def __init__(self) -> None:
        self._outputs: list[EngineOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: EngineOutput) -> None:
        """Add an output and wake the reader."""
        self._outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[EngineOutput]:
        """All outputs since the last call; waits for the first one."""
        if not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs


class Rank:
    """An engine in real time."""

    def __init__(self, engine: Engine, publisher: Publisher) -> None:
        self.engine = engine
        self.publisher = publisher
        self._mailboxes: dict[str, Mailbox] = {}
        self._work = asyncio.Event()
        self._is_shut_down = False

    @classmethod
    @asynccontextmanager
    async def open(cls, config: MockerConfig, engine: EngineConfig, number: int) -> AsyncIterator[Rank]:
        """Bind the sockets of rank `number` and run its engine until the block ends."""
        replay = None if config.kv_replay is None else rank_endpoint(config.kv_replay, number)
        async with Publisher.open(
            rank_endpoint(config.kv_events, number),
            replay,
            BatchEncoder(config.event_shape, number),
            config.topic,
            buffer_steps=config.replay_buffer,
        ) as publisher:
            rank = cls(Engine(speed_up(engine, config.speedup)), publisher)
            async with _running(rank):
                yield rank

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return self.engine.num_waiting + self.engine.num_running

    @contextmanager
    def serving(self, requests: Sequence[EngineRequest]) -> Iterator[Mailbox]:
        """Run these requests. Unfinished ones are aborted at the end of the block."""
        mailbox = Mailbox()
        try:
            for request in requests:
                self.engine.add(request)
                self._mailboxes[request.id] = mailbox
            self._work.set()
            if self._is_shut_down:  # a request that arrives during the shutdown ends at once
                self.shut_down()
            yield mailbox
        finally:
            for request in requests:
                self.engine.abort(request.id)
                self.engine.free(request.id)
                self._mailboxes.pop(request.id, None)

    async def run(self) -> None:
        """Step while there is work."""
        try:
            while True:
                await self._work.wait()
                await self._work_off()
                self._work.clear()  # safe: no await since `has_work` was false
        except Exception:
            self.shut_down()  # a failed engine gives no more outputs: end the waiting requests
            log.exception("engine.failed")
            raise

    async def _work_off(self) -> None:
        now = asyncio.get_running_loop().time
        due_s = now()
        while self.engine.has_work():
            step = self.engine.step()
            # from the time when the step was due, so that late timers do not add up
            due_s = max(due_s, now() - LARGEST_LAG_S) + step.duration_s
            wait_s = due_s - now()
            await asyncio.sleep(wait_s if wait_s > SHORTEST_SLEEP_S else 0)
            self._deliver(step)

    def _deliver(self, step: StepResult) -> None:
        """Publish events, then outputs: an agent must have a block's event before the answer is complete."""
        if step.events:
            self.publisher.publish(time.time(), step.events)
        for output in step.outputs:
            mailbox = self._mailboxes.get(output.id)
            if mailbox is not None:  # None: aborted during the step
                mailbox.put(output)

    def shut_down(self) -> None:
        """End all requests with finish_reason "abort", as vLLM does on SIGTERM."""
        self._is_shut_down = True
        for request_id, mailbox in self._mailboxes.items():
            if self.engine.abort(request_id):
                mailbox.put(EngineOutput(request_id, None, "abort", 0))


@asynccontextmanager
async def _running(rank: Rank) -> AsyncIterator[None]:
    """Run the engine. An error of it is raised when the block ends."""
    task = asyncio.create_task(rank.run(), name="mocker-rank")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
