"""--send-token-ids: engines that take the ids of a chat get those computed here, once they were compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrouter.bodies import edits, lax
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.wire.ids import WorkerId
from kvrouter.prompts import checks as token_checks
from kvrouter.tokens.prompt import ChatPrompt, PromptEncoder, TextPrompt
from tests.frontend.fleet import POOL, Fleet, FleetOf
from tests.frontend.workers import SSE_HEAD, Received, Script, Wire, answer, chunk, event, until

TEXT = "It was the best of times, it was the worst of times. " * 12
MESSAGES = [{"role": "user", "content": TEXT}]
CHAT = {"model": "m", "messages": MESSAGES}
PATH = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
NEVER = {
    "an image": CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
    "echo": CHAT | {"echo": True},
    "cut": CHAT | {"truncate_prompt_tokens": 3},
    "a template": CHAT | {"chat_template": "{{ messages }}"},
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are compared at once, and so is each prompt."""
    monkeypatch.setattr(token_checks, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(token_checks, "AT_MOST_EVERY_S", 0.0)
    monkeypatch.setattr(token_checks, "SHAPES_EVERY_S", 0.0)


def engine(tiny: Path, wrong: Callable[[Any], bool] = lambda _: False, *, fails: bool = False) -> Script:
    """An engine that has an id too many in chats of which `wrong` holds, and may fail clients' chats."""
    encoder = PromptEncoder.load(tiny)

    async def script(received: Received, wire: Wire) -> None:
        body = received.json
        prompt = ChatPrompt(body["messages"]) if "messages" in body else TextPrompt([body["prompt"]])
        (ids,) = await encoder.encode(prompt) or [[]]
        ids = [*ids, 1] if "messages" in body and wrong(body) else ids
        if received.head.startswith(b"POST /tokenize "):
            await wire.send(answer(json.dumps({"tokens": ids}).encode()))
        elif body.get("return_token_ids"):
            await wire.send(answer(json.dumps({"prompt_token_ids": ids, "choices": []}).encode()))
        elif body.get("stream"):
            await wire.send(SSE_HEAD, chunk(event("a")))
            await wire.until_left()
        else:
            await wire.send(answer(status=500 if fails else 200))

    return script


def flags(tiny: Path) -> tuple[str, ...]:
    """Of a frontend that computes token ids."""
    return ("--model-path", str(tiny), "--router-mode", "kv")


async def ids_of(tiny: Path) -> list[int]:
    """The ids of CHAT."""
    (ids,) = await PromptEncoder.load(tiny).encode(ChatPrompt(MESSAGES)) or [[]]
    return ids


def bodies(fleet: Fleet) -> list[bytes]:
    """Token ids of clients' chats, as engines got them."""
    found = [received.body for worker in fleet.workers for received in worker.requests]
    return [body for body in found if b'"max_tokens":7' in body.replace(b" ", b"")]


def served(fleet: Fleet) -> list[Any]:
    """The same as objects."""
    return [json.loads(body) for body in bodies(fleet)]


def sent_ids(fleet: Fleet) -> list[list[int] | None]:
    """The token ids in the chats that engines got."""
    return [(body.get("kv_transfer_params") or {}).get("prompt_token_ids") for body in served(fleet)]


def pool_of(fleet: Fleet) -> Pool:
    """The only one."""
    return fleet.frontend.replica.routers[POOL].pool


async def until_compared(fleet: Fleet, chat: dict[str, Any] = CHAT) -> None:
    """Return when each engine that takes ids was compared, and then a chat of this shape."""
    workers = [each for each in pool_of(fleet).workers.values() if each.card.takes_token_ids]
    if not workers:
        return
    await until(lambda: all(each.has_equal_ids is not None for each in workers))
    while not all(each.shapes for each in workers if each.has_equal_ids):
        await fleet.ask(chat, path=PATH)


def shapes(fleet: Fleet) -> list[list[bool]]:
    """By worker, whether chats of the shapes that were compared were equal."""
    return [list(worker.shapes.values()) for worker in pool_of(fleet).workers.values()]


async def metrics(fleet: Fleet) -> str:
    """The text of /metrics."""
    return (await fleet.get("/metrics")).body.decode()


@pytest.mark.parametrize("takes", [True, False])
async def test_sent(fleet_of: FleetOf, tiny: Path, takes: bool) -> None:
    """The engine gets the client's fields, and the ids of its chat if it takes them."""
    async with fleet_of(*flags(tiny), scripts=(engine(tiny),), takes_token_ids=takes) as fleet:
        if takes:
            await until_compared(fleet)
        response = await fleet.ask(CHAT | {"max_tokens": 7, "x": 1.50}, path=PATH)

        assert 200 == response.status
        assert [await ids_of(tiny) if takes else None] == sent_ids(fleet)
        assert takes == ('kvrouter_token_ids_sent_total{model="m"}' in await metrics(fleet))
        (body,) = served(fleet)
        body.pop("kv_transfer_params", None)
        assert CHAT | {"max_tokens": 7, "x": 1.5} == body


@pytest.mark.parametrize("body", NEVER.values(), ids=NEVER)
async def test_never_sent(fleet_of: FleetOf, tiny: Path, body: dict[str, Any]) -> None:
    """Not where the engine makes another prompt of the chat, or cuts it."""
    async with fleet_of(*flags(tiny), scripts=(engine(tiny),), takes_token_ids=True) as fleet:
        await until_compared(fleet)
        await fleet.ask(body | {"max_tokens": 7}, path=PATH)

        assert [None] == sent_ids(fleet)


@pytest.mark.parametrize("off", [("--send-token-ids", "off"), ("--no-token-comparison",)])
async def test_off(fleet_of: FleetOf, tiny: Path, off: tuple[str, ...]) -> None:
    """Without the setting, or without comparisons."""
    async with fleet_of(*flags(tiny), *off, scripts=(engine(tiny),), takes_token_ids=True) as fleet:
        checks = fleet.frontend.tokens.checks
        await until(lambda: checks is None or (POOL in checks.pools and checks.pools[POOL].equal_prompts))
        await fleet.ask(CHAT | {"max_tokens": 7}, path=PATH)

        assert [None] == sent_ids(fleet)
        assert not pool_of(fleet).sends_token_ids


async def test_only_to_engines_that_were_compared(
    fleet_of: FleetOf, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with other ids gets none, and is named; the other one still gets them."""
    scripts = (engine(tiny), engine(tiny, lambda _: True))
    async with fleet_of(*flags(tiny), scripts=scripts, takes_token_ids=True) as fleet:
        await until_compared(fleet)
        for worker in fleet.workers:
            direct = ("x-kvrouter-mode: direct", f"x-kvrouter-target: {worker.id}")
            await fleet.ask(CHAT | {"max_tokens": 7}, *direct, path=PATH)
        fleet.frontend.audit.run()
        found = (await fleet.get("/workers")).json["targets"]

        assert [await ids_of(tiny), None] == sent_ids(fleet)
        assert [False, True] == [
            "token ids of chats are not those" in str(each["problems"]) for each in found
        ]
        assert 1 == len(fleet.logged("tokens.engine_differs"))

        monkeypatch.setattr(token_checks, "ONE_IN", 1)
        checks = fleet.frontend.tokens.checks
        assert checks is not None
        before = checks.pools[POOL].different
        while checks.pools[POOL].different == before:  # a sample is compared with either engine
            await fleet.ask(CHAT, path=PATH)
        assert pool_of(fleet).sends_token_ids, "what differs at one engine says nothing of the other"


@pytest.mark.parametrize(
    ("context", "asked", "is_sent"), [(400, 8, True), (400, 200, False), (200, 8, False)]
)
async def test_too_long(fleet_of: FleetOf, tiny: Path, context: int, asked: int, is_sent: bool) -> None:
    """A chat that does not fit the context goes without ids: its engine answers as without this router."""
    script = engine(tiny)
    card: dict[str, Any] = {"takes_token_ids": True, "max_model_len": context}
    async with fleet_of(*flags(tiny), scripts=(script,), **card) as fleet:
        await until_compared(fleet, {**CHAT, "messages": [{"role": "user", "content": "short"}]})
        await fleet.ask({**CHAT, "max_completion_tokens": asked, "max_tokens": 7}, path=PATH)

        assert is_sent == (sent_ids(fleet) == [await ids_of(tiny)])


async def test_engine_that_is_away(fleet_of: FleetOf, tiny: Path) -> None:
    """An engine that refused a connection may be another one now: it is compared again."""
    async with fleet_of(*flags(tiny), scripts=(engine(tiny),), takes_token_ids=True) as fleet:
        await until_compared(fleet)
        pool = pool_of(fleet)
        pool.unreachable(WorkerId("w0"))
        was_trusted = pool.sends_token_ids
        await until_compared(fleet)

        assert (False, True) == (was_trusted, pool.sends_token_ids)


async def test_streams_hold_no_ids(fleet_of: FleetOf, tiny: Path) -> None:
    """Once an answer has begun, the ids of its prompt are freed: no other attempt can need them."""
    async with fleet_of(*flags(tiny), scripts=(engine(tiny),), takes_token_ids=True) as fleet:
        await until_compared(fleet)
        async with fleet.connected() as client:
            client.send(CHAT | {"max_tokens": 7, "stream": True}, path=PATH)
            await client.read_until(event("a"))
            (running,) = fleet.frontend.completions.in_flight.running.values()

            assert [await ids_of(tiny)] == sent_ids(fleet)
            assert running.work.ids is not None
            assert (b"", None) == (running.work.ids.field, running.work.ids.sendable)


async def test_shapes(fleet_of: FleetOf, tiny: Path) -> None:
    """The first chat of a shape is compared, not sent; a shape that differs never is, others still are."""
    named: dict[str, Any] = {**CHAT, "max_tokens": 7, "messages": [MESSAGES[0] | {"name": "ann"}]}
    cited: dict[str, Any] = {**CHAT, "max_tokens": 7, "chat_template_kwargs": {"cite": True}}
    script = engine(tiny, lambda body: "chat_template_kwargs" in body)
    async with fleet_of(*flags(tiny), scripts=(script,), takes_token_ids=True) as fleet:
        await until_compared(fleet)
        for chat in (named, cited):
            before = shapes(fleet)
            await fleet.ask(chat, path=PATH)
            await until(lambda: shapes(fleet) != before)  # noqa: B023
        for chat in (named, cited, CHAT | {"max_tokens": 7}):
            await fleet.ask(chat, path=PATH)

        assert [False, False, True, False, True] == [ids is not None for ids in sent_ids(fleet)]
        assert [[True, True, False]] == shapes(fleet)


async def test_later_difference_ends_it(
    fleet_of: FleetOf, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat that differs in spite of its shape: from then on no engine gets ids that are computed here."""
    script = engine(tiny, lambda body: "odd" in str(body["messages"]))
    async with fleet_of(*flags(tiny), scripts=(script,), takes_token_ids=True) as fleet:
        await until_compared(fleet)
        monkeypatch.setattr(token_checks, "ONE_IN", 1)
        odd = {"model": "m", "messages": [{"role": "user", "content": "odd"}], "max_tokens": 7}
        await fleet.ask(odd, path=PATH)
        await until(lambda: fleet.logged("tokens.differ"), "the chat is compared")
        await fleet.ask(CHAT | {"max_tokens": 7}, path=PATH)

        assert [True, False] == [ids is not None for ids in sent_ids(fleet)]


async def test_next_worker(fleet_of: FleetOf, tiny: Path) -> None:
    """An attempt at another worker has them, too: once."""
    scripts = (engine(tiny, fails=True), engine(tiny, fails=True))
    async with fleet_of(*flags(tiny), scripts=scripts, takes_token_ids=True) as fleet:
        await until_compared(fleet)
        await fleet.ask(CHAT | {"max_tokens": 7}, path=PATH)

        assert 2 * [await ids_of(tiny)] == sent_ids(fleet)
        assert all(1 == body.count(b"kv_transfer_params") for body in bodies(fleet))


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("fields", [{}, {"n": 1.0}, {"n": 1.0, "bootstrap_host": "h"}])
async def test_ids_of_the_client(fleet_of: FleetOf, tiny: Path, takes: bool, fields: dict[str, Any]) -> None:
    """A client's own ids reach the engine as they are, and its chat is placed by them if it takes them."""
    own = list(range(7, 75))
    chat = CHAT | {"max_tokens": 7, "kv_transfer_params": {"prompt_token_ids": own}, **fields}
    script = engine(tiny)
    async with fleet_of(
        *flags(tiny), "--no-use-kv-events", scripts=(script,), takes_token_ids=takes
    ) as fleet:
        await until_compared(fleet)
        responses = [await fleet.ask(chat, path=PATH) for _ in range(2)]

        assert 2 * [own] == sent_ids(fleet)
        assert not any("bootstrap_host" in body for body in served(fleet))
        blocks = (len(own) - 1 if takes else len(await ids_of(tiny)) - 1) // 16
        assert ["0", str(blocks)] == [each.header("x-kvrouter-overlap-blocks") for each in responses]


@pytest.mark.parametrize("more", [{"do_remote_prefill": True}, {"prompt_token_ids": "x"}])
async def test_nothing_else_of_the_field(fleet_of: FleetOf, tiny: Path, more: dict[str, Any]) -> None:
    """With anything else in it, what the client sent of the field is removed, and counted."""
    chat = CHAT | {"max_tokens": 7, "kv_transfer_params": {"prompt_token_ids": [1, 2], **more}}
    async with fleet_of(*flags(tiny), scripts=(engine(tiny),), takes_token_ids=True) as fleet:
        await until_compared(fleet)
        await fleet.ask(chat, path=PATH)

        assert [await ids_of(tiny)] == sent_ids(fleet)
        assert 'kvrouter_removed_fields_total{field="kv_transfer_params"} 1.0' in await metrics(fleet)


def test_ids_are_written_in_slices() -> None:
    """As one list, whatever their number."""
    for count in (1, 16_384, 16_385, 40_000):
        field = lax.at_once(edits.token_ids_field(range(count)))
        body = edits.with_field(b' {"kv_transfer_params": null, "a": 1.50} \n', field)
        assert {"kv_transfer_params": {"prompt_token_ids": [*range(count)]}, "a": 1.5} == json.loads(body)
        assert b'"a": 1.50' in body
