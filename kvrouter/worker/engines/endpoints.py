"""Where an engine says its KV events are, as endpoints for whoever stands here.

vLLM and SGLang bind an endpoint with `*` or `::` in it, and all their replay endpoints. With any other
endpoint (0.0.0.0 too) they connect, and the subscriber has to bind that port:

    tcp://*:5557                   ->  tcp://ENGINE:5557       connect
    tcp://[::ffff:127.0.0.1]:5557  ->  tcp://127.0.0.1:5557    connect
    tcp://10.0.0.9:5557            ->  tcp://*:5557            bind
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import MOST_RANKS, Line
from kvrouter.errors import ConfigError
from kvrouter.worker.engines.http import EngineError
from kvrouter.worker.options import AgentOptions, offset_port, read_feeds
from kvrouter.worker.zmq.sockets import FeedOptions

_EVERY_ADDRESS = {"*", "0.0.0.0", "[::]", "::", "[::0]"}
_MAPPED = "[::ffff:"
_ENDPOINT = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}|(?:ipc|inproc)://[^\s]+")


class EventsConfig(Struct, frozen=True):
    """What both engines call KVEventsConfig: of one rank, or of rank 0 with the ports of the others above."""

    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: Line = "tcp://*:5557"
    replay_endpoint: Line | None = None
    topic: Line = ""

    def feed(self, host: str, *, binds: bool = False) -> FeedOptions | None:
        """The feed of an engine at `host`; None if it publishes nothing. `binds`: it always does.

        Raises EngineError.
        """
        if not (self.enable_kv_cache_events and self.publisher == "zmq" and self.endpoint):
            return None
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            if not _ENDPOINT.fullmatch(endpoint):
                raise EngineError(f"the engine's event endpoint {endpoint[:200]!r} is not tcp://HOST:PORT")
        events = self.endpoint
        events = _reach(events, host) if binds or _is_bound(events) else _meet(events)
        replay = _reach(self.replay_endpoint, host) if self.replay_endpoint else None
        return FeedOptions(events, replay, self.topic)


_Sources = Annotated[dict[str, EventsConfig], Meta(max_length=MOST_RANKS)]
_decode_sources = msgspec.json.Decoder(_Sources).decode
_decode_config = msgspec.json.Decoder(EventsConfig).decode


def read_sources(body: bytes, host: str, *, binds: bool = False) -> tuple[FeedOptions, ...]:
    """Read vLLM's /kv_event_sources: an entry per rank, none if events are off. Raises EngineError."""
    try:
        sources = _decode_sources(body)
        ranks = [sources[number] for number in sorted(sources, key=int)]
    except (*UNREADABLE, ValueError) as error:
        raise EngineError(f"/kv_event_sources is not what vLLM answers: {error}") from None
    feeds = [rank.feed(host, binds=binds) for rank in ranks]
    return tuple(feed for feed in feeds if feed is not None) if None not in feeds else ()


def read_config(text: str, host: str, ranks: int) -> tuple[FeedOptions, ...]:
    """Read SGLang's --kv-events-config, whose ports are those of rank 0. Raises EngineError."""
    try:
        first = _decode_config(text)
        feeds = [_of_rank(first, rank).feed(host) for rank in range(ranks)]
    except (*UNREADABLE, ConfigError) as error:
        raise EngineError(f"kv_events_config {text[:200]!r} is not what SGLang takes: {error}") from None
    return tuple(feed for feed in feeds if feed is not None)


def _of_rank(first: EventsConfig, rank: int) -> EventsConfig:
    replay = first.replay_endpoint
    return msgspec.structs.replace(
        first,
        endpoint=offset_port("endpoint", first.endpoint, rank),
        replay_endpoint=offset_port("replay_endpoint", replay, rank) if replay else None,
    )


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")


def _reach(endpoint: str, host: str) -> str:
    """Where to connect to what the engine has bound."""
    address, port = _split(endpoint)
    if address is None:
        return endpoint
    if address in _EVERY_ADDRESS:
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    if address.startswith(_MAPPED):
        return f"tcp://{address[len(_MAPPED) : -1]}:{port}"
    return endpoint


def _meet(endpoint: str) -> str:
    """Where to bind for an engine that connects."""
    return f"tcp://*:{_split(endpoint)[1]}"


def _split(endpoint: str) -> tuple[str | None, str]:
    """Address and port; no address for what is not TCP."""
    if not endpoint.startswith("tcp://"):
        return None, ""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return address, port


_NO_REPLAY = "no replay: what was cached before kvrouter started stays unknown; "
NO_REPLAY = _NO_REPLAY + 'add "replay_endpoint": "tcp://*:5657" to --kv-events-config'
REPLAY_NOT_GIVEN = (
    _NO_REPLAY + "give replay=tcp://HOST:PORT (an agent: --kv-replay), the replay_endpoint of "
    "the engine's --kv-events-config"
)
OTHER_ENDPOINT = (
    "the engine says its events are at {told}, but kv= (an agent: --kv-events) gives {given}: leave it out, "
    "unless it leads there by another way"
)


def settled_feeds(options: AgentOptions, told: Sequence[FeedOptions], ranks: int) -> Sequence[FeedOptions]:
    """One feed for each of an engine's ranks. Raises ConfigError."""
    feeds = options.feeds
    if not feeds:
        return [replace(feed, topic=options.topic) for feed in told] if options.topic else told
    if len(feeds) == 1 == options.ranks < ranks:
        feeds = read_feeds(feeds[0].events, feeds[0].replay, feeds[0].topic, ranks)
    return [feed if feed.replay else replace(feed, replay=_replay(feed, told)) for feed in feeds]


def feed_lacks(options: AgentOptions, told: Sequence[FeedOptions], ranks: int) -> Iterator[str]:
    """What is missing of the endpoints, and where flags and engine contradict each other."""
    feeds = settled_feeds(options, told, ranks)
    others = [feed.events for feed in feeds if _of_port(feed, told) is None]
    if told and others:
        yield OTHER_ENDPOINT.format(told=", ".join(feed.events for feed in told), given=", ".join(others))
    if not all(feed.replay for feed in feeds):
        is_told = any(feed.replay for feed in told) or not told
        yield REPLAY_NOT_GIVEN if is_told else NO_REPLAY


def _replay(feed: FeedOptions, told: Sequence[FeedOptions]) -> str | None:
    same = _of_port(feed, told)
    return same.replay if same is not None else None


def _of_port(feed: FeedOptions, told: Sequence[FeedOptions]) -> FeedOptions | None:
    """The one that the engine tells; its host may have several names."""
    return next((other for other in told if _port(other.events) == _port(feed.events)), None)


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
