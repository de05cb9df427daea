"""Decoding vLLM's events, and passing them to a publisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import multimodal_id
from kvrouter.core.wire.ops import Op
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.blocks.engine_blocks import BlockIds, EngineBlocks, EngineHash
from kvrouter.worker.blocks.resume_points import ALL
from kvrouter.worker.engines.adapter import MAX_REASONS, Batch
from kvrouter.worker.engines.vllm import (
    NO_REMOVALS,
    BlockStored,
    VllmAdapter,
    decode_batch,
    needed_blocks,
    read_extra_keys,
)
from kvrouter.worker.publisher import Sink

STORED = {
    "type": "BlockStored",
    "block_hashes": [7, 8],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}


FULL = {**STORED, "group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW = {
    **STORED, "group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 100,
}  # fmt: skip


class Ledger(Sink):
    """A sink that records its calls."""

    def __init__(self) -> None:
        super().__init__(EngineBlocks(), 16)
        self.calls: list[tuple[Any, ...]] = []

    def _collect(self, ops: list[Op]) -> None:
        raise AssertionError("every call is overridden")

    def stored(
        self,
        engine_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        parent: EngineHash | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
        tier: str = "device",
        *,
        ids: Sequence[BlockIds] = (),
        block_size: int | None = None,
    ) -> None:
        """Write down what was stored."""
        self.calls.append(("stored", [*engine_hashes], parent, lora_name, salt, tier, [*ids], block_size))

    def stored_chunks(
        self,
        chunk_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        parent: EngineHash | None,
        tier: str,
    ) -> None:
        """Write down what another program stored."""
        self.calls.append(("chunks", [*chunk_hashes], [*token_ids], parent, tier))

    def removed(self, engine_hashes: Sequence[EngineHash], tier: str = "device") -> None:
        self.calls.append(("removed", [*engine_hashes], tier))

    def group_stored(
        self, group: int, needed: int, engine_hashes: Sequence[EngineHash], *, is_root: bool
    ) -> None:
        self.calls.append(("group_stored", group, needed, [*engine_hashes], is_root))

    def group_removed(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        self.calls.append(("group_removed", group, [*engine_hashes]))

    def cleared(self) -> None:
        self.calls.append(("cleared",))


def pack(*events: object) -> bytes:
    """A payload as vLLM sends it."""
    packed: bytes = msgpack.packb([1.5, events, 0])
    return packed


def passed_on(*events: object) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    """The calls that a sink gets for events, and the skipped ones."""
    ledger = Ledger()
    adapter = VllmAdapter()
    adapter.publish(adapter.decode(pack(*events)), ledger)
    return ledger.calls, dict(adapter.skipped)


def stored(**changes: object) -> BlockStored:
    (event,) = decode_batch(pack(STORED | changes)).events
    assert isinstance(event, BlockStored)
    return event


def test_order() -> None:
    """Events are passed on in their order."""
    calls, skipped = passed_on(CLEARED, REMOVED, STORED)

    assert [
        ("cleared",),
        ("removed", [7], "device"),
        ("stored", [7, 8], None, None, None, "device", [], 2),
    ] == calls
    assert {} == skipped


@pytest.mark.parametrize("hash_", [2**64 - 1, -5, b"\x01" * 32])
def test_hashes_are_opaque(hash_: int | bytes) -> None:
    """Engine hashes may be any integer or bytes, in both shapes."""
    in_map = {**REMOVED, "block_hashes": [hash_]}
    in_array = ["BlockRemoved", [hash_], "GPU"]

    assert [("removed", [hash_], "device")] * 2 == passed_on(in_map)[0] + passed_on(in_array)[0]


def test_short_arrays() -> None:
    """The arrays of old publishers are shorter; missing fields have their defaults."""
    assert [("stored", [7], 6, None, None, "device", [], 2)] == passed_on(
        ["BlockStored", [7], 6, [1, 2], 2, None]
    )[0]


def test_new_fields() -> None:
    """Unknown fields are ignored, in both shapes."""
    assert passed_on(REMOVED)[0] == passed_on({**REMOVED, "locality": "LOCAL"})[0]
    assert passed_on(REMOVED)[0] == passed_on(["BlockRemoved", [7], "GPU", 0, "LOCAL"])[0]


@pytest.mark.parametrize("event", [STORED, REMOVED, CLEARED])
def test_batch_as_a_map(event: dict[str, object]) -> None:
    """VLLM's main branch sends the batch as a map; it means the same, in one piece and event by event."""
    odd = {"type": "Unknown"}
    whole, mixed = (
        decode_batch(
            msgpack.packb({"type": "KVEventBatch", "ts": 1.5, "events": events, "data_parallel_rank": 3})
        )
        for events in ([event], [event, odd])
    )
    array = decode_batch(pack(event))

    assert [array.events] * 2 == [whole.events, mixed.events]
    assert (1.5, 3, {}, True) == (whole.ts, whole.rank, dict(whole.skipped), whole.can_report)
    assert {"event Unknown": 1} == dict(mixed.skipped)
    assert array.clears is whole.clears


def test_batch_as_a_map_without_a_rank() -> None:
    assert decode_batch(msgpack.packb({"ts": 1.5, "events": []})).rank is None


@pytest.mark.parametrize("batch", [{}, {"ts": 1}, {"events": []}, {"ts": "x", "events": []}, {1: 2}])
def test_malformed_map(batch: dict[object, object]) -> None:
    with pytest.raises(MalformedFrameError, match="not a vLLM event batch"):
        decode_batch(msgpack.packb(batch))


def test_every_clear() -> None:
    """Both kinds of clear empty the table."""
    assert [("cleared",)] * 2 == passed_on(["AllBlocksCleared"])[0] + passed_on({"type": "AllCacheCleared"})[
        0
    ]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, "device"), ("CPU", "host"), ("cpu", "host"), ("STORAGE", "disk"), ("DISK", "disk")],
)
def test_media(medium: str | None, tier: str) -> None:
    """Each medium has a tier."""
    assert [("removed", [7], tier)] == passed_on({**REMOVED, "medium": medium})[0]


def test_offloaded_blocks() -> None:
    """Offload tiers name blocks without tokens, block size 0 (seen in vLLM 0.32's connector)."""
    placeholder = {**STORED, "token_ids": [], "block_size": 0, "medium": "CPU", "group_idx": 0}

    assert ([("stored", [7, 8], None, None, None, "host", [], None)], {}) == passed_on(placeholder)


def test_offloaded_blocks_without_extra_keys() -> None:
    """Off the device an event may lack the salt: its tokens do not name blocks without a further proof."""
    host = {**STORED, "medium": "CPU"}

    assert [("chunks", [7, 8], [1, 2, 3, 4], None, "host")] == passed_on(host)[0]
    assert [("stored", [7, 8], None, None, "s", "host", [[], []], 2)] == passed_on(
        {**host, "extra_keys": [["s"], None]}
    )[0]


def test_chunks_that_are_never_removed() -> None:
    """LMCache inside vLLM announces no removals: its chunks are not counted, and the reason states why."""
    assert ([], {NO_REMOVALS: 1}) == passed_on({**STORED, "medium": "cpu"})


def test_filled_part_of_a_last_block() -> None:
    """A block smaller than others of its group has no name, in one life of the engine."""
    small = {**STORED, "block_hashes": [9], "token_ids": [1], "block_size": 1}
    other = {**small, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    ledger, adapter = Ledger(), VllmAdapter()

    adapter.publish(adapter.decode(pack(STORED, small, STORED, other)), ledger)
    adapter.forget()
    adapter.publish(adapter.decode(pack(small)), ledger)

    assert [[], [None], [], [], []] == [call[6] for call in ledger.calls]


@pytest.mark.parametrize("locality", ["LOCAL", "local", None])
def test_local_blocks(locality: str | None) -> None:
    """Blocks of the engine itself count, also if the event has no locality."""
    assert ([("removed", [7], "disk")], {}) == passed_on(
        {**REMOVED, "medium": "STORAGE", "locality": locality, "ownership": "fs"}
    )


def test_remote_blocks() -> None:
    """Blocks in a store that others reach as well are ignored, both stores and removals."""
    remote = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "kvcr"}

    calls, skipped = passed_on({**STORED, **remote}, {**REMOVED, **remote})

    assert ([], [2]) == (calls, [*skipped.values()])
    assert "locality REMOTE" in next(iter(skipped))


def test_unknown_medium() -> None:
    """Blocks in a medium without a tier are skipped and counted."""
    assert ([], {"medium TAPE": 2}) == passed_on({**STORED, "medium": "TAPE"}, {**REMOVED, "medium": "TAPE"})


@pytest.mark.parametrize("event", [{"type": "Novelty", "x": 1}, ["Novelty", 1]])
def test_unknown_type(event: object) -> None:
    """An unknown event is skipped and counted; the others of its batch count."""
    assert ([("removed", [7], "device")], {"event Novelty": 1}) == passed_on(event, REMOVED)


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": [1, 2, 3]}, {"token_ids": [-1, 2, 3, 4]}, {"block_size": 0}, {"extra_keys": [None]}],
)
def test_unreadable_store(changes: dict[str, object]) -> None:
    """An inconsistent store is skipped: its blocks are missed, no wrong ones are published."""
    calls, skipped = passed_on(STORED | changes)

    assert ([], [1]) == (calls, [*skipped.values()])
    assert all(reason.startswith("BlockStored ") for reason in skipped)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb([1.5]),
        msgpack.packb({"ts": 1}),
        pack({**REMOVED, "block_hashes": 7}),
        pack(5),
        pack([]),
        pack({"no": "type"}),
    ],
)
def test_malformed(payload: bytes) -> None:
    """A payload that is not a batch, or may hide a removal, is malformed."""
    with pytest.raises(MalformedFrameError):
        decode_batch(payload)


@given(st.binary(max_size=64))
def test_any_bytes(payload: bytes) -> None:
    """Any bytes decode or are malformed; no other error is raised."""
    try:
        batch = decode_batch(payload)
    except MalformedFrameError:
        return
    assert isinstance(batch, Batch)


@pytest.mark.parametrize(
    ("lora_name", "keys", "expected"),
    [
        (None, None, (None, [])),
        (None, [["s"], None], ("s", [[], []])),
        ("a", [["a"], ["a"]], (None, [[], []])),
        ("a", [["a", "s"], ["a"]], ("s", [[], []])),
        ("a", [["a", "a"], ["a"]], ("a", [[], []])),
        (None, [[["img", 3], "s"], [["img", -1]]], ("s", [[multimodal_id("img")], [multimodal_id("img")]])),
        (None, [None, [b"digest"]], (None, [[], None])),
        (None, [None, ["stray"]], (None, [[], None])),
    ],
)
def test_extra_keys(lora_name: str | None, keys: object, expected: tuple[object, object]) -> None:
    """Untagged keys are LoRA name, items and salt (first block only); a block with others cannot be named."""
    assert expected == read_extra_keys(stored(lora_name=lora_name, extra_keys=keys))


def test_salt_below_a_parent() -> None:
    """A string on a block below a parent is not a salt."""
    assert (None, [None, []]) == read_extra_keys(stored(parent_block_hash=3, extra_keys=[["s"], None]))


def test_nameless_lora() -> None:
    """Blocks of a LoRA without a name cannot be named, so they are not published."""
    assert (None, [None, None]) == read_extra_keys(stored(lora_id=3))


def test_groups() -> None:
    """Of several KV groups the first with full attention is published, others say where to resume."""
    chunked = {**STORED, "group_idx": 3, "kv_cache_spec_kind": "chunked_local_attention"}
    removals = [{**REMOVED, "group_idx": group} for group in range(4)]

    calls, skipped = passed_on(WINDOW, FULL, {**FULL, "group_idx": 2}, chunked, *removals)

    hashes, gone = STORED["block_hashes"], REMOVED["block_hashes"]
    assert ("group_stored", 0, 50, hashes, True) == calls[0]
    assert "stored" == calls[1][0]
    assert ("group_stored", 2, ALL, hashes, True) == calls[2]
    assert [("group_removed", 0, gone), ("removed", gone, "device"), ("group_removed", 2, gone)] == calls[3:]
    assert {"group of chunked_local_attention": 1, "removal in another group": 1} == skipped


@pytest.mark.parametrize(
    ("kind", "window", "needed"),
    [
        ("sliding_window", 2, 1),
        ("sliding_window", 65, 2),
        ("sliding_window_mla", 66, 3),
        ("sliding_window", None, None),
        ("mamba", None, 1),
        ("mla_attention", None, ALL),
        ("chunked_local_attention", None, None),
        (None, None, None),
    ],
)
def test_needed_blocks(kind: str | None, window: int | None, needed: int | None) -> None:
    """A window needs the blocks of all its tokens but the one to compute; a state needs one block."""
    changes = {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window, "block_size": 32}

    assert needed == needed_blocks(stored(**changes))
    if needed is not None and kind is not None and kind.startswith("sliding"):
        needed += 1  # EAGLE drops the last block that it finds
    assert needed == needed_blocks(stored(**changes), speculates=True)


def test_group_with_other_block_size() -> None:
    """Blocks of another size have engine hashes that no published block has: the group is not followed."""
    halves = {**WINDOW, "block_size": 1}

    calls, skipped = passed_on(halves, FULL, {**REMOVED, "group_idx": 0})

    assert ["stored"] == [entry[0] for entry in calls]
    assert {"group of sliding_window": 1, "removal in another group": 1} == skipped


def test_group_with_other_block_size_comes_first() -> None:
    """In a history without its beginning its store may come alone: it is not followed either."""
    adapter, ledger = VllmAdapter(), Ledger()
    for events in ([{**WINDOW, "block_size": 1}], [FULL]):
        adapter.publish(adapter.decode(pack(*events)), ledger)

    assert ["stored"] == [entry[0] for entry in ledger.calls]
    assert ["its blocks have 1 tokens, not 2"] == [note.rpartition(": ")[2] for note in adapter.notes]


def test_group_with_other_block_size_after_a_restart() -> None:
    """An agent that continues with a saved state knows the size of the published blocks."""
    adapter, ledger = VllmAdapter(), Ledger()
    adapter.restore(1, 2, 0)
    adapter.publish(adapter.decode(pack({**WINDOW, "block_size": 1})), ledger)

    assert [] == ledger.calls


def test_filled_parts_come_first() -> None:
    """A first prompt shorter than a block does not set the size of the groups' blocks."""
    part = {"block_hashes": [5], "token_ids": [1], "block_size": 1}
    adapter, ledger = VllmAdapter(), Ledger()
    for events in ([{**WINDOW, **part}, {**FULL, **part}], [WINDOW, FULL]):
        adapter.publish(adapter.decode(pack(*events)), ledger)

    assert ["group_stored", "stored"] * 2 == [entry[0] for entry in ledger.calls]
    window = "group 0 (sliding_window of 100 tokens)"
    assert [f"overlap follows several KV groups: group 1, {window}"] == adapter.notes


def test_groups_are_noted() -> None:
    """The notes name the groups that are followed, and the others with what they cost."""
    adapter = VllmAdapter()
    chunked = {**STORED, "group_idx": 2, "kv_cache_spec_kind": "chunked_local_attention"}

    adapter.publish(adapter.decode(pack(WINDOW)), Ledger())
    before = adapter.notes
    adapter.publish(adapter.decode(pack(FULL, chunked)), Ledger())

    window = "group 0 (sliding_window of 100 tokens)"
    assert [f"no overlap is known: no KV group with full attention so far, only {window}"] == before
    assert [
        f"overlap follows several KV groups: group 1, {window}",
        "predictions may be too high: overlap does not follow group 2 (chunked_local_attention): "
        "its rule is not known",
    ] == adapter.notes


def test_offloaded_blocks_decide_no_group() -> None:
    """Events of offload tiers lack the kind of their group, so only the device decides, in any order."""
    placeholder = {**STORED, "token_ids": [], "block_size": 0, "medium": "CPU", "group_idx": 1}
    full = {**STORED, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}

    calls, skipped = passed_on(placeholder, full, placeholder)

    assert ["device"] == [entry[5] for entry in calls]
    assert {"group of None": 2} == skipped


def test_reasons_are_bounded() -> None:
    """An engine that invents texts without end gets a bounded number of reasons."""
    _, skipped = passed_on(*({**STORED, "medium": f"TAPE {number}"} for number in range(1000)))

    assert MAX_REASONS + 1 == len(skipped)
    assert 1000 == sum(skipped.values())
