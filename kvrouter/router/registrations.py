"""An engine that callers register (POST /workers, `upsert_worker`), and how its card shows that.

The labels of the card hold the whole registration and its time, so every replica that knows the engine takes
over the newest one, and can announce it if the agent dies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count, takewhile
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import is_worker_id
from kvrouter.core.wire.values import (
    MOST_TEXT_CHARACTERS,
    Amount,
    BlockSize,
    Line,
    Text,
    url_error,
)
from kvrouter.errors import BadRequestError
from kvrouter.router.asked import DEFAULT, FIRST_RANK, RankNumber, WorkerName
from kvrouter.router.placing import ENDPOINT
from kvrouter.worker.options import offset_port
from kvrouter.worker.zmq.sockets import EventEndpoints

# A label of every worker that was registered: others have agents of their own. A long registration goes on in
# registered1 and so on, as a label is a Text.
REGISTERED = "registered"
# Of one engine. Replicas take 256 KiB for a worker (WORKER_BYTES), and 512 ranks need 400 KiB.
MOST_SERVED_RANKS = 256
# The address of an engine without HTTP: no host has it (RFC 2606), and no two engines share one.
NO_HTTP = "http://engine-{}.invalid"
_TCP = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
# A clock that is further ahead than this is wrong: its registrations do not count.
_MOST_AHEAD_US = 24 * 3600 * 10**6


class Registration(Struct, frozen=True):
    """An engine, in the fields of Dynamo's service. Unknown fields are ignored."""

    worker_id: WorkerName
    endpoint: Text
    block_size: BlockSize
    model_name: Annotated[Line, Meta(min_length=1)] = DEFAULT
    kv_events_endpoint: Text | None = None
    kv_events_endpoints: Annotated[dict[str, Text], Meta(max_length=MOST_SERVED_RANKS)] | None = None
    replay_endpoint: Text | None = None
    data_parallel_start_rank: RankNumber | None = None
    data_parallel_size: Annotated[int, Meta(ge=1, le=MOST_SERVED_RANKS)] | None = None
    max_num_batched_tokens: Amount | None = None
    total_kv_blocks: Amount | None = None

    @property
    def name(self) -> str:
        return str(self.worker_id)

    def as_served(self) -> Registration:
        """The same facts in one form, so that two registrations can be compared."""
        first, size = self.data_parallel_start_rank or 0, self.data_parallel_size or 1
        only = {str(first): self.kv_events_endpoint or ""}
        named = self.kv_events_endpoints or only
        return replace(
            self,
            worker_id=self.name,
            endpoint=self.endpoint.rstrip("/"),
            kv_events_endpoint=None,
            kv_events_endpoints={rank: endpoint for rank, endpoint in named.items() if endpoint},
            replay_endpoint=self.replay_endpoint or None,
            data_parallel_start_rank=first,
            data_parallel_size=size,
            max_num_batched_tokens=self.max_num_batched_tokens or None,
            total_kv_blocks=self.total_kv_blocks or None,
        )

    def endpoints(self) -> list[EventEndpoints | None]:
        """Of each rank; None: it publishes no events. Raises BadRequestError."""
        one, replay = self.as_served(), self.replay_endpoint
        events, first = one.kv_events_endpoints or {}, one.data_parallel_start_rank or 0
        for endpoint in filter(None, (*events.values(), replay)):
            if not (found := _TCP.fullmatch(endpoint)) or not 0 < int(found[1]) < 1 << 16:
                raise BadRequestError(f"{endpoint[:100]!r}: use tcp://HOST:PORT, where the engine publishes")
        return [
            EventEndpoints(own, offset_port("replay_endpoint", replay, rank) if replay else None)
            if (own := events.get(str(first + rank)))
            else None
            for rank in range(one.data_parallel_size or 1)
        ]

    def check(self) -> None:
        """Raise BadRequestError for what no agent could follow."""
        if not is_worker_id(self.name):
            raise BadRequestError(f"worker_id {self.name[:100]!r}: use a number, or A-Z a-z 0-9 _ -")
        if not self.endpoint or not self.endpoint.isprintable():
            raise BadRequestError("`endpoint` is empty, or no text: give the engine's address")
        self.endpoints()


class Registered(Struct, frozen=True):
    """A registration in force. Of two for one engine the later one counts, at every replica."""

    at_us: Annotated[int, Meta(ge=0, lt=1 << 62)]
    """When it was made, in µs since 1970."""
    engine: Registration

    def is_after(self, other: Registered) -> bool:
        """Whether it replaces the other one. Of one moment, the greater text does, at all replicas."""
        if self.at_us != other.at_us:
            return self.at_us > other.at_us
        return self != other and _text(self) > _text(other)

    def card(self) -> Mapping[str, Any]:
        """What `announce` takes."""
        engine, text = self.engine, _text(self)
        pieces = [text[at : at + MOST_TEXT_CHARACTERS] for at in range(0, len(text), MOST_TEXT_CHARACTERS)]
        labels = {f"{REGISTERED}{number or ''}": piece for number, piece in enumerate(pieces)}
        if url_error(engine.endpoint):
            labels[ENDPOINT] = engine.endpoint
        if engine.data_parallel_start_rank:
            labels[FIRST_RANK] = str(engine.data_parallel_start_rank)
        return {
            "url": NO_HTTP.format(engine.name) if ENDPOINT in labels else engine.endpoint,
            "model": engine.model_name,
            "tiers": {"device": engine.total_kv_blocks or 0},
            "max_batched_tokens": engine.max_num_batched_tokens or 0,
            "labels": labels,
        }


def registered_in(card: Card, now_us: int) -> Registered | None:
    """What a card shows. None: nothing that can be followed, as of replicas that are older than this."""
    pieces = (card.labels.get(f"{REGISTERED}{number or ''}", "") for number in count())
    try:
        found = msgspec.json.decode("".join(takewhile(bool, pieces)), type=Registered)
        found.engine.check()
    except (msgspec.DecodeError, BadRequestError):
        return None
    if found.engine.name != card.worker_id or found.at_us > now_us + _MOST_AHEAD_US:
        return None
    return replace(found, engine=found.engine.as_served())


def _text(one: Registered) -> str:
    return msgspec.json.encode(one, order="sorted").decode()
