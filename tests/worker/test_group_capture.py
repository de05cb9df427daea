"""Requests and events of a real vLLM 0.32 with a hybrid model, through agent, wire and index.

The engine has two KV groups, full attention and a sliding window of 64 tokens, and evicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from kvrouter.core.feeds.sinks import KvSink
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import Check, CheckResumable, Op, decode_frame
from kvrouter.worker.blocks.state import AgentState, Header, decode_state, digest_of_file, encode_state
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import Apply, Continued, EngineStream
from tests.core.links import Room
from tests.worker.fakes import FakeBus

DATA = Path(__file__).parents[1] / "data" / "vllm_hybrid.msgpack"
BLOCK_SIZE = 32
TARGET = Target(WorkerId("w"), 0)


class World:
    """An agent, and one replica's index that follows it."""

    def __init__(self) -> None:
        self.bus = FakeBus()
        self.rank = self.agent(None)
        self.join()

    def agent(self, former: bytes | None) -> EngineRank:
        """A rank of a new agent, with the bytes of a saved state."""
        state = decode_state(former, "w").ranks[0] if former else None
        publisher = KvPublisher(self.bus, "w", BLOCK_SIZE, model="tiny", incarnation=1)
        return EngineRank(publisher, EngineStream(can_replay=True), former=state, adapter=VllmAdapter())

    def join(self) -> None:
        """A replica joins, and takes a snapshot."""
        self.index = BlockIndex()
        self.sink = KvSink(self.index, TARGET, 1, {TARGET.worker_id: Room(0)})
        self.sink.begin_load()
        for op in self.rank.publisher.blocks.state_ops():
            assert not self.sink.load(op, 0.0)
        self.sink.finish_load()

    def restart_agent(self) -> None:
        """Another agent continues from the state that the former one saved."""
        state = self.rank.state()
        assert state is not None
        pieces = list(encode_state(AgentState(Header(1, "w", 1.0, 1), {0: state})))
        self.rank = self.agent(b"".join([*pieces, digest_of_file(pieces)]))
        self.rank.on_action(Continued())
        self.bus.take()
        self.join()

    def apply(self, seq: int, payload: bytes, now: float) -> None:
        self.rank.on_action(Apply(seq, payload))
        self.rank.publisher.flush(now)
        self.rank.publisher.blocks.check()
        for _, frame in self.bus.take():
            for op in decode_frame(frame).ops or ():
                self.follow(op)

    def follow(self, op: Op) -> None:
        if isinstance(op, Check | CheckResumable):
            assert self.sink.agrees(op)
        else:
            assert not self.sink.apply(op, 0.0)

    def predict(self, tokens: list[int]) -> int:
        """The cached tokens that a router expects: the last token is always computed."""
        most = (len(tokens) - 1) // BLOCK_SIZE
        chain = sequence_hashes(block_hashes(tokens, BLOCK_SIZE))
        return BLOCK_SIZE * min(most, self.index.overlap(chain, most).get(TARGET, 0))


def steps() -> Iterator[tuple[list[int], int, list[bytes]]]:
    """Each request's token ids, the engine's cached tokens, and the batches that followed."""
    yield from msgpack.unpackb(DATA.read_bytes())


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("restarts", [False, True])
def test_predicts_every_request(restarts: bool) -> None:
    """Every prediction is exact, also if agent and replica restart and continue from saved state."""
    world, seq, wrong, hits = World(), 0, [], 0
    for number, (tokens, cached_tokens, payloads) in enumerate(steps()):
        if (predicted := world.predict(tokens)) != cached_tokens:
            wrong.append((number, predicted, cached_tokens))
        hits += cached_tokens > 0
        for payload in payloads:
            seq += 1
            world.apply(seq, payload, number * 10.0)
        if restarts and number % 9 == 8:
            world.restart_agent()

    assert [] == wrong
    assert 38 == hits
    assert not world.rank.skipped


def test_notes_name_the_groups() -> None:
    """An operator sees in /workers which groups decide."""
    world = World()
    for seq, payload in enumerate(next(steps())[2]):
        world.apply(seq, payload, 0.0)

    assert [
        "overlap follows several KV groups: group 0, group 1 (sliding_window of 64 tokens)"
    ] == world.rank.notes
