"""Request traces: read them, scale them to a small fleet, and make prompts for them.

A Mooncake trace contains for each request its arrival, the lengths of prompt and output, and the ids of the
512-token blocks of the prompt: equal ids are equal blocks after equal prefixes. It contains no text, so
prompts are generated: an id always stands for the same tokens, which keeps exactly the sharing of the trace.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

from kvrouter.errors import KvRouterError

# The block size of Mooncake traces: a hash id stands for this many prompt tokens.
TRACE_ID_TOKENS = 512

# The first 3,000 requests of the conversation trace; data/README.md names source and licence.
CONVERSATION_EXCERPT = Path(__file__).parent / "data" / "mooncake_conversation_3000.jsonl.gz"

# What the demo and the mocker's engines take of it: more would take minutes.
SHORT_EXCERPT = 700


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


@dataclass(frozen=True, slots=True)
class Scaling:
    """How to scale the trace of a large fleet down to a small machine."""

    tokens_per_id: int = TRACE_ID_TOKENS
    """Prompts shrink by tokens_per_id / 512; shared prefixes stay shared."""
    output_divisor: int = 1
    duration_s: float | None = None
    """Seconds from the first to the last request; None: as in the trace."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_per_id <= TRACE_ID_TOKENS:
            raise TraceError(f"tokens_per_id {self.tokens_per_id}: use 1 to {TRACE_ID_TOKENS}")
        if self.output_divisor < 1:
            raise TraceError(f"output_divisor {self.output_divisor}: use 1 or more")
        if self.duration_s is not None and self.duration_s < 0:
            raise TraceError(f"duration_s {self.duration_s}: must not be negative")


NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct, frozen=True):
    timestamp: NotNegative
    input_length: Positive
    output_length: NotNegative
    hash_ids: tuple[NotNegative, ...]


def read_mooncake(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a Mooncake trace, or all, with times from the first one on."""
    try:
        with _opened(path) as file:
            lines = list(_lines(path, itertools.islice(file, limit)))
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    if not lines:
        raise TraceError(f"{path}: no requests in it")
    start_ms = lines[0].timestamp
    return [
        TraceRequest((line.timestamp - start_ms) / 1000, line.input_length, line.output_length, line.hash_ids)
        for line in lines
    ]


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path, raw_lines: Iterable[bytes]) -> Iterator[_Line]:
    previous_ms = 0
    for number, raw in enumerate(raw_lines, start=1):
        line = _line(f"{path}:{number}", raw)
        # arrivals are differences of timestamps: a negative one would send requests before the first
        if line.timestamp < previous_ms:
            raise TraceError(f"{path}:{number}: timestamp {line.timestamp} is before the previous line's")
        previous_ms = line.timestamp
        yield line


def _line(place: str, raw: bytes) -> _Line:
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{place}: {error}") from error
    needed = -(-line.input_length // TRACE_ID_TOKENS)
    # with an id too few, the prompt would be shorter than its length says, and share less than the trace
    if len(line.hash_ids) != needed:
        raise TraceError(
            f"{place}: input_length {line.input_length} needs {needed} hash ids of {TRACE_ID_TOKENS} tokens,"
            f" not {len(line.hash_ids)}"
        )
    return line


def scaled(requests: Sequence[TraceRequest], scaling: Scaling) -> list[TraceRequest]:
    """The same requests, shorter and sooner."""
    span_s = requests[-1].arrival_s if requests else 0.0
    compression = 1.0 if scaling.duration_s is None or not span_s else scaling.duration_s / span_s
    return [_scaled_one(request, scaling, compression) for request in requests]


def _scaled_one(request: TraceRequest, scaling: Scaling, compression: float) -> TraceRequest:
    prompt_tokens = max(1, request.prompt_tokens * scaling.tokens_per_id // TRACE_ID_TOKENS)
    return TraceRequest(
        arrival_s=request.arrival_s * compression,
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, request.output_tokens // scaling.output_divisor),
        hash_ids=request.hash_ids[: -(-prompt_tokens // scaling.tokens_per_id)],
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


def named_blocks(request: TraceRequest, *, tokens_per_id: int, block_size: int) -> list[int]:
    """Sequence hashes of the prompt's full blocks, for uses that need no tokens.

    An id stands for its block and all blocks before it, so the id and a place in its block make a hash.
    """
    places = range(tokens_per_id // block_size)
    hashes = [xxh3_64_intdigest(_NAME.pack(id_, place)) for id_ in request.hash_ids for place in places]
    return hashes[: request.prompt_tokens // block_size]


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
