"""GET /clients: who asks for how much, by the client's address: the last minute, and the ten before it.

request that has ended ──count──> [ half a minute | … | half a minute ]  each: address ──> Totals
                                    └── before ────────────┘└─ now ─┘

Addresses are no labels of metrics: there may be any number of them. Here at most MOST_CLIENTS are kept apart
in half a minute, the others together.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec
from msgspec import Struct

from kvrouter.frontend.records.record import AttemptRecord, Ending
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request

STEP_S = 30.0
STEPS_NOW, STEPS_BEFORE = 2, 20
MOST_CLIENTS = 1_000
MOST_ROWS = 100
SHOWN_S = 1.0
OTHERS = "others"
# Proxies in a row; what a client put before theirs is not looked at.
_MOST_HOPS = 16
_MOST_CHARACTERS = 1_024
# Addresses that were worked out from headers, which clients choose.
_MOST_KNOWN = 4_096

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientAddresses:
    """Tells the address of who asks: that of the connection, or what trusted proxies say of it."""

    def __init__(self, trusted_proxies: Sequence[str]) -> None:
        self.trust(trusted_proxies)

    def trust(self, trusted_proxies: Sequence[str]) -> None:
        """Believe these networks from now on."""
        self.trusted = [ipaddress.ip_network(one) for one in trusted_proxies]
        self._known = lru_cache(_MOST_KNOWN)(self._work_out)

    def of(self, request: Request) -> str:
        if not self.trusted:
            return self._known(request.client.address, "")
        forwarded = [value for name, value in request.head.fields if name == "x-forwarded-for"]
        return self._known(request.client.address, ",".join(forwarded)[-_MOST_CHARACTERS:])

    def of_connection(self, address: str) -> str:
        """Of a client whose request could not be read, or is not looked at."""
        return self._known(address, "")

    def _work_out(self, address: str, forwarded: str) -> str:
        # A proxy appends the address of whom it serves. What precedes the first one that is not trusted may
        # be forged.
        client = _address(address)
        hops = forwarded.split(",")[-_MOST_HOPS:]
        while hops and client is not None and self._is_trusted(client):
            before = _address(hops.pop())
            if before is None:
                break
            client = before
        return str(client or address)

    def _is_trusted(self, address: _Address) -> bool:
        return any(address in network for network in self.trusted)


def _address(text: str) -> _Address | None:
    """An address, perhaps with a port, as proxies write it; None if it is none. Without an IPv6 scope."""
    text = text.strip().partition("%")[0]
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


class Totals(Struct):
    """Of requests that have ended. `seconds`: from their arrival to their end, summed."""

    requests: int = 0
    failed: int = 0
    """5xx, or broken off."""
    refused: int = 0
    """4xx."""
    left: int = 0
    """The client ended the connection."""
    prompt_tokens: int = 0
    overlap_tokens: int = 0
    """Predicted to be cached, as in the metrics."""
    output_tokens: int = 0
    seconds: float = 0.0

    def count(self, last: AttemptRecord | None, output_tokens: int, ending: Ending, seconds: float) -> None:
        """Add a request that has ended after so long. `last`: its last attempt; None: it had none."""
        self.requests += 1
        self.seconds += seconds
        if last is not None:
            if last.prompt_tokens:
                self.prompt_tokens += last.prompt_tokens
                self.overlap_tokens += last.overlap_tokens
            self.output_tokens += output_tokens
        if ending != "ok":
            self.failed += ending in {"failed", "broken"}
            self.refused += ending == "refused"
            self.left += ending == "left"

    def add(self, other: Totals) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ClientRow(Struct, frozen=True):
    """`client`: an address; `others` for all that are not shown, or not kept apart."""

    client: str
    in_flight: int
    in_flight_s: float
    """Since the arrival of those in flight, summed."""
    now: Totals
    before: Totals


class ClientsView(Struct, frozen=True):
    """First the client whose requests took most time, those in flight included; `others` last.

    `now_s`, `before_s`: the seconds that `now` and `before` of each client cover.
    """

    now_s: float
    before_s: float
    clients: list[ClientRow]


Requests: TypeAlias = Callable[[], Iterable[tuple[Request, float]]]
"""Returns the requests that workers answer now, and when they arrived."""


class ClientTotals:
    """Counts for one replica. `clock()` returns seconds."""

    def __init__(self, addresses: ClientAddresses, clock: Callable[[], float]) -> None:
        self._addresses = addresses
        self._clock = clock
        self._current: dict[str, Totals] = {}
        self._steps = deque([self._current], maxlen=STEPS_NOW + STEPS_BEFORE)
        self._shown: tuple[float, bytes] = float("-inf"), b""
        self._step_ends = clock() + STEP_S

    def of(self, request: Request, now: float) -> Totals:
        """What a request that has ended is added to."""
        if now >= self._step_ends:
            self._turn(now)
        # not worked out where nothing is to be: this is on the path of every request
        client = self._addresses.of(request) if self._addresses.trusted else request.client.address
        return self._current.get(client) or self._new(client)

    def _new(self, client: str) -> Totals:
        if len(self._current) >= MOST_CLIENTS:
            client = OTHERS
        return self._current.setdefault(client, Totals())

    def _turn(self, now: float) -> None:
        steps = int((now - self._step_ends) // STEP_S) + 1
        self._steps.extend({} for _ in range(min(steps, STEPS_NOW + STEPS_BEFORE)))
        self._current = self._steps[-1]
        self._step_ends += steps * STEP_S

    async def view(self, requests: Requests, _request: Request) -> Answer:
        """GET /clients. All that ask within a second get the same."""
        made_at, body = self._shown
        if self._clock() - made_at >= SHOWN_S:
            body = msgspec.json.encode(self.shown(requests)) + b"\n"
            self._shown = self._clock(), body
        return Answer(200, body, {"cache-control": "no-store"})

    def shown(self, requests: Requests) -> ClientsView:
        """All clients, of which the busiest are kept apart."""
        now = self._clock()
        if now >= self._step_ends:
            self._turn(now)
        in_flight: dict[str, list[float]] = {}
        for request, received_at in requests():
            in_flight.setdefault(self._addresses.of(request), []).append(now - received_at)
        steps = list(self._steps)
        current, before = self._sum(steps[-STEPS_NOW:]), self._sum(steps[:-STEPS_NOW])
        rows = [
            ClientRow(
                client,
                len(in_flight.get(client, ())),
                round(sum(in_flight.get(client, ())), 3),
                current.get(client, Totals()),
                before.get(client, Totals()),
            )
            for client in {**current, **before, **in_flight}
        ]
        rows.sort(key=lambda row: (row.client == OTHERS, -row.now.seconds - row.in_flight_s, row.client))
        now_s = now - (self._step_ends - STEP_S * min(STEPS_NOW, len(steps)))
        before_s = STEP_S * max(0, len(steps) - STEPS_NOW)
        return ClientsView(round(now_s, 3), before_s, _with_others(rows))

    def _sum(self, steps: Iterable[dict[str, Totals]]) -> dict[str, Totals]:
        found: dict[str, Totals] = {}
        for clients in steps:
            for address, totals in clients.items():
                client = address if address == OTHERS else self._addresses.of_connection(address)
                found.setdefault(client, Totals()).add(totals)
        return found


def _with_others(rows: Sequence[ClientRow]) -> list[ClientRow]:
    """The first MOST_ROWS, and all others as one row. That of the others is the last already."""
    shown, rest = rows[:MOST_ROWS], rows[MOST_ROWS:]
    if not rest:
        return list(shown)
    now, before = Totals(), Totals()
    for row in rest:
        now.add(row.now)
        before.add(row.before)
    flying = sum([row.in_flight for row in rest]), round(sum([row.in_flight_s for row in rest]), 3)
    return [*shown, ClientRow(OTHERS, *flying, now, before)]
