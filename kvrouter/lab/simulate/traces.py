"""Request traces: read them, write them, and name their blocks.

A trace contains for each request its arrival, the lengths of prompt and output, and an id for each block of
the prompt, the partial last one included. It contains no text.

    Mooncake      512 tokens an id, milliseconds; equal ids are equal blocks after equal prefixes
    Qwen-Bailian   16 tokens an id, seconds, known by its `chat_id`; its ids name blocks by their own tokens
                   alone (its README: SipHash of each block), so here each becomes the hash of all up to it

Mooncake's lines may have a `block_size`, the tokens of an id: `write_trace` writes it.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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


class _TraceFormat(msgspec.Struct):
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
    return _Bailian if _decoded(place, raw, _TraceFormat).chat_id is not None else _Mooncake


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
