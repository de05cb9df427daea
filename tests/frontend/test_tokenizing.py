"""--tokenizer auto, remote, local and none, and the comparison with the engines' ids, on whole frontends."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from kvrouter.core.tables.predictions import LEAST, WorkerRecord
from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.prompts import checks, engines_way, way_reports
from kvrouter.prompts.checks import PoolCheck
from kvrouter.prompts.engines_way import EnginesWay
from kvrouter.tokens.chat_options import ChatOptions
from kvrouter.tokens.prompt import ChatPrompt, PromptEncoder, TextPrompt
from tests.frontend.clients import Response, ask
from tests.frontend.fleet import POOL, Fleet, FleetOf
from tests.frontend.workers import (
    FakeWorker,
    Received,
    Script,
    Wire,
    answer,
    in_turn,
    says,
    says_and_resets,
    says_and_stalls,
    until,
)

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 12
CHAT = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
OTHER_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": TEXT}
Change = Callable[[list[int]], list[int]]


def engine(tiny: Path, change: Change = lambda ids: ids, status: list[int] | None = None) -> Script:
    """Answers /tokenize with the model's ids, changed; everything else with OK."""
    encoder = PromptEncoder.load(tiny)

    async def script(received: Received, wire: Wire) -> None:
        if not received.head.startswith(b"POST /tokenize "):
            await wire.send(answer())
            return
        body = received.json
        if status and status[0] != 200:
            await wire.send(answer(b'{"error": "no"}', status[0]))
            return
        if "messages" in body:
            ids = await encoder.encode(ChatPrompt(body["messages"]))
        else:
            ids = await encoder.encode(TextPrompt([body["prompt"]]))
        assert ids is not None
        await wire.send(answer(json.dumps({"tokens": change(ids[0])}).encode()))

    return script


def asked(fleet: Fleet, path: bytes) -> list[Received]:
    """The requests to this path at any worker."""
    requests = [received for worker in fleet.workers for received in worker.requests]
    return [received for received in requests if received.head.startswith(b"POST " + path + b" ")]


async def view(fleet: Fleet) -> Any:
    """The field `tokens` of /workers."""
    return (await fleet.get("/workers")).json["tokens"]


async def compared(fleet: Fleet) -> Any:
    """The comparison of the only pool in /workers."""
    (pool,) = (await view(fleet))["compared"].values()
    return pool


def check(fleet: Fleet) -> PoolCheck:
    """The state of the comparison."""
    checks = fleet.frontend.tokens.checks
    assert checks is not None
    return checks.pools.get(POOL, PoolCheck())


def state(fleet: Fleet) -> str:
    """The comparison's state in one word."""
    return check(fleet).state


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are compared at once."""
    monkeypatch.setattr(checks, "LOOK_EVERY_S", 0.01)


@pytest.fixture
def often(looks_often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every real prompt is compared, at once."""
    monkeypatch.setattr(checks, "ONE_IN", 1)
    monkeypatch.setattr(checks, "AT_MOST_EVERY_S", 0.0)


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only requests ask engines for ids."""
    monkeypatch.setattr(EnginesWay, "look", AsyncMock())


# the engines' /tokenize


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are probed at once, and again after a short rest."""
    monkeypatch.setattr(way_reports, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(engines_way, "FIRST_REST_S", 0.02)


def overlap(response: Response) -> int:
    return int(response.header("x-kvrouter-overlap-blocks") or 0)


async def ways(fleet: Fleet) -> dict[str, str]:
    """The way that serves each kind of prompt."""
    (pool,) = (await view(fleet))["ways"].values()
    return {kind: found["way"] for kind, found in pool.items()}


async def readiness(fleet: Fleet) -> Any:
    """The answer of /ready, once the start is over."""
    while (found := (await fleet.get("/ready")).json)["status"] == "starting":
        pass
    return found


def by_engines(fleet: Fleet) -> EnginesWay:
    found = fleet.frontend.tokens.by_engines
    assert found is not None
    return found


def probed(fleet: Fleet) -> Callable[[], bool]:
    """Whether both kinds of prompt were tried with an engine."""
    return lambda: (
        [one.is_proven or one.rests for one in by_engines(fleet)._known.get(POOL, {}).values()]
        == [
            True,
            True,
        ]
    )


@pytest.mark.parametrize("tokenizer", ["auto", "remote"])
async def test_engines(fleet_of: FleetOf, tiny: Path, tokenizer: str) -> None:
    """Without a model path, blocks of texts and chats are hashed from a worker's token ids."""
    flags = ("--tokenizer", tokenizer, "--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(engine(tiny),)) as fleet:
        await until(probed(fleet), "the engine is probed")
        before = len(asked(fleet, b"/tokenize"))
        first = await fleet.ask(CHAT, path="/v1/chat/completions")
        again = await fleet.ask(CHAT, path="/v1/chat/completions")
        await fleet.ask(COMPLETION)

        with PromptEncoder.load(tiny) as encoder:
            (ids,) = await encoder.encode(ChatPrompt(CHAT["messages"])) or [[]]  # type: ignore[arg-type]
        assert [0, (len(ids) - 1) // 16] == [overlap(response) for response in (first, again)]
        index = next(iter(fleet.frontend.replica.routers.values())).pool.index
        assert index.overlap(sequence_hashes(block_hashes(ids, 16)))
        assert 2 == len(asked(fleet, b"/tokenize")) - before, "the equal chat was remembered"
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'kvrouter_remote_tokenizations_total{result="answered"} 2.0' in metrics
        assert 'kvrouter_remote_tokenizations_total{result="remembered"} 1.0' in metrics
        assert 'kvrouter_tokenizer{pool="m-12345678",prompt="chat",way="engines"} 1.0' in metrics
        assert {"chat": "engines", "text": "engines"} == await ways(fleet)
        ready = await readiness(fleet)
        assert ("ready", []) == (ready["status"], ready["reasons"])


async def test_engines_get_no_images(fleet_of: FleetOf, tiny: Path) -> None:
    """They tokenize the text of a chat with images; overlap ends before the first, and decisions say so."""
    url = "data:image/png;base64," + "iVBORw0KGgo" * 10_000
    parts = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": url}}]
    chat = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    flags = ("--tokenizer", "remote", "--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(engine(tiny),)) as fleet:
        await until(probed(fleet), "the engine is probed")
        await fleet.ask(chat, path="/v1/chat/completions")

        sent = asked(fleet, b"/tokenize")[-1].json["messages"][0]["content"]
        assert [TEXT, "<media "] == [sent[0]["text"], sent[1]["text"][:7]]
        (decision,) = (await fleet.get("/decisions?limit=1")).json["decisions"]
        assert "way" == decision["media"]
        assert decision["isl"] > 576, "the image counts in the load"


def sglang(tiny: Path, *, takes_chats: bool) -> Script:
    """Answers /tokenize as SGLang does; since mid-2026 it also takes chats."""
    encoder = PromptEncoder.load(tiny)

    async def script(received: Received, wire: Wire) -> None:
        if not received.head.startswith(b"POST /tokenize "):
            await wire.send(answer())
            return
        body = received.json
        prompt: ChatPrompt | TextPrompt
        if takes_chats and ("prompt" in body) == ("messages" in body):
            await wire.send(answer(b'{"object":"error","message":"Exactly one of"}', 400))
            return
        if "prompt" in body:
            prompt = TextPrompt([body["prompt"]], add_special_tokens=body.get("add_special_tokens", True))
        elif takes_chats:  # always with the beginning of the answer, never with special tokens
            prompt = ChatPrompt(body["messages"], body.get("tools"))
        else:
            where = "{'type': 'missing', 'loc': ('body', 'prompt'), 'msg': 'Field required', 'input': …}"
            error = {"object": "error", "message": f"1 validation error:\n  {where}", "type": "Bad Request"}
            await wire.send(answer(json.dumps(error).encode(), 400))
            return
        (ids,) = await encoder.encode(prompt) or [[]]
        # the number is transformers' for "no limit", longer than 64 bits
        limit = 1000000000000000019884624838656
        found = {"tokens": ids, "count": len(ids), "max_model_len": limit}
        await wire.send(answer(json.dumps(found).encode()))

    return script


def other_chats(
    tiny: Path, separator: str = "\n", *, renders: bool = False, first: tuple[int, ...] = ()
) -> Script:
    """Makes other ids of chats than its /tokenize: with `first` in front, as gpt-oss in Harmony."""
    tokenize, encoder = engine(tiny), PromptEncoder.load(tiny)

    async def script(received: Received, wire: Wire) -> None:
        is_render = received.head.startswith(b"POST /v1/chat/completions/render ")
        is_chat = received.head.startswith(b"POST /v1/chat/completions ")
        if is_render and not renders:
            await wire.send(answer(b'{"detail":"Not Found"}', 404))
        elif is_render or (is_chat and received.json.get("return_token_ids")):
            messages = [
                {**one, "content": separator.join(part["text"] for part in one["content"])}
                if isinstance(one["content"], list)
                else one
                for one in received.json["messages"]
            ]
            if separator == " " and messages[-1]["role"] == "assistant":
                messages[-1] = {**messages[-1], "role": "user"}
            (ids,) = await encoder.encode(ChatPrompt(messages)) or [[]]
            name = "token_ids" if is_render else "prompt_token_ids"
            await wire.send(answer(json.dumps({name: [*first, *ids]}).encode()))
        else:
            await tokenize(received, wire)

    return script


@pytest.mark.parametrize("renders", [False, True])
async def test_chats_that_tokenize_does_not_know(
    fleet_of: FleetOf, tiny: Path, tmp_path: Path, soon: None, renders: bool
) -> None:
    """The chat route counts: chats come from the render route, or are routed without tokens and say why."""
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    script = other_chats(tiny, renders=renders, first=(7, 7))
    flags = (*with_root(tmp_path), "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(script,), tokenizer=str(directory)) as fleet:
        wanted = {"chat": "engines" if renders else "text", "text": "card"}
        while await ways(fleet) != wanted:
            await fleet.get("/live")
        found = (await view(fleet))["ways"][POOL]["chat"]["why_not"]
        assert "the ids of a probe chat are not those of" in found["card"]
        assert renders or "its render route is off" in found["engines"]

        await fleet.ask(CHAT, path="/v1/chat/completions")
        with PromptEncoder.load(tiny) as encoder:
            (ids,) = await encoder.encode(ChatPrompt(CHAT["messages"])) or [[]]  # type: ignore[arg-type]
        blocks = overlap(await fleet.ask(CHAT, path="/v1/chat/completions"))
        assert blocks == (len(ids) + 1) // 16 if renders else blocks > 10


def rejects_last_answer(tiny: Path) -> Script:
    """Rejects a chat that ends with a message of the assistant, as templates of SGLang do that want turns."""
    tokenize = engine(tiny)

    async def script(received: Received, wire: Wire) -> None:
        is_tokenize = received.head.startswith(b"POST /tokenize ")
        if is_tokenize and received.json.get("messages", [{}])[-1].get("role") == "assistant":
            await wire.send(answer(b'{"object":"error","message":"roles must alternate"}', 400))
        else:
            await tokenize(received, wire)

    return script


async def test_engine_rejects_a_probe(fleet_of: FleetOf, tiny: Path, tmp_path: Path, soon: None) -> None:
    """A probe that the engine rejects shows nothing: the others are compared, and the card serves."""
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    flags = (*with_root(tmp_path), "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(rejects_last_answer(tiny),), tokenizer=str(directory)) as fleet:
        while await ways(fleet) != {"chat": "card", "text": "card"}:
            await fleet.get("/live")
        await until(lambda: check(fleet).state == "equal", "it is compared")


@pytest.mark.parametrize("separator", ["\n", " "])
async def test_texts_are_joined_as_the_engine_does(
    fleet_of: FleetOf, tiny: Path, tmp_path: Path, soon: None, separator: str
) -> None:
    """SGLang joins the texts of one content with a blank, vLLM with a line end: the probe shows which."""
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    script = other_chats(tiny, separator)
    flags = (*with_root(tmp_path), "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(script,), tokenizer=str(directory)) as fleet:
        while await ways(fleet) != {"chat": "card", "text": "card"}:
            await fleet.get("/live")
        halves = TEXT[:400], TEXT[400:]
        parts = [{"role": "user", "content": [{"type": "text", "text": half} for half in halves]}]
        await fleet.ask({"model": "m", "messages": parts}, path="/v1/chat/completions")
        joined = {"model": "m", "messages": [{"role": "user", "content": separator.join(halves)}]}

        found = await fleet.ask(joined, path="/v1/chat/completions")
        with PromptEncoder.load(tiny) as encoder:
            (ids,) = await encoder.encode(ChatPrompt(joined["messages"])) or [[]]  # type: ignore[arg-type]
        assert (len(ids) - 1) // 16 == overlap(found)


def with_flags(directory: Path, *, excludes: bool = True) -> Script:
    """A vLLM with --exclude-tools-when-tool-choice-none and --reasoning-effort-map {"high": "low"}."""
    encoder = PromptEncoder.load(directory)

    async def script(received: Received, wire: Wire) -> None:
        body = received.json
        if "prompt" in body:
            prompt: ChatPrompt | TextPrompt = TextPrompt([body["prompt"]])
        elif received.head.startswith(b"POST /tokenize "):
            variables = body.get("chat_template_kwargs", {})
            prompt = ChatPrompt(body["messages"], body.get("tools"), chat_template_kwargs=variables)
        elif received.head.startswith(b"POST /v1/chat/completions "):
            tools = body.get("tools") if not (excludes and body.get("tool_choice") == "none") else None
            effort = {"high": "low"}.get(body.get("reasoning_effort"), body.get("reasoning_effort"))
            prompt = ChatPrompt(body["messages"], tools, effort=effort)
        else:
            await wire.send(answer(b'{"detail":"Not Found"}', 404))
            return
        (ids,) = await encoder.encode(prompt) or [[]]
        await wire.send(answer(json.dumps({"tokens": ids, "prompt_token_ids": ids}).encode()))

    return script


EFFORT_AND_TOOLS = (
    "{{ reasoning_effort if reasoning_effort in ['low', 'high'] }}{{ tools | tojson if tools }}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("way", ["model path", "card", "engines"])
async def test_options_of_the_engine(
    fleet_of: FleetOf, tiny: Path, tmp_path: Path, soon: None, looks_often: None, way: str
) -> None:
    """Flags that decide over tools and efforts show in the ids of probes: overlap follows the engine."""
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    (directory / "chat_template.jinja").write_text(EFFORT_AND_TOOLS)
    flags = {
        "model path": (*with_root(tmp_path), "--model-path", str(directory)),
        "card": with_root(tmp_path),
        "engines": ("--tokenizer", "remote", "--router-mode", "kv"),
    }[way]
    scripts = (with_flags(directory),)
    async with fleet_of(*flags, "--no-use-kv-events", scripts=scripts, tokenizer=str(directory)) as fleet:
        tokens = fleet.frontend.tokens
        router = fleet.frontend.replica.routers[POOL]

        def learnt() -> ChatOptions | None:
            if way == "engines":
                return by_engines(fleet)._options.get(POOL)
            return tokens.checks.options_of(router.pool) if tokens.checks else None

        learned = ChatOptions(leaves_tools_out=True, efforts={"high": "low"})
        await until(lambda: learnt() == learned, "the flags are learnt")
        assert {"chat": way, "text": way} == await ways(fleet)
        await fleet.ask({**CHAT, "reasoning_effort": "low"}, path="/v1/chat/completions")
        tools = [{"type": "function", "function": {"name": "f"}}]
        more = {"reasoning_effort": "high", "tools": tools, "tool_choice": "none"}
        found = await fleet.ask({**CHAT, **more}, path="/v1/chat/completions")

        with PromptEncoder.load(directory) as encoder:
            (ids,) = await encoder.encode(ChatPrompt(CHAT["messages"], effort="low")) or [[]]  # type: ignore[arg-type]
        assert (len(ids) - 1) // 16 == overlap(found)
        fleet.frontend.audit.run()
        assert [] == (await fleet.get("/workers")).json["pools"][0]["problems"]


async def test_options_that_nothing_explains(
    fleet_of: FleetOf, tiny: Path, tmp_path: Path, looks_often: None
) -> None:
    """Chats with an option that the engine reads in an unknown way have no tokens: it is a problem."""
    for name in ("here", "engine"):
        shutil.copytree(tiny, tmp_path / name)
    (tmp_path / "here/chat_template.jinja").write_text(EFFORT_AND_TOOLS)
    (tmp_path / "engine/chat_template.jinja").write_text(EFFORT_AND_TOOLS.replace("| tojson", "| length"))
    flags = ("--tokenizer", "local", "--router-mode", "kv", "--model-path", str(tmp_path / "here"))
    script = with_flags(tmp_path / "engine", excludes=False)
    async with fleet_of(*flags, "--no-use-kv-events", scripts=(script,)) as fleet:
        await until(lambda: bool(check(fleet).options.efforts), "the options are learnt")
        tools = [{"type": "function", "function": {"name": "f"}}]
        path = "/v1/chat/completions"
        found = [overlap(await fleet.ask({**CHAT, "tools": tools}, path=path)) for _ in range(2)]
        plain = [overlap(await fleet.ask(CHAT, path=path)) for _ in range(2)]

        assert ([0, 0], True) == (found, plain[1] > 10)
        fleet.frontend.audit.run()
        (problem,) = (await fleet.get("/workers")).json["pools"][0]["problems"]
        assert "chats with tools have other token ids in the engine" in problem


@pytest.mark.parametrize("takes_chats", [False, True], ids=["before", "since"])
async def test_sglang(fleet_of: FleetOf, tiny: Path, soon: None, takes_chats: bool) -> None:
    """Texts are hashed from its ids; chats, too, or as text with a reason that names the remedy."""
    flags = ("--tokenizer", "auto", "--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(sglang(tiny, takes_chats=takes_chats),)) as fleet:
        await until(probed(fleet), "it was probed")
        assert {"chat": "engines" if takes_chats else "text", "text": "engines"} == await ways(fleet)
        with PromptEncoder.load(tiny) as encoder:
            for body, prompt, path in (
                (COMPLETION, TextPrompt([TEXT]), "/v1/completions"),
                (CHAT, ChatPrompt(CHAT["messages"]), "/v1/chat/completions"),  # type: ignore[arg-type]
            ):
                await fleet.ask(body, path=path)
                (ids,) = await encoder.encode(prompt) or [[]]
                found = overlap(await fleet.ask(body, path=path))
                assert found == (len(ids) - 1) // 16 or (not takes_chats and path != "/v1/completions")
                assert found > 10
        reasons = (await readiness(fleet))["reasons"]
        assert takes_chats or "takes texts only, as in older versions of SGLang" in reasons[0]
        assert len(reasons) == (not takes_chats)


def answers_tokenize(*, status: int = 200, body: bytes = b"{}", gate: asyncio.Event | None = None) -> Script:
    """Answers /tokenize with this, and everything else with OK."""

    async def script(received: Received, wire: Wire) -> None:
        if received.head.startswith(b"POST /tokenize "):
            if gate is not None:
                await gate.wait()
            await wire.send(answer(body, status))
        else:
            await wire.send(answer())

    return script


HOSTILE = {
    "no route": answers_tokenize(status=404, body=b'{"detail":"Not Found"}'),
    "hidden": answers_tokenize(status=403),
    "broken": answers_tokenize(status=500),
    "words": answers_tokenize(body=b'{"tokens": ["a", "b"]}'),
    "no list": answers_tokenize(body=b'{"tokens": {"a": 1}}'),
    "out of range": answers_tokenize(body=b'{"tokens": [-1, 99999999999999999999]}'),
    "huge": answers_tokenize(body=json.dumps({"tokens": [7] * 100_000}).encode()),
    "html": answers_tokenize(body=b"<html>"),
}


@pytest.mark.parametrize("use_events", ["--use-kv-events", "--no-use-kv-events"])
@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE.keys())
async def test_engines_that_fail(fleet_of: FleetOf, script: Script, use_events: str, soon: None) -> None:
    """If engines do not tokenize, texts and chats follow what was sent where, and /ready has the reason."""
    flags = ("--tokenizer", "auto", "--router-mode", "kv", use_events)
    async with fleet_of(*flags, scripts=(script, script)) as fleet:
        answers = [await fleet.ask(CHAT, path="/v1/chat/completions") for _ in range(4)]

        assert {200} == {one.status for one in answers}
        while (await ways(fleet)) != {"chat": "text", "text": "text"}:
            await fleet.ask(CHAT, path="/v1/chat/completions")
            await fleet.ask(COMPLETION)
        first, second = [await fleet.ask(CHAT, path="/v1/chat/completions") for _ in range(2)]
        assert len(TEXT) // 4 // 16 - 1 <= overlap(second)
        assert first.header("x-kvrouter-worker") == second.header("x-kvrouter-worker")
        ready = await readiness(fleet)
        assert "degraded" == ready["status"]
        # a slow machine has time for one more reason: no worker publishes events
        (reason,) = [one for one in ready["reasons"] if "chats are routed by what was sent where" in one]
        assert "/tokenize" in reason


async def test_engine_that_returns(fleet_of: FleetOf, tiny: Path, soon: None) -> None:
    """An engine is asked again as soon as a probe of it is answered; requests do not wait for that."""
    status = [404]
    flags = ("--tokenizer", "auto", "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(engine(tiny, status=status),)) as fleet:
        await until(lambda: len(fleet.logged("tokenizer.way")) == 2, "it has no /tokenize")
        for _ in range(3):
            assert 200 == (await fleet.ask(COMPLETION)).status
        counters = by_engines(fleet).counters
        assert (0, 0) == (counters.answered, counters.failed)

        status[0] = 200
        await until(lambda: len(fleet.logged("tokenizer.way")) == 4, "both kinds are served again")
        assert {"chat": "engines", "text": "engines"} == await ways(fleet)
        await fleet.ask(COMPLETION)
        assert 1 == counters.answered


async def test_engine_that_refuses_all(fleet_of: FleetOf, soon: None) -> None:
    """An engine without a tokenizer takes ids only: nothing lacks, until texts are served all the same."""
    flags = ("--tokenizer", "auto", "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(answers_tokenize(status=400),)) as fleet:
        await until(lambda: len(fleet.logged("tokenizer.way")) == 2, "it was probed")
        assert "ready" == (await readiness(fleet))["status"]

        await fleet.ask(COMPLETION)

        (reason,) = (await readiness(fleet))["reasons"]
        assert "texts are routed by what was sent where" in reason


async def test_one_refused_prompt(fleet_of: FleetOf, tiny: Path) -> None:
    """A prompt that an engine refuses to tokenize is relayed, and the next prompt is tokenized."""
    refuses = [False]
    tokenize = engine(tiny)

    async def script(received: Received, wire: Wire) -> None:
        if received.head.startswith(b"POST /tokenize ") and refuses[0]:
            await wire.send(answer(b'{"error": "no such role"}', 400))
        else:
            await tokenize(received, wire)

    flags = ("--tokenizer", "auto", "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(script,)) as fleet:
        await until(probed(fleet), "the engine is probed")
        refuses[0] = True
        for number in range(engines_way.FAILURES + 1):
            assert 200 == (await fleet.ask({**COMPLETION, "prompt": f"{number}"})).status
        refuses[0] = False
        await fleet.ask(COMPLETION)

        counters = by_engines(fleet).counters
        assert (1, 4, 0) == (counters.answered, counters.refused, counters.failed)


ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"model": "m", "messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"model": "m", "prompt": text},
    "/v1/embeddings": lambda text: {"model": "m", "input": text},
}


SILENT = says_and_stalls()


def tokenizing(worker: FakeWorker) -> int:
    """How many requests to /tokenize it got."""
    return sum(received.head.startswith(b"POST /tokenize ") for received in worker.requests)


def failing(script: Script) -> Script:
    """Answers /tokenize by this script, and everything else with OK."""

    async def whole(received: Received, wire: Wire) -> None:
        await (script if received.head.startswith(b"POST /tokenize ") else says(answer()))(received, wire)

    return whole


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "script",
    [
        says_and_resets(answer(b'{"tokens":[1,2,3]}')[:-4]),
        SILENT,
        says(answer(b'{"detail":"Not Found"}', 404)),
        says(answer(b"<html>", 500)),
        says(answer(b'{"count":1}')),
    ],
    ids=["dies", "hangs", "404", "500", "no ids"],
)
@pytest.mark.usefixtures("no_probes")
async def test_second_engine(
    fleet_of: FleetOf, tiny: Path, monkeypatch: pytest.MonkeyPatch, path: str, script: Script
) -> None:
    """If one engine fails, the ids come from another, and the first is avoided for a while."""
    monkeypatch.setattr(engines_way, "AVOIDED_S", 1e9)
    monkeypatch.setattr(engines_way, "REQUEST_TIMEOUT_S", 20.0)
    is_silent = script is SILENT
    monkeypatch.setattr(engines_way, "LATE_SHARE", 0.01 if is_silent else 0.9)
    flags = ("--tokenizer", "remote", "--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(failing(script), engine(tiny))) as fleet:
        requests = 0
        # Which one is asked first is random. A slow machine may give up a silent one before that has read.
        while requests < 4 or (requests < 50 and not tokenizing(fleet.workers[0])):
            assert 200 == (await fleet.ask(ROUTES[path](f"{requests} {TEXT}"), path=path)).status
            requests += 1

        counters = by_engines(fleet).counters
        assert (requests, 0) == (counters.answered, counters.failed)
        # next to a silent engine, a slow machine may make the good one seem late
        assert is_silent or tokenizing(fleet.workers[0]) == 1, "it is avoided"
        assert not any(fleet.frontend.tokens.blocks.without_tokens.values())


@pytest.mark.usefixtures("no_probes")
async def test_two_engines_that_fail(fleet_of: FleetOf) -> None:
    """If the second one fails, too, the request is placed by its text and counted once."""
    flags = ("--tokenizer", "remote", "--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(failing(says(answer(b"{}", 500))),) * 3) as fleet:
        assert 200 == (await fleet.ask(COMPLETION)).status

        assert (0, 1) == (by_engines(fleet).counters.answered, by_engines(fleet).counters.failed)
        assert [0, 1, 1] == sorted(map(tokenizing, fleet.workers))
        assert 1 == sum(fleet.frontend.tokens.blocks.without_tokens.values())


@pytest.mark.usefixtures("no_probes")
async def test_rejected_prompt_is_asked_once(fleet_of: FleetOf) -> None:
    """A prompt that one engine rejects goes to no other."""
    flags = ("--tokenizer", "remote", "--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(answers_tokenize(status=400),) * 2) as fleet:
        await fleet.ask(COMPLETION)

        assert 1 == len(asked(fleet, b"/tokenize"))
        assert (1, 0) == (by_engines(fleet).counters.refused, by_engines(fleet).counters.failed)


@pytest.mark.usefixtures("no_probes")
async def test_slow_engine(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits a bounded time for its tokens; after three times none waits."""
    monkeypatch.setattr(engines_way, "REQUEST_TIMEOUT_S", 0.3)
    flags = ("--tokenizer", "remote", "--router-mode", "kv")
    gate = asyncio.Event()
    async with fleet_of(*flags, scripts=(answers_tokenize(gate=gate),)) as fleet:
        for _ in range(5):
            assert 200 == (await fleet.ask(COMPLETION)).status

        counters = by_engines(fleet).counters
        assert (3, 3) == (counters.failed, len(asked(fleet, b"/tokenize")))
        assert "text" == (await ways(fleet))["text"]
        gate.set()


def with_root(root: Path) -> tuple[str, ...]:
    return ("--tokenizer", "auto", "--router-mode", "kv", "--tokenizer-root", str(root))


async def test_card(fleet_of: FleetOf, tiny: Path, soon: None) -> None:
    """A directory that a card names serves once its ids are found to be the engine's."""
    script = engine(tiny)
    async with fleet_of(*with_root(tiny.parent), scripts=(script,), tokenizer=str(tiny)) as fleet:
        await until(lambda: logged_ways(fleet)[-2:] == ["card", "card"], "the card's tokenizer serves")
        before = len(asked(fleet, b"/tokenize"))
        first, again = [await fleet.ask(CHAT, path="/v1/chat/completions") for _ in range(2)]

        assert {200} == {first.status, again.status}
        assert before == len(asked(fleet, b"/tokenize"))
        assert {"chat": "card", "text": "card"} == await ways(fleet)


@pytest.mark.parametrize(
    ("removed", "answers", "served"),
    [
        ("nothing", True, {"chat": "engines", "text": "card"}),
        ("tokenizer.json", True, {"chat": "engines", "text": "engines"}),
        ("tokenizer.json", False, {"chat": "text", "text": "text"}),
    ],
)
async def test_mistral(
    fleet_of: FleetOf,
    tiny: Path,
    tmp_path: Path,
    soon: None,
    removed: str,
    answers: bool,
    served: dict[str, str],
) -> None:
    """With Mistral's own files only engines know the ids of chats; a template beside them is not used."""
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    (directory / "tekken.json").write_text("{}")
    (directory / removed).unlink(missing_ok=True)
    script = engine(tiny, status=None if answers else [404])
    async with fleet_of(*with_root(tmp_path), scripts=(script,), tokenizer=str(directory)) as fleet:
        reason = "tokenizer mode mistral" if removed == "nothing" else "tokenizer.json is missing"
        while (
            await ways(fleet) != served
            or reason not in (found := (await view(fleet))["ways"][POOL]["chat"]["why_not"])["card"]
        ):
            pass

        assert 200 == (await fleet.ask(CHAT, path="/v1/chat/completions")).status
        assert answers or "answered 404" in found["engines"]


async def test_card_outside_the_root(fleet_of: FleetOf, tiny: Path, tmp_path: Path, soon: None) -> None:
    """A directory elsewhere is not read, also behind a link below the root."""
    (tmp_path / "link").symlink_to(tiny)
    link = str(tmp_path / "link")
    async with fleet_of(*with_root(tmp_path), scripts=(engine(tiny),), tokenizer=link) as fleet:
        await until(lambda: "card" in str(fleet.logged("tokenizer.way")), "it was tried")
        found = (await view(fleet))["ways"][POOL]["chat"]

        assert "engines" == found["way"]
        assert "is not below --tokenizer-root" in found["why_not"]["card"]


BROKEN = {
    "tokenizer.json": (b"{}", b"[" * 200_000, b"\xff\xfe", b""),
    "tokenizer_config.json": (b"[" * 200_000, b"\xff\xfe"),
    "chat_template.jinja": (b"{% for", b"\xff\xfe", b"{% for x in range(10 ** 9) %}a{% endfor %}"),
}


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, all_ in BROKEN.items() for one in all_])
async def test_card_with_broken_files(
    fleet_of: FleetOf, tiny: Path, tmp_path: Path, soon: None, name: str, content: bytes
) -> None:
    """Files that cannot be read or never end leave the work to the engine, with a reason."""
    directory = tmp_path / "broken"
    shutil.copytree(tiny, directory)
    (directory / name).write_bytes(content)
    script = engine(tiny)
    async with fleet_of(*with_root(tmp_path), scripts=(script,), tokenizer=str(directory)) as fleet:
        await until(lambda: "card" in str(fleet.logged("tokenizer.way")), "it was tried")

        assert 200 == (await fleet.ask(CHAT, path="/v1/chat/completions")).status
        found = (await view(fleet))["ways"][POOL]["chat"]
        assert "engines" == found["way"]
        assert found["why_not"]["card"]


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_card_with_other_ids(
    fleet_of: FleetOf, tiny: Path, soon: None, looks_often: None, kind: str
) -> None:
    """A tokenizer with other ids than the engine's is not used for such prompts, and no alarm is raised.

    Neither at once nor by the comparison of what is served: texts stay with the tokenizer of the card.
    """
    script = engine(tiny, change=lambda ids: [9, *ids] if (ids[0] == 1) == (kind == "chat") else ids)
    async with fleet_of(*with_root(tiny.parent), scripts=(script,), tokenizer=str(tiny)) as fleet:
        while f"the ids of a probe {kind} are not" not in str(
            (found := (await view(fleet))["ways"][POOL])["chat"]["why_not"]
        ):
            pass
        while kind == "chat" and not (await view(fleet))["compared"].get(POOL, {}).get("equal"):
            assert not fleet.logged("tokens.differ")

        found = (await view(fleet))["ways"][POOL]
        assert "engines" == found["chat"]["way"]
        assert ("card" if kind == "chat" else "engines") == found["text"]["way"]
        assert not fleet.logged("tokens.differ")


async def test_card_that_differs_later(fleet_of: FleetOf, tiny: Path, soon: None, often: None) -> None:
    """If a later comparison finds other ids, the engine tokenizes from then on."""
    script = engine(tiny, change=lambda ids: [9, *ids] if len(ids) > 100 else ids)
    async with fleet_of(*with_root(tiny.parent), scripts=(script,), tokenizer=str(tiny)) as fleet:
        await until(lambda: logged_ways(fleet)[-2:] == ["card", "card"], "the card's tokenizer serves")
        while logged_ways(fleet)[-1] == "card":
            assert 200 == (await fleet.ask(COMPLETION)).status

        found = (await view(fleet))["ways"][POOL]["text"]
        assert "engines" == found["way"]
        assert "token ids of texts differ" in found["why_not"]["card"]
        assert 1 == len(fleet.logged("tokens.differ"))


def logged_ways(fleet: Fleet) -> list[str]:
    return [line["way"] for line in fleet.logged("tokenizer.way")]


async def test_peers_learn_texts(fleet_of: FleetOf, soon: None) -> None:
    """What one replica sent where counts at the other one, next to an index of KV events."""
    flags = ("--tokenizer", "auto", "--router-mode", "kv", "--router-replica-sync")
    script = HOSTILE["no route"]
    async with fleet_of(*flags, scripts=(script, script), replicas=2) as fleet:
        await until(lambda: len(fleet.logged("tokenizer.way")) == 4, "both replicas have probed")
        while (await ways(fleet))["chat"] != "text":
            await fleet.ask(OTHER_CHAT, path="/v1/chat/completions")
        first = await fleet.ask(CHAT, path="/v1/chat/completions")
        there = fleet.frontends[1]
        pool = there.replica.routers[POOL].pool
        await until(lambda: len(pool.assumed), "the other replica learnt of it")
        second = await ask(there.url, CHAT, path="/v1/chat/completions")

        assert overlap(second)
        assert first.header("x-kvrouter-worker") == second.header("x-kvrouter-worker")
        assert not len(pool.index)


# none


async def test_none(fleet_of: FleetOf) -> None:
    """With --tokenizer none, texts with the same beginning go to one worker, without a tokenizer."""
    flags = ("--tokenizer", "none", "--router-mode", "kv")
    async with fleet_of(*flags) as fleet:
        turns = {**CHAT, "messages": [*CHAT["messages"], {"role": "user", "content": "and then?"}]}
        first = await fleet.ask(CHAT, path="/v1/chat/completions")
        second = await fleet.ask(turns, path="/v1/chat/completions")

        blocks = len(TEXT) // 4 // 16
        assert "0" == first.header("x-kvrouter-overlap-blocks")
        assert int(second.header("x-kvrouter-overlap-blocks") or 0) in {blocks - 1, blocks}
        assert "none" == (await view(fleet))["tokenizer"]
        assert fleet.logged("tokens.none")
        assert not asked(fleet, b"/tokenize")


# estimated lengths and prompts that are computed whole are not compared


def saying(**usage: Any) -> Script:
    """Replies to every request with this usage."""
    return says(answer(json.dumps({"usage": usage}).encode()))


def record_of(fleet: Fleet) -> WorkerRecord:
    """The audit's record of the only worker."""
    (record,) = fleet.frontend.replica.routers[POOL].predictions.records.values()
    return record


def problems(fleet: Fleet) -> list[str]:
    """The kinds of problems of the only worker."""
    fleet.frontend.audit.run()
    return [problem.kind for problem in fleet.frontend.audit.problems(POOL, fleet.workers[0].id)]


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "text"])
async def test_guessed_lengths(fleet_of: FleetOf, body: dict[str, Any]) -> None:
    """With --tokenizer none an engine with another token count is not a problem."""
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 128}}
    flags = ("--tokenizer", "none", "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(saying(**usage),)) as fleet:
        path = "/v1/chat/completions" if body is CHAT else "/v1/completions"
        for _ in range(LEAST):
            await fleet.ask(body, path=path)

        assert {} == record_of(fleet).lengths
        assert LEAST == sum(record_of(fleet).predictions.values())
        assert [] == problems(fleet)


async def test_guessed_ends(fleet_of: FleetOf, tiny: Path) -> None:
    """With --min-prefix-overlap-ratio only prompts that were tokenized whole are counted and compared."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv", "--min-prefix-overlap-ratio", "0.5")
    async with fleet_of(*flags, "--no-token-comparison", scripts=(saying(prompt_tokens=9),)) as fleet:
        await fleet.ask(COMPLETION)
        for turn in range(LEAST):
            await fleet.ask({"model": "m", "prompt": TEXT + f"and something new {turn} " * 5})

        assert {"different": 1} == record_of(fleet).lengths


@pytest.mark.parametrize(
    ("fields", "is_found"),
    [({}, True), ({"prompt_logprobs": 1}, False), ({"echo": True, "logprobs": 1}, False)],
    ids=["plain", "prompt_logprobs", "echo"],
)
async def test_computed_whole(fleet_of: FleetOf, fields: dict[str, Any], is_found: bool) -> None:
    """For requests for the prompt's logprobs vLLM does not use its cache, and 0 is right."""
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0}}
    flags = ("--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(saying(**usage),)) as fleet:
        for _ in range(LEAST + 1):
            await fleet.ask({"model": "m", "prompt": [*range(100)], **fields})

        assert (["uncached"] if is_found else []) == problems(fleet)
        exact = record_of(fleet).predictions["exact", "index" if is_found else "doubtful"]
        assert (1 if is_found else LEAST + 1) == exact  # placed and charged as it will be computed


async def test_beam_search_is_not_compared(fleet_of: FleetOf) -> None:
    """Answers of a beam search do not report cached tokens; that is not counted as 0."""
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 96}}
    script = in_turn(saying(**usage), saying(**usage), saying(prompt_tokens=100))
    async with fleet_of("--router-mode", "kv", "--no-use-kv-events", scripts=(script,)) as fleet:
        body = {"model": "m", "prompt": [*range(100)]}
        await fleet.ask(body)
        await fleet.ask(body)
        for _ in range(LEAST):
            await fleet.ask({**body, "use_beam_search": True})

        assert 2 == sum(record_of(fleet).predictions.values())


# comparison


async def test_equal(fleet_of: FleetOf, tiny: Path, often: None) -> None:
    """Equal ids are found at the start, and nothing is logged."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(engine(tiny),)) as fleet:
        await until(lambda: check(fleet).equal == 2, "the probes are compared")
        found = await compared(fleet)

        assert (2, 0, None) == (found["equal"], found["different"], found["difference"])
        assert not fleet.logged("tokens.differ")


async def test_differ(fleet_of: FleetOf, tiny: Path, often: None) -> None:
    """A difference is in log, metric and /workers: once, with position, texts and remedy."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv")
    script = engine(tiny, change=lambda ids: [1, *ids])
    async with fleet_of(*flags, scripts=(script,)) as fleet:
        await until(lambda: state(fleet) == "differs", "the difference is found")
        for _ in range(3):
            await fleet.ask(COMPLETION)
        await until(lambda: check(fleet).different > 1, "a real prompt was compared, too")

        (line,) = fleet.logged("tokens.differ")
        assert (0, "text") == (line["position"], line["prompt"])
        assert "the engine puts '<|im_start|>' first" in line["remedy"]
        found = await compared(fleet)
        assert ("differs", 0) == (found["state"], found["difference"]["position"])
        fleet.frontend.audit.run()
        (pool,) = (await fleet.get("/workers")).json["pools"]
        (problem,) = pool["problems"]
        assert "token ids of texts differ" in problem
        assert "at position 0: special tokens: the engine puts" in problem
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'kvrouter_worker_problem{pool="m-12345678",problem="tokens_differ",worker=""} 1.0' in metrics
        assert ["prompt", "position", "remedy"] == list(line)[:3]


async def test_real_prompts(fleet_of: FleetOf, tiny: Path, often: None) -> None:
    """A real prompt can differ although the probes do not; the problem ends when it is equal again."""
    bad = [True]

    def change(ids: list[int]) -> list[int]:
        return [*ids[:50], 9, *ids[51:]] if bad[0] and len(ids) > 100 else ids

    flags = ("--model-path", str(tiny), "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(engine(tiny, change=change),)) as fleet:
        await until(lambda: check(fleet).equal == 2, "the probes are equal")
        await fleet.ask(COMPLETION)
        await until(lambda: state(fleet) == "differs", "the prompt is compared")

        assert 50 == (await compared(fleet))["difference"]["position"]
        bad[0] = False
        await fleet.ask(COMPLETION)
        await until(lambda: state(fleet) == "equal", "it is right again")
        assert fleet.logged("tokens.equal_again")


async def test_unanswered(fleet_of: FleetOf, tiny: Path, often: None) -> None:
    """An engine without /tokenize is logged once as not compared."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(engine(tiny, status=[404]),)) as fleet:
        await until(lambda: state(fleet) == "unanswered", "the probe fails")

        (line,) = fleet.logged("tokens.not_compared")
        assert "answered 404" in line["reason"]


@pytest.mark.parametrize("flags", [("--no-token-comparison",), ("--router-mode", "round-robin")], ids=str)
async def test_not_compared(fleet_of: FleetOf, tiny: Path, often: None, flags: tuple[str, ...]) -> None:
    """No engine is asked if the comparison is off or the mode needs no tokens."""
    base = ("--router-mode", "kv", "--model-path", str(tiny))
    async with fleet_of(*base, *flags, scripts=(engine(tiny),)) as fleet:
        await fleet.ask(COMPLETION)

        assert not asked(fleet, b"/tokenize")


# fastokens, and the prefix-token cache


async def test_the_library_is_shown(fleet_of: FleetOf, tiny: Path) -> None:
    """/workers names the library that serves each model, and /metrics how its ids compared."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv", "--tokenizer-backend=auto")
    async with fleet_of(*flags) as fleet:
        fast = fleet.frontend.tokens.encoders.default.fast
        assert fast is not None
        await asyncio.to_thread(fast.compared.result, 30)
        await fleet.ask(COMPLETION)

        assert {"backend": "fastokens", "checks": {}} == (await view(fleet))["backends"]["default"]
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'kvrouter_tokenizer_checks_total{result="different"} 0.0' in metrics
        fast.difference = "a prompt has other ids"
        assert "default: a prompt has other ids" == fleet.frontend.tokens.compared(POOL).backend


async def test_too_much_waits_for_the_tokenizer(fleet_of: FleetOf, tiny: Path) -> None:
    """A prompt above what may wait gets 503 and the time to come again; those that wait are served."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv", "--tokenizer-workers=1")
    async with fleet_of(*flags, "--tokenizer-queue-mib=1") as fleet:
        encoder, release = fleet.frontend.tokens.encoders.default, threading.Event()
        jobs = encoder.jobs
        assert jobs is not None
        busy = asyncio.create_task(jobs.run(release.wait, 1))
        waits = asyncio.create_task(fleet.ask({**COMPLETION, "prompt": "to be or not " * 50_000}))
        await until(lambda: jobs.waiting > 0, "the first waits")

        refused = await fleet.ask({**COMPLETION, "prompt": "and nobody " * 50_000})
        release.set()

        assert (503, "busy") == (refused.status, "busy" if "tokenizer" in refused.body.decode() else "")
        assert int(refused.header("retry-after")) >= 1
        assert 200 == (await waits).status
        await busy


async def test_prefix_cache_is_shown(fleet_of: FleetOf, tiny: Path) -> None:
    """/workers and the metrics contain what the prefix cache holds and saves."""
    async with fleet_of("--model-path", str(tiny), "--router-mode", "kv") as fleet:
        await fleet.ask(COMPLETION)
        await fleet.ask(COMPLETION)

        cache = (await view(fleet))["prefix_caches"]["default"]
        assert (True, True, 3) == (cache["on"], cache["cut_after_words"], cache["cut_after_tokens"])
        cache = (await view(fleet))["prefix_store"]
        assert cache["known_characters"] + cache["tokenized_characters"] == 2 * len(TEXT)
        metrics = (await fleet.get("/metrics")).body.decode()
        known = float(cache["known_characters"])
        assert f'kvrouter_prefix_store_characters_total{{result="known"}} {known}' in metrics


async def test_several_models(fleet_of: FleetOf, tiny: Path) -> None:
    """A model with its own directory is tokenized and compared with that tokenizer."""
    flags = ("--model-path", f"m={tiny}", "--router-mode", "kv")
    async with fleet_of(*flags, scripts=(engine(tiny),)) as fleet:
        await until(lambda: state(fleet) == "equal", "the probe is compared")
        await fleet.ask(COMPLETION)

        found = await view(fleet)
        assert ("local", ["m"]) == (found["tokenizer"], list(found["prefix_caches"]))
        assert found["prefix_store"]["tokenized_characters"] == len(TEXT)


async def test_prefix_cache_that_is_off(fleet_of: FleetOf, tiny: Path, tmp_path: Path) -> None:
    """A tokenizer that cannot use the prefix cache is in the log and in /workers."""
    file = json.loads((tiny / "tokenizer.json").read_text())
    file["added_tokens"][1]["single_word"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    async with fleet_of("--model-path", str(tmp_path), "--router-mode", "kv") as fleet:
        cache = (await view(fleet))["prefix_caches"]["default"]

        assert not cache["on"]
        assert "single_word" in cache["reason"]
        assert fleet.logged("tokens.no_prefix_cache")


async def test_enough_is_known(fleet_of: FleetOf, tiny: Path) -> None:
    """With --min-prefix-overlap-ratio the rest of a prompt is booked without being tokenized."""
    flags = ("--model-path", str(tiny), "--router-mode", "kv", "--min-prefix-overlap-ratio", "0.5")
    seen = []
    async with fleet_of(*flags, "--no-token-comparison") as fleet:
        router = next(iter(fleet.frontend.replica.routers.values()))
        book = router.pool.active.book
        router.pool.active.book = lambda booking: (seen.append(booking), book(booking))[1]  # type: ignore[method-assign, func-returns-value]
        await fleet.ask(COMPLETION)
        await fleet.ask({"model": "m", "prompt": TEXT + "and something new " * 5})

        whole, partly = seen
        assert 0 == whole.anonymous_blocks
        assert partly.anonymous_blocks > 0
        assert partly.isl > whole.isl
        assert partly.isl // 16 == len(partly.hashes) + partly.anonymous_blocks
