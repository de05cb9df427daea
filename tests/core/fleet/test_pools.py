"""Pools: when they begin and end, and which one serves a model."""

from __future__ import annotations

import itertools

import pytest

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.pools import NAMES_KEPT_S, pool_serving
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.errors import BadRequestError, NoWorkersError, UnknownModelError
from tests.core.replicas import ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, card, chain_from, prompt, request, worker_beat

CHAIN = chain_from(1000, 10)
OTHER_POOL = PoolId("qwen-0a1b2c3d")


def pool_of(pool_id: str, model: str, *loras: str) -> Pool:
    """A pool with one worker."""
    pool = Pool(PoolId(pool_id), PoolSettings())
    own = card(f"worker-{pool_id}", model=model, lora_names=loras)
    pool.update(WorkerId(own.worker_id), worker_beat(own))
    return pool


LLAMA, QWEN = pool_of("a-llama", "llama", "sql", "qwen"), pool_of("b-qwen", "qwen", "sql", "poet")


@pytest.fixture
def replica() -> Replica:
    """A synced replica without workers and peers."""
    return new_replica()


def test_pool_that_comes_back_continues_its_feed() -> None:
    """A pool that is not needed ends. If it comes back, its frames continue after the last seq."""
    replica = new_replica()
    receive_worker(replica, card())
    placed = replica.router(POOL).route(request(prompt(CHAIN)), 0.0)
    replica.router(POOL).feed.frames()
    receive_worker(replica, state="leave")
    rounds(replica, 3 * ROUNDS)
    assert [POOL] == list(replica.routers), "its booking is still in flight"

    replica.router(POOL).bookings.free(placed.key)
    replica.router(POOL).feed.frames()
    rounds(replica, 1)
    assert {POOL: 2} == replica.heartbeat("up", "").feeds, "peers may have missed the end"
    for _ in range(ROUNDS + 2):
        rounds(replica, 1)
        while replica.work(0.0):
            pass
    assert {} == replica.routers
    with pytest.raises(NoWorkersError, match="all have left"):
        replica.router_for("llama")
    replica.next_round(NAMES_KEPT_S + 1)
    with pytest.raises(NoWorkersError, match="no worker has been seen"):
        replica.router_for("llama")

    receive_worker(replica, card())
    assert {POOL: 2} == replica.heartbeat("up", "").feeds


def test_heartbeats_without_a_card_begin_no_pool(replica: Replica) -> None:
    """A worker's pool begins with its card."""
    receive_worker(replica, "w1")

    assert {} == replica.routers


def test_router_for_a_model(replica: Replica) -> None:
    """By model, by adapter, by None if there is one pool. An unknown name is a 404, a missing one a 400."""
    with pytest.raises(NoWorkersError):
        replica.router_for("llama")
    receive_worker(replica, card(lora_names=("adapterA",)))
    assert POOL == replica.router_for("llama").pool.id == replica.router_for(None).pool.id
    assert POOL == replica.router_for("adapterA").pool.id
    receive_worker(replica, card("w2", model="qwen"), pool=OTHER_POOL)

    with pytest.raises(UnknownModelError, match="llama, qwen"):
        replica.router_for("gpt")
    with pytest.raises(BadRequestError, match=r"must be given.*llama, qwen") as refusal:
        replica.router_for(None)
    assert 400 == refusal.value.status


@pytest.mark.parametrize("pools", list(itertools.permutations([LLAMA, QWEN])))
def test_same_answer_everywhere(pools: list[Pool]) -> None:
    """A base model comes before an adapter of its name; adapters of one name go to the first pool."""
    names = ("llama", "qwen", "sql", "poet")

    assert ["a-llama", "b-qwen", "a-llama", "b-qwen"] == [pool_serving(name, pools).id for name in names]


def test_name_of_several_pools() -> None:
    """The pool with most workers of a name serves it: one engine with a pool of its own takes nothing."""
    old, new = Pool(PoolId("k"), PoolSettings()), Pool(PoolId("a"), PoolSettings())
    for number in range(3):
        old.update(
            WorkerId(f"o{number}"), worker_beat(card(f"o{number}", model="k", served_names=("k", "k-v2")))
        )
    new.update(WorkerId("n"), worker_beat(card("n", model="k-v2", served_names=("k-v2",))))

    assert old is pool_serving("k-v2", [new, old])


def test_no_name() -> None:
    """One pool needs no name; with several the error lists the names."""
    assert LLAMA is pool_serving(None, [LLAMA])
    with pytest.raises(BadRequestError, match=r"several are served: llama, poet, qwen, sql"):
        pool_serving(None, [LLAMA, QWEN])


def test_unknown_name() -> None:
    """An unknown name is a 404 with the list; before any worker was seen it is a 503."""
    with pytest.raises(UnknownModelError, match=r"`gpt` does not exist; served: llama"):
        pool_serving("gpt", [LLAMA, QWEN])
    with pytest.raises(NoWorkersError):
        pool_serving("gpt", [Pool(PoolId("x"), PoolSettings())])
