"""Engines that are registered at every router: one acts as the agent, and another one takes over."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.router.registrations import Registered, Registration, registered_in
from kvrouter.worker.announce import announce, connect
from kvrouter.worker.publisher import KvPublisher
from tests.core.worlds import card
from tests.frontend.workers import until, until_found
from tests.router.routers import Router, running_router

PROMPT = list(range(160))
ID = (1 << 64) - 7  # as Ray makes them


@contextlib.asynccontextmanager
async def two_routers(nats: str, namespace: str = "") -> AsyncIterator[tuple[Mocker, Router, Router]]:
    """And an engine without an agent."""
    namespace, config = (
        namespace or uuid.uuid4().hex,
        MockerConfig(EngineConfig(num_blocks=2049), model_name="tiny"),
    )
    async with (
        running_mocker(config) as engine,
        running_router(nats, namespace) as a,
        running_router(nats, namespace) as b,
    ):
        yield engine, a, b


def spec(engine: Mocker, **changes: Any) -> dict[str, Any]:
    """As Ray registers it; the number of its rank is not 0."""
    facts = {"worker_id": ID, "endpoint": "ray://replica#1", "block_size": 16, "total_kv_blocks": 2048}
    events = {"kv_events_endpoints": {"3": engine.kv_events}, "replay_endpoint": engine.kv_replay}
    return {**facts, **events, "data_parallel_start_rank": 3, "max_num_batched_tokens": 8192, **changes}


def acting(*routers: Router) -> list[bool]:
    return [str(ID) in router.site.engines.acting for router in routers]


async def until_overlap(router: Router, tokens: int) -> dict[str, Any]:
    """A selection with this overlap."""
    _, chosen = await until_found(
        lambda: router.ask("/select", {"token_ids": PROMPT}),
        lambda found: found[0] == 200 and found[1]["overlap"]["gpu"] == tokens,
        within_s=20,
    )
    return dict(chosen)


async def test_one_agent_for_all_who_register(nats_url: str) -> None:
    """Both know its blocks. It leaves with its router, the other one reads its history; it is deleted."""
    async with two_routers(nats_url) as (engine, a, b):
        await asyncio.gather(*[router.ok("/workers", spec(engine)) for router in (a, b)])
        await until(lambda: 1 == sum(acting(a, b)), "one of them acts")
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
        async with a.http.post(f"{engine.url}/v1/completions", json=body) as answer:
            assert 200 == answer.status
        for router in (a, b):
            found = await until_overlap(router, 160)
            assert (ID, 3, "ray://replica#1") == (found["worker_id"], found["dp_rank"], found["endpoint"])
            assert {"3": 160} == found["overlap"]["dp"]
        (shown,) = await b.ok("/workers", method="GET")
        assert (2048, 8192, 3, True) == (
            shown["total_kv_blocks"], shown["max_num_batched_tokens"], shown["data_parallel_start_rank"],
            shown["is_registered_here"],
        )  # fmt: skip
        first, second = (a, b) if acting(a)[0] else (b, a)
        await first.site.engines.close()
        await until(lambda: [False, True] == acting(first, second), "the other one takes over")
        await until_overlap(first, 160)

        placed = await second.ok("/select_and_reserve", {"token_ids": PROMPT, "worker_id": ID, "dp_rank": 3})
        await second.ok(f"/workers/{ID}", method="DELETE")
        await until(lambda: not any(acting(a, b)), "nobody acts")
        assert 404 == (await second.ask(f"/reservations/{placed['selection_id']}", method="DELETE"))[0]
        assert 503 == (await second.ask("/select", {"token_ids": PROMPT}))[0]


async def test_a_change_is_announced(nats_url: str) -> None:
    """A PATCH replaces what it names; events of an endpoint that is gone do not matter."""
    async with two_routers(nats_url) as (engine, a, _):
        wrong = {"kv_events_endpoints": {"3": "tcp://127.0.0.1:1"}, "replay_endpoint": None}
        await a.ok("/workers", spec(engine, **wrong))
        changed = {"endpoint": "http://10.0.0.9:8000", "kv_events_endpoints": {"3": engine.kv_events}}
        await a.ok(f"/workers/{ID}", changed, method="PATCH")
        found = await a.ok("/select", {"token_ids": PROMPT})
        assert ("http://10.0.0.9:8000", 3) == (found["endpoint"], found["dp_rank"])


async def test_the_last_registration_counts(nats_url: str) -> None:
    """At every replica that knows the engine, whoever is asked. The agent moves to where it was changed."""
    async with two_routers(nats_url) as (engine, a, b):
        await a.ok("/workers", spec(engine))
        same = {"data_parallel_size": 1, "endpoint": "ray://replica#1/", "worker_id": str(ID), "new": 1}
        await b.ok("/workers", spec(engine, **same))
        assert [True, False] == acting(a, b)
        for size, router in enumerate((b, a, b, b, a), start=1000):
            shown = await router.ok(f"/workers/{ID}", {"total_kv_blocks": size}, method="PATCH")
            assert size == shown["total_kv_blocks"]
            for each in (a, b):
                await until_size(each, size)
        await b.ok("/workers", spec(engine))
        await until_size(a, 2048)
        first, second = (a, b) if acting(a)[0] else (b, a)
        await first.site.engines.close()
        await until(lambda: [False, True] == acting(first, second), "the other one takes over")
        await until_size(first, 2048)


async def test_clocks_differ(nats_url: str) -> None:
    """A change counts also where the clock is behind."""
    async with two_routers(nats_url) as (engine, a, b):
        now_us = b.site.engines.now_us
        b.site.engines.now_us = lambda: now_us() - 3600 * 10**6
        await a.ok("/workers", spec(engine))
        await b.ok("/workers", spec(engine))
        for size, router in enumerate((b, a, b), start=1000):
            shown = await router.ok(f"/workers/{ID}", {"total_kv_blocks": size}, method="PATCH")
            assert size == shown["total_kv_blocks"]
            for each in (a, b):
                await until_size(each, size)


FACTS = Registration("w1", "http://a:1", 16, data_parallel_start_rank=3).as_served()


@pytest.mark.parametrize("ranks", [1, 256])
def test_a_card_shows_the_registration(ranks: int) -> None:
    """However long it is."""
    endpoints = {str(rank): f"tcp://10.0.0.1:{5000 + rank}" for rank in range(ranks)}
    facts = replace(FACTS, kv_events_endpoints=endpoints, data_parallel_size=ranks)
    one = Registered(7, facts)
    assert one == registered_in(card("w1", labels=one.card()["labels"]), now_us=8)


DAY_US = 24 * 3600 * 10**6
FORGED = {
    "of another worker": ("w2", Registered(7, FACTS)),
    "two days ahead": ("w1", Registered(2 * DAY_US, FACTS)),
    "that no agent could follow": ("w1", Registered(7, replace(FACTS, kv_events_endpoints={"3": "ipc://a"}))),
}


@pytest.mark.parametrize("forged", FORGED)
def test_labels_that_do_not_count(forged: str) -> None:
    worker, registered = FORGED[forged]
    assert registered_in(card(worker, labels=registered.card()["labels"]), now_us=8) is None


@pytest.mark.parametrize("label", ["", "yes", "{}", "[" * 4000, '{"at_us": -1, "engine": {}}'])
def test_labels_that_are_none(label: str) -> None:
    assert registered_in(card("w1", labels={"registered": label}), now_us=8) is None


async def test_registrations_at_once(nats_url: str) -> None:
    """Of several in flight, at one router and at two, one counts, and its engine stays."""
    async with two_routers(nats_url) as (engine, a, b):
        sizes = range(1000, 1006)
        calls = [(a, b)[size % 2].ok("/workers", spec(engine, total_kv_blocks=size)) for size in sizes]
        await asyncio.gather(*calls, a.ok("/workers", spec(engine, total_kv_blocks=1006)))
        shown = await until_same_size(a, b)
        assert shown in {*sizes, 1006}


async def test_an_agent_of_its_own_stays(nats_url: str) -> None:
    """It has come after the registration, which may not be changed then."""
    namespace = uuid.uuid4().hex
    async with two_routers(nats_url, namespace) as (engine, a, _):
        await a.ok("/workers", spec(engine))
        own: dict[str, Any] = {"url": engine.url, "model": "default", "namespace": namespace}
        async with connect(nats_url) as bus, announce(bus, [KvPublisher(bus, str(ID), 16)], **own):
            await until(lambda: not acting(a)[0], "the agent takes over")
            for call in (
                a.ask("/workers", spec(engine)),
                a.ask(f"/workers/{ID}", {"block_size": 32}, method="PATCH"),
            ):
                status, error = await call
                assert 409 == status
                assert "has an agent of its own" in str(error)
        await until(lambda: acting(a)[0], "it is gone")


async def until_size(router: Router, size: int) -> None:
    def is_size(found: Any) -> bool:
        return [size] == [one["total_kv_blocks"] for one in found]

    await until_found(partial(router.ok, "/workers", method="GET"), is_size, within_s=20)


async def until_same_size(a: Router, b: Router) -> int:
    """Both show the same, and one of them acts."""

    async def looked() -> list[Any]:
        return [
            [one["total_kv_blocks"] for one in await each.ok("/workers", method="GET")] for each in (a, b)
        ]

    def agree(found: list[Any]) -> bool:
        return found[0] == found[1] and len(found[0]) == 1 and sum(acting(a, b)) == 1

    found = await until_found(looked, agree, within_s=20)
    return int(found[0][0])


@pytest.mark.parametrize("name", ["one", "default"])
async def test_default_after_a_model_has_gone(nats_url: str, name: str) -> None:
    """`default` is the only model that has workers, as soon as the other one's are deleted."""
    async with two_routers(nats_url) as (engine, a, _):
        await a.ok("/workers", spec(engine, model_name=name))
        await a.ok("/workers", spec(engine, worker_id=2, model_name="two", kv_events_endpoints=None))
        assert (400 if name == "one" else 200) == (await a.ask("/select", {"token_ids": PROMPT}))[0]
        await a.ok(f"/workers/{ID}", method="DELETE")
        assert 2 == (await a.ok("/select", {"token_ids": PROMPT}))["worker_id"]


async def test_two_agents_at_once(nats_url: str) -> None:
    """Both begin in the same moment: the later one stays, and the other one watches again."""
    async with two_routers(nats_url) as (engine, a, b):
        for router in (a, b):
            router.site.engines.is_announced = lambda _name: False  # type: ignore[assignment, method-assign]
            router.site.engines._chance = float
        registered = [asyncio.create_task(one.ok("/workers", spec(engine))) for one in (a, b)]
        await until(lambda: all(acting(a, b)), "both act")
        for router in (a, b):
            del router.site.engines.is_announced
        await until(lambda: 1 == sum(acting(a, b)), "one has given way")
        await asyncio.gather(*registered)
