"""The relay in both versions: streams passed on by Python alone, and by C from their second chunk on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvrouter.core.native import versions
from kvrouter.relay import exchange
from kvrouter.relay.streams import Streams


@pytest.fixture(params=versions.CORES)
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The clients' sockets that C has passed on to; with the Python version it stays empty."""
    lent: list[int] = []
    add = Streams.add

    def counted(self: Streams, worker: asyncio.Transport, client: int, *more: Any) -> Any:
        lent.append(client)
        return add(self, worker, client, *more)

    before = versions.in_use()
    if request.param == versions.NATIVE and not Streams().is_native:
        pytest.skip("not built here")
    monkeypatch.setattr(exchange, "PYTHON_CHUNKS", 1)
    monkeypatch.setattr(Streams, "add", counted)
    versions.choose(request.param)
    yield lent
    versions.choose(before)
    assert request.param == versions.NATIVE or not lent
