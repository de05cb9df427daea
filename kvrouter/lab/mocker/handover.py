"""Prefill and decode apart: how a mocker hands KV blocks over to another, as vLLM 0.33 does.

    prefill mocker                                        decode mocker
    a request ends ──lend──> Lease, its blocks pinned     a request comes ──prepared──> the engine
           └──── kv_transfer_params ────> router ──────────────> │                 ^
    freed <── Lease <──── POST /mock/kv/read, as long as the transfer takes ───────┘

`nixl` (NixlConnector, pull) hands over as drawn. A lease is renewed while it is read, can be read once, and
ends by itself. `mooncake` (MooncakeConnector): the same without parameters in the answer, as the router has
named the transfer, and knows the engine id from /query. `example` (ExampleConnector) has no parameters: it
writes a file for each computed block to a shared directory. `sglang`: rooms.py. `p2p` (the offloading
connector's tier) has no halves: a mocker of whole requests reads what it lacks from a peer, on its port of
HTTP, and computes what does not come.

Seen with real engines: another engine, another compatibility hash or a dead prefill engine fail the request;
with incomplete parameters the decode engine prefills. After the lease, too.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta, Struct, structs

from kvrouter.errors import KvRouterError
from kvrouter.lab.mocker.bodies import Transfer, parse
from kvrouter.lab.mocker.cache import Chain
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineRequest
from kvrouter.lab.mocker.hashing import lora_key
from kvrouter.lab.mocker.rank import Rank
from kvrouter.lab.mocker.rooms import ROOM_PATH, Rooms, TransferFailedError

READ_PATH, PULL_PATH = "/mock/kv/read", "/mock/kv/pull"
# Of an answer without a transfer; a real handshake fails after 5 s.
ANSWER_S = 5.0
# Ended leases that are remembered, to tell them from blocks that were read.
MOST_ENDED = 1000
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
_CLASSES = {
    "nixl": "NixlConnector", "mooncake": "MooncakeConnector", "example": "ExampleConnector",
    "p2p": "OffloadingConnector",
    "sglang": "sglang",  # which is no connector of vLLM: the agent needs --kv-connector
}  # fmt: skip
_REFUSED, _ENDED = 409, 410


class LoadFailedError(KvRouterError):
    """The blocks of the prefill engine cannot be loaded (vLLM's `kv_load_failure_policy: fail`)."""

    def __init__(self) -> None:
        super().__init__("Internal server error")


class _BlocksRead(Struct, frozen=True):
    """A decode mocker reads the blocks of a request, which takes it some seconds."""

    engine_id: str
    request_id: str
    kv_hash: str
    seconds: Annotated[float, Meta(ge=0, le=600)]


class _BlocksWanted(Struct, frozen=True):
    """A mocker reads blocks of a prompt that a peer holds, behind the first `own` ones."""

    hashes: list[int]
    own: Annotated[int, Meta(ge=0)]
    kv_hash: str


@dataclass(slots=True)
class Lease:
    """Blocks of an ended request that wait for the decode engine."""

    rank: Rank
    chain: Chain
    timer: asyncio.TimerHandle

    def end(self) -> None:
        """Release the blocks."""
        self.timer.cancel()
        self.rank.engine.cache.release(self.chain)


class Handover:
    """The hand-overs of one mocker, in both directions."""

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank]) -> None:
        self.config = config
        # another start is another engine, as in vLLM
        self._ids = {f"{secrets.token_hex(16)}_dp{number}": rank for number, rank in enumerate(ranks)}
        self._leases: dict[str, Lease] = {}
        self._ended: dict[str, None] = {}
        # Where engines were met: a later wrong port has no effect.
        self._met: dict[str, str] = {}
        self._http: aiohttp.ClientSession | None = None
        self._rooms = Rooms(config.kv_hash)
        if config.kv_store is not None:
            config.kv_store.mkdir(parents=True, exist_ok=True)

    async def connected(self, _: web.Application) -> AsyncIterator[None]:
        """With a client for other mockers, as long as the application runs."""
        async with aiohttp.ClientSession() as self._http:
            yield
        for lease in self._leases.values():
            lease.timer.cancel()

    def add_routes(self, app: web.Application) -> None:
        """Add what routers and other mockers ask."""
        app.cleanup_ctx.append(self.connected)
        app.router.add_post(READ_PATH, self.read)
        app.router.add_post(PULL_PATH, self.given)
        app.router.add_post(ROOM_PATH, self._rooms.joined)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/query", self.query)

    async def server_info(self, _: web.Request) -> web.Response:
        """GET /server_info, as vLLM has it with VLLM_SERVER_DEV_MODE=1."""
        kv_connector = _CLASSES[self.config.kv_connector or "nixl"]
        told = {"kv_connector": kv_connector, "kv_role": _KV_ROLES[self.config.role]}
        return web.json_response({"vllm_config": {"kv_transfer_config": told}})

    async def query(self, _: web.Request) -> web.Response:
        """GET /query, as Mooncake's bootstrap server: the engine id of each rank."""
        ids = {
            number: {"engine_id": engine_id, "worker_addr": {}} for number, engine_id in enumerate(self._ids)
        }
        return web.json_response(ids)

    # --- both ---

    async def prepared(self, rank: Rank, request: EngineRequest, transfer: Transfer) -> EngineRequest:
        """The request as it goes into the engine, after its transfer. Raises KvRouterError."""
        if self.config.kv_connector == "sglang":
            return await self._both_are_here(rank, request, transfer)
        if self.config.kv_connector == "example":
            request = request if self.config.role == "prefill" else await self._found(rank, request)
            return structs.replace(request, keeps_blocks=self.config.role != "decode")
        if self.config.kv_connector == "p2p" and transfer.peer:
            return await self._from_peer(rank, request, transfer)
        if transfer.do_remote_decode is True:
            is_whole = len(request.prompt) >= self.config.engine.block_size
            is_kept = bool(transfer.transfer_id) if self.config.kv_connector == "mooncake" else is_whole
            return structs.replace(request, keeps_blocks=is_kept)
        if transfer.do_remote_prefill is True and transfer.is_complete:
            return await self._pulled(rank, request, transfer)
        return request

    # --- the prefill engine ---

    def lend(
        self, rank: Rank, request: EngineRequest, name: str, http: web.Request, transfer: Transfer
    ) -> dict[str, Any] | None:
        """The parameters for the decode engine, when a request has ended; None: the answer has none.

        `name`: of the answer. `http`: how the router reaches this mocker, the decode engine does, too.
        """
        if request.id not in rank.engine.kept or http.transport is None or self._has_rooms:
            return None
        chain = rank.engine.kept[request.id]
        if self.config.kv_connector == "example":
            self._store(chain.hashes)
            return None
        del rank.engine.kept[request.id]
        if self.config.kv_connector == "mooncake":
            self._keep(str(transfer.transfer_id), rank, chain)
            return None
        known = f"{name}-0-{request.id}"
        self._keep(known, rank, chain)
        host, port = http.transport.get_extra_info("sockname")[:2]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(chain.blocks)],
            "remote_engine_id": next(key for key, each in self._ids.items() if each is rank),
            "remote_request_id": known,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(request.prompt),
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
            "mocker_key": secrets.token_hex(4),  # invented: relays pass on what they do not know
        }

    @property
    def _has_rooms(self) -> bool:
        """Whether a room shows the decode engine what it needs."""
        return self.config.kv_connector == "sglang"

    async def taken(self, transfer: Transfer, cached_tokens: int) -> None:
        """The prefill engine's answer waits until the decode engine has the blocks. Raises KvRouterError."""
        if self._has_rooms and self.config.role == "prefill":
            await self._rooms.taken(transfer, cached_tokens)

    @contextmanager
    def in_room(self, transfer: Transfer) -> Iterator[None]:
        """When its request ends, well or not, the prefill engine leaves the room."""
        try:
            yield
        finally:
            if self._has_rooms and self.config.role == "prefill":
                self._rooms.left(transfer)

    def _keep(self, known: str, rank: Rank, chain: Chain) -> None:
        timer = asyncio.get_running_loop().call_later(self.config.kv_lease_s, self._expire, known)
        self._leases[known] = Lease(rank, chain, timer)

    def _expire(self, known: str) -> None:
        lease = self._leases.pop(known)
        lease.end()
        lease.rank.engine.counters.expired_leases += 1
        self._ended[known] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def read(self, http: web.Request) -> web.Response:
        """POST /mock/kv/read: answers when the transfer is over, and frees the blocks."""
        asked = parse(_BlocksRead, await http.read())
        rank = self._ids.get(asked.engine_id)
        if rank is None or asked.kv_hash != self.config.kv_hash:
            return web.Response(status=_REFUSED)
        lease = self._leases.pop(asked.request_id, None)
        if lease is None or lease.rank is not rank:
            return web.Response(status=_ENDED if asked.request_id in self._ended else _REFUSED)
        lease.timer.cancel()
        try:
            await asyncio.sleep(asked.seconds)
        except asyncio.CancelledError:  # the decode engine has left
            self._keep(asked.request_id, rank, lease.chain)
            raise
        lease.end()
        return web.Response()

    # --- the decode engine ---

    async def _both_are_here(self, rank: Rank, request: EngineRequest, transfer: Transfer) -> EngineRequest:
        """Both halves are in the room; the decode engine has the blocks."""
        if self.config.role == "both":
            return request
        if self.config.role == "prefill":
            return await self._rooms.enter(request, transfer, [*self._ids.values()].index(rank))
        assert self._http is not None
        counters, blocks = rank.engine.counters, -(-len(request.prompt) // self.config.engine.block_size)
        try:
            cached_tokens = await self._rooms.join(self._http, transfer, self._seconds(blocks))
        except TransferFailedError:
            counters.failed_transfers += 1
            raise
        counters.transfers += 1
        counters.transferred_blocks += blocks
        tokens = len(request.prompt)
        return structs.replace(request, remote_tokens=tokens, reported_cached_tokens=cached_tokens)

    async def _pulled(self, rank: Rank, request: EngineRequest, transfer: Transfer) -> EngineRequest:
        counters, size = rank.engine.counters, self.config.engine.block_size
        blocks = -(-len(request.prompt) // size) - rank.engine.cached_blocks(request)
        try:
            status = await self._read(transfer, self._seconds(blocks))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            status = _REFUSED
        if status == _ENDED:
            return request
        if status != web.HTTPOk.status_code:
            counters.failed_transfers += 1
            raise LoadFailedError
        counters.transfers += 1
        counters.transferred_blocks += blocks
        cached = transfer.remote_prefill_cached_tokens
        tokens = len(request.prompt)
        reported = cached if isinstance(cached, int) else tokens
        return structs.replace(request, remote_tokens=tokens, reported_cached_tokens=reported)

    async def _read(self, transfer: Transfer, seconds: float) -> int:
        """The status of the prefill mocker's answer."""
        assert self._http is not None
        engine_id = str(transfer.remote_engine_id)
        url, name = str(transfer.remote_bootstrap_addr), str(transfer.transfer_id)
        if self.config.kv_connector == "nixl":
            host, port = str(transfer.remote_host), int(str(transfer.remote_port))
            at = f"[{host}]" if ":" in host else host
            url, name = f"http://{at}:{port}", str(transfer.remote_request_id)
        url = self._met.get(engine_id, url)
        body = _BlocksRead(engine_id, name, self.config.kv_hash, seconds)
        timeout = aiohttp.ClientTimeout(total=seconds + ANSWER_S)
        data = msgspec.json.encode(body)
        async with self._http.post(url + READ_PATH, data=data, timeout=timeout) as answer:
            if answer.ok:
                self._met[engine_id] = url
            return answer.status

    def _seconds(self, blocks: int) -> float:
        return blocks * self.config.kv_transfer_ms_per_block / 1000

    # --- whole engines ---

    async def given(self, http: web.Request) -> web.Response:
        """POST /mock/kv/pull: how many leading blocks are here, after the time that reading them takes."""
        asked = parse(_BlocksWanted, await http.read())
        if asked.kv_hash != self.config.kv_hash:
            return web.Response(status=_REFUSED)
        (rank,) = self._ids.values()
        cached = {*rank.engine.cache.cached_hashes()}
        held = next((at for at, each in enumerate(asked.hashes) if each not in cached), len(asked.hashes))
        await asyncio.sleep(self._seconds(max(0, held - asked.own)))
        return web.json_response(held)

    async def _from_peer(self, rank: Rank, request: EngineRequest, transfer: Transfer) -> EngineRequest:
        assert self._http is not None
        hashes, own = rank.engine.hashes(request), rank.engine.cached_blocks(request)
        data = msgspec.json.encode(_BlocksWanted(hashes, own, self.config.kv_hash))
        timeout = aiohttp.ClientTimeout(total=self._seconds(len(hashes)) + ANSWER_S)
        try:
            async with self._http.post(
                f"http://{transfer.peer}{PULL_PATH}", data=data, timeout=timeout, raise_for_status=True
            ) as answer:
                held = min(int(await answer.read()), len(hashes))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            held = 0
        counters = rank.engine.counters
        if held <= own:
            counters.failed_transfers += 1
            return request
        counters.transfers += 1
        counters.transferred_blocks += held - own
        return structs.replace(request, remote_tokens=held * self.config.engine.block_size)

    # --- the shared directory ---

    async def _found(self, rank: Rank, request: EngineRequest) -> EngineRequest:
        hashes = rank.engine.hashes(request)
        stored = 0
        while stored < len(hashes) and self._file(hashes[stored]).exists():
            stored += 1
        missing = stored - rank.engine.cached_blocks(request)
        if missing <= 0:
            return request
        await asyncio.sleep(self._seconds(missing))
        return structs.replace(request, remote_tokens=stored * self.config.engine.block_size)

    def _store(self, hashes: Sequence[int]) -> None:
        for each in hashes:
            self._file(each).touch()

    def _file(self, engine_hash: int) -> Path:
        assert self.config.kv_store is not None
        return self.config.kv_store / f"{engine_hash ^ lora_key(self.config.kv_hash):016x}"
