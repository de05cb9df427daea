"""The fields of the engines' KV events, against the fields of the adapters' structs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.worker.engines import sglang, vllm

RECORD = Path(__file__).parents[2] / "data/engine_events.json"
EVENTS = {engine: entry["events"] for engine, entry in msgspec.json.decode(RECORD.read_bytes()).items()}
FIELDS = [
    (engine, event, field)
    for engine, events in EVENTS.items()
    for event, fields in events.items()
    for field in fields
    if not event.endswith("Batch")
]
STRUCTS: dict[str, dict[str, Any]] = {
    "vllm": {
        "BlockStored": vllm.BlockStored,
        "BlockRemoved": vllm.BlockRemoved,
        "AllBlocksCleared": vllm.AllBlocksCleared,
    },
    "sglang": {
        "BlockStored": sglang.PagesStored,
        "BlockRemoved": vllm.BlockRemoved,
        "AllBlocksCleared": vllm.AllBlocksCleared,
    },
}
# Read by nobody here, for this reason.
UNREAD = {
    "session_id": "says who caused the event; the blocks are anybody's",
    "ownership": "names one of several tiers of a medium; a block is counted once for each of them",
}


@pytest.mark.parametrize(("engine", "event", "field"), FIELDS, ids=".".join)
def test_every_field_is_known(engine: str, event: str, field: str) -> None:
    """A field of an engine's event is read, or left unread for a reason: a new one must be thought about."""
    read = {each.name for each in msgspec.structs.fields(STRUCTS[engine][event])}

    assert (field in read) != (field in UNREAD)


@pytest.mark.parametrize("engine", EVENTS)
def test_events_are_those_of_the_adapters(engine: str) -> None:
    """Neither a kind of event nor a field of the batch has been added."""
    kinds = {event for event in EVENTS[engine] if not event.endswith("Batch") and event != "KVCacheEvent"}
    rank = {"vllm": "data_parallel_rank", "sglang": "attn_dp_rank"}[engine]

    assert STRUCTS[engine].keys() == kinds
    assert ["ts", "events", rank] == EVENTS[engine]["EventBatch"]
    assert [] == EVENTS[engine]["KVCacheEvent"]


def test_nothing_unread_is_missing() -> None:
    """A reason for a field that no engine has any more can go."""
    assert UNREAD.keys() <= {field for _, _, field in FIELDS}
