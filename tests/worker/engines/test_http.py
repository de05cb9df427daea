"""What an engine reports about itself, well-formed or not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.bounded_answers import MOST_BYTES
from kvrouter.worker.engines.http import EngineError, EngineGoneError, EngineHttp, Models, read_models
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
        async with EngineHttp.open(server.url, tls_ca=authority.file) as engine:
            assert "0.32.0" == await engine.version()
            assert not await engine.trouble()
        async with EngineHttp.open(server.url) as engine:
            assert await engine.trouble()
            with pytest.raises(EngineError, match=r"certificate is not accepted.*--worker-tls-ca") as refused:
                await engine.models()

    assert not isinstance(refused.value, EngineGoneError)
    assert "operation not permitted" not in str(refused.value)
