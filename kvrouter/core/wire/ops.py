"""Ops, frames, and the messages that repair a feed: replay requests and their answers.

See docs/concepts/design.md#wire.

A frame is msgpack `[version, incarnation, seq, ops]`; an op is an array `[code, …]`; hashes inside an op are
packed little-endian u64. A reader skips unknown codes and additional fields, so that a newer source works
with an older reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from kvrouter.core.wire.values import (
    U64,
    Amount,
    BookedWorker,
    Difference,
    Number,
    Rank,
    RequestId,
    Session,
    ShortText,
    Tier,
    WholePrompt,
    WorkerName,
)
from kvrouter.errors import MalformedFrameError

VERSION = 1
# Half of NATS's default max_payload: a frame must also fit an answer, with its envelope.
MAX_FRAME_BYTES = 512 * 1024
# 32 KiB of hashes: a reader applies a frame in one call, between two requests.
MAX_FRAME_HASHES = 4096
# 480 KB: an AddRequest must fit a frame. Its other blocks travel as a number (`anonymous_blocks`).
MAX_BOOKING_HASHES = 60_000
# Four bytes a character at most, so a SentText in any script fits a frame.
MAX_SENT_CHARS = 100_000
# 32 GiB of one snapshot.
MAX_CHUNKS = 1 << 16

DEVICE, HOST, DISK = 0, 1, 2
TIERS = ("device", "host", "disk")


class Stored(Struct, frozen=True, array_like=True, tag=1):
    """Blocks are now in `tier`; hashes parent first. `parent`: that of the first hash, None at a root."""

    tier: Tier
    parent: U64 | None
    hashes: bytes


class Removed(Struct, frozen=True, array_like=True, tag=2):
    """Blocks left `tier` and all narrower ones; hashes deepest first."""

    tier: Tier
    hashes: bytes


class Cleared(Struct, frozen=True, array_like=True, tag=3):
    """The rank has emptied its cache."""


class Check(Struct, frozen=True, array_like=True, tag=4):
    """The source's count and digest of one tier set (KV) or of its bookings (sync), as of this op."""

    count: Amount
    digest: U64
    tier: Tier = DEVICE


class Resumable(Struct, frozen=True, array_like=True, tag=5):
    """The engine can resume behind these blocks: all its KV groups hold what it needs there.

    From a rank's first such op on (it may name no block) the rank resumes only behind blocks named so.
    Cleared ends that.
    """

    hashes: bytes


class NotResumable(Struct, frozen=True, array_like=True, tag=6):
    """The engine can no longer resume behind these blocks."""

    hashes: bytes


class CheckResumable(Struct, frozen=True, array_like=True, tag=7):
    """The source's count and digest of the blocks behind which its engine can resume."""

    count: Amount
    digest: U64


class AddRequest(Struct, frozen=True, array_like=True, tag=16):
    """A booking begins: its blocks are active on the target, and `prefill_tokens` are charged there."""

    number: Number
    request_id: RequestId
    worker_id: BookedWorker
    rank: Rank
    hashes: bytes
    isl: Amount
    overlap_blocks: Amount
    prefill_tokens: Amount
    anonymous_blocks: Amount = 0
    is_text: bool = False  # the hashes are of text: what is assumed of them counts with KV events, too
    # "prefill" or "decode": one of two bookings of a request that two workers serve; empty: the only one;
    # "pull": the only one, and its target reads blocks from a peer
    role: ShortText = ""
    # whose request it is, and the tokens that it counts, if the tenant has a limit (core/tables/tenants.py)
    tenant: ShortText = ""
    tenant_tokens: Amount = 0


class MarkPrefillCompleted(Struct, frozen=True, array_like=True, tag=17):
    """The booking's prefill tokens are no longer charged."""

    number: Number


class Free(Struct, frozen=True, array_like=True, tag=18):
    """The booking ends."""

    number: Number
    # tokens that the tenant has used, less those that were counted; with none used the request does not count
    settled: Difference = 0


class Progress(Struct, frozen=True, array_like=True, tag=19):
    """The booking's output has filled this many blocks so far."""

    number: Number
    output_blocks: Amount


class Bind(Struct, frozen=True, array_like=True, tag=20):
    """A session is bound to a target for `ttl_ms`."""

    session: Session
    worker_id: BookedWorker
    rank: Rank
    ttl_ms: Amount


class ApproxEntry(Struct, frozen=True, array_like=True, tag=21):
    """Blocks that a target is assumed to hold for another `ttl_ms`. In snapshots only."""

    worker_id: BookedWorker
    rank: Rank
    hashes: bytes
    ttl_ms: Amount
    is_text: bool = False


class SentText(Struct, frozen=True, array_like=True, tag=22):
    """Mode prefix-affinity: the target has computed a prompt that is this text or begins with it."""

    worker_id: BookedWorker
    rank: Rank
    text: Annotated[str, Meta(max_length=MAX_SENT_CHARS)]


class FirstByte(Struct, frozen=True, array_like=True, tag=23):
    """The first byte of a streamed answer came this long after its request was sent.

    Before the booking's MarkPrefillCompleted. A difference, since replicas' clocks are not compared.
    """

    number: Number
    ttft_us: Amount


class PrefillSpeed(Struct, frozen=True, array_like=True, tag=24):
    """What the source has learnt: `tokens` were computed in `us`, both faded sums. In snapshots only.

    `off_us`: the faded sum of the errors of its predictions. `long_…`: the same of long prompts alone; 0 from
    older replicas, which do not tell them apart.
    """

    us: Amount
    tokens: Amount
    off_us: Amount
    samples: Amount
    long_us: Amount = 0
    long_tokens: Amount = 0
    long_samples: Amount = 0


class LostWith(Struct, frozen=True, array_like=True, tag=25):
    """A worker was lost `lost_ms` ago with this prompt in hand, which was sent `sent_ms` ago.

    Differences, since replicas' clocks are not compared.
    """

    prompt: WholePrompt
    worker_id: WorkerName
    sent_ms: Amount
    lost_ms: Amount


class DeadlyPrompt(Struct, frozen=True, array_like=True, tag=26):
    """The source refuses a prompt for another `ttl_ms`: these workers were lost with it."""

    prompt: WholePrompt
    worker_ids: Annotated[list[WorkerName], Meta(max_length=8)]
    ttl_ms: Amount


class Pardon(Struct, frozen=True, array_like=True, tag=27):
    """An operator lets a prompt pass. For `ttl_ms`, what replicas said of it before does not count.

    0: a worker has answered the prompt to its end, so it is no longer suspected; a refused one stays refused.
    """

    prompt: WholePrompt
    ttl_ms: Amount


class TenantUse(Struct, frozen=True, array_like=True, tag=28):
    """What a tenant began `age_ms` ago, within a second. In snapshots only.

    `owner`: the replica that counted it, if it has left; empty: the source.
    """

    tenant: ShortText
    age_ms: Amount
    requests: Amount
    tokens: Amount
    owner: ShortText = ""


Op: TypeAlias = (
    Stored
    | Removed
    | Cleared
    | Check
    | Resumable
    | NotResumable
    | CheckResumable
    | AddRequest
    | MarkPrefillCompleted
    | Free
    | Progress
    | Bind
    | ApproxEntry
    | SentText
    | FirstByte
    | PrefillSpeed
    | LostWith
    | DeadlyPrompt
    | Pardon
    | TenantUse
)


class Frame(Struct, frozen=True, array_like=True):
    """One numbered step of a feed. `seq` counts from 1 within an incarnation."""

    version: int
    incarnation: Number
    seq: Number
    ops: list[Op]


class _Envelope(Struct, frozen=True, array_like=True):
    version: int
    incarnation: Number
    seq: Number
    ops: Raw


class ReplayRequest(Struct, frozen=True, array_like=True):
    """A reader's question: the frames from `from_seq`, or a chunk of a snapshot.

    `part`: the rank (KV) or the pool (sync). `from_seq` 0 asks for a snapshot without a look at the ring.
    """

    version: int
    part: Rank | ShortText
    incarnation: U64
    from_seq: U64
    snapshot_id: U64 = 0
    chunk: U64 = 0


class ReplayFrames(Struct, frozen=True, array_like=True, tag=0):
    """Encoded frames, in order, as many as fit one message. `seq`: the last that the source has sent."""

    frames: list[bytes]
    seq: Number | None = None


class SnapshotChunk(Struct, frozen=True, array_like=True, tag=1):
    """Chunk `chunk` of `chunks` of the source's complete state as of frame `as_of_seq`."""

    snapshot_id: Number
    as_of_seq: Number
    chunk: Number
    chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
    ops: list[Op]
    incarnation: Number


class PartialChunk(SnapshotChunk, frozen=True, array_like=True, tag=1):
    """A chunk of a newer source without its ops of unknown codes, which `unknown_ops` counts."""

    unknown_ops: int = 0


class _ChunkEnvelope(Struct, frozen=True, array_like=True, tag=1):
    snapshot_id: Number
    as_of_seq: Number
    chunk: Number
    chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
    ops: Raw
    incarnation: Number


Answer: TypeAlias = ReplayFrames | SnapshotChunk

encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_chunk_envelope = msgspec.msgpack.Decoder(_ChunkEnvelope).decode
_decode_op: msgspec.msgpack.Decoder[Op] = msgspec.msgpack.Decoder(Op)
_decode_raw_ops = msgspec.msgpack.Decoder(list[Raw]).decode
_decode_code = msgspec.msgpack.Decoder(list[object]).decode
_decode_request = msgspec.msgpack.Decoder(ReplayRequest).decode
_decode_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_KNOWN_CODES = frozenset({*range(1, 8), *range(16, 29)})  # the tags of Op
_WITH_HASHES = (Stored, Removed, Resumable, NotResumable, AddRequest, ApproxEntry)
# What msgspec raises for malformed bytes: besides its own error, for deep nesting and for text not in UTF-8.
UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class Decoded(Struct, frozen=True):
    """A frame as far as it could be read.

    `ops`: None if the frame is of another version or malformed; `trouble` is why it is malformed.
    """

    version: int
    incarnation: int
    seq: int
    ops: list[Op] | None
    unknown_ops: int = 0
    trouble: str = ""


def decode_frame(data: bytes) -> Decoded:
    """Read a frame. Raises MalformedFrameError if not even its number can be read."""
    try:
        frame = _decode_frame(data)
        if frame.version == VERSION:
            _check_hashes(frame.ops)
            return Decoded(VERSION, frame.incarnation, frame.seq, frame.ops)
    except (*UNREADABLE, MalformedFrameError):
        pass  # the fast path failed; the slow one finds out which case it is
    return _decode_leniently(data)


def seq_of(data: bytes) -> int:
    """The number of a frame; 0: it cannot be read."""
    try:
        return _decode_envelope(data).seq
    except UNREADABLE:
        return 0


def _decode_leniently(data: bytes) -> Decoded:
    """For frames with unknown codes, of another version, or malformed. Far slower: it decodes op by op."""
    try:
        envelope = _decode_envelope(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"not a frame: {error}") from None
    if envelope.version != VERSION:
        return Decoded(envelope.version, envelope.incarnation, envelope.seq, None)
    try:
        ops, unknown = _known_ops(envelope.ops)
    except MalformedFrameError as error:
        return Decoded(VERSION, envelope.incarnation, envelope.seq, None, 0, str(error))
    return Decoded(VERSION, envelope.incarnation, envelope.seq, ops, unknown)


def _known_ops(encoded: Raw) -> tuple[list[Op], int]:
    """The ops with known codes, and the number of others. Raises MalformedFrameError."""
    try:
        raw_ops = _decode_raw_ops(encoded)
        known = [raw for raw in raw_ops if _decode_code(raw)[0] in _KNOWN_CODES]
        ops = [_decode_op.decode(raw) for raw in known]
    except (*UNREADABLE, IndexError, TypeError) as error:
        raise MalformedFrameError(f"an op is malformed: {error}") from None
    _check_hashes(ops)
    return ops, len(raw_ops) - len(ops)


def _check_hashes(ops: Sequence[Op]) -> None:
    """Check what the types cannot express. Raises MalformedFrameError."""
    for op in ops:
        if isinstance(op, _WITH_HASHES) and len(op.hashes) & 7:
            raise MalformedFrameError(f"{len(op.hashes)} bytes of hashes: not a multiple of 8")


def decode_request(data: bytes) -> ReplayRequest:
    """Read a replay request. Raises MalformedFrameError."""
    try:
        request = _decode_request(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"not a replay request: {error}") from None
    if request.version != VERSION:
        raise MalformedFrameError(f"replay request of version {request.version}, this is {VERSION}")
    return request


def decode_answer(data: bytes) -> Answer:
    """Read the answer to a replay request. Raises MalformedFrameError."""
    try:
        answer = _decode_answer.decode(data)
    except UNREADABLE as error:
        answer = _decode_newer_chunk(data, error)
    if isinstance(answer, SnapshotChunk):
        _check_hashes(answer.ops)
        if answer.chunk >= answer.chunks:
            raise MalformedFrameError(f"chunk {answer.chunk} of a snapshot of {answer.chunks}")
    return answer


def _decode_newer_chunk(data: bytes, error: Exception) -> PartialChunk:
    """Read a chunk with ops of unknown codes. Raises MalformedFrameError with `error` for other data."""
    try:
        envelope = _decode_chunk_envelope(data)
    except UNREADABLE:
        raise MalformedFrameError(f"not a replay answer: {error}") from None
    ops, unknown = _known_ops(envelope.ops)
    fields = msgspec.structs.asdict(envelope) | {"ops": ops, "unknown_ops": unknown}
    return PartialChunk(**fields)
