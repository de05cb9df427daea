"""The wire of feeds: everything is read as it was written, and no received bytes do harm."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import hashes_of, pack_hashes
from kvrouter.core.wire.ops import (
    MAX_BOOKING_HASHES,
    MAX_FRAME_BYTES,
    VERSION,
    AddRequest,
    ApproxEntry,
    Bind,
    Check,
    CheckResumable,
    Cleared,
    DeadlyPrompt,
    FirstByte,
    Frame,
    Free,
    LostWith,
    MarkPrefillCompleted,
    NotResumable,
    Op,
    Pardon,
    PrefillSpeed,
    Progress,
    Removed,
    ReplayFrames,
    ReplayRequest,
    Resumable,
    SentText,
    SnapshotChunk,
    Stored,
    TenantUse,
    decode_answer,
    decode_frame,
    decode_request,
    encode,
)
from kvrouter.errors import MalformedFrameError
from tests.long import examples

HASHES = pack_hashes([1, 2**64 - 1])
PROMPT = bytes(range(16))
OPS: list[Op] = [
    Stored(1, 2**64 - 1, HASHES),
    Stored(0, None, b""),
    Removed(2, HASHES),
    Cleared(),
    Check(3, 2**64 - 1, 2),
    Resumable(HASHES),
    NotResumable(HASHES),
    CheckResumable(3, 2**64 - 1),
    AddRequest(7, "chatcmpl-é", "w1", 3, HASHES, 40, 1, 24, 5),
    MarkPrefillCompleted(7),
    Progress(7, 2),
    Free(7),
    Bind("session", "w1", 0, 60_000),
    ApproxEntry("w1", 0, HASHES, 119_000),
    SentText("w1", 0, "héllo"),
    FirstByte(7, 312_000),
    PrefillSpeed(300_000, 6_000, 20_000, 200, 250_000, 5_500, 90),
    LostWith(PROMPT, "w1", 1200, 20),
    DeadlyPrompt(PROMPT, ["w1", "w2"], 600_000),
    Pardon(PROMPT, 600_000),
    TenantUse("team", 59_000, 12, 34_000, "r2"),
]
REAL = [
    encode(Frame(VERSION, 1_700_000_000_000_000, 5, OPS)),
    encode(ReplayRequest(VERSION, 0, 5, 9, 1, 2)),
    encode(ReplayRequest(VERSION, "llama-0a1b2c3d", 5, 9)),
    encode(ReplayFrames([encode(Frame(VERSION, 1, 1, OPS))])),
    encode(SnapshotChunk(1, 5, 0, 2, OPS, 7)),
]
amounts = st.integers(0, 2**40)
packed = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(pack_hashes)
tiers = st.integers(0, 2)
names = st.text(max_size=10)
worker_ids = st.from_regex(r"\A([A-Za-z0-9_-]{1,64}\.)?[A-Za-z0-9_-]{1,64}\Z")
whole_prompts = st.binary(min_size=16, max_size=16)
parents = st.one_of(st.none(), st.integers(0, 2**64 - 1))
ops = st.one_of(
    st.builds(Stored, tiers, parents, packed),
    st.builds(Removed, tiers, packed),
    st.just(Cleared()),
    st.builds(Check, amounts, st.integers(0, 2**64 - 1), tiers),
    st.builds(Resumable, packed),
    st.builds(NotResumable, packed),
    st.builds(CheckResumable, amounts, st.integers(0, 2**64 - 1)),
    st.builds(AddRequest, amounts, names, names, tiers, packed, amounts, amounts, amounts, amounts),
    st.builds(MarkPrefillCompleted, amounts),
    st.builds(Progress, amounts, amounts),
    st.builds(Free, amounts),
    st.builds(Bind, names, names, tiers, amounts),
    st.builds(ApproxEntry, names, tiers, packed, amounts),
    st.builds(SentText, names, tiers, names),
    st.builds(FirstByte, amounts, amounts),
    st.builds(PrefillSpeed, *[amounts] * 7),
    st.builds(TenantUse, st.text(max_size=64), *[amounts] * 3, st.text(max_size=64)),
    st.builds(LostWith, whole_prompts, worker_ids, amounts, amounts),
    st.builds(DeadlyPrompt, whole_prompts, st.lists(worker_ids, max_size=8), amounts),
    st.builds(Pardon, whole_prompts, amounts),
)


def frame_of(*raw_ops: Any, version: int = VERSION) -> bytes:  # anything a peer may send
    """A frame as another program may write it."""
    data: bytes = msgpack.packb([version, 1, 1, list(raw_ops)])
    return data


@given(st.integers(1, 2**60), st.integers(1, 2**60), st.lists(ops, max_size=6))
def test_frames_come_back(incarnation: int, seq: int, sent: list[Op]) -> None:
    """Every op of every kind is read as it was written."""
    decoded = decode_frame(encode(Frame(VERSION, incarnation, seq, sent)))

    assert (VERSION, incarnation, seq, sent, 0) == (
        decoded.version, decoded.incarnation, decoded.seq, decoded.ops, decoded.unknown_ops
    )  # fmt: skip


@pytest.mark.parametrize(
    "raw",
    [
        [25, b"15 bytes, no 16", "w1", 1, 1],
        [25, PROMPT, "w 1", 1, 1],
        [25, PROMPT, "w1", -1, 1],
        [26, PROMPT, ["w"] * 9, 1],
        [26, PROMPT, ["a.b.c"], 1],
        [26, PROMPT, ["w1"], 2**60],
        [27, PROMPT * 2, 1],
        [27, "text of 16 chars", 1],
    ],
)
def test_malformed_words_about_prompts(raw: list[Any]) -> None:
    """A hash of another length, a name that is no worker's, more workers than are named, endless times."""
    assert decode_frame(frame_of(raw)).ops is None


def test_the_wire_is_that_of_the_design() -> None:
    """`[version, incarnation, seq, ops]`, ops as `[code, …]` with the codes of the table."""
    version, incarnation, seq, raw = msgpack.unpackb(REAL[0])

    assert (1, 1_700_000_000_000_000, 5) == (version, incarnation, seq)
    assert [1, 1, 2, 3, 4, 5, 6, 7, 16, 17, 19, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28] == [
        op[0] for op in raw
    ]
    assert [1, 1, 2**64 - 1, b"\x01" + bytes(7) + b"\xff" * 8] == raw[0]
    assert [16, 7, "chatcmpl-é", "w1", 3, HASHES, 40, 1, 24, 5, False, "", "", 0] == raw[8]


def test_streaming_reader_finds_the_same() -> None:
    """Msgpack's Unpacker, which knows no shape, cuts a stream of messages where they end."""
    unpacker = msgpack.Unpacker()
    found = []
    stream = b"".join(REAL)
    for start in range(0, len(stream), 7):
        unpacker.feed(stream[start : start + 7])
        found += unpacker

    assert [msgpack.unpackb(data) for data in REAL] == found


def test_unknown_codes_are_skipped_and_counted() -> None:
    """A newer source's ops do not keep an older reader from the known ones."""
    decoded = decode_frame(frame_of([99, "new"], [18, 7], [200], [17, 8]))

    assert [Free(7), MarkPrefillCompleted(8)] == decoded.ops
    assert 2 == decoded.unknown_ops


def test_additional_fields_are_ignored() -> None:
    """In ops and in the frame."""
    data = msgpack.packb([VERSION, 1, 1, [[18, 7, 0, "new", [1]], [3, {}]], "new"])

    assert [Free(7), Cleared()] == decode_frame(data).ops


def test_a_speed_without_long_prompts_is_read() -> None:
    """As older replicas write it; and what they read of ours are its first four fields."""
    (op,) = decode_frame(frame_of([24, 300_000, 6_000, 20_000, 200])).ops or []

    assert PrefillSpeed(300_000, 6_000, 20_000, 200, 0, 0, 0) == op
    assert [24, 300_000, 6_000, 20_000, 200] == msgpack.unpackb(encode(OPS[16]))[:5]


def test_unknown_version_is_not_read() -> None:
    """A frame of another version keeps its number, and its ops are not read."""
    same_form = decode_frame(frame_of([18, 7], version=2))
    other_form = decode_frame(frame_of({"free": 7}, version=2))

    assert (2, 1, None) == (same_form.version, same_form.seq, same_form.ops)
    assert (2, 1, None) == (other_form.version, other_form.seq, other_form.ops)


@pytest.mark.parametrize(
    "op",
    [
        [1, 0, None, b"1234567"],
        [1, 3, None, HASHES],
        [1, -1, None, HASHES],
        [2, 0, b"123"],
        [22, "w", -1, "text"],
        [22, "w", 0, b"text"],
        [2, 3, HASHES],
        [4, 1, 1, 3],
        [4, 1, 1, -1],
        [16, 1, "r", "w", 0, b"123", 1, 0, 1],
        [16, 1, "r", "w", -1, b"", 1, 0, 1],
        [16, 1, "r", "w", 0, b"", -1, 0, 1],
        [16, 1, "r", "w", 0, b"", 1, 0, -1],
        [16, 1, "r", "w", 0, b"", 1, 0, 1, 2**64 - 1],
        [16, 1, "r", "w", 0, b"", 1, 0, 2**64 - 1],
        [19, 1, -1],
        [19, 1, 2**64 - 1],
        [21, "w", 0, b"1", 1],
        [21, "w", 0, b"", -1],
        [18, "seven"],
        [18],
        [],
        "free",
        [[18], 7],
    ],
)
def test_malformed_ops(op: object) -> None:
    """Half hashes, unknown tiers, negative or huge amounts: the frame keeps only its number."""
    decoded = decode_frame(frame_of([18, 1], op))

    assert (1, 1, None) == (decoded.incarnation, decoded.seq, decoded.ops)


def test_text_not_in_utf_8_is_malformed() -> None:
    """In known and in unknown ops."""
    for raw in ([16, 1, b"\xff", "w", 0, b"", 1, 0, 1], [99, b"\xff"]):
        data = frame_of(raw).replace(b"\xc4\x01\xff", b"\xa1\xff")
        assert decode_frame(data).ops is None


def test_malformed_snapshots() -> None:
    """A snapshot with malformed ops, or a chunk number beyond its chunks, is rejected."""
    for chunk in (
        SnapshotChunk(1, 5, 0, 1, [Stored(7, None, HASHES)], 7),
        SnapshotChunk(1, 5, 0, 0, [], 7),
        SnapshotChunk(1, 5, 2, 2, [], 7),
        SnapshotChunk(1, 5, -1, 2, [], 7),
        SnapshotChunk(1, -5, 0, 2, [], 7),
    ):
        with pytest.raises(MalformedFrameError):
            decode_answer(encode(chunk))


def test_requests_and_answers_come_back() -> None:
    """The messages of a recovery are read as they were written."""
    assert ReplayRequest(VERSION, 0, 5, 9, 1, 2) == decode_request(REAL[1])
    assert ReplayRequest(VERSION, "llama-0a1b2c3d", 5, 9) == decode_request(REAL[2])
    assert ReplayFrames([encode(Frame(VERSION, 1, 1, OPS))]) == decode_answer(REAL[3])
    assert SnapshotChunk(1, 5, 0, 2, OPS, 7) == decode_answer(REAL[4])


def test_request_of_another_version_is_rejected() -> None:
    """A reader of another version gets an error rather than a wrong answer."""
    with pytest.raises(MalformedFrameError, match="version 2"):
        decode_request(encode(ReplayRequest(2, 0, 5, 9)))


def survives(data: bytes) -> None:
    """Decode the bytes; the only error may be MalformedFrameError."""
    for decode in (decode_frame, decode_request, decode_answer):
        with contextlib.suppress(MalformedFrameError):
            decode(data)


@examples(300)
@given(st.binary(max_size=200))
@example(b"\x95\x01\x01\x01\x90" + b"\x91" * 5000 + b"\x90")
@example(b"\x97\x01\x01\x01\x01\x01\x01" + b"\x91" * 5000 + b"\x90")
@example(b"\x94\x01\xa1\xff\x01\x01")
def test_any_bytes(data: bytes) -> None:
    """Random bytes, deep nesting and broken text raise nothing but MalformedFrameError."""
    survives(data)


@examples(500)
@given(st.sampled_from(REAL), st.integers(0, 500), st.binary(min_size=1, max_size=3), st.integers(0, 500))
def test_mutated_frames(data: bytes, at: int, patch: bytes, cut: int) -> None:
    """Real frames with changed or missing bytes raise nothing but MalformedFrameError."""
    at %= len(data)

    survives(data[:at] + patch + data[at + len(patch) :])
    survives(data[: cut % len(data)])


def test_longest_booking_fits_a_frame() -> None:
    """60,000 blocks, the most that an AddRequest names, stay below 512 KiB."""
    hashes = pack_hashes(range(2**63, 2**63 + MAX_BOOKING_HASHES))
    op = AddRequest(2**53, "x" * 256, "w" * 64, 1023, hashes, 10**9, 10**6, 10**9, 10**6)

    data = encode(Frame(VERSION, 2**53, 2**53, [op]))

    assert len(data) < MAX_FRAME_BYTES
    (read,) = decode_frame(data).ops or []
    assert isinstance(read, AddRequest)
    assert MAX_BOOKING_HASHES == len(hashes_of(read.hashes))
