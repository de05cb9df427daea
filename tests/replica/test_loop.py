"""The replica on the bus: bookings, assumed blocks and members while requests run."""

from __future__ import annotations

from kvrouter.frontend.server.background import book_progress
from tests.frontend.fleet import BODY, POOL, STREAM, FleetOf
from tests.frontend.workers import (
    OK,
    SSE_HEAD,
    answer,
    chunk,
    event,
    says_and_stalls,
    until,
)
from tests.replica.agents import blocks

SYNCED = ("--router-mode", "kv", "--router-replica-sync")


async def test_output_blocks(fleet_of: FleetOf) -> None:
    """Blocks that an answer fills are booked as it grows."""
    texts = [chunk(event(str(number))) for number in range(40)]
    async with fleet_of("--router-mode", "kv", scripts=(says_and_stalls(SSE_HEAD, *texts),)) as fleet:
        pool = fleet.frontend.replica.routers[POOL].pool
        (target,) = pool.targets
        async with fleet.connected() as client:
            client.send(STREAM)
            await client.read_until(texts[-1])
            frontend = fleet.frontend
            await book_progress(frontend.completions.in_flight, frontend.replica_loop.publishing)

            assert 64 // 16 + 40 // 16 == pool.active.blocks(target)


async def test_predicted_end_of_prefill(fleet_of: FleetOf) -> None:
    """An answer that is not streamed has no first token: the end of its prefill is predicted."""
    async with fleet_of("--router-mode", "kv", scripts=(says_and_stalls(),)) as fleet:
        router = fleet.frontend.replica.routers[POOL]
        pool = router.pool
        (target,) = pool.targets
        router.tables.rates.observe(target, 64, 0.01)
        async with fleet.connected() as client:
            client.send(BODY)
            await until(lambda: pool.active.requests(target), "it runs")
            await until(lambda: pool.active.charged_tokens(target) == 0, "its prefill is over")


async def test_worker_leaves(fleet_of: FleetOf) -> None:
    """A worker that has left gets no request."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        fleet.announce(fleet.workers[0], state="leave")
        await until(lambda: len(fleet.targets(fleet.frontend)) == 1, "it is gone")
        for _ in range(3):
            await fleet.ask()

        assert ["w1"] * 3 == fleet.requests


async def test_approximate_entries(fleet_of: FleetOf) -> None:
    """Without KV events every replica assumes the blocks of a request on its worker."""
    flags = (*SYNCED, "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(OK,), replicas=2) as fleet:
        first = await fleet.ask()
        pools = [frontend.replica.routers[POOL].pool for frontend in fleet.frontends]
        await until(lambda: [len(pool.index) for pool in pools] == [4, 4], "both assume the blocks")
        second = await fleet.ask()

        assert ["0", "3"] == [each.header("x-kvrouter-overlap-blocks") for each in (first, second)]


async def test_no_entry_of_a_failure(fleet_of: FleetOf) -> None:
    """A request that failed leaves no assumed blocks."""
    flags = ("--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(says_and_stalls(answer(b"{}", 500)),)) as fleet:
        await fleet.ask()

        assert 0 == blocks(fleet)
