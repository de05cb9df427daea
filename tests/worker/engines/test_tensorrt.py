"""TensorRT-LLM's events, in the form of its serializer, through its adapter and a publisher."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import block_hashes, block_seed, seeded_block_hashes, sequence_hashes
from kvrouter.core.wire.ops import decode_frame
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.engines.http import EngineError
from kvrouter.worker.engines.tensorrt import WINDOWS, TensorrtAdapter, read_answer
from kvrouter.worker.publisher import KvPublisher
from tests.long import examples
from tests.worker.closed_sets import ClosedSets
from tests.worker.fakes import FakeBus

SIZE = 4
TOKENS = list(range(3 * SIZE))
NAMES = [*sequence_hashes(block_hashes(TOKENS, SIZE))]
HASHES = [2**64 - 1, 7, 12]


class Bench:
    """An adapter with a publisher, and a reader of its frames."""

    def __init__(self) -> None:
        self.adapter = TensorrtAdapter()
        self._bus = FakeBus()
        self._publisher = KvPublisher(self._bus, "w", SIZE, model="m", incarnation=1)
        self._reader = ClosedSets()

    def receive(self, *events: dict[str, Any], **facts: object) -> list[set[int]]:
        """Apply events one by one, each with these facts; returns the tier sets."""
        for number, data in enumerate(events):
            payload = json.dumps({"event_id": number, "data": data, **facts}).encode()
            self.adapter.publish(self.adapter.decode(payload), self._publisher)
            self._publisher.blocks.check()
        self._publisher.flush(1.0)
        for _, frame in self._bus.take():
            self._reader.apply(decode_frame(frame).ops or ())
        return self._reader.tiers


def block(index: int, size: int = SIZE, **facts: object) -> dict[str, Any]:
    """One block of the chain, as the serializer writes it."""
    ids = TOKENS[index * SIZE : index * SIZE + size]
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in ids]
    plain = {"type": "stored_block", "block_hash": HASHES[index], "cache_level": 0, "priority": 35}
    return {**plain, "tokens": tokens, **facts}


def stored(*blocks: dict[str, Any], parent: int | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": [*blocks]}


CREATED = {"type": "created", "num_blocks_per_cache_level": [100, 50]}
ALL = stored(*(block(index) for index in range(3)))


def moved(index: int, old: int, new: int) -> dict[str, Any]:
    """A block changes its level, and keeps its priority."""
    level = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": HASHES[index], "cache_level": level, "priority": None}


def removed(*indexes: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": [HASHES[index] for index in indexes]}


def test_stored_and_removed() -> None:
    """A chain in one event or several has the router's names, and leaves with its removal."""
    bench = Bench()

    assert set(NAMES) == bench.receive(CREATED, ALL)[0]
    assert set(NAMES[:1]) == bench.receive(removed(2, 1))[0]
    assert set(NAMES) == bench.receive(stored(block(1), block(2), parent=HASHES[0]))[0]


def test_levels() -> None:
    """A block that is offloaded stays in host memory, and may come back; its removal names no level."""
    bench = Bench()
    bench.receive(ALL)

    assert [set(NAMES[:2]), set(NAMES)] == bench.receive(moved(2, 0, 1))[:2]
    assert [set(NAMES)] * 2 == bench.receive(moved(2, 1, 0))[:2]
    assert [set(NAMES[:2])] * 2 == bench.receive(moved(2, 0, 1), removed(2))[:2]


def test_change_of_priority() -> None:
    """An update without a level changes nothing."""
    bench = Bench()
    bench.receive(ALL)

    assert set(NAMES) == bench.receive({"type": "updated", "block_hash": 7, "cache_level": None})[0]


def test_block_that_is_not_full() -> None:
    """It has no name until it is stored again, full."""
    bench = Bench()

    assert set(NAMES[:2]) == bench.receive(stored(block(0), block(1), block(2, size=1)))[0]
    assert set(NAMES) == bench.receive(removed(2), stored(block(2), parent=HASHES[1]))[0]


@pytest.mark.parametrize(
    "facts",
    [
        {"lora_id": 3},
        {"mm_keys": [{"hash": "ab"}]},
        {"tokens": [{"token_id": token, "token_extra_id": 9} for token in TOKENS[:SIZE]]},
    ],
)
def test_more_than_tokens(facts: dict[str, Any]) -> None:
    """Blocks of adapters and images are not published, nor any below them."""
    bench = Bench()

    assert set() == bench.receive(stored(block(0, **facts), block(1)))[0]
    assert set() == bench.receive(removed(0, 1))[0]


def test_salt() -> None:
    """A salt in the event is part of the names."""
    names = sequence_hashes(seeded_block_hashes(TOKENS[:SIZE], SIZE, block_seed(None, "s"), [()]))

    assert set(names) == Bench().receive(stored(block(0, cache_salt="s")))[0]


def test_windows() -> None:
    """The largest attention window counts, which the note states with its cost."""
    bench = Bench()
    bench.receive(CREATED, window_size=64)
    bench.receive(CREATED, window_size=512)

    assert set() == bench.receive(ALL, window_size=64)[0]
    assert set(NAMES) == bench.receive(ALL, window_size=512)[0]
    assert set(NAMES) == bench.receive(removed(0, 1, 2), window_size=64)[0]
    assert [WINDOWS] == bench.adapter.notes


def test_smaller_window_first() -> None:
    """Blocks of a window that turns out not to be the largest are withdrawn: no removal would end them."""
    bench = Bench()
    bench.receive(ALL, window_size=64)

    assert {NAMES[0]} == bench.receive(stored(block(0)), window_size=512)[0]
    assert {NAMES[0]} == bench.receive(removed(0, 1, 2), window_size=64)[0]
    assert set() == bench.receive(removed(0), window_size=512)[0]


def test_other_ranks() -> None:
    """Events of another attention rank name another cache."""
    bench = Bench()

    assert set() == bench.receive(ALL, attention_dp_rank=1)[0]
    assert ["events of attention rank 1"] == [reason[:26] for reason in bench.adapter.skipped]


@pytest.mark.parametrize(
    "data", [{"type": "stored", "parent_hash": None, "blocks": [{"block_hash": "x"}]}, {"type": "swapped"}]
)
def test_unknown_events(data: dict[str, Any]) -> None:
    """A store that cannot be read, or another type, is only an undercount: counted."""
    bench = Bench()

    assert set() == bench.receive(data)[0]
    assert [f"event {data['type']} that cannot be read"] == [
        reason.partition(":")[0] for reason in bench.adapter.skipped
    ]


@pytest.mark.parametrize(
    "payload", [b'{"event_id": 1, "data": {"type": "removed", "block_hashes": 7}}', b"[", b"{}"]
)
def test_malformed(payload: bytes) -> None:
    """A removal must not be missed."""
    with pytest.raises(MalformedFrameError, match="TensorRT-LLM event"):
        TensorrtAdapter().decode(payload)


def test_answer() -> None:
    """Empty entries of an answer are left out; an answer of another form is an error."""
    assert [(4, b'{"event_id": 4}')] == read_answer(b'[{}, {"event_id": 4}]')
    for body in (b"{}", b"[1]", b'[{"event_id": -1}]', b""):
        with pytest.raises(EngineError, match="TensorRT-LLM's format"):
            read_answer(body)


FIELDS = [
    "event_id",
    "data",
    "type",
    "parent_hash",
    "blocks",
    "block_hash",
    "tokens",
    "token_id",
    "cache_level",
]
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-5, 2**70), st.text(max_size=3), st.sampled_from(["stored", "removed"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@examples(100)
@given(
    st.sampled_from([ALL, moved(1, 0, 1), removed(1)]), st.sampled_from(FIELDS), VALUES, st.integers(0, 200)
)
def test_damaged_events(event: dict[str, Any], name: str, value: object, cut: int) -> None:
    """Any damage is counted or malformed; the table keeps its invariants, and good events are applied."""
    bench = Bench()
    with contextlib.suppress(MalformedFrameError):
        bench.receive({**event, name: value})
    with contextlib.suppress(MalformedFrameError):
        bench.adapter.decode(json.dumps({"event_id": 1, "data": event}).encode()[:cut])
    bench.receive(removed(0, 1, 2), removed(0, 1, 2), ALL)

    assert bench.receive()[0] <= set(NAMES)
