"""A simulated engine, honest or hostile: HTTP, a publisher of KV events, a socket for replays.

HonestEngine ──batch──> published, kept for replays ──> the blocks with which the agent must end
     └──mutated, repeated, misnumbered, cut──> published, or sent as a replay, while `is_hostile`
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.ids import SequenceHash
from tests.fuzz.mutate import EDGES, Mutator

Kind: TypeAlias = Literal["vllm", "sglang"]
BLOCK_TOKENS = 16
CAPACITY_BLOCKS = 512
_END_OF_REPLAY = b"\xff" * 8
_ODD_SEQS = [0, 1, 2**31, 2**53, 2**62, 2**63, 2**64 - 2, 2**64 - 1]
_ODD_LABELS = ["", "NaN", "-1", "9" * 400, "1e300", "None", 'a\\"b', "x" * 3000]


@dataclass(slots=True)
class _Block:
    name: SequenceHash
    parent: int | None
    children: set[int] = field(default_factory=set)


class HonestEngine:
    """Stores chains of blocks below others and evicts leaves, like a paged cache. Pure."""

    def __init__(self, rng: random.Random, kind: Kind) -> None:
        self.kind = kind
        # All batches so far, for replays, from number 0.
        self.batches: list[bytes] = []
        self._rng = rng
        self._blocks: dict[int, _Block] = {}

    def held(self) -> set[int]:
        """The sequence hashes of the blocks in its cache."""
        return {block.name for block in self._blocks.values()}

    def step(self) -> bytes:
        """The next batch."""
        events = [self._store(), *self._evicted()]
        batch: bytes = msgpack.packb([1000.0 + len(self.batches), events, 0])
        self.batches.append(batch)
        return batch

    def _store(self) -> Any:
        rng = self._rng
        parent = rng.choice([None, *self._blocks]) if self._blocks else None
        count = rng.randint(1, 8)
        hashes = [rng.getrandbits(63) for _ in range(count)]
        tokens = [rng.randrange(32_000) for _ in range(count * BLOCK_TOKENS)]
        above = self._blocks[parent].name if parent is not None else None
        event = self._event("BlockStored", hashes, parent, tokens)
        for hash_, name in zip(
            hashes, sequence_hashes(block_hashes(tokens, BLOCK_TOKENS), above), strict=True
        ):
            self._blocks[hash_] = _Block(name, parent)
            if parent is not None:
                self._blocks[parent].children.add(hash_)
            parent = hash_
        return event

    def _evicted(self) -> list[Any]:
        hashes = []
        while len(self._blocks) > CAPACITY_BLOCKS - 8:
            leaf = next(hash_ for hash_, block in self._blocks.items() if not block.children)
            parent = self._blocks.pop(leaf).parent
            if parent is not None:
                self._blocks[parent].children.discard(leaf)
            hashes.append(leaf)
        return [self._event("BlockRemoved", hashes)] if hashes else []

    def _event(self, type_: str, hashes: list[int], *rest: Any) -> Any:
        if self.kind == "sglang":
            return [type_, hashes, *rest, BLOCK_TOKENS, None, "GPU"] if rest else [type_, hashes, "GPU"]
        event: dict[str, Any] = {"type": type_, "block_hashes": hashes, "medium": "GPU"}
        if rest:
            event |= {"parent_block_hash": rest[0], "token_ids": rest[1], "block_size": BLOCK_TOKENS}
        return event


class ServedEngine:
    """An HonestEngine with its sockets. Open it with `async with`."""

    def __init__(
        self, engine: HonestEngine, rng: random.Random, pub: zmq.asyncio.Socket, router: zmq.asyncio.Socket
    ) -> None:
        self.engine = engine
        self.url = ""
        # Whether replays and metrics are hostile, too.
        self.is_hostile = False
        self._rng = rng
        self._mutator = Mutator(rng)
        self._pub = pub
        self._router = router

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, kind: Kind, seed: int) -> AsyncIterator[ServedEngine]:
        """Bind all sockets on ports chosen by the system."""
        rng = random.Random(seed)
        context = zmq.asyncio.Context()
        pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        pub.set(zmq.XPUB_NODROP, 1)
        served = cls(HonestEngine(rng, kind), rng, pub, router)
        replays = asyncio.create_task(served.answer_replays())
        runner = web.AppRunner(served.application())
        try:
            pub.bind("tcp://127.0.0.1:*")
            router.bind("tcp://127.0.0.1:*")
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield served
        finally:
            replays.cancel()
            await asyncio.gather(replays, return_exceptions=True)
            await runner.cleanup()
            context.destroy(linger=0)

    @property
    def events(self) -> str:
        """The endpoint of its KV events."""
        return _endpoint(self._pub)

    @property
    def replay(self) -> str:
        """The endpoint of its replays."""
        return _endpoint(self._router)

    async def until_subscribed(self) -> None:
        """Return when an agent has subscribed."""
        await self._pub.recv()

    async def publish_honest(self) -> None:
        """Publish one more batch, as an engine does."""
        batch = self.engine.step()
        await self._send([b"", _number(len(self.engine.batches) - 1), batch])

    async def publish_hostile(self) -> None:
        """Publish one message that no engine sends."""
        await self._send(self._hostile_message())

    async def _send(self, frames: list[bytes]) -> None:
        while True:
            try:
                await self._pub.send_multipart(frames)
                return
            except zmq.Again:  # no more are in flight than fit in the agent's queue
                await asyncio.sleep(0.001)

    def _hostile_message(self) -> list[bytes]:
        rng, batches = self._rng, self.engine.batches
        at = rng.randrange(len(batches))
        payload = batches[at] if rng.random() < 0.15 else self._mutator.mutate(batches[at])
        due = len(batches) + rng.choice((0, 0, 0, -1, 1, 5))
        seq = rng.choice((at, due, due, due, rng.choice(_ODD_SEQS)))
        frames = [rng.choice((b"", b"", b"kv@a@b", b"\xff\x00")), _number(max(0, seq)), payload]
        if rng.random() < 0.05:
            return rng.choice((frames[:1], frames[:2], [*frames, b"more"], [b"", rng.randbytes(7), payload]))
        return frames

    async def answer_replays(self) -> None:
        while True:
            identity, *_, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            for seq, payload in list(enumerate(self.engine.batches))[first:]:
                if self.is_hostile and self._rng.random() < 0.1:
                    await self._router.send_multipart(
                        [identity, *self._hostile_message()[: self._rng.randrange(4)]]
                    )
                await self._router.send_multipart([identity, b"", _number(seq), payload])
            if not self.is_hostile or self._rng.random() < 0.7:
                await self._router.send_multipart([identity, b"", _END_OF_REPLAY, b""])

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._answer)])
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        match request.path:
            case "/v1/models":
                return web.json_response({"data": [{"id": "fuzz", "owned_by": self.engine.kind}]})
            case "/metrics":
                return web.Response(text=self._metrics())
            case "/kv_event_sources" if self.engine.kind == "vllm":
                return web.json_response({"0": self._events("[::ffff:127.0.0.1]")})
            case "/server_info" if self.engine.kind == "sglang":
                config = msgpack.unpackb(msgpack.packb(self._events("*")))
                return web.json_response({"version": "0.5", "page_size": 16, "kv_events_config": config})
            case "/health":
                return web.Response()
            case _:
                return web.Response(status=404)

    def _events(self, host: str) -> dict[str, str]:
        return {
            "publisher": "zmq",
            "endpoint": self.events.replace("127.0.0.1", host),
            "replay_endpoint": self.replay,
        }

    def _metrics(self) -> str:
        size, blocks = f'block_size="{BLOCK_TOKENS}"', f'num_gpu_blocks="{CAPACITY_BLOCKS}"'
        text = (
            f"process_start_time_seconds 10\nvllm:cache_config_info{{{size},{blocks}}} 1\n"
            f"sglang:page_size {BLOCK_TOKENS}\nsglang:num_pages {CAPACITY_BLOCKS}\n"
            'vllm:num_requests_running{engine="0"} 1\nsglang:num_running_reqs{dp_rank="0"} 1\n'
        )
        if not self.is_hostile:
            return text
        rng = self._rng
        number = rng.choice((*map(str, (edge for edge in EDGES if isinstance(edge, int | float))), "9" * 400))
        odd = [line.rpartition(" ")[0] + f" {number}" for line in text.splitlines()]
        odd += [f'vllm:num_requests_running{{engine="{rng.choice(_ODD_LABELS)}"}} {number}']
        return "\n".join(rng.sample(odd, rng.randint(0, len(odd)))) + "\n"


def _number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def _endpoint(socket: zmq.asyncio.Socket) -> str:
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")
