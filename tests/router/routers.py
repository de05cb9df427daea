"""Routers in this process, in the namespace of a fleet of frontends and scripted workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.server.http_server import Site
from kvrouter.router.service import PlacementPort, open_router_site
from kvrouter.router.settings import COMMAND
from kvrouter.settings.read import load
from tests.frontend.fleet import Fleet, hears_itself
from tests.frontend.workers import until


@dataclass
class Router:
    """A router, and a client of its port."""

    running: RunningFrontend
    site: PlacementPort
    http: aiohttp.ClientSession

    async def ask(
        self, path: str, body: Any = None, *, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        """Status and JSON of an answer. Headers have _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.running.url}{path}"
        async with self.http.request(method, url, json=body, headers=named) as answer:
            return answer.status, await answer.json()

    async def ok(self, path: str, body: Any = None, *, method: str = "POST", **headers: str) -> Any:
        """The JSON of an answer that must be good."""
        status, found = await self.ask(path, body, method=method, **headers)
        assert status in {200, 201}, found
        return found

    async def loads(self) -> dict[Any, tuple[int, int, int]]:
        """Tokens, blocks and requests of each rank, of the first model."""
        (model,) = await self.ok("/loads", method="GET")
        return {
            one["worker_id"]: (
                one["potential_prefill_tokens"],
                one["potential_decode_blocks"],
                one["active_requests"],
            )
            for one in model["loads"]
        }


@contextlib.asynccontextmanager
async def running_router(nats: str, namespace: str, *flags: str) -> AsyncIterator[Router]:
    """A router that receives what is published."""
    words = ["--port", "0", "--nats", nats, "--namespace", namespace, "--tokenizer", "local"]
    loaded = load(COMMAND, [*words, "--drain-grace-s", "0", *flags], {})
    ports: list[PlacementPort] = []

    @contextlib.asynccontextmanager
    async def open_site(plain: Site) -> AsyncIterator[Site]:
        async with open_router_site(plain, loaded.settings) as site:
            ports.append(site.port_routes.__self__)  # type: ignore[union-attr]
            yield site

    async with (
        running_frontend(loaded.settings, open_site=open_site) as running,
        aiohttp.ClientSession() as http,
    ):
        await until(lambda: hears_itself(running.replica), "the router hears itself")
        yield Router(running, ports[0], http)


@contextlib.asynccontextmanager
async def routers_of(fleet: Fleet, nats: str, *flags: str, count: int = 2) -> AsyncIterator[list[Router]]:
    """Routers in a fleet, each of which sees all of its workers."""
    async with contextlib.AsyncExitStack() as stack:
        open_one = partial(running_router, nats, fleet.subjects.namespace, *flags)
        routers = [await stack.enter_async_context(open_one()) for _ in range(count)]
        for worker in fleet.workers:
            fleet.announce(worker)  # scripted workers answer no hello
        for router in routers:
            sees_all = partial(sees, fleet, router, count)
            await until(sees_all, "the router sees all workers and peers")
        yield routers


def sees(fleet: Fleet, router: Router, routers: int) -> bool:
    """Whether it sees each worker, and every replica but itself."""
    peers = len(fleet.frontends) + routers - 1
    is_joined = len(router.running.replica.peers) == peers
    return is_joined and len(fleet.targets(router.running)) == len(fleet.workers)
