"""Policies of pools that come and go: each is refreshed while it is in use, and closed once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.wire.heartbeats import encode
from kvrouter.core.wire.ids import PoolId, RouterId
from kvrouter.policies import POLICIES
from kvrouter.policies.guarded import GuardedPolicy
from kvrouter.replica.policy_upkeep import PolicyUpkeep
from tests.core.worlds import W1, card, fixed, worker_beat
from tests.frontend.workers import turns, until
from tests.policies.guarded_classes import Fails


class Fleeting(Fails):
    """Counts its calls; every hook but refresh fails."""

    def __init__(self) -> None:
        self.refreshed = self.closed = 0

    async def refresh(self) -> None:
        self.refreshed += 1

    def close(self) -> None:
        self.closed += 1
        super().close()


@contextlib.asynccontextmanager
async def looked_after(policy: BuiltInPolicy) -> AsyncIterator[tuple[Replica, PolicyUpkeep]]:
    """A replica with one pool, and its upkeep running."""
    replica = Replica(
        ReplicaSettings(),
        RouterId("me"),
        1,
        lambda _pool: RouterRules(policy, fixed(0.0)),
        chance=fixed(0.5),
    )
    replica.worker_heartbeat(W1, encode(worker_beat(card("w1"), pool=PoolId("p"))), 0.0)
    upkeep = PolicyUpkeep(replica)
    task = asyncio.create_task(upkeep.run())
    yield replica, upkeep
    upkeep.close()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def refreshes() -> list[asyncio.Task[Any]]:
    """The tasks that refresh policies."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("refresh ")]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.replica.policy_upkeep.LOOK_S", 0.001)


async def test_pool_that_goes() -> None:
    """Its policy is closed and no longer refreshed; its mistakes stay in the metrics."""
    policy = Fleeting()
    async with looked_after(GuardedPolicy(policy, "fleeting")) as (replica, upkeep):
        await until(lambda: policy.refreshed > 1)
        (refresh,) = refreshes()
        replica.worker_heartbeat(W1, encode(worker_beat("w1", state="leave", pool=PoolId("p"))), 1.0)
        for _ in range(20):
            replica.next_round(2.0)
        assert {} == replica.routers
        await until(lambda: policy.closed)
        await until(refresh.cancelled)
        counted = {labels["where"]: value for *_, labels, value in upkeep.samples()}
        assert {"on_workers": 2.0, "on_worker_removed": 1.0, "close": 1.0} == counted
    assert 1 == policy.closed


async def test_built_in_mode_needs_no_upkeep() -> None:
    """It has neither a task nor a metric."""
    async with looked_after(POLICIES["kv"]()) as (_, upkeep):
        await turns()
        assert [] == refreshes()
        assert [] == list(upkeep.samples())
