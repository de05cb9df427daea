"""Which pool an agent joins, if its engine has several names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from aiohttp import web
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
from kvrouter.worker.pool_choice import choose_pool, pool_of, why_equal

NAMES = ("k-v2", "k", "k-old")
NOWHERE = "http://127.0.0.1:9"
WHY = {"k": "equal", "k-old": "equal"}


def card(model: str, tokenizer: str = "/models/k", worker: str = "old", url: str = NOWHERE) -> Card:
    """A live worker of this pool."""
    return Card(
        worker_id=worker, url=url, model=model, served_names=(model,), block_size=16, tokenizer=tokenizer
    )


@pytest.mark.parametrize(
    ("models", "pool"),
    [
        ([], "k-v2"),
        (["k"], "k"),
        (["x"], "k-v2"),
        (["k-old", "k", "k"], "k"),
        (["k-old", "k"], "k"),  # the first by name
        (["k", "k-v2"], "k"),
        (["k", "k", "k-v2"], "k"),
        (["k", "k-v2", "k-v2"], "k-v2"),
    ],
)
def test_pool(models: list[str], pool: str) -> None:
    """The pool of most live workers that may be joined."""
    assert pool == pool_of("k-v2", map(card, models), WHY)


def test_pool_that_may_not_be_joined() -> None:
    """Workers with other tokens do not count, however many they are."""
    assert "k-v2" == pool_of("k-v2", [card("k"), card("k")], {"k": ""})


@given(st.lists(st.sampled_from([*NAMES, "x"])), st.randoms())
def test_order_does_not_matter(models: list[str], random: object) -> None:
    """Agents that start together and hear the same workers choose the same pool."""
    cards = [card(model) for model in models]
    chosen = pool_of("k-v2", cards, WHY)
    random.shuffle(cards)  # type: ignore[attr-defined]

    assert chosen in NAMES
    assert chosen == pool_of("k-v2", cards, WHY)


def facts(*names: str) -> EngineFacts:
    """An engine with these names."""
    return EngineFacts(Models(names, ()), "0.33.0", Scrape(), tokenizer="/models/k")


Answer: TypeAlias = Callable[[dict[str, Any]], list[int] | None]


class Tokenizing:
    """An engine whose /tokenize answers so; None: it rejects the prompt."""

    def __init__(self, answer: Answer) -> None:
        self.url = ""
        self.keys: set[str] = set()
        self.models: set[str] = set()
        self._answer = answer

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, answer: Answer) -> AsyncIterator[Tokenizing]:
        """Serve on a free port of this machine."""
        engine, app = cls(answer), web.Application()
        app.router.add_post("/tokenize", engine.tokenize)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield engine
        finally:
            await runner.cleanup()

    async def tokenize(self, http: web.Request) -> web.Response:
        """POST /tokenize."""
        body = await http.json()
        self.keys.add(http.headers.get("authorization", ""))
        self.models.add(body["model"])
        ids = self._answer(body)
        return web.json_response({"tokens": ids}, status=200 if ids else 400)


def plain(body: dict[str, Any]) -> list[int] | None:
    """Ids that depend on the prompt."""
    return [len(str(body.get("messages") or body["prompt"]))]


def other_texts(body: dict[str, Any]) -> list[int] | None:
    """Another tokenizer."""
    return [7] if "prompt" in body else plain(body)


def other_chats(body: dict[str, Any]) -> list[int] | None:
    """Another template."""
    return [7] if "messages" in body else plain(body)


def no_system(body: dict[str, Any]) -> list[int] | None:
    """A template that rejects a system message."""
    return None if "system" in str(body) else plain(body)


def nothing(_: dict[str, Any]) -> list[int] | None:
    """No prompt is taken."""
    return None


@pytest.mark.parametrize(
    ("own", "other", "directory", "may_join"),
    [
        (plain, plain, "/models/any", True),
        (plain, other_texts, "/models/k", False),
        (plain, other_chats, "/models/k", False),
        (no_system, no_system, "/models/any", True),
        (plain, no_system, "/models/k", False),
        # one of the two cannot be asked: the directory counts, also below another path
        (plain, nothing, "/data/k", True),
        (nothing, plain, "/data/k", True),
        (plain, nothing, "/models/any", False),
        (nothing, nothing, "", False),
    ],
)
async def test_equal_tokens(own: Answer, other: Answer, directory: str, may_join: bool) -> None:
    """A pool may be joined if its engines make the same ids; if nothing shows it, by the directory."""
    async with Tokenizing.open(own) as mine, Tokenizing.open(other) as theirs:
        options = AgentOptions(mine.url, "new", api_key="secret")

        assert may_join is bool(
            await why_equal(options, facts(*NAMES), [card("k", directory, url=theirs.url)])
        )

        assert {"Bearer secret"} == mine.keys
        assert ({"k-v2"}, {"k"}) == (mine.models, theirs.models or {"k"})


async def test_key_stays_with_the_own_engine() -> None:
    """Whoever may publish a card can name any URL in it: the key goes to the own engine only."""
    async with Tokenizing.open(plain) as mine, Tokenizing.open(plain) as theirs:
        options = AgentOptions(mine.url, "new", api_key="secret")

        assert await why_equal(options, facts(*NAMES), [card("k", url=theirs.url)])

        assert ({"Bearer secret"}, {""}) == (mine.keys, theirs.keys)


async def test_member_at_an_address_that_is_never_asked() -> None:
    """Nothing is sent to a cloud's metadata service, whatever a card says."""
    async with Tokenizing.open(plain) as mine:
        forged = card("k", "/models/any", url="http://169.254.169.254")

        assert not await why_equal(AgentOptions(mine.url, "new"), facts(*NAMES), [forged])


async def test_a_member_that_is_gone() -> None:
    """The next one is asked, within a bounded number."""
    async with Tokenizing.open(plain) as engine:
        options, gone = AgentOptions(engine.url, "new"), card("k", "/models/any")
        member = card("k", "/models/any", url=engine.url)

        assert await why_equal(options, facts(*NAMES), [gone, gone, member])
        assert not await why_equal(options, facts(*NAMES), [gone, gone, gone, member])


async def test_comparison_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and the directory counts."""
    monkeypatch.setattr(pool_choice, "COMPARE_S", 0.0)
    async with Tokenizing.open(plain) as engine:
        member = card("k", "/data/k", url=engine.url)

        assert await why_equal(AgentOptions(engine.url, "new"), facts(*NAMES), [member])


async def test_unknown_directory() -> None:
    """Without a directory nothing says that the tokens are equal."""
    unknown = replace(facts(*NAMES), tokenizer="")

    assert not await why_equal(AgentOptions(NOWHERE, "new"), unknown, [card("k", "")])


@pytest.fixture
def listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent listens until it has found a pool."""
    monkeypatch.setattr(pool_choice, "LISTEN_S", 1e9)


@pytest.mark.parametrize("other", ["old", "vllm.old"])
async def test_listening(nats_url: str, listens: None, other: str) -> None:
    """It listens until the card of a fitting worker comes; not at all if there is nothing to choose."""
    options = AgentOptions(engine_url=NOWHERE, worker_id="new", nats=nats_url, namespace=uuid.uuid4().hex)
    subject = Subjects(options.namespace).live_worker(WorkerId(other))
    own = Subjects(options.namespace).live_worker(WorkerId("new"))

    def beat(of: Card | None) -> bytes:
        return encode(WorkerBeat(VERSION, 1, "up", "pool", [], 1, of))

    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus, bus.part() as part:
        assert await choose_pool(options, part, facts("k"), asyncio.Event()) is None
        assert "m" == await choose_pool(replace(options, model="m"), part, facts(*NAMES), asyncio.Event())
        choosing = asyncio.create_task(choose_pool(options, part, facts(*NAMES), asyncio.Event()))
        bus.publish(own, beat(card("k-old", worker="new")))  # a former life of its own does not count
        bus.publish(subject, b"broken")
        cards = itertools.chain([None, None], itertools.repeat(card("k", worker=other)))
        while not choosing.done():
            bus.publish(subject, beat(next(cards)))
            await asyncio.sleep(0.01)

    assert "k" == await choosing


async def test_leaving(nats_url: str, listens: None) -> None:
    """An agent that is told to leave listens no longer."""
    options = AgentOptions(engine_url=NOWHERE, worker_id="new", nats=nats_url, namespace="n")
    leave = asyncio.Event()
    leave.set()
    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus, bus.part() as part:
        async with asyncio.timeout(20):
            assert await choose_pool(options, part, facts(*NAMES), leave) is None
