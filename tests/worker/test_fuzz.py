"""Damaged batches of a real engine, through the whole way that batches go.

Whatever arrives: nothing is raised, the table keeps its invariants, a reader of the feed never finds a
hole, and good batches that follow are applied as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.wire.ops import decode_frame
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.engines.adapter import MAX_REASONS
from kvrouter.worker.engines.sglang import SglangAdapter
from kvrouter.worker.engines.vllm import VllmAdapter, decode_batch
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import Action, EngineStream, Numbered, Restarted, Step
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints
from tests.worker.closed_sets import ClosedSets
from tests.worker.connecting_engine import Connecting
from tests.worker.fakes import FakeBus
from tests.worker.mutations import Message, mutate, pervert

DATA = Path(__file__).parents[1] / "data"
CAPTURES = ["vllm_capture.msgpack", "vllm_capture_array_0.23.msgpack"]
BLOCKS = 100


@cache
def captured(name: str) -> list[Message]:
    """What a real engine sent, in order, numbered from 0."""
    batches = [payload for _, _, payload in msgpack.unpackb((DATA / name).read_bytes())]
    return [[b"kv@e@tiny", seq.to_bytes(8, "big"), payload] for seq, payload in enumerate(batches)]


@cache
def another_life(name: str) -> list[Message]:
    """The same of an engine that has restarted: other times, so other bytes."""
    lives = []
    for topic, number, payload in captured(name):
        ts, *rest = msgpack.unpackb(payload)
        lives.append([topic, number, msgpack.packb([ts + 1e6, *rest])])
    return lives


class Way:
    """A rank at the end of a feed, and a reader of what it publishes."""

    def __init__(self, feed: EngineEvents | None = None, adapter: VllmAdapter | None = None) -> None:
        self.bus = FakeBus()
        self.publisher = KvPublisher(self.bus, "w", 32, model="tiny", incarnation=1)
        self.stream = feed.stream if feed else EngineStream(can_replay=False)
        self.rank = EngineRank(self.publisher, self.stream, BLOCKS, adapter=adapter)
        self._reader = ClosedSets()
        self._incarnation = 1
        self._now = 0.0

    def hear(self, message: Message) -> None:
        """What EngineEvents does with a message, without a socket."""
        if len(message) == 3 and len(message[1]) == 8:
            self.do(self.stream.receive(int.from_bytes(message[1], "big"), message[2]))

    def do(self, step: Step) -> Step:
        """Apply a step, and look at everything afterwards."""
        for action in step.actions:
            self.rank.on_action(action)
            self.look()
        return step

    def on_action(self, action: Action) -> None:
        """What a feed passes on."""
        self.do(Step([action]))

    def look(self) -> None:
        """Raise if an invariant is broken, or if a reader of the feed would find a hole."""
        self._now += 1.0  # every flush owes a digest
        self.publisher.blocks.check()
        self.publisher.flush(self._now)
        if self.publisher.incarnation != self._incarnation:  # heartbeats tell readers of a new life
            self._reader, self._incarnation = ClosedSets(), self.publisher.incarnation
        assert self.publisher.blocks.count() <= BLOCKS
        assert len(self.rank.skipped) <= MAX_REASONS + 1
        for _, payload in self.bus.take():
            self._reader.apply(decode_frame(payload).ops or ())

    @property
    def held(self) -> set[int]:
        """What a reader holds of the device."""
        return self._reader.tiers[0]


@cache
def expected(name: str) -> frozenset[int]:
    """What is held after the capture, if nothing is damaged."""
    way = Way()
    for message in captured(name):
        way.hear(message)
    return frozenset(way.held)


def damaged(name: str, seed: int, count: int, share: float) -> Iterable[Message]:
    """The capture's first messages: every other one lies, and a share of all is broken as well."""
    chance = random.Random(seed)
    for message in captured(name)[:count]:
        heard = pervert(message, chance, hashes(name)) if chance.random() < 0.5 else [message]
        for single in heard:
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
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), share=st.sampled_from([0.0, 0.02, 0.3]))
def test_damage_then_good_batches(name: str, seed: int, count: int, share: float) -> None:
    """After any damage an engine's next life is read as if nothing had happened."""
    way = Way()
    for message in damaged(name, seed, count, share):
        way.hear(message)

    for message in another_life(name):
        way.hear(message)

    assert expected(name) == way.held
    assert not way.rank.is_partial


@settings(max_examples=100, deadline=None)
@given(payloads=st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes(payloads: list[bytes]) -> None:
    """Payloads that never were an engine's are lost history at most."""
    way = Way(adapter=SglangAdapter())
    for seq, payload in enumerate(payloads):
        way.hear([b"", seq.to_bytes(8, "big"), payload])

    assert set() == way.held
    assert sum(not is_readable(payload) for payload in payloads) == way.rank.losses["malformed"]


def is_readable(payload: bytes) -> bool:
    """Whether it happens to be a batch."""
    try:
        decode_batch(payload)
    except MalformedFrameError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_damaged_replays(seed: int) -> None:
    """Replays that fail, end early or are damaged: sooner or later the feed goes on with what is live."""
    chance = random.Random(seed)
    way = Way()
    way.stream = way.rank._stream = EngineStream(can_replay=True)
    messages = captured(CAPTURES[0])[:40]
    step = way.do(way.stream.begin())
    for message in messages:
        step = answered(way, step, messages, chance)
        for heard in mutate(message, chance) if chance.random() < 0.2 else [message]:
            if len(heard) == 3 and len(heard[1]) == 8:
                step = way.do(way.stream.receive(int.from_bytes(heard[1], "big"), heard[2]))
                step = answered(way, step, messages, chance)

    way.do(Step([Restarted()]))
    assert set() == way.held


def answered(way: Way, step: Step, messages: list[Message], chance: random.Random) -> Step:
    """Answer the questions that follow from a step, one way or another; they must come to an end.

    By chance damage may look like one restart after the other: so the last answers are good ones.
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
    """An engine's answer, damaged here and there."""
    answer: list[Numbered] = []
    for message in messages[: chance.randint(0, 40)]:
        for heard in mutate(message, chance) if chance.random() < 0.1 else [message]:
            if len(heard) == 3 and len(heard[1]) == 8:
                answer.append((int.from_bytes(heard[1], "big"), heard[2]))
    return answer


@pytest.mark.parametrize("seed", range(3))
async def test_over_a_socket(seed: int, free_port: Callable[[], int]) -> None:
    """The same over ZMQ: what no feed can read is counted, and the feed lives on."""
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
        async with asyncio.timeout(20):
            while not (feed.stream.next_seq == 125 and way.held == expected(CAPTURES[0])):
                assert not task.done(), task
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert feed.malformed
    assert sum(way.rank.losses.values()) + sum(way.rank.skipped.values())
