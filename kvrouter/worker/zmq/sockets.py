"""The sockets of one rank's engine events: a SUB for live batches, a DEALER for each replay.

    SUB ──────reader──┐
                      ├─> inbox ─> EngineStream ─> on_action, in order, in slices
    DEALER ──replay───┘                  └─ requests a replay

The engine binds its publisher if its endpoint contains `*`; otherwise it connects and the agent binds. So an
endpoint with `*` is bound here. Any program can connect to a bound endpoint: the agent follows the first
topic that it receives, counts the others and logs each once (`SharedSocket` serves several engines). A replay
uses a DEALER, because a REQ reads only the first message of the answer. Each replay has a new DEALER, so that
a late answer is never taken for the answer to a later request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import structlog
import zmq
import zmq.asyncio

from kvrouter.errors import ConfigError
from kvrouter.worker.engines.adapter import Reasons
from kvrouter.worker.zmq.ordering import Action, EngineStream, Numbered, Step

log = structlog.get_logger()

# Actions run for this long before other tasks get a turn: a replay of 10,000 batches would otherwise delay
# the agent's heartbeats.
SLICE_S = 0.005
# Small, so that the reader waits for the consumer: pyzmq's futures are done at once while messages wait, so
# without a full queue the reader never yields.
_INBOX_BATCHES = 64
# On a shared socket a rank that is too slow must not delay the others, so its batches are dropped beyond this
# many. A dropped batch is a gap, and repaired as one.
MAX_QUEUED_BATCHES = 20_000
# vLLM's own `hwm`: more could not wait on its side either.
_RECEIVE_HIGH_WATER_MARK = 100_000
# One batch: 3 M token ids. libzmq closes the connection of a peer that sends more, and never reopens it.
MOST_MESSAGE_BYTES = 16 * 1024 * 1024
# One replay. vLLM and SGLang keep 10,000 batches by default.
MOST_REPLAY_BYTES = 256 * 1024 * 1024
MOST_REPLAY_BATCHES = 100_000
_MAX_SHOWN_TOPIC = 200
_END_OF_REPLAY = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where one rank publishes its events. Times in seconds. Without `replay` gaps cannot be repaired."""

    events: str
    replay: str | None = None
    topic: str = ""
    replay_timeout_s: float = 5.0
    verify_after_s: float = 10.0


Input: TypeAlias = Callable[[EngineStream], Step]


class EngineEvents:
    """One rank's events in order. Open it with `async with`, then `run` it in a task."""

    def __init__(
        self, options: EventEndpoints, context: zmq.asyncio.Context, sub: zmq.asyncio.Socket | None = None
    ) -> None:
        """Without `sub`, a SharedSocket calls `deliver`."""
        self.stream = EngineStream(can_replay=options.replay is not None)
        self.malformed = 0
        # Batches of other topics than the followed one, by topic.
        self.other_topics = Reasons()
        self._topic: bytes | None = None
        self._turn_ends = 0.0
        self._options = options
        self._context = context
        self._sub = sub
        # Nothing has arrived since the engine was asked whether it is still the same process.
        self._is_quiet = False
        self._reader: asyncio.Task[None] | None = None
        # Set once it is known where the engine's history begins, and that history has been passed on.
        self.settled = asyncio.Event()
        self._has_replays = True
        self._inbox: asyncio.Queue[Input] = asyncio.Queue(_INBOX_BATCHES if sub else MAX_QUEUED_BATCHES)
        self._start: Input | None = EngineStream.begin

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, options: EventEndpoints) -> AsyncIterator[EngineEvents]:
        """Connect or bind before the first replay is requested, so that no batch is lost between the two."""
        with open_sub(options.events, options.topic) as (context, sub):
            events = cls(options, context, sub)
            # at once: a bound SUB sends its subscriptions only while it is being read
            events._reader = asyncio.create_task(events._read(sub), name="engine_events.read")
            try:
                yield events
            finally:
                events._reader.cancel()
                await asyncio.wait([events._reader])

    @property
    def notes(self) -> list[str]:
        """What an operator should know about the endpoint."""
        if not self.other_topics:
            return []
        topics = ", ".join(sorted(self.other_topics))
        return [f"several topics on {self._options.events}, ignored: {topics}; list the engines in --engines"]

    def deliver(self, number: bytes, payload: bytes) -> None:
        """Take a live batch from a shared socket. A batch beyond MAX_QUEUED_BATCHES is dropped."""
        batch = _numbered([number, payload])
        if batch is None:
            self._count_malformed(3)
            return
        seq, payload = batch
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(partial(EngineStream.receive, seq=seq, payload=payload))

    def learn_replay(self, endpoint: str | None) -> None:
        """Before `run`: use the replay endpoint that the engine reports, if the options have none."""
        self._options = replace(self._options, replay=endpoint)
        self.stream = EngineStream(can_replay=endpoint is not None)

    def resume(self, seq: int, digest: bytes, *, was_complete: bool) -> None:
        """Before `run`: continue after the last batch that a former agent applied."""
        self._start = partial(EngineStream.resume, seq=seq, digest=digest, was_complete=was_complete)

    def restart(self) -> None:
        """Forget the order of batches and read the engine's history again from its start."""
        self._start = EngineStream.begin
        self._topic = None
        with contextlib.suppress(asyncio.QueueFull):  # full: `run` is not waiting, so it needs no wake-up
            self._inbox.put_nowait(_nothing)

    async def run(self, on_action: Callable[[Action], None]) -> None:
        """Call `on_action` for every action, in order, until cancelled."""
        if self._sub is not None and self._reader is not None and self._reader.done():  # by an error
            self._reader = asyncio.create_task(self._read(self._sub), name="engine_events.read")
        async with asyncio.TaskGroup() as tasks:
            if self._reader is not None:
                tasks.create_task(_watch(self._reader), name="engine_events.watch")
            while True:
                step = await self._next_step()
                await self._perform(step, on_action)
                if not self.stream.is_beginning:
                    self.settled.set()
                if step.replay_from is not None:
                    tasks.create_task(self._replay(step.replay_from), name="engine_events.replay")

    async def _next_step(self) -> Step:
        """The step after the next input; after a quiet time, the question whether the engine is the same."""
        if self._start is not None:
            start, self._start = self._start, None
            return start(self.stream)
        try:
            async with asyncio.timeout(self._options.verify_after_s):
                take = await self._inbox.get()
        except TimeoutError:
            self._is_quiet = True
            return self.stream.verify()
        return take(self.stream)

    async def _perform(self, step: Step, on_action: Callable[[Action], None]) -> None:
        for action in step.actions:
            on_action(action)
            await self._give_way()
        await self._give_way()  # also after a step without actions: a full inbox would never yield

    async def _give_way(self) -> None:
        """Let other tasks run once in SLICE_S."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = clock() + SLICE_S

    async def _read(self, sub: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sub.recv_multipart()
            self._is_quiet = False
            batch = _numbered(frames[1:]) if len(frames) == 3 else None
            if batch is None:
                self._count_malformed(len(frames))
            elif self._is_followed(frames[0]):
                seq, payload = batch
                await self._inbox.put(partial(EngineStream.receive, seq=seq, payload=payload))

    def _is_followed(self, topic: bytes) -> bool:
        """Whether the topic is the engine's. On a bound endpoint that is the first topic received."""
        if self._topic is None or not agent_binds(self._options.events):
            self._topic = topic
        if topic == self._topic:
            return True
        shown = show_topic(topic)
        if shown not in self.other_topics:
            log.warning("engine.other_topic", endpoint=self._options.events, topic=shown, ignored=True)
        self.other_topics.note(shown)
        return False

    async def _replay(self, from_seq: int) -> None:
        """Request a replay once, and queue its whole answer or its failure."""
        assert self._options.replay is not None
        endpoint, timeout_s = self._options.replay, self._options.replay_timeout_s
        batches = await ask_replay(self._context, endpoint, from_seq, timeout_s)
        self._log_outage(batches is not None, from_seq)
        if self._is_quiet and batches and batches[-1][0] > from_seq:
            self._connect_again()
        if batches is None:
            await self._inbox.put(partial(EngineStream.replay_failed, asked=from_seq))
        else:
            await self._inbox.put(partial(EngineStream.replayed, asked=from_seq, batches=batches))

    def _connect_again(self) -> None:
        """Reconnect to an engine whose events do not arrive: libzmq does not after an oversized message."""
        if self._sub is not None and not agent_binds(self._options.events):
            with contextlib.suppress(zmq.ZMQError):
                self._sub.disconnect(self._options.events)
            self._sub.connect(self._options.events)
            log.warning("engine.connected_again", endpoint=self._options.events)

    def _log_outage(self, is_answered: bool, from_seq: int) -> None:
        """Log once when replays fail and once when they work again.

        A restarted engine answers no replay before its first event, so its history is read again then.
        """
        if self._has_replays and not is_answered:
            log.warning("engine.no_replay", endpoint=self._options.replay, from_seq=from_seq)
        elif is_answered and not self._has_replays:
            log.info("engine.replays_again", endpoint=self._options.replay)
            if not self.stream.is_complete:
                self.restart()
        self._has_replays = is_answered

    def _count_malformed(self, frames: int) -> None:
        self.malformed += 1
        if self.malformed == 1:
            log.warning("engine.malformed_message", endpoint=self._options.events, frames=frames)


async def _watch(reader: asyncio.Task[None]) -> None:
    """Wait for the reader, and raise the error that has ended it."""
    await asyncio.wait([reader])
    reader.result()


async def ask_replay(
    context: zmq.asyncio.Context, endpoint: str, from_seq: int, timeout_s: float
) -> list[Numbered] | None:
    """All batches that an engine still has from `from_seq` on.

    None if the engine pauses for longer than `timeout_s`, or sends more than the limits of a replay.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.RCVHWM, 0)  # no limit: the engine's ROUTER drops messages for a full peer without a trace
    dealer.set(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
    batches: list[Numbered] = []
    left_bytes, left = MOST_REPLAY_BYTES, MOST_REPLAY_BATCHES
    try:
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", from_seq.to_bytes(8, "big")])
        while left > 0 and left_bytes > 0:
            async with asyncio.timeout(timeout_s):
                frames = await dealer.recv_multipart()
            if frames[-2] == _END_OF_REPLAY:
                return batches
            batch = _numbered(frames[-2:])  # from the end: SGLang's replays have no topic frame
            if batch is not None:
                batches.append(batch)
            left, left_bytes = left - 1, left_bytes - sum(map(len, frames))
            if left % _INBOX_BATCHES == 0:
                await asyncio.sleep(0)
        return None
    except (TimeoutError, IndexError, zmq.ZMQError):
        return None
    finally:
        dealer.close(linger=0)


def _nothing(stream: EngineStream) -> Step:
    return Step()


def _numbered(frames: list[bytes]) -> Numbered | None:
    """Sequence number and payload; None if the number is not 8 bytes."""
    number, payload = frames
    return (int.from_bytes(number, "big"), payload) if len(number) == 8 else None


def agent_binds(endpoint: str) -> bool:
    """Whether an endpoint names no host, so that the agent binds it."""
    return any(anywhere in endpoint for anywhere in ("*", "//0.0.0.0:", "//[::]:"))


def show_topic(topic: bytes) -> str:
    """A topic as readable text of bounded length."""
    return topic[:_MAX_SHOWN_TOPIC].decode(errors="backslashreplace")


@contextlib.contextmanager
def open_sub(endpoint: str, topic: str) -> Iterator[tuple[zmq.asyncio.Context, zmq.asyncio.Socket]]:
    """A SUB socket at an endpoint, and its context, in which replays may open theirs. Raises ConfigError."""
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    try:
        sub.set(zmq.RCVHWM, _RECEIVE_HIGH_WATER_MARK)
        sub.set(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        sub.set(zmq.IPV6, int("[" in endpoint))
        sub.subscribe(topic)
        _attach(sub, endpoint)
        yield context, sub
    finally:
        context.destroy(linger=0)


def _attach(sub: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        if agent_binds(endpoint):
            sub.bind(endpoint)
        else:
            sub.connect(endpoint)
    except zmq.ZMQError as error:
        way_out = ""
        if error.errno == errno.EADDRINUSE:
            way_out = (
                "; if the engine has bound it (its own endpoint contains a *), give tcp://HOST:PORT here"
            )
        raise ConfigError(f"--kv-events {endpoint}: {error}{way_out}") from None
