"""GET /fleet/stream: snapshots as server-sent events."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kvrouter.errors import TooManyViewersError
from kvrouter.observe.dashboard import stream as module
from kvrouter.observe.dashboard.stream import FleetStream
from kvrouter.relay.exchange import ClientSide
from kvrouter.relay.request import Request, RequestHead
from tests.frontend.clients import connected
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.workers import until_found
from tests.observe.test_document import view_of

END = b"\n\n"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)


async def test_snapshots_one_after_another(fleet_of: FleetOf) -> None:
    """Each has what /fleet has, its targets as a table; on the admin listener until the client leaves."""
    async with fleet_of(ranks=2) as fleet:
        whole = (await fleet.get("/fleet")).json
        async with connected(fleet.frontend.admin_url) as client:
            client.writer.write(b"GET /fleet/stream HTTP/1.1\r\nhost: t\r\n\r\n")
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert (await _event(client)).startswith(b"event: history\ndata: [{")
            seen = [_read(await _event(client)) for _ in range(3)]

        assert b"content-type: text/event-stream" in head.lower()
        assert all(one.keys() == whole.keys() for one in seen)
        table = seen[-1]["targets"]
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        assert [_without_time(row) for row in whole["targets"]] == [_without_time(row) for row in rows]
        assert seen[0]["time"] < seen[1]["time"] < seen[2]["time"]


async def test_one_snapshot_for_all_viewers(fleet_of: FleetOf) -> None:
    """Further viewers cost no snapshots; beyond the limit they get a 503; one that leaves makes room."""
    async with fleet_of() as fleet:
        made = 0
        whole = await _snapshot(fleet)

        async def snapshot() -> Any:
            nonlocal made
            made += 1
            return whole

        stream = FleetStream(snapshot, lambda: b"[]")
        viewers = [(await stream.view(_request())).events for _ in range(module.MOST_VIEWERS)]
        for each in viewers:
            assert b"event: history\ndata: []\n\n" == await anext(each)
        for _ in range(4):
            assert 1 == len({await one for one in [asyncio.ensure_future(anext(each)) for each in viewers]})

        assert 4 == made
        with pytest.raises(TooManyViewersError, match=f"{module.MOST_VIEWERS} dashboards"):
            await stream.view(_request())
        await viewers.pop().aclose()
        viewers.append((await stream.view(_request())).events)
        assert await anext(viewers[-1])
        for each in viewers:
            await each.aclose()


async def test_a_viewer_that_leaves_makes_room(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On both ports."""
    monkeypatch.setattr(module, "MOST_VIEWERS", 1)
    (tmp_path / "key").write_text("k")
    async with fleet_of("--admin-key-file", str(tmp_path / "key")) as fleet:
        for url in (fleet.url, fleet.frontend.admin_url, fleet.url):
            await until_found(partial(_is_served, url), what="the viewer before counts no longer")


async def _is_served(url: str) -> bool:
    """Whether there is room for a viewer, which leaves again."""
    async with connected(url) as client:
        client.writer.write(b"GET /fleet/stream HTTP/1.1\r\nhost: t\r\nauthorization: Bearer k\r\n\r\n")
        return b" 200 " in await client.reader.readline() and bool(await client.reader.readuntil(b"data: {"))


async def test_a_viewer_that_does_not_read(fleet_of: FleetOf) -> None:
    """It skips events; others get theirs, and what waits for it is bounded."""
    async with fleet_of(ranks=64) as fleet, connected(fleet.frontend.admin_url) as idle:
        idle.writer.write(b"GET /fleet/stream HTTP/1.1\r\nhost: t\r\n\r\n")
        async with connected(fleet.frontend.admin_url) as client:
            client.writer.write(b"GET /fleet/stream HTTP/1.1\r\nhost: t\r\n\r\n")
            await client.reader.readuntil(b"\r\n\r\n")
            await _event(client)  # history
            times = [_read(await _event(client))["time"] for _ in range(20)]

        assert times == sorted(times)
        assert 200 == (await fleet.get("/workers")).status


async def _event(client: Any) -> bytes:
    """The next one; the chunks of the transfer are taken off."""
    async with asyncio.timeout(5):
        data = b""
        while not data.endswith(END):
            size = int((await client.reader.readuntil(b"\r\n")).strip(), 16)
            data += (await client.reader.readexactly(size + 2))[:-2]
        return data


def _read(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    return dict(json.loads(event.removeprefix(b"data: ")))


def _without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "stale_s"}


async def _snapshot(fleet: Fleet) -> Any:
    return await view_of(fleet).snapshot()


def _request() -> Request:
    head = RequestHead("GET", "/fleet/stream", [], wants_keep_alive=True)
    return Request(head, cast(ClientSide, None))  # the view does not write
