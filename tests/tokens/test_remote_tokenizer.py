"""The client of /tokenize, against scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter.tls import trusting
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt
from kvrouter.tokens.remote_tokenizer import (
    MOST_CALLS,
    RENDER,
    TOKENIZE,
    BusyError,
    EngineTokenizer,
    EngineTokenizerError,
    NoTokenizeRouteError,
    RefusedError,
    SlowError,
    tokenize_bodies,
)
from tests.certificates import Authority

Reply = Callable[[dict[str, Any]], web.StreamResponse]


class Engine:
    """Answers /tokenize with `reply`."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.reply: Reply = lambda body: web.json_response({"count": 2, "tokens": [7, len(self.asked)]})
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers)
        await self.gate.wait()
        return self.reply(self.asked[-1])


@pytest.fixture
async def server() -> AsyncIterator[Engine]:
    """A scripted engine."""
    async with serving() as fake:
        yield fake


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Engine]:
    """Runs a scripted engine while inside."""
    fake, app = Engine(), web.Application()
    app.router.add_post("/tokenize", fake.tokenize)
    app.router.add_post("/v1/chat/completions", fake.tokenize)
    running = TestServer(app)
    await running.start_server(ssl=tls)
    try:
        fake.url = str(running.make_url("")).rstrip("/")
        yield fake
        fake.gate.set()
    finally:
        await running.close()


async def test_texts(server: Engine) -> None:
    """Each text is one request, with the engine's default for special tokens."""
    async with EngineTokenizer.open("key") as engines:
        found = await engines.tokenize(server.url, "m", TextPrompt(["a", "b"]))

    assert {1, 2} == {ids[1] for ids in found}
    assert [
        {"model": "m", "add_special_tokens": True, "prompt": "a"},
        {"model": "m", "add_special_tokens": True, "prompt": "b"},
    ] == sorted(server.asked, key=lambda body: str(body["prompt"]))
    assert "Bearer key" == server.headers[0]["authorization"]


async def test_chat(server: Engine) -> None:
    """All fields that shape a chat's prompt are sent; absent ones, and a beginning of the answer, are not."""
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]
    whole = ChatPrompt(messages, tools, False, True, {"x": 1}, True, slice(-1, None))
    async with EngineTokenizer.open() as engines:
        await engines.tokenize(server.url, None, ChatPrompt(messages))
        found = await engines.tokenize(server.url, None, whole)

    assert [[2]] == found
    plain = {"messages": messages, "continue_final_message": False}
    assert [
        {**plain, "add_special_tokens": False},
        {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"x": 1},
            "add_special_tokens": True,
        },
    ] == server.asked


async def test_options_of_a_chat() -> None:
    """/tokenize gets the effort as variables of the template; a chat route gets what the client sent."""
    tools = [{"type": "function"}]
    chat = ChatPrompt([], tools, chat_template_kwargs={"x": 1}, effort="low", tool_choice="none")

    (found,), (served,) = [tokenize_bodies("m", chat, route) for route in (TOKENIZE, RENDER)]

    variables = {"x": 1, "enable_thinking": True, "reasoning_effort": "low"}
    assert variables == json.loads(found)["chat_template_kwargs"]
    assert not {"reasoning_effort", "tool_choice"} & json.loads(found).keys()
    more = {"chat_template_kwargs": {"x": 1}, "reasoning_effort": "low", "tool_choice": "none"}
    assert json.loads(found) | more == json.loads(served)


@pytest.mark.parametrize(
    "served", [{"prompt_token_ids": [5]}, {"choices": [{"prompt_token_ids": [5]}]}], ids=["vllm", "sglang"]
)
async def test_chat_that_is_served(server: Engine, served: dict[str, Any]) -> None:
    """The ids of a chat are those with which it is served: of the response, or of its choices."""
    server.reply = lambda body: web.json_response(served)
    async with EngineTokenizer.open() as engines:
        found = await engines.reference(server.url, "m", ChatPrompt([{"role": "user", "content": "hi"}]))

    assert [5] == found


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (web.Response(status=400, text="no such role"), RefusedError, "answered 400: no such role"),
        (web.Response(status=422, text="prompt: field required"), RefusedError, "answered 422: prompt"),
        (
            web.Response(
                status=422,
                text="2 validation errors: {'type': 'missing', 'loc': ('body', 'TokenizeCompletionRequest',"
                " 'prompt'), 'msg': 'Field required', 'input': {'content': \"'loc': ('body', 'prompt')\"}}",
            ),
            RefusedError,
            "answered 422",
        ),
        (web.Response(status=404, text="The model `m` does not exist"), RefusedError, "answered 404: The"),
        (web.Response(status=404), NoTokenizeRouteError, "answered 404"),
        (web.Response(status=403), NoTokenizeRouteError, "answered 403"),
        (web.Response(status=500), EngineTokenizerError, "answered 500"),
        (web.Response(text='{"tokens": [-1]}'), EngineTokenizerError, "answered without tokens"),
        (web.Response(text='{"tokens": [4294967296]}'), EngineTokenizerError, "answered without tokens"),
        (web.Response(text='{"tokens": ["a"]}'), EngineTokenizerError, "answered without tokens"),
        (web.Response(text='{"tokens": []}'), RefusedError, "answered no token"),
        (web.Response(text="<html>"), EngineTokenizerError, "answered without tokens"),
        (web.Response(text='{"tokens": "x"}'), EngineTokenizerError, "answered without tokens"),
    ],
    ids=[
        *["400", "422", "union", "model", "404", "403", "500", "negative", "large", "words", "empty"],
        *["html", "schema"],
    ],
)
async def test_failures(server: Engine, reply: web.Response, kind: type[Exception], words: str) -> None:
    """Any answer without tokens is one error that quotes the answer."""
    server.reply = lambda _: reply
    async with EngineTokenizer.open() as engines:
        with pytest.raises(kind, match=words):
            await engines.tokenize(server.url, "m", TextPrompt(["a"]))


async def test_no_engine_listens(free_port: Callable[[], int]) -> None:
    """An engine that does not listen is an error."""
    async with EngineTokenizer.open() as engines:
        with pytest.raises(EngineTokenizerError, match=r"/tokenize: connection refused"):
            await engines.tokenize(f"http://127.0.0.1:{free_port()}", "m", TextPrompt(["a"]))


@pytest.mark.parametrize("texts", [["a"], ["a", "b"]], ids=len)
async def test_too_slow(server: Engine, texts: list[str]) -> None:
    """A request waits for its tokens no longer than it says, with one text or several."""
    server.gate.clear()
    async with EngineTokenizer.open() as engines:
        with pytest.raises(SlowError, match=r"no answer within 0\.05 s"):
            await engines.tokenize(server.url, "m", TextPrompt(texts), 0.05)


async def test_answer_without_end(server: Engine) -> None:
    """An answer that is too long for its prompt is not read to its end."""
    server.reply = lambda _: web.json_response({"tokens": [7] * 100_000})
    async with EngineTokenizer.open() as engines:
        with pytest.raises(EngineTokenizerError, match=r"answers more than \d+ bytes"):
            await engines.tokenize(server.url, "m", TextPrompt(["a"]))


async def test_bounded(server: Engine) -> None:
    """Calls beyond MOST_CALLS fail at once; a call that ends or is cancelled frees its place."""
    server.gate.clear()
    async with EngineTokenizer.open() as engines:
        waiting = asyncio.create_task(engines.tokenize(server.url, "m", TextPrompt(["a"] * MOST_CALLS)))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await engines.tokenize(server.url, "m", TextPrompt(["c"]))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        server.gate.set()

        assert await engines.tokenize(server.url, "m", TextPrompt(["d"]))


async def test_not_unicode(server: Engine) -> None:
    """Half a surrogate pair never reaches the engine."""
    async with EngineTokenizer.open() as engines:
        with pytest.raises(RefusedError, match="not valid Unicode"):
            await engines.tokenize(server.url, "m", TextPrompt(["\ud800"]))
    assert [] == server.asked


async def test_https(tmp_path: Path) -> None:
    """An engine behind TLS needs a trusted authority; otherwise the error states the remedy."""
    authority = Authority(tmp_path)
    async with serving(authority.server()) as server:
        async with EngineTokenizer.open(tls=trusting(authority.file)) as engines:
            found = await engines.tokenize(server.url, "m", TextPrompt(["a"]))
        async with EngineTokenizer.open() as engines:
            with pytest.raises(EngineTokenizerError, match=r"certificate is not accepted.*--worker-tls-ca"):
                await engines.tokenize(server.url, "m", TextPrompt(["a"]))

    assert [[7, 1]] == found
    assert server.url.startswith("https://")
