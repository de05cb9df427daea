"""Every example of docs/library.md runs, with a real NATS server and mockers where it needs them."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kvrouter.worker.options import worker_id_of
from tests.client.examples import DOCS, block, blocks, output_of
from tests.e2e.fleet import Fleet, running_fleet
from tests.frontend.workers import until


@dataclass(frozen=True, slots=True)
class Place:
    """The NATS server and namespace of a fleet."""

    nats: str
    namespace: str
    fleet: Fleet

    async def output_of(self, part: str) -> list[str]:
        """The output of the example that contains `part`."""
        return await output_of(block("library.md", part), nats=self.nats, namespace=self.namespace)


@pytest.fixture
async def place(nats_url: str) -> AsyncIterator[Place]:
    """One frontend, two mockers."""
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, frontends=1, mockers=2) as fleet:
        yield Place(nats_url, namespace, fleet)


def test_all_are_tried() -> None:
    """Each example has a test below."""
    assert 8 == len(blocks("library.md"))


async def test_hashes() -> None:
    """Hashes are the published ones, and overlap is per target and tier."""
    said = await output_of(block("library.md", "index = BlockIndex()"))

    assert "[10823191264391160519, 1219978239041041138]" == said[0]
    assert "[(Target(worker_id='w1', rank=0), 3), (Target(worker_id='w2', rank=1), 1)]" == said[1]
    assert "[1, 2]" == said[2]
    assert "{Target(worker_id='w1', rank=0): 2}" == said[3]


async def test_indexer_on_nats(place: Place) -> None:
    """The indexer finds the worker that has computed a prompt, and its rank."""
    before, by_worker, by_target = await place.output_of("KvIndexer(16).subscribe")

    workers = {worker_id_of(mocker.url) for mocker in place.fleet.mockers}
    assert "{}" == before
    assert by_worker in {f"{{'{worker}': 4}}" for worker in workers}
    assert "rank=0): 4}" in by_target


async def test_indexer_by_hand() -> None:
    """Frames carried by hand, one of them lost and replayed."""
    assert ["{'w1': 3}", "{'w1': 2}"] == await output_of(block("library.md", "indexer.replayed"))


async def test_approximate_indexer() -> None:
    """Blocks that were sent count as held until the worker is removed."""
    said = await output_of(block("library.md", "process_routing_decision"))

    assert ["{'w1': 3, 'w2': 2}", "{'w2': 2}"] == said


async def test_router_on_nats(place: Place) -> None:
    """The second request finds the blocks of the first; nothing stays booked, here or at the frontend."""
    first, second = await place.output_of("KvRouter.connect")

    worker = first.split()[0]
    assert [f"{worker} had 0 of 5 blocks", f"{worker} had 4 of 5 blocks"] == [first, second]
    routers = place.fleet.frontends[0].replica.routers.values()
    await until(lambda: not any(router.pool.active.owners() for router in routers), "all bookings end")


async def test_router_by_hand() -> None:
    """Load spreads requests, overlap attracts them, and `explain` lists every term."""
    spread, drawn, *terms = await output_of(block("library.md", "router.explain"))

    assert "True" == spread
    assert "True 10" == drawn
    assert ["w1/0", "w2/0"] == [line.split()[0] for line in terms]
    assert all("'cost'" in line for line in terms)


async def test_simulator() -> None:
    """A replica learns of its peer's booking from the frame it receives."""
    assert ["True"] == await output_of(block("library.md", "b.receive"))


async def test_outside_simulator() -> None:
    """docs/examples/outside_simulator.py: auto has better times, more is cached, and runs repeat."""
    example = (DOCS / "examples/outside_simulator.py").read_text()
    fewer = example.replace("QUESTION_TOKENS = 1000,", "QUESTION_TOKENS = 300,")
    assert fewer != example
    first, second = [await output_of(fewer) for _ in range(2)]

    auto, one = ([float(number) for number in re.findall(r"(?<= )[\d.]+(?=[ %])", line)] for line in first)
    assert first == second
    assert auto[0] < one[0]
    assert auto[1] < one[1]
    assert auto[2] > one[2]


async def test_client(place: Place) -> None:
    """A stream, a whole answer, and a chosen worker."""
    workers, *chunks, answer, direct = await place.output_of("client.round_robin")

    assert 2 == workers.count("'") // 2
    assert all(chunk.startswith("chunk") for chunk in chunks)
    assert "chunk length" in chunks
    assert ["answer 2", "direct 3"] == [answer, direct]
