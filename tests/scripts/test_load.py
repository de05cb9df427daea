"""The load generator, with a server of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scripts.kit.http_client import Head
from scripts.kit.load import LoadRequest, Outcome, _Stream, run_load

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DONE = "data: [DONE]\n\n"


def usage(prompt: int = 100, cached: int | None = 64, output: int = 2) -> str:
    """The last chunk of a stream."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n"


TOKEN = 'data: {"choices": [{"text": "a"}]}\n\n'
GOOD = [": a comment\n\n", TOKEN, TOKEN, usage(), DONE]


async def respond(http: web.Request, parts: list[str], status: int = 200) -> web.StreamResponse:
    """Stream `parts`."""
    response = web.StreamResponse(status=status, headers={"x-kvrouter-worker": "w1"})
    await response.prepare(http)
    for part in parts:
        await response.write(part.encode())
    return response


async def good(http: web.Request) -> web.StreamResponse:
    """A complete, valid answer."""
    return await respond(http, GOOD)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server; yields its base URL."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    server = TestServer(app)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


async def one(handler: Handler, request: LoadRequest | None = None, timeout_s: float = 60.0) -> Outcome:
    """The outcome of one request."""
    async with serving(handler) as url:
        (outcome,) = await run_load([request or LoadRequest(0.0, b"{}")], [url], request_timeout_s=timeout_s)
    return outcome


def answering(*parts: str, status: int = 200) -> Handler:
    """A handler that streams `parts`."""

    async def handler(http: web.Request) -> web.StreamResponse:
        return await respond(http, list(parts), status)

    return handler


async def test_good_answer() -> None:
    """The outcome has times, tokens and worker."""
    outcome = await one(good, LoadRequest(0.0, b"{}", output_tokens=2))

    assert (None, 200, "w1") == (outcome.error, outcome.status, outcome.worker)
    assert (100, 64, 2) == (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens)
    assert outcome.ttft_s is not None
    assert outcome.latency_s is not None
    assert 0 < outcome.ttft_s <= outcome.latency_s


async def test_body_and_headers_arrive() -> None:
    """Send the given bytes."""
    seen: list[tuple[bytes, str | None]] = []

    async def handler(http: web.Request) -> web.StreamResponse:
        seen.append((await http.read(), http.headers.get("x-request-id")))
        return await good(http)

    await one(handler, LoadRequest(0.0, b'{"prompt":[1]}', headers={"x-request-id": "r"}))

    assert [(b'{"prompt":[1]}', "r")] == seen


async def test_urls_in_turn() -> None:
    """Requests go to the replicas in turn."""
    done: list[Outcome] = []
    async with serving(good) as first, serving(good) as second:
        outcomes = await run_load([LoadRequest(0.0, b"{}")] * 5, [first, second], on_done=done.append)

        assert [first, second, first, second, first] == [outcome.url for outcome in outcomes]
    assert {0, 1, 2, 3, 4} == {outcome.number for outcome in done}
    assert not [outcome.error for outcome in outcomes if outcome.error]


async def test_open_loop() -> None:
    """A request is sent although the one before it has no answer yet."""
    waiting: list[asyncio.Event] = []

    async def handler(http: web.Request) -> web.StreamResponse:
        waiting.append(asyncio.Event())
        if len(waiting) == 3:
            for event in waiting:
                event.set()
        await waiting[-1].wait()
        return await good(http)

    async with serving(handler) as url:
        outcomes = await run_load([LoadRequest(at_s, b"{}") for at_s in (0.0, 0.001, 0.002)], [url])

    assert [None] * 3 == [outcome.error for outcome in outcomes]
    assert all(0 <= outcome.late_s for outcome in outcomes)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (answering("busy", status=503), "status 503: busy"),
        (answering(TOKEN, usage()), r"ended without data: \[DONE\]"),
        (answering(), r"ended without data: \[DONE\]"),
        (answering(TOKEN, 'data: {"error": {"message": "gone"}}\n\n', DONE), 'error event: .*"gone"'),
        (answering(TOKEN, usage(output=1), DONE), "1 output tokens instead of 2"),
        (answering(TOKEN, TOKEN, DONE), "0 output tokens instead of 2"),
        (answering(TOKEN, "data: {not json\n\n", usage(output=3), DONE), "3 output tokens instead of 2"),
    ],
)
async def test_answers_that_are_none(handler: Handler, says: str) -> None:
    """A wrong body is an error, despite status 200."""
    outcome = await one(handler, LoadRequest(0.0, b"{}", output_tokens=2))

    assert outcome.error is not None
    assert pytest.raises(AssertionError, match=says).matches(AssertionError(outcome.error)), outcome.error


async def test_server_dies_mid_stream() -> None:
    """A lost connection is an error."""

    async def handler(http: web.Request) -> web.StreamResponse:
        response = await respond(http, [TOKEN])
        assert http.transport is not None
        http.transport.abort()
        return response

    outcome = await one(handler)

    assert "connection" in (outcome.error or "")


async def test_no_server(free_port: Callable[[], int]) -> None:
    """A refused connection is the outcome of its request, and the run continues."""
    outcomes = await run_load([LoadRequest(0.0, b"{}")] * 2, [f"http://127.0.0.1:{free_port()}"])

    assert all("cannot connect" in (outcome.error or "") for outcome in outcomes)


async def silent(http: web.Request) -> web.StreamResponse:
    """Accepts connections, and never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_request_timeout() -> None:
    """A request without an answer ends with its timeout."""
    outcome = await one(silent, timeout_s=0.02)

    assert "no complete answer within 0.02 s" == outcome.error


async def test_time_limit() -> None:
    """The run ends by itself; unfinished and unsent requests are errors."""
    requests = [LoadRequest(0.0, b"{}"), LoadRequest(3600.0, b"{}")]
    async with serving(silent) as url:
        outcomes = await run_load(requests, [url], time_limit_s=0.05)

    assert "not finished when the run ended" == outcomes[0].error
    assert "not sent before the end of the run" == outcomes[1].error


async def test_cancelled_run_leaves_nothing() -> None:
    """A cancelled run closes its connections."""
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        with suppress(ConnectionResetError):
            await reader.read()
        gone.set()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        run = asyncio.ensure_future(run_load([LoadRequest(0.0, b"{}")], [url]))
        await arrived.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await gone.wait()


# --- one stream, with the test's clock ---

HEAD = Head(200, {})


def judged(parts: list[bytes]) -> Outcome:
    """A stream whose parts come one second apart, from second 1 on."""
    clock = iter(range(1000))
    outcome = Outcome(0, "")
    stream = _Stream(lambda: float(next(clock)), outcome)
    for part in parts:
        stream.feed(part)
    stream.conclude(HEAD, LoadRequest(0.0, b""))
    return outcome


def test_comments_are_no_data() -> None:
    """The first byte is that of the first `data:` line, also after a comment."""
    assert judged([b"data: {}\n\n"]).ttft_s is not None
    assert judged([b": data:\n\n", b"event: data: x\n\n"]).ttft_s is None
    assert judged([b": ping\n\nda", b"ta: {}\n\n"]).ttft_s is not None


def test_long_stream() -> None:
    """Of a long stream only the end is kept, which is enough."""
    parts = [TOKEN.encode()] * 3000 + [usage().encode(), DONE.encode()]
    outcome = judged(parts)

    assert (None, 100, 64) == (outcome.error, outcome.prompt_tokens, outcome.cached_tokens)


def test_usage_without_details() -> None:
    """Without cached tokens in the usage, the count is 0."""
    assert 0 == judged([usage(cached=None).encode(), DONE.encode()]).cached_tokens
