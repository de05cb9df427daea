"""Where an agent reads an engine's KV events: from its flags, otherwise as the engine reports it.

The engine reports its endpoints from its own point of view. vLLM and SGLang bind an endpoint with `*` or `::`
in it, and all their replay endpoints. With any other endpoint (0.0.0.0 too) they connect, and the agent has
to bind that port:

    engine reports                     agent uses
    tcp://*:5557                   ->  tcp://ENGINE:5557       connect
    tcp://[::ffff:127.0.0.1]:5557  ->  tcp://127.0.0.1:5557    connect
    tcp://10.0.0.9:5557            ->  tcp://*:5557            bind
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import MOST_RANKS, Line
from kvrouter.errors import ConfigError
from kvrouter.worker.engines.http import EngineError
from kvrouter.worker.options import AgentOptions, offset_port, read_endpoints
from kvrouter.worker.zmq.sockets import EventEndpoints

_EVERY_ADDRESS = {"*", "0.0.0.0", "[::]", "::", "[::0]"}
_MAPPED = "[::ffff:"
_ENDPOINT = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}|(?:ipc|inproc)://[^\s]+")


class EventsConfig(Struct, frozen=True):
    """What both engines call KVEventsConfig: for one rank, or for rank 0 (rank r's ports are r higher)."""

    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: Line = "tcp://*:5557"
    replay_endpoint: Line | None = None
    topic: Line = ""

    def endpoints(self, host: str, *, binds: bool = False) -> EventEndpoints | None:
        """The endpoints of an engine at `host`; None if it publishes no events. Raises EngineError.

        `binds`: the engine binds an endpoint of any form (the mocker does).
        """
        if not (self.enable_kv_cache_events and self.publisher == "zmq" and self.endpoint):
            return None
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            if not _ENDPOINT.fullmatch(endpoint):
                raise EngineError(f"the engine's event endpoint {endpoint[:200]!r} is not tcp://HOST:PORT")
        events = self.endpoint
        events = _reach(events, host) if binds or _engine_binds(events) else _meet(events)
        replay = _reach(self.replay_endpoint, host) if self.replay_endpoint else None
        return EventEndpoints(events, replay, self.topic)


_Sources = Annotated[dict[str, EventsConfig], Meta(max_length=MOST_RANKS)]
_decode_sources = msgspec.json.Decoder(_Sources).decode
_decode_config = msgspec.json.Decoder(EventsConfig).decode


def read_sources(body: bytes, host: str, *, binds: bool = False) -> tuple[EventEndpoints, ...]:
    """Read vLLM's /kv_event_sources: one entry per rank; empty if events are off. Raises EngineError."""
    try:
        sources = _decode_sources(body)
        ranks = [sources[number] for number in sorted(sources, key=int)]  # as texts, "10" comes before "2"
    except (*UNREADABLE, ValueError) as error:
        raise EngineError(f"/kv_event_sources is not in vLLM's format: {error}") from None
    found = [rank.endpoints(host, binds=binds) for rank in ranks]
    # all or none: without one rank's endpoints the others would get wrong numbers
    return tuple(each for each in found if each is not None) if None not in found else ()


def read_config(text: str, host: str, ranks: int) -> tuple[EventEndpoints, ...]:
    """Read SGLang's --kv-events-config; its ports are those of rank 0. Raises EngineError."""
    try:
        first = _decode_config(text)
        found = [_of_rank(first, rank).endpoints(host) for rank in range(ranks)]
    except (*UNREADABLE, ConfigError) as error:
        raise EngineError(f"kv_events_config {text[:200]!r} is not in SGLang's format: {error}") from None
    return tuple(each for each in found if each is not None)


def _of_rank(first: EventsConfig, rank: int) -> EventsConfig:
    replay = first.replay_endpoint
    return msgspec.structs.replace(
        first,
        endpoint=offset_port("endpoint", first.endpoint, rank),
        replay_endpoint=offset_port("replay_endpoint", replay, rank) if replay else None,
    )


def _engine_binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")


def _reach(endpoint: str, host: str) -> str:
    """Where to connect to an endpoint that the engine has bound."""
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
    """Address and port; no address if the endpoint is not TCP."""
    if not endpoint.startswith("tcp://"):
        return None, ""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return address, port


EVENTS_ARE_OFF = "events off: "
_NO_REPLAY = "no replay: blocks cached before kvrouter started stay unknown; "
NO_REPLAY = _NO_REPLAY + 'add "replay_endpoint": "tcp://*:5657" to --kv-events-config'
REPLAY_NOT_GIVEN = (
    _NO_REPLAY + "give --kv-replay tcp://HOST:PORT (kvrouter serve: replay=), the replay_endpoint of the "
    "engine's --kv-events-config"
)
_REPORTS = "the engine reports its "
_OTHER_ENDPOINT = (
    _REPORTS + "{what} at {reported}, but {flag} (kvrouter serve: {key}) is {given}: leave it out, or give "
    "the engine's own endpoint. Another port is right only where ports are mapped"
)
_OTHER = re.compile(
    re.escape(_REPORTS)
    + r"(events|replay) at (.+), but --kv-\w+ \(kvrouter serve: \w+=\) is (.+): leave it out"
)
# An engine may have 1,024 ranks, and a path of ipc:// may be long.
_MOST_SHOWN, _MOST_CHARACTERS = 3, 128


def settled_endpoints(
    options: AgentOptions, reported: Sequence[EventEndpoints], ranks: int
) -> Sequence[EventEndpoints]:
    """The endpoints of each rank: those of the flags, completed by what the engine reports.

    Raises ConfigError.
    """
    given = options.endpoints
    if not given:
        return [replace(each, topic=options.topic) for each in reported] if options.topic else reported
    if len(given) == 1 == options.ranks < ranks:  # the engine has more ranks, on the next ports
        given = read_endpoints(given[0].events, given[0].replay, given[0].topic, ranks)
    return [each if each.replay else replace(each, replay=_replay(each, reported)) for each in given]


def endpoint_lacks(options: AgentOptions, reported: Sequence[EventEndpoints], ranks: int) -> Iterator[str]:
    """Which endpoints are missing, and where flags and engine contradict each other."""
    settled = settled_endpoints(options, reported, ranks)
    for what, flag, key in (("events", "--kv-events", "kv="), ("replay", "--kv-replay", "replay=")):
        theirs = _endpoints_of(what, reported)
        ports = {_port(endpoint) for endpoint in theirs}
        others = [endpoint for endpoint in _endpoints_of(what, settled) if _port(endpoint) not in ports]
        if theirs and others:
            yield _OTHER_ENDPOINT.format(
                what=what, flag=flag, key=key, reported=shown(theirs), given=shown(others)
            )
    if not all(each.replay for each in settled):
        has_replay = any(each.replay for each in reported) or not reported
        yield REPLAY_NOT_GIVEN if has_replay else NO_REPLAY


def _endpoints_of(what: str, ranks: Sequence[EventEndpoints]) -> list[str]:
    return [found for each in ranks if (found := each.events if what == "events" else each.replay)]


def shown(endpoints: Sequence[str | None]) -> str:
    """The first of them, and how many more there are; for logs and notes."""
    given = [endpoint for endpoint in endpoints if endpoint]
    more = f" and {len(given) - _MOST_SHOWN} more" if len(given) > _MOST_SHOWN else ""
    return ", ".join(endpoint[:_MOST_CHARACTERS] for endpoint in given[:_MOST_SHOWN]) + more or "none"


def noted(lacks: Sequence[str]) -> list[str]:
    """The lacks that belong on the card: those of events, which spoil overlap where nothing else shows it.

    Missing load and a cache that is off show in the heartbeats and on the card. A note with the word
    `predict` would count as the reason for inexact predictions (core/audit/problems.py): none has it.
    """
    return [lack for lack in lacks if lack.startswith((_REPORTS, EVENTS_ARE_OFF, _NO_REPLAY))]


class Contradiction(NamedTuple):
    """Where an agent reads events, or their replay (`what`), against what its engine reports."""

    what: str
    reported: str
    given: str


def contradictions(notes: Sequence[str]) -> list[Contradiction]:
    """Those that the notes of a card report."""
    return [Contradiction(found[1], found[2], found[3]) for note in notes if (found := _OTHER.match(note))]


def _replay(given: EventEndpoints, reported: Sequence[EventEndpoints]) -> str | None:
    same = _of_port(given, reported)
    return same.replay if same is not None else None


def _of_port(given: EventEndpoints, reported: Sequence[EventEndpoints]) -> EventEndpoints | None:
    # by port alone: the engine's host may have several names
    return next((other for other in reported if _port(other.events) == _port(given.events)), None)


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
