"""Tenants that wait for a worker: whose turn it is, with counts that replicas share."""

from __future__ import annotations

import asyncio

from tests.frontend.clients import ask
from tests.frontend.fleet import FleetOf
from tests.frontend.test_admission_queue import STEP, SYNCED
from tests.frontend.test_keys import Ring, ring
from tests.frontend.workers import until
from tests.relay.gates import Crowd, Gate, numbered

__all__ = ["ring"]


async def test_tenants_take_turns(fleet_of: FleetOf, ring: Ring) -> None:
    """Two requests of one wait, then two of another: they go in turns. What peers served counts here."""
    greedy, modest = ring.add("greedy"), ring.add("modest")
    gate = Gate()
    async with fleet_of(*ring.flags, *SYNCED, scripts=(gate.script,), replicas=2, **STEP) as fleet:
        await until(lambda: all(each.replica.peers for each in fleet.frontends), "they know each other")
        here, other = fleet.frontends
        for number in range(1, 4):  # at the other replica, one after the other
            gate.permits.release()
            assert 200 == (await ask(other.url, numbered(number), greedy)).status
        await until(lambda: here.replica.tenants.served("greedy") >= 3 * 64, "it was told here")
        first = asyncio.create_task(ask(here.url, numbered(0), modest))
        await until(lambda: gate.arrived == [1, 2, 3, 0], "the worker is full")
        crowd = Crowd(fleet)
        for number, key in ((11, greedy), (12, greedy), (21, modest), (22, modest)):
            await crowd.add(number, key)
        for count in range(5, 9):
            gate.permits.release()
            await gate.until_sent(count)
        gate.open()

        assert 200 == (await first).status
        assert [200] * 4 == await crowd.statuses()
        assert [11, 21, 12, 22] == gate.arrived[4:]  # of equal turns the first that came
