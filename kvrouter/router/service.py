"""The service: a frontend's replica whose port answers where requests should go.

The admin listener is a frontend's, so `kvrouter verify`, `top` and the dashboard see one more replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import cast

import msgspec
from msgspec.structs import replace

from kvrouter.bus import Subjects
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.frontend.operators.dry_route import api_of
from kvrouter.frontend.operators.rights import AdminGate, AdminKey, Rights, check_type, open_gate
from kvrouter.frontend.operators.views import View, answering
from kvrouter.frontend.records.record import Record, clock
from kvrouter.frontend.server.background import running
from kvrouter.frontend.server.http_server import Site
from kvrouter.relay.answer import Answer, AnswerLines, Events
from kvrouter.relay.exchange import ClientSide
from kvrouter.relay.request import Request, RequestHead
from kvrouter.relay.routes import Routes
from kvrouter.router.asked import DEFAULT, PlacementAsk, is_given
from kvrouter.router.dynamo import WORKERS, DynamoCalls
from kvrouter.router.mooncake import MooncakeCalls
from kvrouter.router.over_nats import OverNats
from kvrouter.router.placing import Placing
from kvrouter.router.ray import RayCalls
from kvrouter.router.reservations import Reservations
from kvrouter.router.settings import RouterOptions
from kvrouter.router.workers import RegisteredEngines

# Probes have no key.
_OPEN = frozenset({"/health", "/ready"})
_HEAD = RequestHead("POST", "/v1/completions", [], wants_keep_alive=True)


class PlacementPort:
    """The calls of every dialect, in place of what a frontend serves on its port."""

    def __init__(self, site: Site, options: RouterOptions) -> None:
        self._completions = completions = site.completions
        self._admin = admin = site.admin
        self._refused = completions.readers.refused
        loop, publishing = asyncio.get_running_loop(), completions.publishing
        self._names = (options.host, *options.process.admin_names)
        self.placing = Placing(
            publishing.replica,
            Reservations(options.per_caller),
            publishing.flush_spaced,
            loop.time,
            lease_s=options.lease_s,
            aliases=lambda: completions.accept.aliases,
            read_body=self._read_body,
        )
        self.engines = RegisteredEngines(publishing.replica, options.nats, options.namespace)
        self._dialects = (
            DynamoCalls(self.placing, self.engines, admin.ready_facts, admin.is_connected),
            RayCalls(self.placing, completions.accept, loop.time),
            MooncakeCalls(self.placing),
        )

    def routes(self, rights: Rights) -> Routes:
        """Who may use the admin listener may use these."""
        gate, routes = AdminGate(rights.key, self._names), Routes()
        for method, path, view in self._views():
            checked = view if path in _OPEN else _checked(view, gate)
            routes.add(method, path, answering(checked, rights, open_gate, self._refused))
        return routes

    def over_nats(self, options: RouterOptions) -> OverNats:
        """The same, without what changes workers: a user who may call may not announce any."""
        rights, routes = Rights(open_gate, AdminKey(None)), Routes(_why_not_over_nats)
        for method, path, view in self._views():
            if method == "GET" or not f"{path}/".startswith(WORKERS):
                routes.add(method, path, answering(view, rights, open_gate, self._refused))
        return OverNats(
            self._admin, Subjects(options.namespace), self.placing.replica.router_id, routes, rights
        )

    def _views(self) -> Iterator[tuple[str, str, View]]:
        for dialect in self._dialects:
            for method, path, view in dialect.views():
                yield method, path, view if path in _OPEN else self._dated(view)

    def _dated(self, view: View) -> View:
        """Without NATS the last known state answers, and the header says so."""

        async def dated(request: Request) -> Answer | AnswerLines | Events:
            found = await view(request)
            if self._admin.is_connected() or not isinstance(found, Answer):
                return found
            return replace(found, headers={**found.headers, "x-kvrouter-stale": "nats"})

        return dated

    async def _read_body(self, asked: PlacementAsk, request_id: str) -> tuple[Router, RouteRequest]:
        """Find the tokens as a frontend does. Raises the errors that the request itself would raise."""
        body = self._body_of(asked)
        # nothing is answered through it, so it has no client
        request = Request(_HEAD, cast("ClientSide", None), body)
        record = Record(request, request_id, asyncio.get_running_loop().time(), clock())
        work = await self._completions.accept.work(record, api_of(body), None)
        return work.router, work.route

    def _body_of(self, asked: PlacementAsk) -> bytes:
        if is_given(asked.request):
            return bytes(asked.request)
        router = self.placing.router_for(asked.model_name, asked.group)
        model = asked.lora_name or (router.pool.model if asked.model_name == DEFAULT else asked.model_name)
        prompt = {"prompt": asked.text} if asked.text is not None else {"messages": asked.messages}
        salt = {"cache_salt": asked.cache_salt} if asked.cache_salt else {}
        return msgspec.json.encode({"model": model, **prompt, **salt})


@contextlib.asynccontextmanager
async def open_router_site(site: Site, options: RouterOptions) -> AsyncIterator[Site]:
    """The site with a placement port, and the tasks of that."""
    port = PlacementPort(site, options)
    site.port_routes = port.routes
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(port.engines.close)
        await stack.enter_async_context(running({"reservations": port.placing.expire_forever()}))
        await stack.enter_async_context(port.over_nats(options).answering())
        yield site


def _why_not_over_nats(path: str) -> str:
    return "workers change over HTTP only" if path.startswith(WORKERS) else ""


def _checked(view: View, gate: AdminGate) -> View:
    async def checked(request: Request) -> Answer | AnswerLines | Events:
        # a page cannot know the key, so with it any name of this host will do
        if not gate.key.is_in(request.headers):
            gate.check(request, hosts=[request.headers.get("host", "")], own_address="")
        if request.body:  # libraries name a type for a body that they do not send
            check_type(request, has_body=True)
        return await view(request)

    return checked
