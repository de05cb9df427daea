"""Heartbeats and worker cards: who is there, how far its feeds are, what it can serve (design §5)."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from kvrouter.core.events import UNREADABLE, VERSION
from kvrouter.core.ids import is_identifier
from kvrouter.errors import MalformedFrameError

State = Literal["up", "down", "draining", "leave"]


class Card(Struct, frozen=True, kw_only=True):
    """What a worker can serve; it changes rarely.

    `tiers` maps a tier's name to its capacity in blocks, 0 meaning unknown. `rank_header` is the
    request header that addresses a data-parallel rank; empty where there is only one.
    """

    worker_id: str
    url: str
    model: str
    served_names: tuple[str, ...] = ()
    lora_names: tuple[str, ...] = ()
    max_loras: int = 0
    """Adapters it has room for at once; 0 if that is not known."""
    block_size: int
    ranks: int = 1
    rank_header: str = ""
    tiers: dict[str, int] = msgspec.field(default_factory=lambda: {"device": 0})
    max_model_len: int = 0
    max_batched_tokens: int = 0
    max_sequences: int = 0
    engine: str = ""
    engine_version: str = ""
    labels: dict[str, str] = {}
    started_at_us: int = 0
    publishes_events: bool = True
    repairs_by_report: bool = False
    """Whether requests to a partial rank shall ask for `kv_cache_report_mode: full` (design §5)."""
    notes: tuple[str, ...] = ()
    """What an operator is to know about this engine's events: what of them is not indexed, and why."""
    prefix_caching: bool | None = None
    """Whether the engine reuses what it has computed; None if it does not say."""

    def names(self) -> tuple[str, ...]:
        """Every model name a client may use for this worker."""
        return (*(self.served_names or (self.model,)), *self.lora_names)


class RankBeat(Struct, frozen=True, array_like=True):
    """One rank's feed and load. Usage is a fraction 0..1 of the KV blocks; None: not reported."""

    rank: int
    incarnation: int
    seq: int
    partial: bool = False
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    waiting_loras: tuple[str, ...] = ()
    """Adapters that requests wait for, as the engine reports them."""
    running_loras: tuple[str, ...] | None = None
    """Adapters that requests in flight use; None: not reported."""
    metrics: dict[str, float] = {}
    """Statistics of an operator's own choice (`--metric` of the agent), by name."""


class WorkerBeat(Struct, frozen=True, array_like=True):
    """A worker's heartbeat. The card itself travels on change, on hello and every 10 s."""

    version: int
    incarnation: int
    state: State
    pool: str
    ranks: list[RankBeat]
    card_version: int
    card: Card | None = None
    interval_ms: int | None = None
    """Time between its heartbeats; None: an agent that does not say."""


class RouterBeat(Struct, frozen=True, array_like=True):
    """A replica's heartbeat. `feeds` maps a pool to the last seq of its sync feed.

    `round` counts this replica's own heartbeats: one that comes back proves that the bus works.
    `workers` are those it hears; only the answer to a hello names them, for whoever joins.
    """

    version: int
    incarnation: int
    state: State
    address: str
    feeds: dict[str, int]
    round: int
    interval_ms: int | None = None
    workers: list[str] = []


encode = msgspec.msgpack.Encoder().encode
_decode_worker = msgspec.msgpack.Decoder(WorkerBeat).decode
_decode_router = msgspec.msgpack.Decoder(RouterBeat).decode


def decode_worker_beat(data: bytes) -> WorkerBeat:
    """Read a worker's heartbeat. Raises MalformedFrameError."""
    try:
        beat = _decode_worker(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"no worker heartbeat: {error}") from None
    return _checked(beat)


def decode_router_beat(data: bytes) -> RouterBeat:
    """Read a replica's heartbeat. Raises MalformedFrameError."""
    try:
        beat = _decode_router(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"no router heartbeat: {error}") from None
    if beat.version != VERSION:
        raise MalformedFrameError(f"router heartbeat of version {beat.version}, this is {VERSION}")
    return beat


def _checked(beat: WorkerBeat) -> WorkerBeat:
    if beat.version != VERSION:
        raise MalformedFrameError(f"worker heartbeat of version {beat.version}, this is {VERSION}")
    card = beat.card
    if card is None:
        return beat
    if not is_identifier(card.worker_id):
        raise MalformedFrameError(f"card with worker_id {card.worker_id!r}: use 1 to 64 of A-Z a-z 0-9 _ -")
    if card.block_size < 1 or not 1 <= card.ranks <= 1024:
        raise MalformedFrameError(
            f"card of {card.worker_id} has block size {card.block_size}, {card.ranks} ranks"
        )
    return beat
