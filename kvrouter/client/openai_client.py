"""`Client`: sends OpenAI bodies straight to the workers of one model, without a frontend.

    generate = random, round_robin, direct ──> a worker ──POST──> its answers, as they arrive

No KV overlap, no bookings, no retries: use a frontend or `KvRouter` for these.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvrouter.bus import NatsOptions
from kvrouter.bus.embedded import DEFAULT_URL
from kvrouter.client.membership import READY_TIMEOUT_S, joined, replica_with, until_serving
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import ReplicaSettings
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.policy import Candidate, RouteRequest, Wanted
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.errors import (
    BadRequestError,
    ConfigError,
    NoWorkersError,
    WorkerDiedError,
    WorkerRefusedError,
    WorkerSilentError,
)
from kvrouter.policies.baseline import Direct, Random, RoundRobin
from kvrouter.replica.loop import first_turn
from kvrouter.tls import trusting

Answers = AsyncIterator[dict[str, Any]]
"""Chunks of a stream, or one whole answer."""

_CONNECT_TIMEOUT_S = 10.0


class Client:
    """Use with `async with`, which waits until the model's workers are known.

    `headers` are sent with each request, such as an API key. `worker_tls_ca`: authorities to trust behind
    https:// URLs of workers, in addition to the system's. Raises NoWorkersError if no worker serves the
    model within `ready_timeout_s`.
    """

    def __init__(
        self,
        namespace: str,
        model: str,
        *,
        nats: NatsOptions | str | None = None,
        headers: Mapping[str, str] | None = None,
        worker_tls_ca: Path | None = None,
        first_byte_timeout_s: float = 600.0,
        idle_timeout_s: float = 300.0,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.namespace = namespace
        self.model = model
        self.generate = self.random
        self._nats = nats if nats is not None else os.environ.get("NATS_URL", DEFAULT_URL)
        self._headers = dict(headers or {})
        self._worker_tls_ca = worker_tls_ca
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._replica = replica_with(Random, ReplicaSettings(PoolSettings(use_kv_events=False)))
        self._round_robin = RoundRobin(first_turn())
        self._pool: PoolId | None = None
        self._http: aiohttp.ClientSession | None = None
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(joined(self._replica, self._nats, self.namespace))
            self._pool = await until_serving(self._replica, self.model, self._ready_timeout_s)
            # aiohttp's defaults would cut answers after 5 minutes and queue requests beyond 100 connections.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
            connector = aiohttp.TCPConnector(limit=0, ssl=trusting(self._worker_tls_ca))
            session = aiohttp.ClientSession(timeout=timeout, connector=connector)
            self._http = await stack.enter_async_context(session)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    def worker_ids(self) -> list[str]:
        """Workers that take requests now."""
        return list(dict.fromkeys(target.worker_id for target in self._serving().pool.targets))

    def random(self, request: Mapping[str, Any]) -> Answers:
        """Any worker, all equally likely."""
        return self._send(request, Random())

    def round_robin(self, request: Mapping[str, Any]) -> Answers:
        """Each worker in turn."""
        return self._send(request, self._round_robin)

    def direct(self, request: Mapping[str, Any], worker_id: str, rank: int = 0) -> Answers:
        """The worker named. Raises NoWorkersError while it takes no requests."""
        return self._send(request, Direct(), Wanted(WorkerId(worker_id), rank))

    async def _send(
        self, request: Mapping[str, Any], policy: BuiltInPolicy, wanted: Wanted | None = None
    ) -> Answers:
        """Choose a worker, send, yield its answers. Leaving early closes the connection: the engine stops."""
        path = _path_of(request)
        chosen = self._choose(str(request.get("model", self.model)), policy, wanted)
        worker_id, card = chosen.target.worker_id, chosen.card
        headers = {**self._headers, "content-type": "application/json"}
        if card.rank_header:
            headers[card.rank_header] = str(chosen.target.rank)
        body = msgspec.json.encode({"model": self.model, **request})
        with _worker_errors(worker_id):
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._first_byte_timeout_s):
                    posted = self._session().post(card.url + path, data=body, headers=headers)
                    response = await stack.enter_async_context(posted)
                    if response.status >= 400:
                        raise WorkerRefusedError(worker_id, response.status, await response.text())
                if response.content_type != "text/event-stream":
                    async with asyncio.timeout(self._idle_timeout_s):
                        yield msgspec.json.decode(await response.read())
                    return
                async for event in self._events(response):
                    yield _checked(event, worker_id)

    async def _events(self, response: aiohttp.ClientResponse) -> Answers:
        """The `data:` lines as JSON, until `[DONE]`."""
        rest = b""
        while True:
            async with asyncio.timeout(self._idle_timeout_s):
                piece = await response.content.readany()
            if not piece:
                raise aiohttp.ClientPayloadError("the stream has ended without [DONE]")
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield msgspec.json.decode(data)

    def _choose(self, name: str, policy: BuiltInPolicy, wanted: Wanted | None) -> Candidate:
        router = self._serving()
        pool = router.pool
        asked = RouteRequest("", lora_name=name if name in pool.lora_names else None, wanted=wanted)
        candidates = pool.candidates(asked)
        if not candidates:
            raise NoWorkersError(f"no live worker for model {name!r}")
        moment = Moment(time.monotonic(), random.random, router.tables)
        chosen = candidates[policy.pick(asked, candidates, moment)]
        policy.routed(asked, chosen, moment)
        return chosen

    def _serving(self) -> Router:
        if self._pool is None:
            raise ConfigError("open the Client first: async with Client(…) as client")
        return self._replica.router(self._pool)

    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None  # opened together with the router
        return self._http


def _path_of(request: Mapping[str, Any]) -> str:
    if "messages" in request:
        return "/v1/chat/completions"
    if "prompt" in request:
        return "/v1/completions"
    raise BadRequestError("a request has `messages` (chat) or a `prompt`")


def _checked(event: dict[str, Any], worker_id: str) -> dict[str, Any]:
    # An engine that fails in the middle of a stream reports it in an event: the status was sent before.
    error = event.get("error")
    if not error:
        return event
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) else WorkerDiedError.status
    raise WorkerRefusedError(worker_id, status, msgspec.json.encode(event).decode())


@contextlib.contextmanager
def _worker_errors(worker_id: str) -> Iterator[None]:
    """Raise errors of the connection as errors of kvrouter."""
    try:
        yield
    except TimeoutError as error:
        raise WorkerSilentError(f"worker {worker_id} sent nothing for too long") from error
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        raise WorkerDiedError(f"worker {worker_id}: {error}") from error
