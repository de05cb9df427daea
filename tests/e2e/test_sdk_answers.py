"""What the `openai` and `anthropic` packages make of what engines stream: calls, objects, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.frontend.fleet import Fleet, running_fleet
from tests.frontend.workers import LAST_CHUNK, SSE_HEAD, Received, Wire, answer, chunk

ERROR = {"message": "the engine says no", "type": "x", "code": 0}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
PARTS = ('{"ci', 'ty":"Par', 'is"}')
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"type": "function", "function": {"name": "weather", "parameters": TOOL}}
KINDS = {
    400: (openai.BadRequestError, anthropic.BadRequestError),
    401: (openai.AuthenticationError, anthropic.AuthenticationError),
    404: (openai.NotFoundError, anthropic.NotFoundError),
    429: (openai.RateLimitError, anthropic.RateLimitError),
    503: (openai.InternalServerError, anthropic.InternalServerError),
}


class City(pydantic.BaseModel):
    city: str


def chat_events(body: dict[str, Any]) -> list[Any]:
    """The chunks of a chat: a call if there are tools, else the parts as text; usage if it is wanted."""
    base: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def event(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return base | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    calls = [{"index": 0, "function": {"arguments": part}} for part in PARTS]
    first: dict[str, Any] = {"index": 0, "id": "call_1", "type": "function"}
    first["function"] = {"name": "weather", "arguments": ""}
    deltas: list[dict[str, Any]] = [{"content": part} for part in PARTS]
    if body.get("tools"):
        deltas = [{"tool_calls": [call]} for call in (first, *calls)]
    last = event({}, "tool_calls" if body.get("tools") else "stop")
    usage = [base | {"choices": [], "usage": USAGE}] if body.get("stream_options") else []
    return [event({"role": "assistant", "content": ""}), *map(event, deltas), last, *usage]


def message_events() -> list[Any]:
    """Thinking, text and a call, as Anthropic's API streams them."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [{"type": "thinking_delta", "thinking": "hm"}, {"type": "signature_delta", "signature": "s"}],
        ),
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "I look."}]),
        (
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {}},
            [{"type": "input_json_delta", "partial_json": part} for part in PARTS],
        ),
    ]
    message: dict[str, Any] = {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
    }
    message |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 0}}
    events: list[Any] = [{"type": "message_start", "message": message}]
    for index, (block, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": "tool_use", "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ending, "usage": {"output_tokens": 3}})
    return [*events, {"type": "message_stop"}]


def sse(event: dict[str, Any]) -> bytes:
    named = f"event: {event['type']}\n" if "type" in event else ""
    return chunk(f"{named}data: {json.dumps(event)}\n\n".encode())


async def engine(received: Received, wire: Wire) -> None:
    """The last message says what to answer: a status, `break` for an error amid a stream, or an answer."""
    body, is_message = received.json, received.head.startswith(b"POST /v1/messages ")
    wanted = body["messages"][-1]["content"]
    if wanted.isdigit():
        error: dict[str, Any] = {"error": {**ERROR, "code": int(wanted)}}
        await wire.send(answer(json.dumps(error).encode(), int(wanted), b"retry-after: 7\r\n"))
        return
    if not body.get("stream"):
        message = {"role": "assistant", "content": None, "refusal": "I will not."}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
        await wire.send(answer(json.dumps({**whole, "usage": USAGE}).encode()))
        return
    events = message_events() if is_message else chat_events(body)
    if wanted == "break":
        kind = {"type": "error"} if is_message else {}
        events = [*events[:7], {**kind, "error": {**ERROR, "code": 500}}]
    tail = b"" if is_message else chunk(b"data: [DONE]\n\n")
    await wire.send(SSE_HEAD, *map(sse, events), tail + LAST_CHUNK)


@pytest.fixture
async def fleet(nats_url: str) -> AsyncIterator[Fleet]:
    """A frontend and one scripted engine."""
    async with running_fleet(nats_url, "--retries", "0", scripts=(engine,)) as running:
        yield running


def openai_of(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)


def anthropic_of(fleet: Fleet) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=fleet.url, api_key="none", max_retries=0)


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_openai_streams(fleet: Fleet) -> None:
    """Call deltas become a call, text deltas an object of the client's type; usage comes last."""
    asked: Any = {"model": "m", "messages": says("go"), "stream_options": {"include_usage": True}}
    async with openai_of(fleet) as client:
        async with client.chat.completions.stream(**asked, tools=[FUNCTION]) as stream:
            called = await stream.get_final_completion()
        async with client.chat.completions.stream(**asked, response_format=City) as stream:
            parsed = await stream.get_final_completion()
        refused = await client.chat.completions.parse(model="m", messages=says("go"), response_format=City)

    (choice,) = called.choices
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert ("tool_calls", "weather", "".join(PARTS)) == (
        choice.finish_reason,
        call.function.name,
        call.function.arguments,
    )
    assert City(city="Paris") == parsed.choices[0].message.parsed
    assert called.usage is not None
    assert 12 == called.usage.total_tokens
    assert ("I will not.", None) == (refused.choices[0].message.refusal, refused.choices[0].message.parsed)


async def test_anthropic_streams(fleet: Fleet) -> None:
    """Thinking, text and a call arrive as blocks of their types."""
    async with (
        anthropic_of(fleet) as client,
        client.messages.stream(model="m", max_tokens=9, messages=says("go")) as stream,
    ):
        message = await stream.get_final_message()

    thinking, text, use = message.content
    assert thinking.type == "thinking"
    assert text.type == "text"
    assert use.type == "tool_use"
    assert ("hm", "s", "I look.") == (thinking.thinking, thinking.signature, text.text)
    assert ("weather", {"city": "Paris"}) == (use.name, use.input)
    assert ("tool_use", 9, 3) == (
        message.stop_reason,
        message.usage.input_tokens,
        message.usage.output_tokens,
    )


@pytest.mark.parametrize("status", KINDS)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_by_status(fleet: Fleet, status: int, streams: bool) -> None:
    """Each status is the package's own error; the engine's Retry-After reaches the client."""
    of_openai, of_anthropic = KINDS[status]
    async with openai_of(fleet) as client, anthropic_of(fleet) as other:
        with pytest.raises(of_openai) as chat:
            await client.chat.completions.create(model="m", messages=says(f"{status}"), stream=streams)
        with pytest.raises(of_anthropic) as message:
            await other.messages.create(model="m", max_tokens=9, messages=says(f"{status}"), stream=streams)

    for caught in (chat.value, message.value):
        assert status == caught.status_code
        if status in {429, 503}:
            assert "7" == caught.response.headers["retry-after"]


async def test_error_amid_a_stream(fleet: Fleet) -> None:
    """An error event after output is an error, so a part cannot pass for the whole answer."""
    async with openai_of(fleet) as client, anthropic_of(fleet) as other:
        stream = await client.chat.completions.create(
            model="m", messages=says("break"), tools=[FUNCTION], stream=True
        )
        with pytest.raises(openai.APIError):
            [event async for event in stream]
        with pytest.raises(anthropic.APIStatusError):
            async with other.messages.stream(model="m", max_tokens=9, messages=says("break")) as events:
                await events.get_final_message()
