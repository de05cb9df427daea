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

import msgspec
from msgspec import Struct

from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request

STEP_S = 30.0
STEPS_NOW, STEPS_BEFORE = 2, 20
MOST_CLIENTS = 1_000
MOST_ROWS = 100
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
        self._trusted = [ipaddress.ip_network(one) for one in trusted_proxies]
        self._known = lru_cache(_MOST_KNOWN)(self._work_out)

    def of(self, request: Request) -> str:
        if not self._trusted:
            return self._known(request.client.address, "")
        forwarded = [value for name, value in request.head.fields if name == "x-forwarded-for"]
        return self._known(request.client.address, ",".join(forwarded)[-_MOST_CHARACTERS:])

    def of_connection(self, address: str) -> str:
        """Of a client whose request could not be read."""
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
        return any(address in network for network in self._trusted)


def _address(text: str) -> _Address | None:
    """An address, perhaps with a port, as proxies write it; None if it is none."""
    text = text.strip()
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
    prompt_tokens: int = 0
    overlap_tokens: int = 0
    """Predicted to be cached, as in the metrics."""
    output_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Totals) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ClientRow(Struct, frozen=True):
    client: str
    in_flight: int
    now: Totals
    before: Totals


class ClientsView(Struct, frozen=True):
    """The busiest client first. `now_s`, `before_s`: the seconds that `now` and `before` of each cover."""

    now_s: float
    before_s: float
    clients: list[ClientRow]


class ClientTotals:
    """Counts for one replica. `clock()` returns seconds; `running()` the requests that workers answer now."""

    def __init__(
        self,
        addresses: ClientAddresses,
        clock: Callable[[], float],
        running: Callable[[], Iterable[Request]],
    ) -> None:
        self._addresses = addresses
        self._clock = clock
        self._running = running
        self._steps: deque[dict[str, Totals]] = deque([{}], maxlen=STEPS_NOW + STEPS_BEFORE)
        self._step_ends = clock() + STEP_S

    def of(self, request: Request, now: float) -> Totals:
        """What a request that has ended is added to."""
        if now >= self._step_ends:
            self._turn(now)
        clients, client = self._steps[-1], self._addresses.of(request)
        found = clients.get(client)
        if found is None:
            found = self._new(clients, client)
        return found

    def _new(self, clients: dict[str, Totals], client: str) -> Totals:
        if len(clients) >= MOST_CLIENTS:
            client = OTHERS
        return clients.setdefault(client, Totals())

    def _turn(self, now: float) -> None:
        steps = int((now - self._step_ends) // STEP_S) + 1
        self._steps.extend({} for _ in range(min(steps, STEPS_NOW + STEPS_BEFORE)))
        self._step_ends += steps * STEP_S

    async def view(self, _request: Request) -> Answer:
        """GET /clients."""
        return Answer(200, msgspec.json.encode(self.shown()) + b"\n", {"cache-control": "no-store"})

    def shown(self) -> ClientsView:
        """The clients with the most seconds of the last minute and in flight."""
        now = self._clock()
        if now >= self._step_ends:
            self._turn(now)
        in_flight: dict[str, int] = {}
        for request in self._running():
            client = self._addresses.of(request)
            in_flight[client] = in_flight.get(client, 0) + 1
        steps = list(self._steps)
        current, before = _sum(steps[-STEPS_NOW:]), _sum(steps[:-STEPS_NOW])
        rows = [
            ClientRow(
                client, in_flight.get(client, 0), current.get(client, Totals()), before.get(client, Totals())
            )
            for client in {**current, **before, **in_flight}
        ]
        rows.sort(key=lambda row: (-row.in_flight, -row.now.seconds, -row.before.seconds, row.client))
        now_s = now - (self._step_ends - STEP_S * min(STEPS_NOW, len(steps)))
        before_s = STEP_S * max(0, len(steps) - STEPS_NOW)
        return ClientsView(round(now_s, 3), before_s, rows[:MOST_ROWS])


def _sum(steps: Iterable[dict[str, Totals]]) -> dict[str, Totals]:
    found: dict[str, Totals] = {}
    for clients in steps:
        for client, totals in clients.items():
            found.setdefault(client, Totals()).add(totals)
    return found
