"""`kvrouter index`: lists and compares the indexes of real frontends."""

from __future__ import annotations

import asyncio
import io
import os
import sys

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import Stored
from kvrouter.observe.replica import ReplicaError, open_replicas
from kvrouter.observe.settings import ReplicaAccess
from kvrouter.observe.verify.index_command import diff, differences, dump, main
from tests.frontend.fleet import FleetOf
from tests.frontend.workers import until
from tests.replica.agents import HASHES, Agent

W0 = Target(WorkerId("w0"))


async def test_dump_and_diff(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each block; replicas with equal feeds are equal, and a missing block is named.

    A reader that has enough, as `head`, ends the dump without a word.
    """
    async with fleet_of("--router-mode", "kv", replicas=2, publishes_events=True) as fleet:
        agent = Agent(fleet)
        agent.beat()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])))
        indexes = [router.pool.index for each in fleet.frontends for router in each.replica.routers.values()]
        await until(lambda: [3, 3] == [index.blocks(W0) for index in indexes], "both have the blocks")
        urls = [each.admin_url for each in fleet.frontends]

        async with open_replicas(urls, ReplicaAccess()) as (first, second):
            out = io.StringIO()
            await dump(first, [], out)
            assert sorted(f"w0/0\tdevice\t{hash_:016x}" for hash_ in HASHES[:3]) == sorted(
                out.getvalue().splitlines()
            )
            assert (set(), set()) == await diff(first, second, ["w0"], 0)
            indexes[1].remove(W0, HASHES[2:3])
            only = await diff(first, second, [], 0)
        (line,) = differences("U", only[0])
        assert (f"w0/0: 1 block only in U: device:{HASHES[2]:016x}", set()) == (line, only[1])
        flags = [f"--replica={url}" for url in urls]
        assert 1 == await asyncio.to_thread(main, ["diff", *flags, "--timeout-s=0"])
        assert 2 == await asyncio.to_thread(main, ["dump", flags[0], "--worker=w9"])
        assert (
            "/workers/w9/blocks?after=0 answers 404: the replica knows no such worker"
            in capsys.readouterr().err
        )
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as closed:
            monkeypatch.setattr(sys, "stdout", closed)
            assert 0 == await asyncio.to_thread(main, ["dump", flags[0]])


async def test_answer_that_breaks_off() -> None:
    """A page without its last line is an error: what came is not everything."""

    async def blocks(_: web.Request) -> web.Response:
        return web.Response(text='{"router_id": "r"}\n')

    app = web.Application()
    app.router.add_get("/workers/w/blocks", blocks)
    async with (
        TestServer(app) as server,
        open_replicas([str(server.make_url("")).rstrip("/")], ReplicaAccess()) as (replica,),
    ):
        with pytest.raises(ReplicaError, match="broke off"):
            await dump(replica, ["w"], io.StringIO())


@pytest.mark.parametrize("words", [["dump"], ["diff", "--replica=a:1"], ["diff", *["--replica=a:1"] * 2]])
def test_how_many_replicas(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One to dump, two different ones to compare."""
    assert 2 == main(words)
    assert "needs" in capsys.readouterr().err


def test_replica_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and exit status 2."""
    assert 2 == main(["dump", "--replica=127.0.0.1:1"])
    assert "127.0.0.1:1 cannot be reached" in capsys.readouterr().err
