"""TensorRT-LLM (`trtllm-serve`): its KV events, and what the engine reports about itself.

    POST /kv_cache_events  ->  [{"event_id": 7, "data": {"type": "stored", …}, "window_size": …}, …]

An answer has the events since the answer before, so only one program may ask. PolledEvents asks, and passes
each event on under its `event_id`. This was read in TensorRT-LLM's documentation and in the serializer of its
events (`KVCacheEventSerializer`), not observed on an engine.

- `stored`: a chain of blocks below `parent_hash`. A block that is not full yet is stored, too.
- `updated` with a `cache_level`: a block moves between the GPU (0) and host memory (1).
- `removed`: the blocks are gone, from either level.
- With several attention windows each has its own blocks. Those of the largest window count.

The events have neither adapters nor, in most versions, salts. /metrics is not read: it is not in Prometheus'
format, and each answer takes the statistics from the next reader. /prometheus/metrics exists with
`return_perf_metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import MOST_BLOCK_SIZE, Number, TokenId
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.engines.adapter import Adapter, Batch
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineError, EngineHttp, Models
from kvrouter.worker.engines.vllm import word
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.publisher import Sink
from kvrouter.worker.zmq.sockets import EventEndpoints

OWNER = "tensorrt_llm"
EVENTS_PATH = "kv_cache_events"
METRICS_PATH = "prometheus/metrics"
# Its `tokens_per_block`, which it does not report.
DEFAULT_BLOCK_SIZE = 32
BLOCK_SIZE_ASSUMED = (
    "block size unknown, 32 (the default of tokens_per_block) is assumed: give --kv-cache-block-size if it "
    "is another"
)
NO_LOAD = "load unknown, only this router's own requests count: set return_perf_metrics"
EVENTS_BY_BUFFER = (
    "whether events are on is unknown: set enable_block_reuse and event_buffer_max_size in kv_cache_config; "
    "no other program may read /kv_cache_events"
)
WINDOWS = (
    "of several attention windows, overlap counts the largest: a prompt whose blocks have left a smaller one "
    "is predicted too high"
)
_TIER_OF_LEVEL = {0: "device", 1: "host"}


class _Token(Struct, frozen=True):
    token_id: TokenId
    # Not 0: an image or another embedding stands here.
    token_extra_id: int = 0


class _StoredBlock(Struct, frozen=True):
    block_hash: int
    tokens: Annotated[list[_Token], Meta(min_length=1, max_length=MOST_BLOCK_SIZE)]
    cache_level: int = 0
    lora_id: int | None = None
    mm_keys: list[Any] | None = None
    cache_salt: str | None = None

    @property
    def can_be_named(self) -> bool:
        """Whether nothing but tokens and a salt is part of the block's identity."""
        return (
            self.lora_id is None and not self.mm_keys and not any(one.token_extra_id for one in self.tokens)
        )


class _Created(Struct, frozen=True, tag="created"):
    pass


class _Stored(Struct, frozen=True, tag="stored"):
    parent_hash: int | None
    blocks: list[_StoredBlock]


class _Removed(Struct, frozen=True, tag="removed"):
    block_hashes: list[int]


class _LevelChange(Struct, frozen=True):
    old_value: int
    new_value: int


class _Updated(Struct, frozen=True, tag="updated"):
    block_hash: int
    cache_level: _LevelChange | None = None


class TensorRtEvent(Struct, frozen=True):
    """One event. `window_size` is the attention window that it belongs to, if the engine names it."""

    event_id: Number
    data: _Created | _Stored | _Removed | _Updated
    window_size: int | None = None
    attention_dp_rank: int | None = None


class _Numbered(Struct, frozen=True):
    event_id: Number | None = None


class _Type(Struct, frozen=True):
    type: str = ""


class _Typed(Struct, frozen=True):
    data: _Type = _Type()


_decode_event = msgspec.json.Decoder(TensorRtEvent).decode
_decode_number = msgspec.json.Decoder(_Numbered).decode
_decode_type = msgspec.json.Decoder(_Typed).decode
_decode_answer = msgspec.json.Decoder(list[msgspec.Raw]).decode
_Place: TypeAlias = tuple[str | None, int, bool]


def read_answer(body: bytes) -> list[tuple[int, bytes]]:
    """The events of an answer, each with its number. Raises EngineError. Empty entries are left out."""
    try:
        numbered = [(_decode_number(raw).event_id, bytes(raw)) for raw in _decode_answer(body)]
    except UNREADABLE as error:
        raise EngineError(f"/{EVENTS_PATH} is not in TensorRT-LLM's format: {error}") from None
    return [(number, event) for number, event in numbered if number is not None]


class TensorrtAdapter(Adapter[TensorRtEvent]):
    """Passes TensorRT-LLM's events to a publisher. A payload is one event."""

    def __init__(self) -> None:
        super().__init__()
        self._window = 0
        self._has_windows = False
        # The tokens of the largest block so far. A smaller one is not full.
        self._block_size = 0

    @property
    def notes(self) -> list[str]:
        return [WINDOWS] if self._has_windows else []

    def forget(self) -> None:
        self._window, self._has_windows, self._block_size = 0, False, 0

    def decode(self, payload: bytes) -> Batch[TensorRtEvent]:
        try:
            event = _decode_event(payload)
        except UNREADABLE as error:
            return Batch(0.0, None, [], Counter([_skip_reason(payload, error)]))
        return Batch(0.0, event.attention_dp_rank, [event])

    def publish(self, batch: Batch[TensorRtEvent], sink: Sink) -> None:
        for reason, times in batch.skipped.items():
            self.skipped.note(reason, times)
        for event in batch.events:
            if event.attention_dp_rank:
                self.skipped.note(
                    f"events of attention rank {event.attention_dp_rank}: only rank 0 is followed"
                )
            elif self._is_followed(event.window_size or 0, sink):
                self._pass_on(event.data, sink)

    def _is_followed(self, window: int, sink: Sink) -> bool:
        """Whether an event belongs to the largest window.

        An engine names all of them at its start. An agent that began later, or again after a gap, may meet a
        smaller one first: its blocks are withdrawn, since its removals will be ignored.
        """
        if window > self._window:
            if self._block_size:
                sink.cleared()
            self._block_size = 0
        self._has_windows |= self._window not in {0, window}
        self._window = max(self._window, window)
        return window == self._window

    def _pass_on(self, data: _Created | _Stored | _Removed | _Updated, sink: Sink) -> None:
        match data:
            case _Stored():
                self._stored(data, sink)
            case _Removed():
                for tier in _TIER_OF_LEVEL.values():  # the event does not name the level
                    sink.removed([_u64(one) for one in data.block_hashes], tier)
            case _Updated(cache_level=_LevelChange(old_value=old, new_value=new)):
                if new in _TIER_OF_LEVEL:
                    sink.stored([_u64(data.block_hash)], (), tier=_TIER_OF_LEVEL[new])
                if old in _TIER_OF_LEVEL:
                    sink.removed([_u64(data.block_hash)], _TIER_OF_LEVEL[old])

    def _stored(self, data: _Stored, sink: Sink) -> None:
        parent = None if data.parent_hash is None else _u64(data.parent_hash)
        salt = data.blocks[0].cache_salt if data.blocks else None
        # the 0: without any block max() would have one number, for which it raises
        self._block_size = max(self._block_size, *(len(block.tokens) for block in data.blocks), 0)
        for (tier, size, has_name), group in groupby(data.blocks, self._place):
            blocks = list(group)
            hashes = [_u64(block.block_hash) for block in blocks]
            if tier is None:
                self.skipped.note(f"cache level {word(blocks[0].cache_level)}")
            else:
                tokens = [token.token_id for block in blocks for token in block.tokens]
                ids = () if has_name else [None] * len(blocks)
                sink.stored(hashes, tokens, parent, None, salt, tier, ids=ids, block_size=size)
            parent = hashes[-1]

    def _place(self, block: _StoredBlock) -> _Place:
        size = len(block.tokens)
        has_name = block.can_be_named and size == self._block_size
        return _TIER_OF_LEVEL.get(block.cache_level), size, has_name


def _u64(number: int) -> int:
    """An engine's hash in 64 bits: JSON's numbers have no bound, a saved state has."""
    return number & (2**64 - 1)


def _skip_reason(payload: bytes, error: Exception) -> str:
    """Raises MalformedFrameError if the event may be a removal."""
    try:
        kind = _decode_type(payload).data.type
    except UNREADABLE:
        kind = ""
    if kind in {"", "removed"}:  # if ignored, blocks that are gone would stay published
        raise MalformedFrameError(f"TensorRT-LLM event that cannot be read: {error}")
    return f"event {word(kind)} that cannot be read: {error}"[:160]


async def learn_tensorrt(engine: EngineHttp, models: Models, options: AgentOptions) -> EngineFacts:
    """Ask /version and /prometheus/metrics. Raises EngineError."""
    engine.metrics_path = METRICS_PATH
    scrape, why = await engine.scrape_if_any()
    return EngineFacts(
        models,
        await engine.version(),
        scrape,
        OWNER,
        endpoints=(EventEndpoints(f"{options.engine_url.rstrip('/')}/{EVENTS_PATH}"),),
        tokenizer=models.root,
        lacks=tuple(_lacks(options, has_metrics=not why)),
        assumed_block_size=DEFAULT_BLOCK_SIZE,
        has_metrics=not why,
    )


def _lacks(options: AgentOptions, *, has_metrics: bool) -> Iterator[str]:
    yield EVENTS_BY_BUFFER
    if not options.block_size:
        yield BLOCK_SIZE_ASSUMED
    if not has_metrics:
        yield NO_LOAD
