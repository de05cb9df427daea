"""What an engine says about itself, well-formed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.worker.engine_http import EngineError, EngineGoneError, EngineHttp, Models, read_models
from tests.certificates import Authority
from tests.worker.fake_engine import EngineServer


def test_models() -> None:
    """An entry with a parent is a LoRA adapter; the others are names of the base model."""
    base = b'{"id": "a", "parent": null, "max_model_len": 8}, {"id": "b"}'
    body = b'{"data": [' + base + b', {"id": "l", "parent": "a"}]}'

    assert Models(("a", "b"), ("l",), 8) == read_models(body)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": []}', b'{"data": [{"id": 1}]}', b"\xff"])
def test_no_models(body: bytes) -> None:
    """An answer without a base model is an error that says so."""
    with pytest.raises(EngineError, match="/v1/models"):
        read_models(body)


async def test_engine(free_port: Callable[[], int]) -> None:
    """Version, metrics and health are read over HTTP."""
    async with EngineServer.open(free_port()) as server, EngineHttp.open(server.url) as engine:
        assert "0.32.0" == await engine.version()
        assert 100 == (await engine.scrape()).device_blocks
        assert await engine.is_healthy()
        server.is_healthy = False
        assert not await engine.is_healthy()
        server.metrics = "vllm:num_requests_running{engine=\n"
        with pytest.raises(EngineError, match="/metrics is not in Prometheus"):
            await engine.scrape()


async def test_no_engine(free_port: Callable[[], int]) -> None:
    """Where nobody listens: not healthy, no version, and an error that names the path."""
    async with EngineHttp.open(f"http://127.0.0.1:{free_port()}") as engine:
        assert not await engine.is_healthy()
        assert not await engine.version()
        with pytest.raises(EngineError, match="/v1/models"):
            await engine.models()


async def test_https(free_port: Callable[[], int], tmp_path: Path) -> None:
    """An engine with a certificate of its own authority is asked over TLS by whoever is given that."""
    authority = Authority(tmp_path)
    async with EngineServer.open(free_port(), authority.door()) as server:
        async with EngineHttp.open(server.url, tls_ca=authority.file) as engine:
            assert "0.32.0" == await engine.version()
            assert await engine.is_healthy()
        async with EngineHttp.open(server.url) as engine:
            assert not await engine.is_healthy()
            with pytest.raises(EngineError, match=r"certificate is not accepted.*--worker-tls-ca") as refused:
                await engine.models()

    assert not isinstance(refused.value, EngineGoneError)
    assert "operation not permitted" not in str(refused.value)
