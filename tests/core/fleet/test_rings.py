"""Dropped pools are freed at once: old objects are kept from the garbage collector."""

from __future__ import annotations

import gc
import weakref

from kvrouter.core.wire.ids import PoolId
from tests.core.replicas import ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import card

OTHER_POOL = PoolId("qwen-0a1b2c3d")


def test_pools_that_end_are_freed() -> None:
    """A pool's router and tables are in no reference cycle, so reference counting frees them."""
    replica = new_replica()
    receive_worker(replica, card("w1"))
    receive_worker(replica, card("w2"), pool=OTHER_POOL)
    router = replica.routers[OTHER_POOL]
    left = [weakref.ref(one) for one in (router, router.pool, router.feed.source)]
    del router
    gc.collect()
    gc.disable()
    try:
        receive_worker(replica, "w2", state="leave", pool=OTHER_POOL)
        for _ in range(3 * ROUNDS):
            replica.work(0.0)
            rounds(replica, 1)

        assert OTHER_POOL not in replica.routers
        assert [None, None, None] == [one() for one in left]
    finally:
        gc.enable()
