"""Heartbeats and worker cards: state, load, the last frame of each feed, and what a worker can serve.

See docs/concepts/design.md#wire.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.wire.addresses import host_error
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import UNREADABLE, VERSION
from kvrouter.core.wire.values import (
    MOST_NAMES,
    MOST_NUMBER,
    Amount,
    BlockSize,
    Finite,
    Identifier,
    Line,
    Lookahead,
    Number,
    Rank,
    RankHeader,
    Ranks,
    Seconds,
    SettingText,
    Share,
    ShortText,
    Text,
    Total,
    Url,
    WorkerName,
    rank_header_error,
    url_error,
)
from kvrouter.errors import MalformedFrameError, RefusedCardError

State = Literal["up", "down", "draining", "leave"]

_Names = Annotated[tuple[Line, ...], Meta(max_length=MOST_NAMES)]
# Of a hello. The others follow when these are served by one pool.
MOST_SHARED_NAMES = 64
_Texts = Annotated[tuple[Text, ...], Meta(max_length=MOST_NAMES)]


BOTH, PREFILL, DECODE = "both", "prefill", "decode"
# Ways to hand KV blocks over that routers serve (kvrouter/connectors).
CONNECTORS = ("nixl", "mooncake", "example", "sglang")
# Those whose decode engines compute no prompt: they serve nothing without a prefill engine.
PAIRS_ONLY = frozenset({"sglang"})
# The way in which engines of whole requests read blocks from each other.
PEER = "p2p"


class Card(Struct, frozen=True, kw_only=True):
    """A worker's description; it changes rarely.

    `tiers` maps a tier's name to its capacity in blocks; 0: unknown. `rank_header`: the request header that
    addresses a data-parallel rank; empty if there is only one rank.
    """

    worker_id: WorkerName
    url: Url
    model: Line
    served_names: _Names = ()
    lora_names: _Names = ()
    max_loras: Amount = 0  # adapters that fit at the same time; 0: unknown
    block_size: BlockSize
    ranks: Ranks = 1
    rank_header: RankHeader = ""
    tiers: Annotated[dict[Text, Amount], Meta(max_length=16)] = msgspec.field(
        default_factory=lambda: {"device": 0}
    )
    max_model_len: Amount = 0
    max_batched_tokens: Amount = 0
    max_sequences: Amount = 0
    # prompt tokens that a rank computes in a second, as the operator expects; 0: unknown
    prefill_tokens_per_s: Amount = 0
    engine: Text = ""
    engine_version: Text = ""
    labels: Annotated[dict[Text, Text], Meta(max_length=256)] = {}
    started_at_us: Number = 0
    publishes_events: bool = True
    # for operators: which of the engine's events are not indexed, and why
    notes: _Texts = ()
    # whether the engine reuses computed blocks; None: not reported
    prefix_caching: bool | None = None
    # start of the engine's process; 0: not reported. Another start is another, empty cache
    engine_started_at_us: Number = 0
    # whether the engine decodes speculatively: with EAGLE or MTP it reuses one block less than it holds
    speculates: bool = False
    # so many tokens behind a block are part of its name (vLLM 0.33 with EAGLE or MTP)
    lookahead: Lookahead = 0
    # whether chats may come with the ids of their prompts: `kv_transfer_params.prompt_token_ids`
    takes_token_ids: bool = False
    # the directory or hub id of the engine's model, as the engine names it
    tokenizer: Line = ""
    # of the program that announces the worker; empty: it reports none
    agent_version: Text = ""
    # which part of a request it computes: "both", "prefill" or "decode"; another word is a newer agent's
    role: Text = "both"
    # how it hands blocks over to the other half of a pair, and where that happens; empty or 0: not known
    kv_connector: Text = ""
    bootstrap_port: Amount = 0
    kv_address: Text = ""
    # what must be equal on both sides of a hand-over, besides engine, version and block size
    kv_hash: Text = ""
    # of a prefill worker's engine, by rank, where the decode engine asks for the blocks by this id
    kv_engine_ids: _Texts = ()

    def names(self) -> tuple[str, ...]:
        """Every model name that a client may use for this worker."""
        return (*self.base_names(), *self.lora_names)

    def base_names(self) -> tuple[str, ...]:
        """The names of its base model."""
        return self.served_names or (self.model,)

    def part(self) -> dict[str, str]:
        """Its role and connector, if it does not serve whole requests only: for logs and labels."""
        return {} if self.role == BOTH else {"role": self.role, "kv_connector": self.kv_connector}


class RankBeat(Struct, frozen=True, array_like=True):
    """One rank's feed and load. Usage is a fraction 0..1 of the KV blocks; None: not reported."""

    rank: Rank
    incarnation: Number
    seq: Number
    partial: bool = False
    running: Amount | None = None
    waiting: Amount | None = None
    kv_usage: Share | None = None
    # adapters of waiting and of running requests, as the engine reports them; None: not reported
    waiting_loras: _Texts = ()
    running_loras: _Texts | None = None
    # engine metrics that the operator chose with the agent's `--metric`, by name
    metrics: Annotated[dict[Text, Finite], Meta(max_length=256)] = {}


class WorkerBeat(Struct, frozen=True, array_like=True):
    """A worker's heartbeat. The card itself travels on change, on hello and every 10 s."""

    version: int
    incarnation: Number
    state: State
    pool: Identifier
    ranks: Annotated[list[RankBeat], Meta(max_length=1024)]
    card_version: Number
    card: Card | None = None
    interval_ms: Amount | None = None  # between its heartbeats; None: not reported


class Hello(Struct, frozen=True, array_like=True):
    """What a hello may carry: names of models that several pools serve (see worker/pool_choice.py).

    Without one, a hello has no payload. Replicas, and agents of older versions, do not look at it.
    """

    shared_names: Annotated[tuple[Line, ...], Meta(max_length=MOST_SHARED_NAMES)]


class RoutingChange(Struct, frozen=True, array_like=True):
    """Settings of routing that an operator has changed in all replicas: flags without dashes, and texts.

    The later one holds everywhere: the greater epoch, then the greater revision, of equal ones the greater
    `by`. Without `settings` all are again as configured. A reset begins an epoch, and revisions with 1.
    """

    revision: Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
    by: Identifier  # the replica that was told
    settings: Annotated[dict[SettingText, SettingText], Meta(max_length=64)]
    who: SettingText = ""
    why: SettingText = ""
    epoch: Number = 0  # resets before it; an older replica ignores it

    def is_later(self, other: RoutingChange | None) -> bool:
        """Whether this one holds."""
        return other is None or (standing(self), self.by) > (standing(other), other.by)


def standing(change: RoutingChange | None) -> tuple[int, int]:
    """Epoch and revision; 0 and 0 as configured."""
    return (change.epoch, change.revision) if change is not None else (0, 0)


class Heard(Struct, frozen=True, array_like=True):
    """How a replica follows feeds: those of a peer's bookings, or of its workers' caches.

    `lag`: frames that it has yet to apply. `mismatches`: digests of the sender that differed from its copy.
    """

    feeds: Amount
    live: Amount
    lag: Amount
    mismatches: Amount


class Times(Struct, frozen=True):
    """A histogram: the count up to each bound, and above the last."""

    bounds_s: Annotated[tuple[Seconds, ...], Meta(max_length=64)]
    counts: Annotated[list[Total], Meta(max_length=65)]


class Traffic(Struct, frozen=True):
    """What a replica has served since its start: totals, except `queued`, the requests that wait now.

    `prompt_tokens` and `overlap_tokens` (predicted) are those of all placed requests, `reusable_tokens` those
    of which each cache of `uncached_tokens` did not have so many. `later_s`: by how much the chosen targets
    were predicted to be later than the earliest ones, over `ttft_decisions`. `refused`: ended with 4xx.
    """

    requests: Total
    failed: Total
    prompt_tokens: Total
    overlap_tokens: Total
    output_tokens: Total
    ttft: Times
    inter_token: Times
    queued: Total = 0
    reusable_tokens: Total = 0
    uncached_tokens: Annotated[dict[ShortText, Total], Meta(max_length=16)] = {}
    ttft_decisions: Total = 0
    later_s: Seconds = 0.0
    refused: Total = 0


class RouterBeat(Struct, frozen=True, array_like=True):
    """A replica's heartbeat. `feeds` maps a pool to the last seq of its sync feed.

    `round` counts this replica's own heartbeats: one that comes back proves that the bus works.
    `workers`: the workers whose heartbeats it receives, so that a joining replica knows which cards to wait
    for; only the answer to a hello has them. `serves` maps each pool in which it has a live target to the
    pool's block size there; it is empty while the replica starts or drains and takes no requests.
    `hears`: the peers that it hears, and how it follows their bookings; `caches`: how it follows workers'
    caches; `traffic`: what it has served. Only people read these three (the dashboard); None: not reported.
    """

    version: int
    incarnation: Number
    state: State
    address: Url
    feeds: Annotated[dict[Identifier, Number], Meta(max_length=1024)]
    round: Number
    interval_ms: Amount | None = None
    workers: Annotated[list[WorkerName], Meta(max_length=4096)] = []
    serves: Annotated[dict[Identifier, BlockSize], Meta(max_length=1024)] = {}
    routing: RoutingChange | None = None  # the latest that it knows, so that joiners learn it
    hears: Annotated[dict[Identifier, Heard], Meta(max_length=1024)] | None = None
    caches: Heard | None = None
    traffic: Traffic | None = None
    clients_url: Url = ""  # where it takes requests; `address` is its admin listener


encode = msgspec.msgpack.Encoder().encode
_decode_worker = msgspec.msgpack.Decoder(WorkerBeat).decode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_router = msgspec.msgpack.Decoder(RouterBeat).decode


def decode_worker_beat(data: bytes, worker_id: WorkerId) -> WorkerBeat:
    """Read a heartbeat that arrived on this worker's subject.

    Raises MalformedFrameError, and RefusedCardError if all but what its card says can be taken.
    """
    try:
        beat = _decode_worker(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"not a worker heartbeat: {error}") from None
    if beat.version != VERSION:
        raise MalformedFrameError(f"worker heartbeat of version {beat.version}, this is {VERSION}")
    if trouble := _contradiction(beat):
        raise MalformedFrameError(f"worker heartbeat: {trouble}")
    if beat.card is not None and (trouble := _card_error(beat.card, worker_id)):
        raise RefusedCardError(f"worker heartbeat: {trouble}")
    return beat


def decode_hello(data: bytes) -> Hello:
    """Read a hello. What is malformed is a hello without names."""
    try:
        return _decode_hello(data) if data else Hello(())
    except UNREADABLE:
        return Hello(())


def card_trouble(card: Card) -> str:
    """Why readers would reject a card; empty if they would not."""
    try:
        beat = WorkerBeat(VERSION, 0, "up", "pool", [], 0, card)
        decode_worker_beat(encode(beat), WorkerId(card.worker_id))
    except (MalformedFrameError, OverflowError, TypeError, ValueError) as error:
        return str(error)
    return ""


def decode_router_beat(data: bytes) -> RouterBeat:
    """Read a replica's heartbeat. Raises MalformedFrameError."""
    try:
        beat = _decode_router(data)
    except UNREADABLE as error:
        raise MalformedFrameError(f"not a router heartbeat: {error}") from None
    if beat.version != VERSION:
        raise MalformedFrameError(f"router heartbeat of version {beat.version}, this is {VERSION}")
    for url in filter(None, (beat.address, beat.clients_url)):
        if trouble := url_error(url):
            raise MalformedFrameError(f"router heartbeat: {trouble}")
    return beat


def _contradiction(beat: WorkerBeat) -> str:
    """Why fields of a heartbeat that the types accept contradict each other; empty if they do not."""
    ranks = [rank.rank for rank in beat.ranks]
    if len(set(ranks)) < len(ranks):
        return f"names a rank twice: {ranks}"
    return ""


def _card_error(card: Card, worker_id: WorkerId) -> str:
    """Why a card that can be read is not taken; empty if it is."""
    if card.worker_id != worker_id:
        return f"the card of {card.worker_id} on the subject of {worker_id}"
    if trouble := url_error(card.url) or host_error(card.url) or rank_header_error(card.rank_header):
        return trouble
    return "" if card.model else "its card names no model"
