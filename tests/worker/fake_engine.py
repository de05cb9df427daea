"""An engine as the agent sees it, on real sockets: HTTP, a publisher of KV events, a replay socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web

from tests.frontend.workers import until

END_OF_REPLAY = b"\xff" * 8


class EventSockets:
    """The event sockets of one rank. Batches are numbered from 0; `forget` removes some from the replay."""

    def __init__(
        self, pub: zmq.asyncio.Socket, router: zmq.asyncio.Socket, *, names_topic_in_replays: bool
    ) -> None:
        self._replay_topic = [b"topic"] if names_topic_in_replays else []
        self.events = _endpoint(pub)
        self.replay = _endpoint(router)
        self.buffer: list[bytes] = []
        self._pub = pub
        self._router = router

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, *, names_topic_in_replays: bool = True) -> AsyncIterator[EventSockets]:
        """Bind both sockets and answer replays; SGLang leaves out the topic in them."""
        context = zmq.asyncio.Context()
        pub, router = _bound(context, zmq.XPUB), _bound(context, zmq.ROUTER)
        sockets = cls(pub, router, names_topic_in_replays=names_topic_in_replays)
        replays = asyncio.create_task(sockets.answer_replays())
        try:
            yield sockets
        finally:
            replays.cancel()
            context.destroy(linger=0)

    async def until_subscribed(self) -> None:
        """Return when a subscriber has arrived: an XPUB receives its subscription."""
        async with asyncio.timeout(5):
            await self._pub.recv()

    def source(self) -> dict[str, object]:
        """The endpoints as vLLM reports them, in the form in which it binds them."""
        mapped = self.events.replace("127.0.0.1", "[::ffff:127.0.0.1]")
        return {"publisher": "zmq", "endpoint": mapped, "replay_endpoint": self.replay, "topic": "topic"}

    def restart(self) -> None:
        """Begin again, as another process would."""
        self.buffer = []

    async def send(self, payload: bytes, *, is_lost: bool = False) -> None:
        """Publish the next batch, unless the wire loses it."""
        self.buffer.append(payload)
        if not is_lost:
            await self._pub.send_multipart([b"topic", _number(len(self.buffer) - 1), payload])

    async def send_raw(self, frames: list[bytes]) -> None:
        """Publish any frames."""
        await self._pub.send_multipart(frames)

    async def answer_replays(self) -> None:
        while True:
            identity, _, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            for seq, payload in list(enumerate(self.buffer))[first:]:
                await self._router.send_multipart([identity, b"", *self._replay_topic, _number(seq), payload])
            end = [b""] if self._replay_topic else []
            await self._router.send_multipart([identity, b"", *end, END_OF_REPLAY, b""])


class EngineServer:
    """The HTTP side. `is_healthy`, `metrics` and `sources` may be changed while it serves.

    `sources` is the answer of /kv_event_sources; None: it has no such path.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_healthy = True
        # Every path but /health answers with this status, if it is not 200.
        self.status = 200
        self.asked: list[str] = []
        self.model = "tiny"
        self.version = "0.32.0"
        self.adapters = ["adapter"]
        self.sources: dict[str, object] | None = None
        self.scrapes = 0
        self.metrics = (
            'vllm:cache_config_info{block_size="2",engine="0",num_gpu_blocks="100"} 1.0\n'
            'vllm:num_requests_running{engine="0"} 3.0\n'
            "process_start_time_seconds 10.0\n"
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[EngineServer]:
        """Serve on a port of this machine."""
        server = cls(f"{'http' if tls is None else 'https'}://127.0.0.1:{port}")
        app = web.Application()
        for path in ("v1/models", "metrics", "version", "health", "kv_event_sources"):
            app.router.add_get(f"/{path}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        try:
            yield server
        finally:
            await runner.cleanup()

    async def scraped(self, count: int) -> None:
        """Return when the metrics have been requested this many times."""
        await until(lambda: self.scrapes >= count)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.status != 200 and request.path != "/health":
            return web.Response(status=self.status, text="this rank\nis retired")
        match request.path:
            case "/v1/models":
                base = {"id": self.model, "root": "/m", "parent": None, "max_model_len": 512}
                loras = [
                    {"id": adapter, "root": "/l", "parent": self.model, "max_model_len": None}
                    for adapter in self.adapters
                ]
                return web.json_response({"object": "list", "data": [base, *loras]})
            case "/metrics":
                self.scrapes += 1
                return web.Response(text=self.metrics)
            case "/kv_event_sources":
                return web.json_response(self.sources, status=200 if self.sources is not None else 404)
            case "/version":
                return web.json_response({"version": self.version})
            case _:
                return web.Response(status=200 if self.is_healthy else 503)


def pack(*events: object, ts: float = 100.0) -> bytes:
    """A batch as vLLM packs it."""
    payload: bytes = msgpack.packb([ts, events, 0])
    return payload


def store(*hashes: int, parent: int | None = None) -> dict[str, object]:
    """BlockStored for a chain of blocks of two tokens, made of their hashes."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [token for hash_ in hashes for token in (hash_, hash_)],
        "block_size": 2,
    }


def _bound(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.bind("tcp://127.0.0.1:*")
    return socket


def _endpoint(socket: zmq.asyncio.Socket) -> str:
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def _number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")
