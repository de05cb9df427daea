"""A proxy between the router and a prefill engine, which spoils what is handed over.

replica ──prompt──> Between ──────────────> prefill engine
        <──answer── changes, delay <──────
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from scripts.kit.ports import free_ports

_PASSED = frozenset({"content-type", "date"})
_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


class Between:
    """`changes`: to the parameters of each answer. `before`: awaited before such an answer goes on."""

    runner: web.AppRunner

    def __init__(self, session: aiohttp.ClientSession, engine_url: str, url: str) -> None:
        self._session, self._engine_url, self.url = session, engine_url, url
        self.changes: dict[str, Any] = {}
        self.before: Callable[[], Awaitable[None]] | None = None
        self.spoilt = 0

    def reset(self) -> None:
        """Pass on everything as it is."""
        self.changes, self.before = {}, None

    async def close(self) -> None:
        """Refuse connections, as the port of a dead engine does."""
        await self.runner.cleanup()

    async def _changed(self, answer: bytes) -> bytes:
        found = json.loads(answer) if b'"kv_transfer_params"' in answer else {}
        if not found.get("kv_transfer_params") or not (self.changes or self.before):
            return answer
        self.spoilt += 1
        if self.before is not None:
            await self.before()
        found["kv_transfer_params"] |= self.changes
        return json.dumps(found).encode()

    async def _pass_on(self, request: web.Request) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        body, url = await request.read() or None, self._engine_url + request.path_qs
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                data = await self._changed(await answer.read())
                kept = {name: value for name, value in answer.headers.items() if name.lower() in _PASSED}
                return web.Response(status=answer.status, body=data, headers=kept)
        except aiohttp.ClientError:
            if request.transport is not None:  # else the client has left
                request.transport.abort()  # as the engine's own connection ended
            return web.Response(status=502)


@contextlib.asynccontextmanager
async def between(engine_url: str) -> AsyncIterator[Between]:
    """The proxy of this engine, as long as it is needed."""
    (port,) = free_ports(1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
        proxy = Between(session, engine_url, f"http://127.0.0.1:{port}")
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", proxy._pass_on)
        proxy.runner = web.AppRunner(app, access_log=None)
        await proxy.runner.setup()
        await web.TCPSite(proxy.runner, "127.0.0.1", port).start()
        try:
            yield proxy
        finally:
            await proxy.close()
