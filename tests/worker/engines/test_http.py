"""What an engine reports about itself, well-formed or not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.bounded_answers import MOST_BYTES
from kvrouter.tls import trusting
from kvrouter.worker.engines.http import (
    EngineError,
    EngineGoneError,
    EngineHttp,
    EngineStatusError,
    Models,
    read_models,
    remedy_of,
)
from tests.certificates import Authority
from tests.worker.fake_engine import EngineServer


def test_models() -> None:
    """An entry with a parent is a LoRA adapter; the others are names of the base model."""
    base = b'{"id": "a", "parent": null, "max_model_len": 8}, {"id": "b"}'
    body = b'{"data": [' + base + b', {"id": "l", "parent": "a"}]}'

    assert Models(("a", "b"), ("l",), 8) == read_models(body)


HUGE = b'{"data": [' + b",".join([b'{"id": "a"}'] * 5000) + b"]}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"data": []}',
        b'{"data": [{"id": 1}]}',
        b"\xff",
        b'{"data": [{"id": "\xff"}]}',
        b"[" * 100_000,
        HUGE,
        b'{"data": [{"id": "' + b"a" * 2000 + b'"}]}',
        b'{"data": [{"id": "two\\nlines"}]}',
        b'{"data": [{"id": "a", "max_model_len": -1}]}',
        b'{"data": [{"id": "a", "max_model_len": 1' + b"0" * 30 + b"}]}",
    ],
    ids=lambda body: body[:40],
)
def test_no_models(body: bytes) -> None:
    """An answer without a base model, or one that no card could carry, is an error with the reason."""
    with pytest.raises(EngineError, match="/v1/models"):
        read_models(body)


async def test_engine(free_port: Callable[[], int]) -> None:
    """Version, metrics and health are read over HTTP."""
    async with EngineServer.open(free_port()) as server, EngineHttp.open(server.url) as engine:
        assert "0.32.0" == await engine.version()
        assert 100 == (await engine.scrape()).device_blocks
        assert not await engine.trouble()
        server.is_healthy = False
        assert await engine.trouble()
        server.metrics = "vllm:num_requests_running{engine=\n"
        with pytest.raises(EngineError, match="/metrics is not in Prometheus"):
            await engine.scrape()


@pytest.mark.parametrize("status", [400, 404, 410, 500, 502, 503, 504])
async def test_only_health_answers(free_port: Callable[[], int], status: int) -> None:
    """An engine that answers 200 to /health and an error to /v1/models, which it had, serves nothing."""
    async with EngineServer.open(free_port()) as server, EngineHttp.open(server.url) as engine:
        await engine.models()
        server.status = status
        trouble = await engine.trouble()
        server.status = 200

        assert f"/v1/models answered {status}: this rank is retired" == str(trouble)
        assert await engine.trouble() is None


@pytest.mark.parametrize("status", [401, 403, 429])
async def test_refused_questions(free_port: Callable[[], int], status: int) -> None:
    """An agent whose key is old, or that asks too often, proves nothing about the engine."""
    async with EngineServer.open(free_port()) as server, EngineHttp.open(server.url) as engine:
        await engine.models()
        server.status = status

        assert await engine.trouble() is None


async def test_one_question_each(free_port: Callable[[], int]) -> None:
    """A probe asks each path once at most, and /v1/models not before it has ever answered."""
    async with EngineServer.open(free_port()) as server, EngineHttp.open(server.url) as engine:
        server.status = 404
        assert await engine.trouble() is None
        assert ["/health"] == server.asked
        server.status = 200
        await engine.models()
        server.asked.clear()
        assert await engine.trouble() is None

    assert ["/health", "/v1/models"] == server.asked


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (EngineGoneError("/v1/models: connection refused"), "start the engine"),
        (EngineStatusError("v1/models", 401), "--engine-api-key-file"),
        (EngineStatusError("v1/models", 403), "--engine-api-key-file"),
        (EngineStatusError("v1/models", 404), "--engine-url"),
        (EngineStatusError("v1/models", 503), "engine's log"),
        (EngineError("/metrics has no block size: give --kv-cache-block-size"), "what the reason names"),
    ],
    ids=str,
)
def test_each_trouble_has_a_remedy(error: EngineError, remedy: str) -> None:
    """What to do follows from how the engine fails."""
    assert remedy in remedy_of(error)


@pytest.mark.parametrize(
    "framing",
    [b"content-length: 1" + b"0" * 15, b"transfer-encoding: chunked", b"connection: close"],
    ids=["length", "chunked", "until close"],
)
async def test_endless_answer(framing: bytes) -> None:
    """An endless answer is abandoned at a limit, and the connection closed."""
    is_closed = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % framing)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                await writer.drain()
        is_closed.set()
        writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with EngineHttp.open(f"http://{host}:{port}") as engine:
            with pytest.raises(EngineError, match=f"/metrics: answers more than {MOST_BYTES} bytes"):
                await engine.scrape()
            async with asyncio.timeout(10):
                await is_closed.wait()


async def test_endless_interim_answers() -> None:
    """Endless 1xx answers are abandoned at once, also on the health path."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with EngineHttp.open(f"http://{host}:{port}") as engine:
            with pytest.raises(EngineError, match="interim answers"):
                await engine.scrape()
            assert await engine.trouble()


async def test_packed_answer() -> None:
    """A compressed answer, which was not requested, is not decompressed: it may become a gigabyte."""
    bomb = gzip.compress(b"#" * 1_000_000)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        assert b"accept-encoding: identity" in asked.lower()
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)
        writer.write(head + bomb)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with EngineHttp.open(f"http://{host}:{port}") as engine:
            assert bomb == await engine.find("metrics")


async def test_no_engine(free_port: Callable[[], int]) -> None:
    """Without an engine: not healthy, no version, and an error that names the path."""
    async with EngineHttp.open(f"http://127.0.0.1:{free_port()}") as engine:
        assert await engine.trouble()
        assert not await engine.version()
        with pytest.raises(EngineError, match="/v1/models"):
            await engine.models()


async def test_https(free_port: Callable[[], int], tmp_path: Path) -> None:
    """With the right authority the agent reaches an engine over TLS."""
    authority = Authority(tmp_path)
    async with EngineServer.open(free_port(), authority.server()) as server:
        async with EngineHttp.open(server.url, tls=trusting(authority.file)) as engine:
            assert "0.32.0" == await engine.version()
            assert not await engine.trouble()
        async with EngineHttp.open(server.url) as engine:
            assert await engine.trouble()
            with pytest.raises(EngineError, match=r"certificate is not accepted.*--worker-tls-ca") as refused:
                await engine.models()

    assert not isinstance(refused.value, EngineGoneError)
    assert "operation not permitted" not in str(refused.value)
