"""Why a server gives no answer."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter.bounded_answers import engine_connector, is_alive, no_answer
from kvrouter.tls import trusting


async def reason(url: str) -> str:
    """Why the server at `url` does not answer."""
    async with aiohttp.ClientSession(connector=engine_connector(trusting(None))) as http:
        with pytest.raises(aiohttp.ClientError) as caught:
            await http.get(url)
    return no_answer(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_port_without_a_server(scheme: str, host: str, free_port: Callable[[], int]) -> None:
    """The words of the system; aiohttp's own text has `ssl:default` for plain HTTP, too."""
    assert "connection refused" == await reason(f"{scheme}://{host}:{free_port()}")


async def test_unknown_name() -> None:
    """A name that DNS does not know; its error numbers are not the system's."""
    said = await reason("http://nowhere.invalid")

    assert said
    assert "ssl" not in said
    assert "unknown error" not in said


async def test_tls_where_the_server_has_none() -> None:
    """The cause of an error of TLS stays in the text."""
    async with TestServer(web.Application()) as server:
        assert "WRONG_VERSION_NUMBER" in await reason(f"https://127.0.0.1:{server.port}")


def test_alive() -> None:
    """An engine with a key, or without a health path, is alive; one with a server error is not."""
    assert all(map(is_alive, (200, 204, 301, 401, 403, 404, 405, 501)))
    assert not any(map(is_alive, (500, 502, 503, 504)))
