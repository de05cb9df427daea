"""Prefill and decode apart as SGLang 0.5.23 does it: both halves of a request meet in a room.

    P's half ──enter──> Room <──POST /mock/kv/room── D's half, which waits
                         │ both are there: P computes ──taken──> D reads, P answers
                         └── a second half of one kind, or one that leaves: both fail

The prefill engine has the rooms. One half waits for the other for WAIT_S.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta, Struct, structs

from kvrouter.errors import BadRequestError, KvRouterError
from kvrouter.lab.mocker.bodies import Transfer, parse
from kvrouter.lab.mocker.engine import EngineRequest

ROOM_PATH = "/mock/kv/room"
# SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and …_WAITING_TIMEOUT.
WAIT_S = 300.0
# Rooms that are remembered when they have ended: none is used again.
MOST_ROOMS = 10_000
_FAILED = 409


class TransferFailedError(KvRouterError):
    def __init__(self, room: object) -> None:
        super().__init__(f"KVTransferError(bootstrap_room={room})")


class _Join(Struct, frozen=True):
    """A decode mocker comes into a room, and reads for some seconds."""

    room: int
    rank: int | None
    kv_hash: str
    seconds: Annotated[float, Meta(ge=0, le=600)]


class _Room:
    """`computed` has P's count of cached tokens; `read` is done when D has the blocks."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.halves: list[str] = []
        self.rank: int | None = None
        self.decode_is_here = loop.create_future()
        self.computed: asyncio.Future[int] = loop.create_future()
        self.read = loop.create_future()

    def come(self, half: str) -> None:
        """Raises TransferFailedError if one has come before."""
        if half in self.halves:
            self.fail()
            raise TransferFailedError(half)
        self.halves.append(half)

    def fail(self) -> None:
        for one in (self.decode_is_here, self.computed, self.read):
            if not one.done():
                one.set_exception(TransferFailedError("it failed"))
                one.exception()  # is not awaited by all


class Rooms:
    """Of one mocker: those where it computes, and how it comes into those of others."""

    def __init__(self, kv_hash: str) -> None:
        self._kv_hash = kv_hash
        self._rooms: dict[int, _Room] = {}

    def _room(self, number: int) -> _Room:
        if number not in self._rooms:
            if len(self._rooms) >= MOST_ROOMS:
                self._rooms.pop(next(iter(self._rooms))).fail()
            self._rooms[number] = _Room()
        return self._rooms[number]

    async def enter(self, request: EngineRequest, transfer: Transfer, rank: int) -> EngineRequest:
        """P's half: waits for the other, and then computes one token. Raises TransferFailedError."""
        room = self._room(_number(transfer))
        room.come("prefill")
        room.rank = rank
        try:
            async with asyncio.timeout(WAIT_S):
                await room.decode_is_here
        except BaseException:
            room.fail()
            raise
        return structs.replace(request, max_tokens=1, keeps_blocks=True)

    async def taken(self, transfer: Transfer, cached_tokens: int) -> None:
        """P's half has its token: waits until the other has the blocks. Raises TransferFailedError."""
        room = self._room(_number(transfer))
        if not room.computed.done():
            room.computed.set_result(cached_tokens)
        await room.read

    def left(self, transfer: Transfer) -> None:
        """P's half has ended, well or not."""
        self._room(_number(transfer)).fail()

    async def joined(self, http: web.Request) -> web.Response:
        """POST /mock/kv/room: answers when the blocks are read, with P's count of cached tokens."""
        asked = parse(_Join, await http.read())
        room = self._room(asked.room)
        try:
            room.come("decode")
            if not room.decode_is_here.done():
                room.decode_is_here.set_result(None)
            cached_tokens = await asyncio.shield(room.computed)
            if asked.kv_hash != self._kv_hash or asked.rank not in {None, room.rank}:
                raise TransferFailedError(asked.room)
            await asyncio.sleep(asked.seconds)
            if room.read.done():
                raise TransferFailedError(asked.room)
            room.read.set_result(None)
        except TransferFailedError:
            room.fail()
            return web.Response(status=_FAILED)
        except asyncio.CancelledError:  # the decode engine has left
            room.fail()
            raise
        return web.json_response(cached_tokens)

    async def join(self, client: aiohttp.ClientSession, transfer: Transfer, seconds: float) -> int:
        """D's half: waits until it has the blocks; returns P's cached tokens. Raises TransferFailedError."""
        number, host = _number(transfer), str(transfer.bootstrap_host)
        at = f"[{host}]" if ":" in host else host
        rank = transfer.disagg_prefill_dp_rank
        data = msgspec.json.encode(_Join(number, rank, self._kv_hash, seconds))
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        url = f"http://{at}:{transfer.bootstrap_port}{ROOM_PATH}"
        try:
            async with client.post(url, data=data, timeout=timeout) as answer:
                if answer.ok:
                    cached: int = msgspec.json.decode(await answer.read(), type=int)
                    return cached
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            pass
        raise TransferFailedError(number)


def _number(transfer: Transfer) -> int:
    room: Any = transfer.bootstrap_room
    if not isinstance(room, int):
        raise BadRequestError("Invalid request: Disaggregated request received without bootstrap room id.")
    return room
