"""Errors in the form of the client's own API: every route × every refusal, on both ports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin

import anthropic
import openai
import pytest

from kvrouter.bodies.apis import Api
from kvrouter.frontend.requests.engine_routes import api_of, relayed
from tests.frontend.clients import Response, connected
from tests.frontend.fleet import FleetOf
from tests.frontend.workers import SSE_HEAD, chunk, says_and_closes

ROUTES = list(relayed())
POSTS = [path for method, path, _ in ROUTES if method == "POST"]
UNKNOWN = (
    "/v1/messages/x",
    "/v1/messages/count_tokens/x",
    "/cohere/v2/x",
    "/v2/chat",
    "/v1/chat/x",
    "/nothing",
)
ID = "x-request-id: r1"
HOST = "host: test"
JSON = "content-type: application/json"
LIMIT = 1 << 20
_ANTHROPIC = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def message_in(api: Api, answer: Response) -> str:
    """The message, as the API's clients find it. Fails if anything of the error object is missing."""
    body: dict[str, Any] = answer.json
    assert "application/json" == answer.header("content-type")
    assert "r1" == answer.header("x-request-id")
    match api.error_schema:
        case "AnthropicError":
            assert ("error", "r1", "r1") == (body["type"], body["request_id"], answer.header("request-id"))
            kind = _ANTHROPIC.get(answer.status, "invalid_request_error")
            assert kind == body["error"]["type"]
            return str(body["error"]["message"])
        case "CohereError":
            assert {"message", "id"} == set(body)
            return str(body["message"])
        case "CohereOrOpenAIError":
            assert {"message", "id", "error"} == set(body)
            assert body["message"] == body["error"]["message"]
            return str(body["message"])
        case "OllamaError":
            assert ["error"] == list(body)
            assert isinstance(body["error"], str)
            return str(body["error"])
    assert {"message", "type", "param", "code"} == set(body["error"])
    assert answer.status == body["error"]["code"]
    return str(body["error"]["message"])


async def refused(url: str, head: str, *lines: str, body: bytes = b"") -> Response:
    async with connected(url) as client:
        client.writer.write("\r\n".join([f"{head} HTTP/1.1", *lines, ID, "", ""]).encode() + body)
        return await client.response()


def _posted(body: Any) -> tuple[str, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"content-length: {len(data)}", data


NAMELESS = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 1}
BODIES: dict[str, tuple[int, Any]] = {
    "unknown model": (404, {**NAMELESS, "model": "nope"}),
    "not an object": (400, []),
    "malformed": (400, b"{"),
    "wrong override": (400, {**NAMELESS, "model": "m", "kvrouter": {"mode": "unheard-of"}}),
}


@pytest.mark.parametrize("case", BODIES)
async def test_bodies(fleet_of: FleetOf, case: str) -> None:
    """What is wrong with a body is reported in the form of its route's API, on both ports."""
    status, body = BODIES[case]
    length, data = _posted(body)
    async with fleet_of() as fleet:
        for url in (fleet.url, fleet.frontend.admin_url):
            for method, path, api in ROUTES:
                if method != "GET":
                    answer = await refused(url, f"{method} {path}", HOST, JSON, length, body=data)

                    assert status == answer.status, path
                    assert message_in(api, answer)
        assert not fleet.requests


async def test_no_workers(fleet_of: FleetOf) -> None:
    """Without a worker every route answers 503 with `retry-after`, in its API's form."""
    length, data = _posted(NAMELESS)
    async with fleet_of(scripts=()) as fleet:
        for method, path, api in ROUTES:
            answer = await refused(fleet.url, f"{method} {path}", HOST, length, body=data)

            assert (503, "1") == (answer.status, answer.header("retry-after")), path
            assert message_in(api, answer)


async def test_wrong_method(fleet_of: FleetOf) -> None:
    """Another method is 405 with `allow`, in the form of the path's API, on both ports."""
    async with fleet_of() as fleet:
        for url in (fleet.url, fleet.frontend.admin_url):
            for path in sorted({path for _, path, _ in ROUTES}):
                allowed = sorted(method for method, other, _ in ROUTES if other == path)
                answer = await refused(url, f"DELETE {path}?a=b", HOST)

                assert (405, ", ".join(allowed)) == (answer.status, answer.header("allow"))
                assert message_in(api_of(path), answer).startswith(f"DELETE {path}: use ")


@pytest.mark.parametrize("path", UNKNOWN)
async def test_unknown_paths(fleet_of: FleetOf, path: str) -> None:
    """A path below an API's that is no route is a 404 for the API's clients."""
    length, data = _posted(NAMELESS)
    async with fleet_of() as fleet:
        for url in (fleet.url, fleet.frontend.admin_url):
            answer = await refused(url, f"POST {path}", HOST, length, body=data)

            assert 404 == answer.status
            assert f"POST {path}: Not Found" == message_in(api_of(path), answer)


HEADS: dict[str, tuple[int, Callable[[str], tuple[str, ...]]]] = {
    "too large": (413, lambda path: (f"POST {path}", HOST, JSON, f"content-length: {LIMIT + 1}")),
    "unknown coding": (
        415,
        lambda path: (f"POST {path}", HOST, "content-encoding: nonsense", "content-length: 1"),
    ),
    "expectation": (417, lambda path: (f"POST {path}", HOST, "expect: tea", "content-length: 1")),
    "no host": (400, lambda path: (f"POST {path}", "content-length: 1")),
    "absolute form, two hosts": (400, lambda path: (f"POST http://test{path}", HOST, HOST)),
    "long query": (414, lambda path: (f"POST {path}?{'a' * 9000}",)),
    "long header": (431, lambda path: (f"POST {path}", ID, f"x-a: {'a' * 9000}")),
    "many headers": (431, lambda path: (f"POST {path}", ID, *[f"x-{n}: {'a' * 8000}" for n in range(9)])),
    "bad header": (400, lambda path: (f"POST {path}", ID, "x-b: 1", "no header")),
    "two lengths": (400, lambda path: (f"POST {path}", ID, HOST, "content-length: 1", "content-length: 2")),
    "bad chunks": (
        400,
        lambda path: (f"POST {path}", HOST, "transfer-encoding: chunked", f"{ID}\r\n\r\nnonsense"),
    ),
    "malformed gzip": (
        400,
        lambda path: (
            f"POST {path}",
            HOST,
            "content-encoding: gzip",
            "content-length: 4",
            f"{ID}\r\n\r\nnope",
        ),
    ),
}


@pytest.mark.parametrize("case", HEADS)
async def test_before_routing(fleet_of: FleetOf, case: str) -> None:
    """What is refused before a route is found has the form of the path's API, too."""
    status, lines = HEADS[case]
    async with fleet_of("--max-body-mib", "1") as fleet:
        for path in (*POSTS, *UNKNOWN):
            answer = await refused(fleet.url, *lines(path))

            assert status == answer.status, path
            if case != "long query":  # the id comes after the line that is too long
                assert message_in(api_of(path), answer)
            else:
                assert (api_of(path).error_schema == "AnthropicError") == (answer.json.get("type") == "error")
        assert not fleet.requests


@pytest.mark.parametrize("case", ["too large", "unknown coding", "expectation"])
async def test_on_the_admin_listener(fleet_of: FleetOf, case: str) -> None:
    """There aiohttp reads the heads; what it leaves to the router is refused as on the clients' port."""
    status, lines = HEADS[case]
    async with fleet_of("--max-body-mib", "1") as fleet:
        for path in POSTS:
            answer = await refused(fleet.frontend.admin_url, *lines(path))

            assert status == answer.status, path
            assert message_in(api_of(path), answer)
        assert not fleet.requests


async def test_the_body_is_invited_on_the_admin_listener(fleet_of: FleetOf) -> None:
    """A client that waits for `100 Continue` gets it, and then its answer."""
    async with fleet_of() as fleet, connected(fleet.frontend.admin_url) as client:
        for expectation in ("100-continue", "100-Continue"):
            length, data = _posted({**NAMELESS, "model": "m"})
            head = ["POST /v1/completions HTTP/1.1", HOST, JSON, length, f"expect: {expectation}", "", ""]
            client.writer.write("\r\n".join(head).encode())
            assert b"HTTP/1.1 100 Continue\r\n\r\n" == await client.read_until(b"\r\n\r\n")
            client.writer.write(data)

            assert 200 == (await client.response()).status


async def test_one_slash_too_many(fleet_of: FleetOf) -> None:
    """As FastAPI: a redirection that keeps method and body, and leads to the route below any prefix."""
    length, data = _posted(NAMELESS)
    async with fleet_of() as fleet:
        for url in (fleet.url, fleet.frontend.admin_url):
            for method, path, api in ROUTES:
                answer = await refused(url, f"{method} {path}/?a=b", HOST, length, body=data)

                assert 307 == answer.status
                assert f"/kv{path}?a=b" == urljoin(f"/kv{path}/?a=b", answer.header("location"))
                assert message_in(api, answer).endswith(f"use {path}")
            for path in (f"/{POSTS[0]}", f"{POSTS[0]}//", "//"):
                assert 404 == (await refused(url, f"POST {path}", HOST, length, body=data)).status
        assert not fleet.requests


async def test_closed_routes_say_why(fleet_of: FleetOf) -> None:
    """The message of the 404 has the reason."""
    async with fleet_of() as fleet:
        answer = await refused(fleet.url, "POST /sleep", HOST, "content-length: 0")

        assert message_in(api_of("/sleep"), answer).startswith("POST /sleep: Not Found (changes the engine")


BROKEN = {
    "/cohere/v2/chat": {"type": "message-end", "delta": {"finish_reason": "ERROR"}},
    "/generate": {"error": {"type": "BadGatewayError"}},
    "/v1/messages": {"type": "error", "error": {"type": "api_error"}},
}


@pytest.mark.parametrize("path", BROKEN)
async def test_broken_streams(fleet_of: FleetOf, path: str) -> None:
    """A stream whose worker breaks off ends in the error event of its API."""
    event = b'data: {"type":"content-start"}\n\n'
    async with fleet_of(scripts=(says_and_closes(SSE_HEAD + chunk(event)),)) as fleet:
        answer = await fleet.ask({**NAMELESS, "model": "m", "stream": True}, path=path)

        def within(part: Any, whole: Any) -> bool:
            return part == whole or all(within(value, whole[key]) for key, value in part.items())

        assert within(BROKEN[path], answer.events[-1])


async def test_anthropics_package(fleet_of: FleetOf) -> None:
    """It raises its own error, with the type, the message and the request's id."""
    async with fleet_of() as fleet, anthropic.AsyncAnthropic(base_url=fleet.url, api_key="k") as client:
        chat: Any = {"model": "nope", "messages": NAMELESS["messages"]}
        for call in (client.messages.create(max_tokens=1, **chat), client.messages.count_tokens(**chat)):
            with pytest.raises(anthropic.NotFoundError, match="nope") as raised:
                await call

            assert raised.value.request_id
            assert isinstance(raised.value.body, dict)
            assert "not_found_error" == raised.value.body["error"]["type"]
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()


async def test_openais_package(fleet_of: FleetOf) -> None:
    """It raises its own error, with type and code; a base URL with a slash too many is followed."""
    async with fleet_of() as fleet, openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="k") as client:
        for call in (
            client.embeddings.create(model="nope", input="x"),
            client.responses.create(model="nope", input="x"),
            client.images.generate(model="nope", prompt="x"),
        ):
            with pytest.raises(openai.NotFoundError, match="nope") as raised:
                await call

            assert ("NotFoundError", "404") == (raised.value.type, str(raised.value.code))
        assert b"{}" != (await client.post("/embeddings/", body={"model": "m", "input": "x"}, cast_to=bytes))
