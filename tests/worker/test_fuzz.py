"""Damaged batches of a real engine, through all parts of the agent that batches pass.

With any damage: no error is raised, the table keeps its invariants, a reader of the feed never finds a hole,
and later good batches are applied.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.wire.ops import decode_frame
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.engines.adapter import MAX_REASONS, Adapter
from kvrouter.worker.engines.sglang import SglangAdapter
from kvrouter.worker.engines.vllm import VllmAdapter, decode_batch
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import Action, EngineStream, Numbered, Restarted, Step
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints
from tests.frontend.workers import until
from tests.long import IS_LONG
from tests.worker.closed_sets import ClosedSets
from tests.worker.connecting_engine import Connecting
from tests.worker.fakes import FakeBus
from tests.worker.mutations import Message, mutate, pervert

EXAMPLES = 300 if IS_LONG else 15
DATA = Path(__file__).parents[1] / "data"
CAPTURES = ["vllm_capture.msgpack", "vllm_capture_array_0.23.msgpack"]
BLOCKS = 100


@cache
def captured(name: str) -> list[Message]:
    """The batches of a real engine, in order, numbered from 0."""
    batches = [payload for _, _, payload in msgpack.unpackb((DATA / name).read_bytes())]
    return [[b"kv@e@tiny", seq.to_bytes(8, "big"), payload] for seq, payload in enumerate(batches)]


@cache
def another_life(name: str) -> list[Message]:
    """The same batches from an engine that has restarted: other times, so other bytes."""
    lives = []
    for topic, number, payload in captured(name):
        ts, *rest = msgpack.unpackb(payload)
        lives.append([topic, number, msgpack.packb([ts + 1e6, *rest])])
    return lives


class Way:
    """A rank with its publisher, and a reader of its feed."""

    def __init__(self, feed: EngineEvents | None = None, adapter: Adapter[Any] | None = None) -> None:
        self.bus = FakeBus()
        self.publisher = KvPublisher(self.bus, "w", 32, model="tiny", incarnation=1)
        self.stream = feed.stream if feed else EngineStream(can_replay=False)
        self.rank = EngineRank(self.publisher, self.stream, BLOCKS, adapter=adapter or VllmAdapter())
        self._reader = ClosedSets()
        self._incarnation = 1
        self._now = 0.0

    def receive(self, message: Message) -> None:
        """Take a message as EngineEvents does, without a socket."""
        if len(message) == 3 and len(message[1]) == 8:
            self.do(self.stream.receive(int.from_bytes(message[1], "big"), message[2]))

    def do(self, step: Step) -> Step:
        """Apply a step, and check everything afterwards."""
        for action in step.actions:
            self.rank.on_action(action)
            self.check()
        return step

    def on_action(self, action: Action) -> None:
        """Apply an action."""
        self.do(Step([action]))

    def check(self) -> None:
        """Raise if an invariant is broken, or if a reader of the feed would find a hole."""
        self._now += 1.0  # so that every flush sends a digest
        self.publisher.blocks.check()
        self.publisher.flush(self._now)
        if self.publisher.incarnation != self._incarnation:  # readers learn of a new life from heartbeats
            self._reader, self._incarnation = ClosedSets(), self.publisher.incarnation
        assert self.publisher.blocks.count() <= BLOCKS
        assert len(self.rank.skipped) <= MAX_REASONS + 1
        for _, payload in self.bus.take():
            self._reader.apply(decode_frame(payload).ops or ())

    @property
    def held(self) -> set[int]:
        """The blocks that a reader holds on the device."""
        return self._reader.tiers[0]


@cache
def expected(name: str) -> frozenset[int]:
    """The blocks after the whole capture, if nothing is damaged."""
    way = Way()
    for message in captured(name):
        way.receive(message)
    return frozenset(way.held)


def damaged(name: str, seed: int, count: int, share: float) -> Iterable[Message]:
    """The first messages of the capture: every other one is wrong, and some are broken as well."""
    chance = random.Random(seed)
    for message in captured(name)[:count]:
        received = pervert(message, chance, hashes(name)) if chance.random() < 0.5 else [message]
        for single in received:
            yield from mutate(single, chance) if chance.random() < share else [single]


@cache
def hashes(name: str) -> list[int]:
    """Every engine hash of the capture."""
    found: dict[int, None] = {}
    for _, _, payload in captured(name):
        for event in decode_batch(payload).events:
            found.update(dict.fromkeys(getattr(event, "block_hashes", ())))
    return list(found)


@pytest.mark.parametrize("name", CAPTURES)
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), share=st.sampled_from([0.0, 0.02, 0.3]))
def test_damage_then_good_batches(name: str, seed: int, count: int, share: float) -> None:
    """After any damage the engine's next life is read without an error."""
    way = Way()
    for message in damaged(name, seed, count, share):
        way.receive(message)

    for message in another_life(name):
        way.receive(message)

    assert expected(name) == way.held
    assert not way.rank.is_partial


@settings(max_examples=EXAMPLES)
@given(payloads=st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes(payloads: list[bytes]) -> None:
    """Arbitrary payloads cause lost history at most."""
    way = Way(adapter=SglangAdapter())
    for seq, payload in enumerate(payloads):
        way.receive([b"", seq.to_bytes(8, "big"), payload])

    assert set() == way.held
    assert sum(not is_readable(payload) for payload in payloads) == way.rank.losses["malformed"]


def is_readable(payload: bytes) -> bool:
    """Whether the bytes happen to be a batch."""
    try:
        decode_batch(payload)
    except MalformedFrameError:
        return False
    return True


@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**32))
def test_damaged_replays(seed: int) -> None:
    """Replays may fail, end early or be damaged: in the end live batches are applied."""
    chance = random.Random(seed)
    way = Way()
    way.stream = way.rank._stream = EngineStream(can_replay=True)
    messages = captured(CAPTURES[0])[:40]
    step = way.do(way.stream.begin())
    for message in messages:
        step = answered(way, step, messages, chance)
        for received in mutate(message, chance) if chance.random() < 0.2 else [message]:
            if len(received) == 3 and len(received[1]) == 8:
                step = way.do(way.stream.receive(int.from_bytes(received[1], "big"), received[2]))
                step = answered(way, step, messages, chance)

    way.do(Step([Restarted()]))
    assert set() == way.held


def answered(way: Way, step: Step, messages: list[Message], chance: random.Random) -> Step:
    """Answer the questions that follow from a step, one way or another; they must come to an end.

    By chance damage may check like one restart after the other: so the last answers are good ones.
    """
    for tries in range(20):
        if step.replay_from is None:
            return step
        asked = step.replay_from
        if tries >= 10:
            whole = [(int.from_bytes(seq, "big"), payload) for _, seq, payload in messages[asked:]]
            step = way.do(way.stream.replayed(asked, whole))
        elif chance.random() < 0.3:
            step = way.do(way.stream.replay_failed(asked))
        else:
            step = way.do(way.stream.replayed(asked, replay(messages[asked:], chance)))
    raise AssertionError(f"still asking from {asked}")


def replay(messages: list[Message], chance: random.Random) -> list[Numbered]:
    """An engine's answer, with damage."""
    answer: list[Numbered] = []
    for message in messages[: chance.randint(0, 40)]:
        for received in mutate(message, chance) if chance.random() < 0.1 else [message]:
            if len(received) == 3 and len(received[1]) == 8:
                answer.append((int.from_bytes(received[1], "big"), received[2]))
    return answer


@pytest.mark.parametrize("seed", range(3))
async def test_over_a_socket(seed: int, free_port: Callable[[], int]) -> None:
    """The same over ZMQ: unreadable messages are counted, and the rank goes on."""
    port = free_port()
    async with (
        EngineEvents.open(EventEndpoints(f"tcp://*:{port}")) as feed,
        Connecting.open(f"tcp://127.0.0.1:{port}", "kv@e@tiny") as engine,
    ):
        way = Way(feed)
        task = asyncio.create_task(feed.run(way.on_action))
        for message in damaged(CAPTURES[0], seed, 100, 0.2):
            if message:
                await engine.send_raw(message)
        for message in another_life(CAPTURES[0]):
            await engine.send_raw(message)
        await until(
            lambda: task.done() or (feed.stream.next_seq == 125 and way.held == expected(CAPTURES[0]))
        )
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert feed.malformed
    assert sum(way.rank.losses.values()) + sum(way.rank.skipped.values())
