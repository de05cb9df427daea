"""The replicas, over their admin listeners: state, feeds, tokens, versions, ports, clocks.

Each one is looked at twice, at the beginning and at the end of the listening: a counter that grows between
the two looks is a fault of now, one that does not may be of last week.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvrouter.observe.doctor.findings import clean
from kvrouter.observe.document import Fleet, PoolState, ReplicaHealth, ReplicaReady, Routing, Workers
from kvrouter.observe.replica import MOST_BYTES, ReplicaClient, ReplicaError, decoded

WORKERS_S = 10.0
MOST_REPLICAS = 256
MOST_MODELS = 8
_MOST_COUNT = 2.0**53
# What a replica answers whose key is needed.
_NOT_LET_IN = (401, 403)
AT_ONCE = 8
_SERIES = ("process_open_fds", "process_max_fds")
_SAMPLE = re.compile(rb"^([a-z_]{1,64})(?:\{[^\n]{0,200}\})? ([0-9.e+]{1,30})\s*$", re.MULTILINE)
# Chats of these ways are tokenized by the replica itself, so replicas may differ. With the others a probe
# would ask an engine, and the replica might change its way by the answer.
LOCAL_WAYS = {"model path", "card"}
# Several roles and turns: a template that differs shows in them.
PROBE = {
    "messages": [
        {"role": "system", "content": "You are the doctor of a fleet. Answer briefly."},
        {"role": "user", "content": "Is everything well?\n" * 40},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Look again."},
    ]
}


@dataclass(slots=True)
class Examined:
    """One replica as it answers. `is_given`: by the command line; else a heartbeat named it."""

    url: str
    is_given: bool
    announced: str = ""
    """The router id of the heartbeat that named the URL."""
    health: ReplicaHealth | None = None
    ready: ReplicaReady | None = None
    ready_status: int = 0
    routing: Routing | None = None
    workers: Workers | None = None
    later: Workers | None = None
    fleet: Fleet | None = None
    fleet_later: Fleet | None = None
    """At the second look; None, as of a version without /fleet: not known."""
    trouble: str = ""
    """Why it cannot be examined at all."""
    is_tls_trouble: bool = False
    is_impostor: bool = False
    workers_trouble: str = ""
    skew_s: float | None = None
    expires_s: float | None = None
    series: dict[str, int] = field(default_factory=dict)
    """Of /metrics: open and allowed descriptors. Unknown ones are missing."""
    clients_trouble: str = ""
    open_at: str = ""
    """An address that is not loopback, where its operators' routes answer without a key."""
    prompts: dict[str, int] = field(default_factory=dict)
    """Model -> tokens of the probe, as it counts them."""

    @property
    def router_id(self) -> str:
        return self.health.router_id if self.health is not None else self.announced

    def chat_way(self, pool: str) -> str:
        """How it turns chats of a pool into tokens; empty: not known."""
        ways = self.workers.tokens.ways.get(pool, {}) if self.workers is not None else {}
        return ways["chat"].way if "chat" in ways else ""


def _message(body: bytes) -> str:
    """What an error of a replica says."""
    said = decoded(body, dict[str, dict[str, Any]]) or {}
    return clean(said.get("error", {}).get("message", "no reason"), 200)


class ExaminedReplicas:
    """Asks replicas over HTTP, each URL twice. `own_addresses`: of this machine, to others."""

    def __init__(
        self, http: aiohttp.ClientSession, key: str | None, tls_name: str | None, own_addresses: Sequence[str]
    ) -> None:
        self.met: dict[str, Examined] = {}
        self._http = http
        self._key = key
        self._tls_name = tls_name
        self._own = own_addresses
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def meet(self, url: str, *, is_given: bool, announced: str = "") -> None:
        """Look for the first time. `announced`: whose heartbeat named the URL."""
        known = self.met.get(url)
        if known is not None:
            known.announced = known.announced or announced
        elif len(self.met) < MOST_REPLICAS:
            one = self.met[url] = Examined(url, is_given, announced)
            async with self._turns:
                await self._look(one, self._client(url, self._key))

    async def look_again(self) -> None:
        """The second look at those that answered, and how many tokens they count in one chat."""

        async def again(one: Examined, pools: Sequence[PoolState]) -> None:
            async with self._turns:
                client = self._client(one.url, self._key)
                one.later, one.fleet_later = await _workers(one, client), await _fleet(client)
                for row in pools[:MOST_MODELS]:
                    if one.chat_way(row.pool) in LOCAL_WAYS:
                        await _probe_prompt(one, client, row.model)

        shown = [(one, one.workers.pools) for one in self.met.values() if one.workers is not None]
        await asyncio.gather(*(again(one, pools) for one, pools in shown))

    def _client(self, url: str, key: str | None = None) -> ReplicaClient:
        return ReplicaClient(url, self._http, key, self._tls_name)

    async def _look(self, one: Examined, client: ReplicaClient) -> None:
        fetched = await client.fetch("/health")
        one.skew_s, one.expires_s = fetched.skew_s, fetched.expires_s
        if not fetched.status:
            one.trouble, one.is_tls_trouble = fetched.reason, fetched.is_tls_trouble
            return
        if fetched.status in _NOT_LET_IN:
            one.workers_trouble = f"it answers {fetched.status}: {_message(fetched.body)}"
            return
        one.health = decoded(fetched.body, ReplicaHealth) if fetched.status == 200 else None
        if one.health is None:
            one.is_impostor = True
            one.trouble = f"/health answers {fetched.status}, not as a kvrouter replica"
            return
        ready = await client.fetch("/ready")
        one.ready, one.ready_status = decoded(ready.body, ReplicaReady), ready.status
        one.workers = await _workers(one, client)
        if one.workers is not None:
            one.fleet = await _fleet(client)
            one.routing = decoded((await client.fetch("/routing")).body, Routing)
            query = "&".join(f"name[]={name}" for name in _SERIES)
            one.series = read_series((await client.fetch(f"/metrics?{query}")).body)
            await self._look_at_doors(one, one.health)

    async def _look_at_doors(self, one: Examined, health: ReplicaHealth) -> None:
        """The clients' port; and whether the operators' routes are open to the network."""
        clients = clients_url(one.url, health.url) if health.url else ""
        if clients:
            live = await self._client(clients).fetch("/live")
            # its certificate may be for names of the load balancer
            if not live.status and not live.is_tls_trouble:
                one.clients_trouble = f"{clients}: {live.trouble}"
        for url in self._outer_urls(one.url) if clients != one.url else ():
            outside = self._client(url)
            answer = await outside.fetch("/routing")
            if answer.status == 200 and decoded(answer.body, Routing) is not None:
                there = decoded((await outside.fetch("/health")).body, ReplicaHealth)
                if there is not None and there.router_id == one.router_id:
                    one.open_at = url
                    return

    def _outer_urls(self, url: str) -> list[str]:
        """Where others may reach this listener: its own address, or this machine's if that is loopback."""
        if not is_loopback(urlsplit(url).hostname or ""):
            return [url]
        return [replaced for address in self._own if (replaced := _with_host(url, address))]


async def _workers(one: Examined, client: ReplicaClient) -> Workers | None:
    fetched = await client.fetch("/workers", MOST_BYTES, WORKERS_S)
    workers = decoded(fetched.body, Workers) if fetched.status == 200 else None
    if fetched.status != 200:
        one.workers_trouble = fetched.trouble or f"/workers answers {fetched.status}"
    else:
        one.workers_trouble = "" if workers is not None else "/workers is not in this version's format"
    return workers


async def _fleet(client: ReplicaClient) -> Fleet | None:
    try:
        return await client.fleet(WORKERS_S)
    except ReplicaError:
        return None


async def _probe_prompt(one: Examined, client: ReplicaClient, model: str) -> None:
    """By a dry run: nothing is sent to an engine."""
    fetched = await client.fetch("/v1/route", json={**PROBE, "model": model})
    route = decoded(fetched.body, dict[str, Any]) if fetched.status == 200 else None
    if route is not None and isinstance(isl := route.get("isl"), int):
        one.prompts[model] = isl


def read_series(exposition: bytes) -> dict[str, int]:
    """The wanted numbers in an exposition; of a series with labels the sum."""
    found: dict[str, int] = {}
    for name, text in _SAMPLE.findall(exposition):
        key = name.decode()
        with contextlib.suppress(ValueError, OverflowError):
            if key in _SERIES and 0 <= (number := float(text)) < _MOST_COUNT:
                found[key] = found.get(key, 0) + round(number)
    return found


def is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


def _with_host(url: str, host: str) -> str:
    parts = urlsplit(url)
    name = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{name}:{parts.port}").geturl() if parts.port else ""


def clients_url(admin_url: str, clients: str) -> str:
    """The clients' port as reached from here: with the admin listener's host if it has every address."""
    with contextlib.suppress(ValueError):
        host, admin_host = urlsplit(clients).hostname, urlsplit(admin_url).hostname
        if host in {"0.0.0.0", "::"} and admin_host:
            return _with_host(clients, admin_host)
        if host and (not is_loopback(host) or is_loopback(admin_host or "")):
            return clients
    return ""
