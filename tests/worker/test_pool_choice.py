"""Which pool an agent joins, if its engine has several names."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.core.wire.heartbeats import Card, WorkerBeat, encode
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.worker import pool_choice
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.pool_choice import choose_pool, pool_of

NAMES = ("k-v2", "k", "k-old")


def card(model: str, tokenizer: str = "/models/k", worker: str = "old") -> Card:
    """A live worker of this pool."""
    return Card(
        worker_id=worker,
        url="http://h:1",
        model=model,
        served_names=(model,),
        block_size=16,
        tokenizer=tokenizer,
    )


@pytest.mark.parametrize(
    ("cards", "pool"),
    [
        ([], "k-v2"),
        ([card("k")], "k"),
        ([card("k", "/data/k")], "k"),  # another path on another host
        ([card("k", "/models/other")], "k-v2"),
        ([card("k", "")], "k-v2"),
        ([card("x")], "k-v2"),
        ([card("k-old"), card("k"), card("k")], "k"),
        ([card("k-old"), card("k")], "k"),  # its own order decides
        ([card("k"), card("k-v2")], "k-v2"),
    ],
)
def test_pool(cards: list[Card], pool: str) -> None:
    """The pool of most live workers that are called by one of its names and have its model directory."""
    assert pool == pool_of(NAMES, "/models/k", cards)


@given(st.lists(st.sampled_from([*NAMES, "x"])), st.randoms())
def test_order_does_not_matter(models: list[str], random: object) -> None:
    """Agents that start together and hear the same workers choose the same pool."""
    cards = [card(model) for model in models]
    chosen = pool_of(NAMES, "/models/k", cards)
    random.shuffle(cards)  # type: ignore[attr-defined]

    assert chosen in NAMES
    assert chosen == pool_of(NAMES, "/models/k", cards)


def test_unknown_directory() -> None:
    """Without a directory nothing says that the tokens are equal."""
    assert "k-v2" == pool_of(NAMES, "", [card("k", "")])


def facts(*names: str) -> EngineFacts:
    """An engine with these names."""
    return EngineFacts(Models(names, ()), "0.33.0", Scrape(), tokenizer="/models/k")


async def test_listening(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens until the card of a fitting worker comes; not at all if there is nothing to choose."""
    monkeypatch.setattr(pool_choice, "LISTEN_S", 1e9)
    options = AgentOptions(
        engine_url="http://h:2", worker_id="new", nats=nats_url, namespace=uuid.uuid4().hex
    )
    subject = Subjects(options.namespace).live_worker(WorkerId("old"))
    own = Subjects(options.namespace).live_worker(WorkerId("new"))

    def beat(of: Card | None) -> bytes:
        return encode(WorkerBeat(VERSION, 1, "up", "pool", [], 1, of))

    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus:
        with bus.part() as part:
            assert await choose_pool(options, part, facts("k"), asyncio.Event()) is None
            assert "m" == await choose_pool(replace(options, model="m"), part, facts(*NAMES), asyncio.Event())
            choosing = asyncio.create_task(choose_pool(options, part, facts(*NAMES), asyncio.Event()))
            bus.publish(own, beat(card("k-old", worker="new")))  # a former life of its own does not count
            bus.publish(subject, b"broken")
            cards = itertools.chain([None, None], itertools.repeat(card("k")))
            while not choosing.done():
                bus.publish(subject, beat(next(cards)))
                await asyncio.sleep(0.01)

    assert "k" == await choosing


async def test_leaving(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is told to leave listens no longer."""
    monkeypatch.setattr(pool_choice, "LISTEN_S", 1e9)
    options = AgentOptions(engine_url="http://h:2", worker_id="new", nats=nats_url, namespace="n")
    leave = asyncio.Event()
    leave.set()
    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus:
        with bus.part() as part:
            async with asyncio.timeout(20):
                assert await choose_pool(options, part, facts(*NAMES), leave) is None
