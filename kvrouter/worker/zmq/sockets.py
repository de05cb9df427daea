"""The sockets of one rank's engine events: a SUB for live batches, a DEALER for each replay.

    SUB ──────reader──┐
                      ├─> inbox ─> EngineStream ─> on_action, in order, in slices
    DEALER ──replay───┘                  └─ asks for a replay

The engine binds its publisher if its endpoint contains `*`, else it connects and we bind; hence
an endpoint with `*` is bound here. Whoever likes can connect to that: the first topic heard is
followed, others are counted and said once (`SharedSocket` is for several engines). Replays go through
a DEALER, because a REQ reads only the first message of the answer; a new one for each, so that a late
answer meets nobody.
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

SLICE_S = 0.005
"""How long actions run before other tasks get a turn."""
_INBOX_BATCHES = 64
"""Few, so that the reader gives way: pyzmq's futures are done at once while messages wait."""
MAX_QUEUED_BATCHES = 20_000
"""Of a feed on a shared socket, where one that does not keep up must not hold up the others."""
_RECEIVE_HIGH_WATER_MARK = 100_000
MOST_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one batch: 3 M token ids. libzmq closes the connection of a peer that sends more, for good."""
MOST_REPLAY_BYTES = 256 * 1024 * 1024
MOST_REPLAY_BATCHES = 100_000
"""Of one replay. vLLM and SGLang keep 10,000 batches by default."""
_MAX_SHOWN_TOPIC = 200
_END_OF_REPLAY = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """Where one rank's events are. Times in seconds; without `replay` gaps cannot be repaired."""

    events: str
    replay: str | None = None
    topic: str = ""
    replay_timeout_s: float = 5.0
    verify_after_s: float = 10.0


Heard: TypeAlias = Callable[[EngineStream], Step]


class ZmqFeed:
    """One rank's batches, put in order. Open it with `async with`, then `run` it in a task."""

    def __init__(
        self, options: FeedOptions, context: zmq.asyncio.Context, sub: zmq.asyncio.Socket | None = None
    ) -> None:
        """Without `sub` somebody else calls `deliver`."""
        self.stream = EngineStream(can_replay=options.replay is not None)
        self.malformed = 0
        self.strangers = Reasons()
        """Batches of other topics than the one that is followed, by topic."""
        self._topic: bytes | None = None
        self._turn_ends = 0.0
        self._options = options
        self._context = context
        self._sub = sub
        self._is_quiet = False
        """Nothing has been heard since the engine was asked whether it still is the same."""
        self._reader: asyncio.Task[None] | None = None
        self.settled = asyncio.Event()
        """Set once it is known from where the history can be had, and that part has been passed on."""
        self._has_replays = True
        self._inbox: asyncio.Queue[Heard] = asyncio.Queue(_INBOX_BATCHES if sub else MAX_QUEUED_BATCHES)
        self._start: Heard | None = EngineStream.begin

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, options: FeedOptions) -> AsyncIterator[ZmqFeed]:
        """Connect, or bind, before anything is replayed: nothing is lost between the two.

        It reads at once, because a bound SUB subscribes only while it is read.
        """
        with open_sub(options.events, options.topic) as (context, sub):
            feed = cls(options, context, sub)
            feed._reader = asyncio.create_task(feed._read(sub), name="zmq_feed.read")
            try:
                yield feed
            finally:
                feed._reader.cancel()
                await asyncio.wait([feed._reader])

    @property
    def notes(self) -> list[str]:
        """What an operator is to know about the endpoint."""
        if not self.strangers:
            return []
        topics = ", ".join(sorted(self.strangers))
        return [f"several topics on {self._options.events}, ignored: {topics}; list the engines in --engines"]

    def deliver(self, number: bytes, payload: bytes) -> None:
        """Take a live batch from a shared socket. What there is no room for is a gap, and repaired as one."""
        batch = _numbered([number, payload])
        if batch is None:
            self._count_malformed(3)
            return
        seq, payload = batch
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(partial(EngineStream.receive, seq=seq, payload=payload))

    def learn_replay(self, endpoint: str | None) -> None:
        """Before it runs: what the engine tells, where the options are silent."""
        self._options = replace(self._options, replay=endpoint)
        self.stream = EngineStream(can_replay=endpoint is not None)

    def resume(self, seq: int, digest: bytes, *, was_complete: bool) -> None:
        """Before it runs: begin behind the batch that a former agent applied last."""
        self._start = partial(EngineStream.resume, seq=seq, digest=digest, was_complete=was_complete)

    def restart(self) -> None:
        """Forget the order of batches and read the engine's history again from its start."""
        self._start = EngineStream.begin
        self._topic = None
        with contextlib.suppress(asyncio.QueueFull):  # full: nobody has to be woken
            self._inbox.put_nowait(_nothing)

    async def run(self, on_action: Callable[[Action], None]) -> None:
        """Feed `on_action` for ever; it is plain, and sees a Restarted or Lost before what follows."""
        if self._sub is not None and self._reader is not None and self._reader.done():  # by an error
            self._reader = asyncio.create_task(self._read(self._sub), name="zmq_feed.read")
        async with asyncio.TaskGroup() as tasks:
            if self._reader is not None:
                tasks.create_task(_watch(self._reader), name="zmq_feed.watch")
            while True:
                step = await self._next_step()
                await self._perform(step, on_action)
                if not self.stream.is_beginning:
                    self.settled.set()
                if step.replay_from is not None:
                    tasks.create_task(self._replay(step.replay_from), name="zmq_feed.replay")

    async def _next_step(self) -> Step:
        """What follows from the next thing heard; a question of our own if it was quiet."""
        if self._start is not None:
            start, self._start = self._start, None
            return start(self.stream)
        try:
            async with asyncio.timeout(self._options.verify_after_s):
                heard = await self._inbox.get()
        except TimeoutError:
            self._is_quiet = True
            return self.stream.verify()
        return heard(self.stream)

    async def _perform(self, step: Step, on_action: Callable[[Action], None]) -> None:
        for action in step.actions:
            on_action(action)
            await self._give_way()
        await self._give_way()  # as many steps may wait as the inbox has room for

    async def _give_way(self) -> None:
        """Let other tasks run if this one has had its turn."""
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
            elif self._is_ours(frames[0]):
                seq, payload = batch
                await self._inbox.put(partial(EngineStream.receive, seq=seq, payload=payload))

    def _is_ours(self, topic: bytes) -> bool:
        """Whether it is of the engine that is followed: on an endpoint of ours, the first that is heard."""
        if self._topic is None or not is_bound(self._options.events):
            self._topic = topic
        if topic == self._topic:
            return True
        shown = show_topic(topic)
        if shown not in self.strangers:
            log.warning("engine.other_topic", endpoint=self._options.events, topic=shown, ignored=True)
        self.strangers.note(shown)
        return False

    async def _replay(self, from_seq: int) -> None:
        """Ask once and report the whole answer, or that there was none."""
        assert self._options.replay is not None
        endpoint, timeout_s = self._options.replay, self._options.replay_timeout_s
        batches = await ask_replay(self._context, endpoint, from_seq, timeout_s)
        self._tell_outage(batches is not None, from_seq)
        if self._is_quiet and batches and batches[-1][0] > from_seq:
            self._connect_again()
        if batches is None:
            await self._inbox.put(partial(EngineStream.replay_failed, asked=from_seq))
        else:
            await self._inbox.put(partial(EngineStream.replayed, asked=from_seq, batches=batches))

    def _connect_again(self) -> None:
        """The engine has published, and nothing came: after too long a message libzmq does not come back."""
        if self._sub is not None and not is_bound(self._options.events):
            with contextlib.suppress(zmq.ZMQError):
                self._sub.disconnect(self._options.events)
            self._sub.connect(self._options.events)
            log.warning("engine.connected_again", endpoint=self._options.events)

    def _tell_outage(self, is_answered: bool, from_seq: int) -> None:
        """Once when replays are not answered any more: who restarts answers none before its first event."""
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
    """End as the reader does."""
    await asyncio.wait([reader])
    reader.result()


async def ask_replay(
    context: zmq.asyncio.Context, endpoint: str, from_seq: int, timeout_s: float
) -> list[Numbered] | None:
    """All batches that an engine still has from a number on; None if it pauses longer, or does not end."""
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.RCVHWM, 0)  # a ROUTER drops what there is no room for
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
            batch = _numbered(frames[-2:])
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
    """`[seq, payload]`; None if the number is not 8 bytes."""
    number, payload = frames
    return (int.from_bytes(number, "big"), payload) if len(number) == 8 else None


def is_bound(endpoint: str) -> bool:
    """Whether an endpoint names no host, so that it is ours to bind."""
    return any(anywhere in endpoint for anywhere in ("*", "//0.0.0.0:", "//[::]:"))


def show_topic(topic: bytes) -> str:
    """A topic for people."""
    return topic[:_MAX_SHOWN_TOPIC].decode(errors="backslashreplace")


@contextlib.contextmanager
def open_sub(endpoint: str, topic: str) -> Iterator[tuple[zmq.asyncio.Context, zmq.asyncio.Socket]]:
    """A SUB socket at an endpoint, and the context that it and others may live in. Raises ConfigError."""
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
        if is_bound(endpoint):
            sub.bind(endpoint)
        else:
            sub.connect(endpoint)
    except zmq.ZMQError as error:
        way_out = ""
        if error.errno == errno.EADDRINUSE:
            way_out = (
                "; if the engine has bound it, because its own endpoint has a *, give tcp://HOST:PORT here"
            )
        raise ConfigError(f"--kv-events {endpoint}: {error}{way_out}") from None
