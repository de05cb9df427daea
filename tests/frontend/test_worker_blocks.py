"""GET /workers/ID/blocks: a worker's part of the index, in pages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import Stored
from kvrouter.frontend.operators.worker_blocks import WorkerBlocks
from tests.frontend.clients import get
from tests.frontend.fleet import POOL, Fleet, FleetOf
from tests.frontend.workers import until
from tests.replica.agents import HASHES, Agent, blocks

KV = ("--router-mode", "kv")
BLOCKS = "/workers/w0/blocks"
TEXTS = [f"{hash_:016x}" for hash_ in HASHES]


async def pages(fleet: Fleet, limit: int) -> list[list[dict[str, Any]]]:
    """The lines of each page."""
    found: list[list[dict[str, Any]]] = []
    after: int | None = 0
    while after is not None:
        answer = await fleet.get(f"{BLOCKS}?limit={limit}&after={after}")
        assert (200, "application/x-ndjson") == (answer.status, answer.header("content-type"))
        found.append([json.loads(line) for line in answer.body.splitlines()])
        after = found[-1][-1]["next"]
    return found


@pytest.mark.parametrize("limit", [1, 100])
async def test_pages(fleet_of: FleetOf, limit: int) -> None:
    """All pages together have each block once, with its tier; first and last line have the frame."""
    async with fleet_of(*KV, publishes_events=True, tiers={"device": 9, "host": 9}) as fleet:
        agent = Agent(fleet)
        agent.beat()
        agent.publish(Stored(1, None, pack_hashes(HASHES[:3])), Stored(0, None, pack_hashes(HASHES[:1])))
        await until(lambda: blocks(fleet) == 3, "the frame is applied")

        found = await pages(fleet, limit)

    rows = [(row["tier"], hash_) for page in found for row in page[1:-1] for hash_ in row["hashes"]]
    assert sorted([("device", TEXTS[0]), ("host", TEXTS[1]), ("host", TEXTS[2])]) == sorted(rows)
    assert (len(found) > 1) == (limit == 1)
    first, last = found[0][0], found[-1][-1]
    assert (str(POOL), "w0", 16) == (first["pool"], first["worker_id"], first["block_size"])
    (rank,) = first["ranks"]
    assert [("device", 1), ("host", 3)] == [(tier["tier"], tier["blocks"]) for tier in rank["tiers"]]
    assert ([rank], None) == (last["ranks"], last["next"])


async def test_made_between_requests(fleet_of: FleetOf) -> None:
    """Each shard is a step of its own, after which others go on."""
    async with fleet_of(*KV, publishes_events=True) as fleet:
        (pool,) = [router.pool for router in fleet.frontend.replica.routers.values()]
        worker = pool.workers[next(iter(pool.workers))]

        lines = list(WorkerBlocks(fleet.frontend.replica)._lines(pool, worker, 0, 10))

    assert pool.index.shards == lines.count(b"")


async def test_refused(fleet_of: FleetOf) -> None:
    """Other workers, paths and numbers have their errors; the clients' port has it only with the key."""
    async with fleet_of(*KV) as fleet:
        assert 404 == (await fleet.get("/workers/w9/blocks")).status
        assert 404 == (await fleet.get("/workers/w0")).status
        for query in ("limit=0", "limit=x", "after=-1"):
            answer = await fleet.get(f"{BLOCKS}?{query}")
            assert (400, True) == (answer.status, query.partition("=")[0] in answer.body.decode())
        assert 404 == (await get(fleet.url, BLOCKS)).status
