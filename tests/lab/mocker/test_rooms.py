"""Two mockers that meet in rooms, as SGLang's engines do, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker

ALONE = MockerConfig(EngineConfig(num_blocks=64, max_model_len=1024), speedup=10_000)
PREFILL = replace(ALONE, kv_connector="sglang", role="prefill", kv_transfer_ms_per_block=0)
DECODE = replace(PREFILL, role="decode")
PROMPT = list(range(100))
Answer = tuple[int, Any]


class Pair:
    """A prefill and a decode mocker."""

    def __init__(self, http: aiohttp.ClientSession, prefill: Mocker, decode: Mocker) -> None:
        self.http, self.prefill, self.decode = http, prefill, decode

    async def ask(self, mocker: Mocker, room: int | None, **more: object) -> Answer:
        port = int(self.prefill.url.rpartition(":")[2])
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        body = {"prompt": PROMPT, "max_tokens": 8, **fields, "disagg_prefill_dp_rank": 0} | more
        async with self.http.post(f"{mocker.url}/v1/completions", json=body) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def both(self, room: int, **more: object) -> tuple[Answer, Answer]:
        first, second = await asyncio.gather(
            self.ask(self.prefill, room, **more), self.ask(self.decode, room, **more)
        )
        return first, second


@asynccontextmanager
async def pair(prefill: MockerConfig = PREFILL, decode: MockerConfig = DECODE) -> AsyncIterator[Pair]:
    async with (
        running_mocker(prefill) as first,
        running_mocker(decode) as second,
        aiohttp.ClientSession() as http,
    ):
        yield Pair(http, first, second)


def said(answer: Answer) -> tuple[int, str, int]:
    status, body = answer
    assert 200 == status, body
    usage = body["usage"]
    return (
        usage["completion_tokens"],
        body["choices"][0]["text"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


async def test_a_room() -> None:
    """The prefill engine answers one token, the other as one engine alone, with the prefill's count."""
    async with pair() as engines, running_mocker(ALONE) as alone:
        _, whole, _ = said(await engines.ask(alone, None))
        for room, cached in ((7, 0), (8, 96)):
            first, second = await engines.both(room)
            assert 1 == said(first)[0]
            assert (8, whole, cached) == said(second)
        for one in (engines.prefill, engines.decode):
            one.engine.check()
            assert 0 == one.engine.cache.used_blocks


async def test_one_half_waits() -> None:
    """Neither half is answered without the other, and none computes."""
    async with pair() as engines:
        for first, second in ((engines.prefill, engines.decode), (engines.decode, engines.prefill)):
            room = id(first)
            waiting = asyncio.create_task(engines.ask(first, room))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            assert 0 == engines.prefill.engine.cache.used_blocks
            await engines.ask(second, room)
            assert 200 == (await waiting)[0]


async def test_a_duplicate_fails_both() -> None:
    """A second request in a room fails itself and the one that waits there, and nothing comes later."""
    async with pair() as engines:
        waiting = asyncio.create_task(engines.ask(engines.prefill, 5))
        await asyncio.sleep(0.02)
        assert 500 == (await engines.ask(engines.prefill, 5))[0]
        assert 500 == (await waiting)[0]
        assert 500 == (await engines.ask(engines.decode, 5))[0]

        assert [200, 200] == [status for status, _ in await engines.both(6)]
        assert [500, 500] == [status for status, _ in await engines.both(6)]


async def test_a_half_that_leaves() -> None:
    """Its room is lost: the other one fails."""
    async with pair() as engines:
        for first, second in ((engines.prefill, engines.decode), (engines.decode, engines.prefill)):
            room = id(second)
            leaving = asyncio.create_task(engines.ask(first, room))
            await asyncio.sleep(0.05)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await asyncio.sleep(0.05)
            status, body = await engines.ask(second, room)
            assert (500, True) == (status, "KVTransferError" in body["error"]["message"])


async def test_no_room() -> None:
    """SGLang's 400."""
    async with pair() as engines:
        for one in (engines.prefill, engines.decode):
            status, body = await engines.ask(one, None)
            assert (400, True) == (status, "without bootstrap room id" in body["error"]["message"])


async def test_wrong_rank_or_hash() -> None:
    async with pair(decode=replace(DECODE, kv_hash="other")) as engines:
        assert [500, 500] == [status for status, _ in await engines.both(1)]
    async with pair() as engines:
        assert [500, 500] == [status for status, _ in await engines.both(1, disagg_prefill_dp_rank=1)]


async def test_no_prefill_engine() -> None:
    async with pair() as engines:
        status, _ = await engines.ask(engines.decode, 1, bootstrap_port=1)
        assert 500 == status
        stream = {"stream": True}
        _, text = await engines.ask(engines.decode, 2, bootstrap_port=1, **stream)
        assert "KVTransferError" in text
