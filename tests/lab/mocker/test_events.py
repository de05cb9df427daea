"""The event bytes are vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvrouter.lab.mocker.events import (
    GPU,
    BatchEncoder,
    ClearedBlocks,
    KvEvent,
    RemovedBlocks,
    StoredBlocks,
    removed,
)

DATA = Path(__file__).parents[2] / "data"
CAPTURES = {"map": "vllm_capture.msgpack", "array": "vllm_capture_array_0.23.msgpack"}


def recorded(shape: str) -> list[bytes]:
    """The payloads of a real engine, in one shape."""
    return [payload for _, _, payload in msgpack.unpackb((DATA / CAPTURES[shape]).read_bytes())]


def rebuilt(event: dict[str, Any]) -> KvEvent:
    """The struct of a decoded event of map shape, without vLLM's newer fields."""
    fields = {name: value for name, value in event.items() if name not in {"type", "session_id"}}
    kinds: list[type[KvEvent]] = [StoredBlocks, RemovedBlocks, ClearedBlocks]
    (kind,) = [kind for kind in kinds if kind.__struct_config__.tag == event["type"]]
    return kind(**fields)


@pytest.mark.parametrize("shape", CAPTURES)
def test_same_bytes_as_vllm(shape: str) -> None:
    """The 125 batches of a real engine, decoded and encoded again, are the same bytes."""
    encoder = BatchEncoder(shape, rank=0)

    for payload, batch in zip(recorded(shape), map(msgpack.unpackb, recorded("map")), strict=True):
        timestamp, events, _ = batch
        if shape == "map" and any("session_id" in event for event in events):
            continue
        assert payload == encoder.encode(timestamp, [rebuilt(event) for event in events])


def test_rank_travels_with_the_batch() -> None:
    """The third field is the data-parallel rank."""
    payload = BatchEncoder("map", rank=3).encode(1.5, [removed(2**64 - 1, GPU)])

    expected = [
        1.5,
        [{"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU", "group_idx": 0}],
        3,
    ]
    assert expected == msgpack.unpackb(payload)
