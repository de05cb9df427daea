"""125 batches of a real vLLM 0.32, through all parts of the agent, compared with its `cached_tokens`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.ops import decode_frame
from kvrouter.worker.blocks.engine_blocks import BlocksImage
from kvrouter.worker.engines.vllm import VllmAdapter, decode_batch
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import Apply, EngineStream
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints
from tests.frontend import workers
from tests.worker.closed_sets import ClosedSets
from tests.worker.fake_engine import EventSockets
from tests.worker.fakes import FakeBus

DATA = Path(__file__).parents[1] / "data"
BLOCK_SIZE = 32
CAPTURES = ["vllm_capture.msgpack", "vllm_capture_array_0.23.msgpack"]
AS_BYTES = "with hashes as bytes"


@dataclass(frozen=True, slots=True)
class Request:
    """A recorded request."""

    label: str
    hashes: list[int]
    isl: int
    cached_tokens: int


def read_requests() -> Iterator[tuple[float, Request]]:
    """The requests with recorded token ids and cached tokens, and the time at which they were sent."""
    for record in json.loads((DATA / "vllm_requests.json").read_text())["requests"]:
        tokens, cached = record.get("prompt_token_ids"), record.get("cached_tokens")
        if tokens and cached is not None:
            yield record["t0"], Request(record["label"], hash_prompt(record), len(tokens), cached)


def hash_prompt(record: dict[str, Any]) -> list[int]:
    """The sequence hashes of a recorded prompt."""
    salt = record["request"].get("cache_salt")
    return [*sequence_hashes(block_hashes(record["prompt_token_ids"], BLOCK_SIZE, salt=salt))]


def read_batches(name: str) -> Iterator[tuple[float, bytes]]:
    """The captured payloads with their own timestamps."""
    file = CAPTURES[0] if name == AS_BYTES else name
    for _, _, payload in msgpack.unpackb((DATA / file).read_bytes()):
        yield decode_batch(payload).ts, with_bytes(payload) if name == AS_BYTES else payload


def with_bytes(payload: bytes) -> bytes:
    """The batch as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0: hashes of 32 bytes that end in the int."""
    ts, events, rank = msgpack.unpackb(payload)
    for event in events:
        if "block_hashes" in event:
            event["block_hashes"] = [whole_hash(short) for short in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = whole_hash(event["parent_block_hash"])
    packed: bytes = msgpack.packb([ts, events, rank])
    return packed


def whole_hash(short: int) -> bytes:
    """A hash whose short form this is."""
    return b"\xff" * 24 + short.to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a request by the published blocks, and the engine's report."""

    request: Request
    cached_tokens: int


def replay(name: str) -> list[Prediction]:
    """Replay the capture in time order; every step checks prefix closure and digests."""
    bus = FakeBus()
    publisher = KvPublisher(bus, "w", BLOCK_SIZE, model="tiny", incarnation=1)
    rank = EngineRank(publisher, EngineStream(can_replay=True), capacity_blocks=100, adapter=VllmAdapter())
    reader = ClosedSets()
    predictions = []
    moments = [*read_batches(name), *read_requests()]
    for ts, moment in sorted(moments, key=lambda moment: moment[0]):
        if isinstance(moment, Request):
            predictions.append(Prediction(moment, predict(moment, reader.tiers[0])))
            continue
        assert isinstance(moment, bytes)
        rank.on_action(Apply(0, moment))
        publisher.flush(ts)
        publisher.blocks.check()
        for _, payload in bus.take():
            reader.apply(decode_frame(payload).ops or ())
    assert not rank.skipped
    assert not rank.losses
    return predictions


def predict(request: Request, published: set[int]) -> int:
    """The cached tokens that a router would expect: the last token is always computed."""
    overlap = next((i for i, name in enumerate(request.hashes) if name not in published), len(request.hashes))
    return BLOCK_SIZE * min(overlap, (request.isl - 1) // BLOCK_SIZE)


@pytest.mark.parametrize("name", [*CAPTURES, AS_BYTES])
def test_predicts_what_the_engine_reported(name: str) -> None:
    """54 of 58 predictions are exact; the others were in flight, or cleared and not announced yet."""
    predictions = replay(name)

    wrong = [made for made in predictions if made.cached_tokens != made.request.cached_tokens]
    assert 58 == len(predictions)
    assert ["dup-concurrent"] * 3 + ["after-reset"] == [made.request.label for made in wrong]
    assert (128, 0) == (wrong[-1].cached_tokens, wrong[-1].request.cached_tokens)


def test_both_shapes_mean_the_same() -> None:
    """Batches re-encoded as arrays decode to the same events."""
    maps, arrays = (
        [
            [{field: getattr(event, field) for field in event.__struct_fields__} for event in batch.events]
            for batch in (decode_batch(payload) for _, payload in read_batches(name))
        ]
        for name in CAPTURES
    )

    assert maps == arrays


@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.parametrize("names_topic", [True, False], ids=["as vLLM", "as SGLang"])
async def test_over_sockets(name: str, names_topic: bool) -> None:
    """Started late, with batches lost on the wire and a restart: the table is that of the whole history."""
    payloads = [payload for _, payload in read_batches(name)]
    async with EventSockets.open(names_topic_in_replays=names_topic) as engine:
        for payload in payloads[:40]:
            await engine.send(payload)
        async with EngineEvents.open(
            EventEndpoints(engine.events, engine.replay, verify_after_s=0.1)
        ) as events:
            rank = EngineRank(
                KvPublisher(FakeBus(), "w", BLOCK_SIZE, model="tiny", incarnation=1),
                events.stream,
                adapter=VllmAdapter(),
            )

            def is_at(count: int) -> bool:
                return rank.publisher.blocks.image() == held_after(payloads[:count])

            task = asyncio.create_task(events.run(rank.on_action))
            await engine.until_subscribed()
            for number, payload in enumerate(payloads[40:]):
                await engine.send(payload, is_lost=number % 7 == 3)
            await until(lambda: is_at(len(payloads)), task)

            engine.restart()
            for number, payload in enumerate(payloads[:50]):
                await engine.send(payload, is_lost=number % 5 == 1)
            await until(lambda: is_at(50), task)
            assert not rank.is_partial
            assert not rank.losses
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(is_so: Callable[[], bool], task: asyncio.Task[None]) -> None:
    """Return when `is_so` holds."""
    await workers.until(lambda: is_so() or task.done())
    assert is_so(), task


def held_after(payloads: Sequence[bytes]) -> BlocksImage:
    """The table after these batches, if none is lost."""
    stream = EngineStream(can_replay=False)
    rank = EngineRank(
        KvPublisher(FakeBus(), "w", BLOCK_SIZE, model="tiny", incarnation=1), stream, adapter=VllmAdapter()
    )
    for seq, payload in enumerate(payloads):
        for action in stream.receive(seq, payload).actions:
            rank.on_action(action)
    return rank.publisher.blocks.image()
