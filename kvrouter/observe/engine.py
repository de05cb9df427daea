"""The probe of engines behind cards: what they answer over HTTP, and where their events can be replayed.

GET /v1/models, /health, /metrics when it is met, /metrics again later ──> Engine, Work
the reports of its kind (worker/engines/discovery.py) ─────────────────> endpoints of replays
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvrouter.bounded_answers import MOST_BYTES, address_below
from kvrouter.core.wire.heartbeats import Card
from kvrouter.errors import KvRouterError
from kvrouter.observe.replica import MIB, Fetched, authorized, fetch
from kvrouter.tls import trusting
from kvrouter.worker.engines.discovery import kind_named, learn
from kvrouter.worker.engines.http import MODELS_PATH, EngineHttp, read_models
from kvrouter.worker.engines.metrics import NO_WORK, EngineWork, read_work
from kvrouter.worker.options import AgentOptions

# Examined at once; sockets for as many are needed.
AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """How to reach engines. `replays`: by worker id and rank, for engines that do not report them."""

    api_key: str | None = None
    tls_ca: Path | None = None
    replays: Mapping[str, Sequence[str]] = field(default_factory=dict)

    async def replays_of(self, card: Card) -> Sequence[str]:
        """The endpoints, by rank, as given or as the engine reports them. Raises KvRouterError."""
        if given := self.replays.get(card.worker_id):
            return given
        options = AgentOptions(
            card.url,
            card.worker_id,
            block_size=card.block_size,
            role=card.role,
            kv_connector=card.kv_connector,
        )
        async with EngineHttp.open(card.url, self.api_key, trusting(self.tls_ca)) as http:
            return [feed.replay or "" for feed in (await learn(http, options)).endpoints]


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """What one engine answered."""

    url: str
    models: Fetched
    health: Fetched
    names: tuple[str, ...] = ()
    trouble: str = ""
    """Why /v1/models cannot be read."""
    work: EngineWork = NO_WORK


class Engines:
    """Asks the engines, each URL once."""

    def __init__(self, http: aiohttp.ClientSession, api_key: str | None) -> None:
        self.met: dict[str, EngineProbe] = {}
        self.later: dict[str, EngineWork] = {}
        self._http = http
        self._headers = authorized(api_key)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def meet(self, cards: Iterable[Card]) -> None:
        urls = {card.url: card for card in cards if card.url and card.url not in self.met}
        await asyncio.gather(*(self._meet(url, card) for url, card in urls.items()))

    async def look_again(self) -> None:
        """Read once more how much the engines have computed."""
        await asyncio.gather(*(self._look_again(url) for url, one in self.met.items() if one.work != NO_WORK))

    async def _meet(self, url: str, card: Card) -> None:
        async with self._turns:
            models = await self._get(url, MODELS_PATH)
            if not models.status:
                self.met[url] = EngineProbe(url, models, Fetched())
                return
            path = kind_named(card.engine).health_path
            health = models if path == MODELS_PATH else await self._get(url, path)
            work = await self._work(url)
        try:
            found = read_models(models.body) if models.status == 200 else None
            names = (*found.served_names, *found.lora_names) if found is not None else ()
            self.met[url] = EngineProbe(url, models, health, names, "", work)
        except KvRouterError as error:
            self.met[url] = EngineProbe(url, models, health, (), str(error), work)

    async def _look_again(self, url: str) -> None:
        async with self._turns:
            self.later[url] = await self._work(url)

    async def _work(self, url: str) -> EngineWork:
        fetched = await self._get(url, "metrics", MOST_BYTES)
        return read_work(fetched.body) if fetched.status == 200 else NO_WORK

    async def _get(self, url: str, path: str, most_bytes: int = MIB) -> Fetched:
        return await fetch(self._http, address_below(url, path), headers=self._headers, most_bytes=most_bytes)
