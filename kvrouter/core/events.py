"""What travels in a feed: ops, frames, and the questions and answers that repair it (design §5).

A frame is msgpack `[version, incarnation, seq, ops]`; an op is an array `[code, …]`; hashes inside
an op are packed little-endian u64. A reader skips codes it does not know and fields behind those
it knows, so that a newer source and an older reader can work side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec import Raw, Struct

from kvrouter.errors import MalformedFrameError

VERSION = 1
MAX_FRAME_BYTES = 512 * 1024
MAX_FRAME_HASHES = 4096
MAX_BOOKING_HASHES = 60_000
"""An AddRequest names at most this many blocks (480 KB); the rest travels as a number."""

MAX_AMOUNT = 1 << 48
"""Token and block counts beyond this are damage; sums of smaller ones stay within 64 bits."""

DEVICE, HOST, DISK = 0, 1, 2
TIERS = ("device", "host", "disk")


class Stored(Struct, frozen=True, array_like=True, tag=1):
    """Blocks are now in `tier`; hashes parent first. `parent` is that of the first, None at a root."""

    tier: int
    parent: int | None
    hashes: bytes


class Removed(Struct, frozen=True, array_like=True, tag=2):
    """Blocks left `tier` and all narrower ones; hashes deepest first."""

    tier: int
    hashes: bytes


class Cleared(Struct, frozen=True, array_like=True, tag=3):
    """The rank holds nothing any more."""


class Check(Struct, frozen=True, array_like=True, tag=4):
    """The source's own count and digest of one tier set (KV) or of its bookings (sync), as of this op."""

    count: int
    digest: int
    tier: int = DEVICE


class AddRequest(Struct, frozen=True, array_like=True, tag=16):
    """A booking begins: its blocks are active on the target and `prefill_tokens` are charged there."""

    number: int
    request_id: str
    worker_id: str
    rank: int
    hashes: bytes
    isl: int
    overlap_blocks: int
    prefill_tokens: int
    anonymous_blocks: int = 0


class MarkPrefillCompleted(Struct, frozen=True, array_like=True, tag=17):
    """The booking's prefill tokens are no longer charged."""

    number: int


class Free(Struct, frozen=True, array_like=True, tag=18):
    """The booking ends."""

    number: int


class Progress(Struct, frozen=True, array_like=True, tag=19):
    """The booking's output now fills this many blocks of its own."""

    number: int
    output_blocks: int


class Bind(Struct, frozen=True, array_like=True, tag=20):
    """A session keeps to a target for `ttl_ms`."""

    session: str
    worker_id: str
    rank: int
    ttl_ms: int


class ApproxEntry(Struct, frozen=True, array_like=True, tag=21):
    """Snapshots only: blocks a target is assumed to hold for `ttl_ms` more."""

    worker_id: str
    rank: int
    hashes: bytes
    ttl_ms: int


class SentText(Struct, frozen=True, array_like=True, tag=22):
    """Mode prefix-affinity: the target has computed a prompt with this text, or one that begins with it."""

    worker_id: str
    rank: int
    text: str


Op: TypeAlias = (
    Stored
    | Removed
    | Cleared
    | Check
    | AddRequest
    | MarkPrefillCompleted
    | Free
    | Progress
    | Bind
    | ApproxEntry
    | SentText
)


class Frame(Struct, frozen=True, array_like=True):
    """One numbered step of a feed. `seq` counts from 1 within an incarnation."""

    version: int
    incarnation: int
    seq: int
    ops: list[Op]


class _Envelope(Struct, frozen=True, array_like=True):
    version: int
    incarnation: int
    seq: int
    ops: Raw


class ReplayRequest(Struct, frozen=True, array_like=True):
    """What a reader asks of a source: the frames from `from_seq`, or a chunk of a snapshot.

    `part` is the rank (KV) or the pool (sync). `from_seq` 0 asks for a snapshot at once.
    """

    version: int
    part: int | str
    incarnation: int
    from_seq: int
    snapshot_id: int = 0
    chunk: int = 0


class ReplayFrames(Struct, frozen=True, array_like=True, tag=0):
    """Encoded frames, in order; as many as fit one message. `seq`: how many the source has sent in all."""

    frames: list[bytes]
    seq: int | None = None


class SnapshotChunk(Struct, frozen=True, array_like=True, tag=1):
    """Chunk `chunk` of `chunks` of everything the source held as of frame `as_of_seq`."""

    snapshot_id: int
    as_of_seq: int
    chunk: int
    chunks: int
    ops: list[Op]
    incarnation: int


Answer: TypeAlias = ReplayFrames | SnapshotChunk

encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_op: msgspec.msgpack.Decoder[Op] = msgspec.msgpack.Decoder(Op)
_decode_raw_ops = msgspec.msgpack.Decoder(list[Raw]).decode
_decode_code = msgspec.msgpack.Decoder(list[object]).decode
_decode_request = msgspec.msgpack.Decoder(ReplayRequest).decode
_decode_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_KNOWN_CODES = frozenset({1, 2, 3, 4, 16, 17, 18, 19, 20, 21, 22})
UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What msgspec raises for bytes that are not what they claim to be."""


class Decoded(Struct, frozen=True):
    """A frame as far as it could be read: `ops` is None if they are malformed or of another version."""

    version: int
    incarnation: int
    seq: int
    ops: list[Op] | None
    unknown_ops: int = 0


def decode_frame(data: bytes) -> Decoded:
    """Read a frame. Raises MalformedFrameError if not even its number can be read."""
    try:
        frame = _decode_frame(data)
    except UNREADABLE:
        return _decode_leniently(data)
    if frame.version != VERSION or not _are_sound(frame.ops):
        return Decoded(frame.version, frame.incarnation, frame.seq, None)
    return Decoded(frame.version, frame.incarnation, frame.seq, frame.ops)


def _decode_leniently(data: bytes) -> Decoded:
    """The slow road, for frames with codes unknown here, of another version, or malformed."""
    try:
        envelope = _decode_envelope(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"no frame: {error}") from None
    if envelope.version != VERSION:
        return Decoded(envelope.version, envelope.incarnation, envelope.seq, None)
    try:
        raw_ops = _decode_raw_ops(envelope.ops)
        known = [raw for raw in raw_ops if _decode_code(raw)[0] in _KNOWN_CODES]
        ops = [_decode_op.decode(raw) for raw in known]
    except (*UNREADABLE, IndexError, TypeError):
        return Decoded(envelope.version, envelope.incarnation, envelope.seq, None)
    unknown = len(raw_ops) - len(ops)
    return Decoded(VERSION, envelope.incarnation, envelope.seq, ops if _are_sound(ops) else None, unknown)


def decode_request(data: bytes) -> ReplayRequest:
    """Read a replay request. Raises MalformedFrameError."""
    try:
        request = _decode_request(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"no replay request: {error}") from None
    if request.version != VERSION:
        raise MalformedFrameError(f"replay request of version {request.version}, this is {VERSION}")
    return request


def decode_answer(data: bytes) -> Answer:
    """Read the answer to a replay request. Raises MalformedFrameError."""
    try:
        answer = _decode_answer.decode(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"no replay answer: {error}") from None
    if isinstance(answer, SnapshotChunk) and not _is_sound_chunk(answer):
        raise MalformedFrameError(f"snapshot {answer.snapshot_id} has numbers or ops out of range")
    return answer


def _is_sound_chunk(chunk: SnapshotChunk) -> bool:
    return 0 <= chunk.chunk < chunk.chunks and chunk.as_of_seq >= 0 and _are_sound(chunk.ops)


def _are_sound(ops: Sequence[Op]) -> bool:
    """What msgspec's types do not say: whole hashes, known tiers, no negative amounts."""
    return all(map(_is_sound, ops))


def _is_sound(op: Op) -> bool:
    match op:
        case Stored() | Removed():
            return len(op.hashes) % 8 == 0 and DEVICE <= op.tier <= DISK
        case AddRequest():
            amounts = (op.isl, op.overlap_blocks, op.prefill_tokens, op.anonymous_blocks, op.rank)
            return len(op.hashes) % 8 == 0 and min(amounts) >= 0 and max(amounts) <= MAX_AMOUNT
        case Progress():
            return 0 <= op.output_blocks <= MAX_AMOUNT
        case Check():
            return DEVICE <= op.tier <= DISK
        case ApproxEntry() | Bind():
            is_whole = isinstance(op, Bind) or len(op.hashes) % 8 == 0
            return is_whole and op.rank >= 0 and 0 <= op.ttl_ms <= MAX_AMOUNT
        case _:
            return not isinstance(op, SentText) or op.rank >= 0
