"""Engines that are registered at every router: one acts as the agent, and another one takes over."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from tests.frontend.workers import until, until_found
from tests.router.routers import Router, running_router

PROMPT = list(range(160))
ID = (1 << 64) - 7  # as Ray makes them


@contextlib.asynccontextmanager
async def two_routers(nats: str) -> AsyncIterator[tuple[Mocker, Router, Router]]:
    """And an engine without an agent."""
    namespace, config = uuid.uuid4().hex, MockerConfig(EngineConfig(num_blocks=2049), model_name="tiny")
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


async def test_facts_that_differ(nats_url: str) -> None:
    """Another replica must register the same facts. A change of one that has it moves the agent there."""
    async with two_routers(nats_url) as (engine, a, b):
        await a.ok("/workers", spec(engine))
        status, error = await b.ask("/workers", spec(engine, total_kv_blocks=1024))
        assert 409 == status
        assert "registered at another replica with other facts (block_size 16" in str(error)
        assert 404 == (await b.ask(f"/workers/{ID}", method="DELETE"))[0]  # it kept nothing

        await b.ok("/workers", spec(engine))
        assert [True, False] == acting(a, b)
        await b.ok("/workers", spec(engine, total_kv_blocks=1024))
        await until(lambda: [False, True] == acting(a, b), "the agent has moved")
        for router in (a, b):
            await until_found(
                partial(router.ok, "/workers", method="GET"),
                lambda shown: [1024] == [one["total_kv_blocks"] for one in shown],
                within_s=5,
            )


async def test_default_after_a_model_has_gone(nats_url: str) -> None:
    """`default` is the only model that has workers, as soon as the other one's are deleted."""
    async with two_routers(nats_url) as (engine, a, _):
        await a.ok("/workers", spec(engine, model_name="one"))
        await a.ok("/workers", spec(engine, worker_id=2, model_name="two", kv_events_endpoints=None))
        assert 400 == (await a.ask("/select", {"token_ids": PROMPT}))[0]
        await a.ok(f"/workers/{ID}", method="DELETE")
        assert 2 == (await a.ok("/select", {"token_ids": PROMPT}))["worker_id"]


async def test_two_agents_at_once(nats_url: str) -> None:
    """Both begin in the same moment: the later one stays, and the other one watches again."""
    async with two_routers(nats_url) as (engine, a, b):
        for router in (a, b):
            router.site.engines.has_agent = lambda _engine: False  # type: ignore[assignment, method-assign]
            router.site.engines._chance = float
        registered = [asyncio.create_task(one.ok("/workers", spec(engine))) for one in (a, b)]
        await until(lambda: all(acting(a, b)), "both act")
        for router in (a, b):
            del router.site.engines.has_agent
        await until(lambda: 1 == sum(acting(a, b)), "one has given way")
        await asyncio.gather(*registered)
