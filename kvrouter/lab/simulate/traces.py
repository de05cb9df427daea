"""Request traces: read them, scale them to a small fleet, and make prompts for them.

A trace contains for each request its arrival, the lengths of prompt and output, and an id for each block of
the prompt, the partial last one included. It contains no text, so prompts are generated: an id always stands
for the same tokens, which keeps exactly the sharing of the trace.

    Mooncake      512 tokens an id, milliseconds; equal ids are equal blocks after equal prefixes
    Qwen-Bailian   16 tokens an id, seconds, known by its `chat_id`; its ids name blocks by their own tokens
                   alone (its README: SipHash of each block), so here each becomes the hash of all up to it

Mooncake's lines may have a `block_size`, the tokens of an id: `write_trace` writes it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from kvrouter.core.wire.hashes import sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.errors import KvRouterError

# The block size of Mooncake traces: a hash id stands for this many prompt tokens.
TRACE_ID_TOKENS = 512
BAILIAN_ID_TOKENS = 16

# The first 3,000 requests of the conversation trace; data/README.md names source and licence.
CONVERSATION_EXCERPT = Path(__file__).parent / "data" / "mooncake_conversation_3000.jsonl.gz"

# What the demo and the mocker's engines take of it: more would take minutes.
SHORT_EXCERPT = 700

# A line of a prompt of a million tokens in ids of 16 is a tenth of it. A file without line ends is no trace.
_MOST_LINE_BYTES = 8 * 1024 * 1024
_FIELDS = "a line is a JSON object with timestamp, input_length, output_length and hash_ids"
_READ_EVERY = 1_000
_NAME = struct.Struct("<QQ")


class TraceError(KvRouterError):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Since the first request."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    id_tokens: int = TRACE_ID_TOKENS
    """The prompt tokens that an id stands for."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How to scale the trace of a large fleet down to a small machine."""

    tokens_per_id: int | None = None
    """Prompts shrink by this over the trace's tokens per id, and share as before. None: they do not."""
    output_divisor: int = 1
    duration_s: float | None = None
    """Seconds from the first to the last request; None: as in the trace."""

    def __post_init__(self) -> None:
        if self.tokens_per_id is not None and not 1 <= self.tokens_per_id <= TRACE_ID_TOKENS:
            raise TraceError(f"tokens_per_id {self.tokens_per_id}: use 1 to {TRACE_ID_TOKENS}")
        if self.output_divisor < 1:
            raise TraceError(f"output_divisor {self.output_divisor}: use 1 or more")
        if self.duration_s is not None and self.duration_s < 0:
            raise TraceError(f"duration_s {self.duration_s}: must not be negative")


NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Length = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
IdTokens = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: NotNegative
    input_length: Positive
    output_length: Length
    hash_ids: tuple[NotNegative, ...]
    block_size: IdTokens = TRACE_ID_TOKENS
    chat_id: object = None

    @property
    def id_tokens(self) -> int:
        return self.block_size

    def request(self, start: float) -> TraceRequest:
        """The request, its arrival counted from `start`."""
        arrival_s = (self.timestamp - start) / 1000
        return TraceRequest(arrival_s, self.input_length, self.output_length, self.hash_ids, self.block_size)


class _Bailian(msgspec.Struct, frozen=True):
    timestamp: Seconds
    input_length: Positive
    output_length: Length
    hash_ids: tuple[NotNegative, ...]
    chat_id: int

    @property
    def id_tokens(self) -> int:
        return BAILIAN_ID_TOKENS

    def request(self, start: float) -> TraceRequest:
        """The request, its arrival counted from `start`. Its ids name prefixes."""
        names = tuple(sequence_hashes([BlockHash(id_) for id_ in self.hash_ids]))
        return TraceRequest(
            self.timestamp - start, self.input_length, self.output_length, names, BAILIAN_ID_TOKENS
        )


class _Kind(msgspec.Struct):
    """What distinguishes the formats."""

    chat_id: object = None


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace, or all. Raises TraceError."""
    return list(trace_requests(path, limit))


def trace_requests(
    path: Path, limit: int | None = None, on_read: Callable[[float], None] = lambda share: None
) -> Iterator[TraceRequest]:
    """One request after another, with times from the first one on. Raises TraceError with file and line.

    `on_read` is called now and then with the share of the file that has been read.
    """
    number = 0
    kind: type[_Mooncake | _Bailian] = _Mooncake
    start = previous = 0.0
    id_tokens = 0
    try:
        with _opened(path) as file:
            for number, raw in enumerate(_lines(file, limit), start=1):
                place = f"{path}:{number}"
                if number == 1:
                    kind = _kind(place, raw)
                line = _line(place, raw, kind)
                if number == 1:
                    start, id_tokens = line.timestamp, line.id_tokens
                if line.id_tokens != id_tokens:
                    raise TraceError(f"{place}: block_size {line.id_tokens}, the first line has {id_tokens}")
                # arrivals are differences of timestamps: a negative one would send requests before the first
                if line.timestamp < previous:
                    raise TraceError(
                        f"{place}: timestamp {line.timestamp} is before the previous line's: sort by it"
                    )
                previous = line.timestamp
                if not number % _READ_EVERY:
                    on_read(_share_read(file))
                yield line.request(start)
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}:{number + 1}" if number else f"{path}"
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot read the trace {where}: {reason}") from error
    if not number:
        raise TraceError(f"{path}: no requests in it")


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace as Mooncake's, with block sizes. Ids are numbered anew. Raises TraceError.

    A prompt without an id for its partial last block gets one of its own.
    """
    numbers: dict[int, int] = {}
    own = itertools.count(1 << 40)
    try:
        with path.open("wb") as file:
            for request in requests:
                ids = [numbers.setdefault(id_, len(numbers)) for id_ in request.hash_ids]
                missing = -(-request.prompt_tokens // request.id_tokens) - len(ids)
                line = {
                    "timestamp": round(1000 * request.arrival_s),
                    "input_length": request.prompt_tokens,
                    "output_length": request.output_tokens,
                    "hash_ids": [*ids, *(next(own) for _ in range(missing))],
                    "block_size": request.id_tokens,
                }
                file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:
        raise TraceError(f"cannot write the trace {path}: {error.strerror}") from error


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _share_read(file: gzip.GzipFile | io.BufferedReader) -> float:
    """Of a file; of a pipe, whose size is not known, 0."""
    size = os.fstat(file.fileno()).st_size
    # of an archive, the compressed bytes
    return os.lseek(file.fileno(), 0, os.SEEK_CUR) / size if size else 0.0


def _lines(file: gzip.GzipFile | io.BufferedReader, limit: int | None) -> Iterator[bytes]:
    # not `for line in file`: a file without line ends would be read as a whole
    lines = iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b"")
    return itertools.islice(lines, limit)


def _kind(place: str, raw: bytes) -> type[_Mooncake | _Bailian]:
    """The format of a trace, by its first line."""
    return _Bailian if _decoded(place, raw, _Kind).chat_id is not None else _Mooncake


_Decoded = TypeVar("_Decoded")


def _decoded(place: str, raw: bytes, kind: type[_Decoded]) -> _Decoded:
    if len(raw) > _MOST_LINE_BYTES:
        raise TraceError(f"{place}: longer than {_MOST_LINE_BYTES} bytes: {_FIELDS}")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{place}: {error}: {_FIELDS}") from error


def _line(place: str, raw: bytes, kind: type[_Mooncake | _Bailian]) -> _Mooncake | _Bailian:
    line = _decoded(place, raw, kind)
    if isinstance(line, _Mooncake) and line.chat_id is not None:
        raise TraceError(f"{place}: has a chat_id, the first line has none: give each trace its own file")
    needed = -(-line.input_length // line.id_tokens)
    # with an id too few, the prompt would be shorter than its length says, and share less than the trace
    if len(line.hash_ids) != needed:
        raise TraceError(
            f"{place}: input_length {line.input_length} needs {needed} hash ids of {line.id_tokens} tokens,"
            f" not {len(line.hash_ids)}"
        )
    return line


def scaled(requests: Sequence[TraceRequest], scaling: Scaling) -> list[TraceRequest]:
    """The same requests, shorter and sooner."""
    span_s = requests[-1].arrival_s if requests else 0.0
    compression = 1.0 if scaling.duration_s is None or not span_s else scaling.duration_s / span_s
    return [_scaled_one(request, scaling, compression) for request in requests]


def _scaled_one(request: TraceRequest, scaling: Scaling, compression: float) -> TraceRequest:
    tokens_per_id = scaling.tokens_per_id or request.id_tokens
    if tokens_per_id > request.id_tokens:
        raise TraceError(
            f"tokens_per_id {tokens_per_id}: the trace has {request.id_tokens}: use that, or fewer"
        )
    prompt_tokens = max(1, request.prompt_tokens * tokens_per_id // request.id_tokens)
    return TraceRequest(
        arrival_s=request.arrival_s * compression,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, request.output_tokens // scaling.output_divisor),
        hash_ids=request.hash_ids[: -(-prompt_tokens // tokens_per_id)],
        id_tokens=tokens_per_id,
    )


def spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, with those of one timestamp spread evenly until the next timestamp."""
    # the conversation trace counts time in steps of 3 s: as recorded, its requests would arrive in bursts
    bursts = [list(burst) for _, burst in itertools.groupby(requests, key=lambda request: request.arrival_s)]
    starts = [burst[0].arrival_s for burst in bursts]
    gaps = [later - start for start, later in itertools.pairwise(starts)] + [
        0.0
    ]  # the last burst is not spread
    return [
        replace(request, arrival_s=request.arrival_s + gap * position / len(burst))
        for burst, gap in zip(bursts, gaps, strict=True)
        for position, request in enumerate(burst)
    ]


def named_blocks(request: TraceRequest, block_size: int) -> list[int]:
    """Sequence hashes of the prompt's full blocks, for uses that need no tokens. Raises TraceError.

    An id stands for its block and all blocks before it, so the id and a place in its block make a hash; of a
    block of several ids the last one is enough.
    """
    check_block_size(request.id_tokens, block_size)
    ids = request.hash_ids
    if block_size > request.id_tokens:
        ids = ids[block_size // request.id_tokens - 1 :: block_size // request.id_tokens]
    places = range(max(1, request.id_tokens // block_size))
    hashes = [xxh3_64_intdigest(_NAME.pack(id_, place)) for id_ in ids for place in places]
    return hashes[: request.prompt_tokens // block_size]


def check_block_size(id_tokens: int, block_size: int) -> None:
    """Raise TraceError if ids and blocks do not end at the same tokens."""
    if id_tokens % block_size and block_size % id_tokens:
        raise TraceError(
            f"--block-size {block_size}: must divide the trace's {id_tokens} tokens of an id or be a multiple"
        )


class Prompts:
    """Makes a request's prompt from its hash ids: an id gives the same tokens on any machine."""

    def __init__(self, *, tokens_per_id: int, vocabulary_size: int) -> None:
        self._tokens_per_id = tokens_per_id
        self._vocabulary_size = vocabulary_size
        self._decode = struct.Struct(f"<{tokens_per_id}I").unpack

    def token_ids(self, request: TraceRequest) -> list[int]:
        """The whole prompt; its last block may be partial."""
        tokens = list(itertools.chain.from_iterable(map(self._block, request.hash_ids)))
        return tokens[: request.prompt_tokens]

    def _block(self, hash_id: int) -> list[int]:
        noise = hashlib.shake_128(struct.pack("<Q", hash_id)).digest(4 * self._tokens_per_id)
        return [number % self._vocabulary_size for number in self._decode(noise)]
