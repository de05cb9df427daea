"""`Client`: sends OpenAI bodies straight to the workers of one model, without a frontend.

    generate ──KvRouter.route_body──> the worker that holds most of the prompt ──POST──> its answers
    random, round_robin, direct ──> the same in these modes

No retries: use a frontend for these.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import aiohttp
import msgspec

from kvrouter.bounded_answers import address_below
from kvrouter.bus import NatsOptions
from kvrouter.bus.embedded import DEFAULT_URL
from kvrouter.client.kv_router import About, KvRouter, NewPolicy, PlacedRequest
from kvrouter.client.membership import READY_TIMEOUT_S
from kvrouter.core.routing.policy import OverlapWeight
from kvrouter.core.tables.approx import DEFAULT_TTL_S
from kvrouter.errors import (
    BadRequestError,
    ConfigError,
    WorkerDiedError,
    WorkerRefusedError,
    WorkerSilentError,
)
from kvrouter.prompts.settings import TokenOptions
from kvrouter.relay.events import Event, EventKind, EventReader
from kvrouter.tls import trusting

Answers = AsyncIterator[dict[str, Any]]
"""Chunks of a stream, or one whole answer."""

_CONNECT_TIMEOUT_S = 10.0
# Chunks of a stream between two reports of its progress, which peers need once a second at most.
_PROGRESS_CHUNKS = 32


class Client:
    """Use with `async with`, which waits until the model's workers are known.

    `model` None: the only one that is served; then `model` has its name.
    `headers` are sent with each request, such as an API key. `worker_tls_ca`: authorities to trust behind
    https:// URLs of workers, in addition to the system's. The other settings are those of
    `KvRouter.connect`. Raises NoWorkersError if no worker serves the model within `ready_timeout_s`.
    """

    def __init__(
        self,
        namespace: str,
        model: str | None,
        *,
        nats: NatsOptions | str | None = None,
        headers: Mapping[str, str] | None = None,
        worker_tls_ca: Path | None = None,
        first_byte_timeout_s: float = 600.0,
        idle_timeout_s: float = 300.0,
        ready_timeout_s: float = READY_TIMEOUT_S,
        policy: NewPolicy = "kv",
        overlap_weight: OverlapWeight | None = None,
        temperature: float = 0.0,
        use_kv_events: bool = True,
        ttl_s: float = DEFAULT_TTL_S,
        replica_sync: bool = False,
        tokens: TokenOptions | None = None,
    ) -> None:
        self.namespace = namespace
        self.model = model
        self._headers = dict(headers or {})
        self._worker_tls_ca = worker_tls_ca
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._connect = partial(
            KvRouter.connect,
            nats if nats is not None else os.environ.get("NATS_URL", DEFAULT_URL),
            namespace,
            model,
            policy=policy,
            overlap_weight=overlap_weight,
            temperature=temperature,
            use_kv_events=use_kv_events,
            ttl_s=ttl_s,
            replica_sync=replica_sync,
            ready_timeout_s=ready_timeout_s,
            tokens=tokens,
            worker_tls_ca=worker_tls_ca,
        )
        self._router: KvRouter | None = None
        self._http: aiohttp.ClientSession | None = None
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            router = await stack.enter_async_context(self._connect())
            # aiohttp's defaults would cut answers after 5 minutes and queue requests beyond 100 connections.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
            connector = aiohttp.TCPConnector(limit=0, ssl=trusting(self._worker_tls_ca))
            session = aiohttp.ClientSession(timeout=timeout, connector=connector)
            self._http = await stack.enter_async_context(session)
            self._router = router
            self.model = self.model or router.model
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    def worker_ids(self) -> list[str]:
        """Workers that take requests now."""
        return self._opened().worker_ids()

    @property
    def router(self) -> KvRouter:
        """The router that places the requests."""
        return self._opened()

    def generate(self, request: Mapping[str, Any], **about: Unpack[About]) -> Answers:
        """The worker that `policy` chooses: by default where the prompt is cached and load is low."""
        return self._send(request, **about)

    def random(self, request: Mapping[str, Any]) -> Answers:
        """Any worker, all equally likely."""
        return self._send(request, mode="random")

    def round_robin(self, request: Mapping[str, Any]) -> Answers:
        """Each worker in turn."""
        return self._send(request, mode="round-robin")

    def direct(self, request: Mapping[str, Any], worker_id: str, rank: int = 0) -> Answers:
        """The worker named. Raises NoWorkersError while it takes no requests."""
        return self._send(request, mode="direct", target=f"{worker_id}/{rank}")

    async def _send(self, request: Mapping[str, Any], **about: Unpack[About]) -> Answers:
        """Place, send, yield the answers. Leaving early closes the connection: the engine stops."""
        path, body = _path_of(request), {"model": self.model, **request}
        with await self._opened().route_body(body, **about) as placed, _worker_errors(placed):
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._first_byte_timeout_s):
                    response = await stack.enter_async_context(self._post(placed, path, body))
                    if response.status >= 400:
                        raise WorkerRefusedError(placed.worker_id, response.status, await response.text())
                if response.content_type != "text/event-stream":
                    async with asyncio.timeout(self._idle_timeout_s):
                        yield msgspec.json.decode(await response.read())
                    return
                chunks = 0
                async for event in self._events(response):
                    if event.error is not None:
                        raise WorkerRefusedError(placed.worker_id, event.error.status, event.data.decode())
                    if event.shows_output:
                        if not chunks % _PROGRESS_CHUNKS:
                            placed.mark_prefill_completed()  # the first call counts
                            placed.progress(chunks)
                        chunks += 1
                    yield msgspec.json.decode(event.data)

    def _post(
        self, placed: PlacedRequest, path: str, body: Mapping[str, Any]
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._http is not None  # opened together with the router
        headers = {**self._headers, "content-type": "application/json", **placed.headers}
        return self._http.post(
            address_below(placed.url, path.removeprefix("/")),
            data=msgspec.json.encode(body),
            headers=headers,
        )

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
        """The events with data, until `[DONE]`. Only output puts off the limit for the next output."""
        loop, reader = asyncio.get_running_loop(), EventReader()
        limit_at = loop.time() + self._first_byte_timeout_s
        while True:
            async with asyncio.timeout_at(limit_at):
                piece = await response.content.readany()
            if not piece:
                raise aiohttp.ClientPayloadError("the stream has ended without [DONE]")
            events = reader.feed(piece)
            for event in events:
                if event.kind is EventKind.END and not event.finishes:
                    return
                if event.data:
                    yield event
            if any(event.shows_output for event in events):
                limit_at = loop.time() + self._idle_timeout_s

    def _opened(self) -> KvRouter:
        if self._router is None:
            raise ConfigError("open the Client first: async with Client(…) as client")
        return self._router


def _path_of(request: Mapping[str, Any]) -> str:
    if "messages" in request:
        return "/v1/chat/completions"
    if "prompt" in request:
        return "/v1/completions"
    raise BadRequestError("a request has `messages` (chat) or a `prompt`")


@contextlib.contextmanager
def _worker_errors(placed: PlacedRequest) -> Iterator[None]:
    """Raise errors of the connection as errors of kvrouter, and report their status to the policy."""
    worker_id = placed.worker_id
    try:
        try:
            yield
        except TimeoutError as error:
            raise WorkerSilentError(f"worker {worker_id} sent nothing for too long") from error
        except (aiohttp.ClientError, msgspec.DecodeError) as error:
            raise WorkerDiedError(f"worker {worker_id}: {error}") from error
    except (WorkerSilentError, WorkerDiedError, WorkerRefusedError) as error:
        placed.answered(error.status)
        raise
