"""What the `openai` and `anthropic` packages make of what engines stream: calls, objects, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.e2e.scripted_engine import PARTS, engine
from tests.frontend.fleet import Fleet, running_fleet

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
        refused = await client.chat.completions.parse(
            model="m", messages=says("refuse"), response_format=City
        )

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
