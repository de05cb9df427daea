"""Growing conversations over every API, through two replicas in turn, with the packages that users have."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anthropic
import openai
import pydantic
import pytest

from kvrouter.core.tables.predictions import PredictionKind
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.worker.options import worker_id_of
from tests.e2e.fleet import Fleet, running_fleet, until

TURNS = 4
SYSTEM = "You are a helpful assistant that answers in one sentence. " * 4
QUESTION = "And what, then, is the block hash of the block number"
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GIVEN = {"city": "mock"}


class City(pydantic.BaseModel):
    name: str
    people: int = pydantic.Field(ge=1_000)


class Trip(pydantic.BaseModel):
    """What a client may ask for."""

    cities: list[City] = pydantic.Field(min_length=2)
    by: Literal["train", "bus"]


class Turn(NamedTuple):
    """What one turn reports: by the engine's usage, and by the router's headers."""

    said: str
    prompt_tokens: int
    cached_tokens: int
    headers: Any

    @property
    def overlap_tokens(self) -> int:
        return 16 * int(self.headers["x-kvrouter-overlap-blocks"])


@pytest.fixture
async def fleet(nats_url: str, tiny: Path) -> AsyncIterator[Fleet]:
    """Two frontends in mode kv with two mockers."""
    engine = EngineConfig(num_blocks=2048 + 1)
    async with running_fleet(
        nats_url, uuid.uuid4().hex, frontends=2, mockers=2, model_path=tiny, engine=engine
    ) as running:
        yield running


def openai_at(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_at(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def messages(url: str, chat: list[Any]) -> Turn:
    async with anthropic_at(url) as client:
        raw = await client.messages.with_raw_response.create(
            model="tiny", max_tokens=8, system=SYSTEM, messages=chat
        )
        message = await raw.parse()
        (block,) = message.content
        assert block.type == "text"
        cached = message.usage.cache_read_input_tokens or 0
        return Turn(block.text, message.usage.input_tokens + cached, cached, raw.headers)


async def streamed_messages(url: str, chat: list[Any]) -> Turn:
    async with (
        anthropic_at(url) as client,
        client.messages.stream(model="tiny", max_tokens=8, system=SYSTEM, messages=chat) as stream,
    ):
        said = "".join([text async for text in stream.text_stream])
        message = await stream.get_final_message()
        cached = message.usage.cache_read_input_tokens or 0
        return Turn(said, message.usage.input_tokens + cached, cached, stream.response.headers)


async def responses(url: str, chat: list[Any]) -> Turn:
    async with openai_at(url) as client:
        raw = await client.responses.with_raw_response.create(
            model="tiny", max_output_tokens=8, instructions=SYSTEM, input=chat, store=False
        )
        return _turn(raw.parse(), raw.headers)


async def streamed_responses(url: str, chat: list[Any]) -> Turn:
    async with openai_at(url) as client:
        stream = await client.responses.create(
            model="tiny", max_output_tokens=8, instructions=SYSTEM, input=chat, stream=True, store=False
        )
        events = [event async for event in stream]
        assert list(range(len(events))) == [event.sequence_number for event in events]
        assert events[-1].type in {"response.completed", "response.incomplete"}
        return _turn(events[-1].response, stream.response.headers)


def _turn(response: Any, headers: Any) -> Turn:
    usage = response.usage
    return Turn(response.output_text, usage.input_tokens, usage.input_tokens_details.cached_tokens, headers)


@pytest.mark.parametrize("ask", [messages, streamed_messages, responses, streamed_responses])
async def test_growing_conversation(fleet: Fleet, ask: Callable[[str, list[Any]], Awaitable[Turn]]) -> None:
    """Every turn after the first goes to the worker that holds the turns before, with the overlap it has."""
    chat: list[Any] = []
    turns: list[Turn] = []
    for number in range(TURNS):
        chat.append({"role": "user", "content": f"{QUESTION} {number}?"})
        turn = await ask(fleet.frontends[number % 2].url, chat)
        chat.append({"role": "assistant", "content": turn.said})
        turns.append(turn)
        await _until_indexed(fleet, turn.prompt_tokens)

    assert 1 == len({turn.headers["x-kvrouter-worker"] for turn in turns})
    assert [turn.cached_tokens for turn in turns] == [turn.overlap_tokens for turn in turns]
    # all full blocks of the turn before, its answer included
    for before, turn in itertools.pairwise(turns):
        assert turn.cached_tokens >= before.prompt_tokens // 16 * 16
    kind = PredictionKind("messages" if "messages" in ask.__name__ else "responses")
    records = [
        record
        for frontend in fleet.frontends
        for router in frontend.replica.routers.values()
        for record in router.predictions.records.values()
    ]
    assert {kind} == {known for record in records for known in record.kinds}
    assert all(ours == theirs for record in records for ours, theirs in [record.last_lengths])


async def _until_indexed(fleet: Fleet, prompt_tokens: int) -> None:
    """Until both replicas have the engines' blocks, including the answered prompt's, and no booking of it."""
    held = {worker_id_of(mocker.url): mocker.engine.cache for mocker in fleet.mockers}
    routers = [router for each in fleet.frontends for router in each.replica.routers.values()]
    await until(
        lambda: (
            max(len(set(cache.cached_hashes())) for cache in held.values()) >= prompt_tokens // 16
            and not any(router.pool.active.owners() for router in routers)
            and all(
                router.pool.index.digest(target)[0] == len(set(held[target.worker_id].cached_hashes()))
                for router in routers
                for target in router.pool.targets
            )
        )
    )


@pytest.mark.parametrize("streams", [False, True])
async def test_previous_response(fleet: Fleet, streams: bool) -> None:
    """A chat that names the response before goes on where it is kept, at any replica."""
    turns: list[Turn] = []
    asked: Any = {"model": "tiny", "max_output_tokens": 8, "stream": streams}
    async with openai_at(fleet.frontends[0].url) as client:
        for number in range(TURNS):
            asked["input"] = f"{QUESTION} {number}?"
            raw = await client.responses.with_raw_response.create(**asked)
            response: Any = raw.parse()
            if streams:
                response = [event async for event in response][-1].response
            asked["previous_response_id"] = response.id
            turns.append(_turn(response, raw.headers))
            await _until_indexed(fleet, turns[-1].prompt_tokens)

    assert 1 == len({turn.headers["x-kvrouter-worker"] for turn in turns})
    assert [turn.cached_tokens for turn in turns] == [turn.overlap_tokens for turn in turns]
    assert turns[-1].cached_tokens > 80
    async with openai_at(fleet.frontends[1].url) as client:
        # placed where it is kept, though this replica does not know the chat
        raw = await client.responses.with_raw_response.create(**{**asked, "input": "hi", "stream": False})
        assert turns[-1].headers["x-kvrouter-worker"] == raw.headers["x-kvrouter-worker"]
        with pytest.raises(openai.NotFoundError, match="resp_unknown"):
            await client.responses.create(model="tiny", input="hi", previous_response_id="resp_unknown")


async def test_anthropic_tools(fleet: Fleet) -> None:
    """A demanded tool is called, whole and streamed, and its result continues the chat."""
    tools: Any = [{"name": "get_weather", "description": "Now.", "input_schema": TOOL}]
    asked: Any = {"model": "tiny", "max_tokens": 64, "tools": tools, "tool_choice": {"type": "any"}}
    chat: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    async with anthropic_at(fleet.frontends[0].url) as client:
        called = await client.messages.create(messages=chat, **asked)
        async with client.messages.stream(messages=chat, **asked) as stream:
            streamed = await stream.get_final_message()
        (use,) = called.content
        assert use.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}
        chat += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        answer = await client.messages.create(model="tiny", max_tokens=8, tools=tools, messages=chat)
        counted = await client.messages.count_tokens(model="tiny", tools=tools, messages=chat)

    assert [("get_weather", GIVEN)] * 2 == [
        (block.name, block.input) for block in (use, *streamed.content) if block.type == "tool_use"
    ]
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached


async def test_anthropic_errors(fleet: Fleet) -> None:
    """Errors of the router and of the engine become the package's own."""
    chat: list[Any] = [{"role": "user", "content": "hi"}]
    unknown_role: Any = [{"role": "tool", "content": "hi"}]
    async with anthropic_at(fleet.frontends[0].url) as client:
        with pytest.raises(anthropic.NotFoundError, match="gpt-4"):
            await client.messages.create(model="gpt-4", max_tokens=8, messages=chat)
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(model="tiny", max_tokens=8, messages=unknown_role)


async def test_openai_tools(fleet: Fleet) -> None:
    """The same over chats and /v1/responses."""
    shown: Any = {"name": "get_weather", "description": "Now.", "parameters": TOOL}
    asked: Any = {"model": "tiny", "input": "Weather?", "tool_choice": "required"}
    asked["tools"] = [{"type": "function", **shown}]
    async with openai_at(fleet.frontends[0].url) as client:
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[{"type": "function", "function": shown}],
            tool_choice="required",
        )
        response = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()

    calls_of_chat: Any = chat.choices[0].message.tool_calls
    (call,) = calls_of_chat
    calls: list[Any] = [item for one in (response, streamed) for item in one.output]
    named = [(item.name, json.loads(item.arguments)) for item in calls if item.type == "function_call"]
    assert ("get_weather", GIVEN) == (call.function.name, json.loads(call.function.arguments))
    assert [("get_weather", GIVEN)] * 2 == named


async def test_openai_structured_output(fleet: Fleet) -> None:
    """Answers fit the schema that was asked for: chats, whole and streamed, and responses."""
    chat: list[Any] = [{"role": "user", "content": "Where to?"}]
    async with openai_at(fleet.frontends[0].url) as client:
        parsed = await client.chat.completions.parse(model="tiny", messages=chat, response_format=Trip)
        asked = client.chat.completions.stream(model="tiny", messages=chat, response_format=Trip)
        async with asked as stream:
            streamed = await stream.get_final_completion()
        response = await client.responses.parse(model="tiny", input="Where to?", text_format=Trip)
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model="tiny", messages=chat, response_format=Trip, max_tokens=3
            )

    trips = [parsed.choices[0].message.parsed, streamed.choices[0].message.parsed, response.output_parsed]
    assert [Trip] * 3 == [type(trip) for trip in trips]
    assert trips[0] == trips[1] == trips[2]


async def test_openai_reasoning_and_embeddings(fleet: Fleet) -> None:
    """A chat with an effort thinks before it answers; equal texts have equal vectors."""
    chat: list[Any] = [{"role": "user", "content": "Why?"}]
    asked: Any = {"model": "tiny", "messages": chat, "reasoning_effort": "low", "max_tokens": 12}
    async with openai_at(fleet.frontends[0].url) as client:
        whole: Any = (await client.chat.completions.create(**asked)).choices[0].message
        deltas: list[Any] = [
            part.choices[0].delta
            async for part in await client.chat.completions.create(**asked, stream=True)
            if part.choices
        ]
        vectors = await client.embeddings.create(model="tiny", input=["a b", "c", "a b"], dimensions=32)

    thought = "".join([getattr(delta, "reasoning", None) or "" for delta in deltas])
    assert whole.reasoning == thought != ""
    assert whole.content == "".join([delta.content or "" for delta in deltas])
    first, second, third = [one.embedding for one in vectors.data]
    assert 32 == len(first)
    assert first == third != second


@pytest.mark.parametrize("most", [12, 3], ids=["whole", "cut amid the reasoning"])
async def test_reasoning_of_responses(fleet: Fleet, most: int) -> None:
    """The response of a stream is that without one: an item with the reasoning, then the message."""
    asked: Any = {"model": "tiny", "input": "Why?", "reasoning": {"effort": "low"}, "max_output_tokens": most}
    async with openai_at(fleet.frontends[0].url) as client:
        whole: Any = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events: list[Any] = [event async for event in stream]

    done = events[-1].response
    assert ["reasoning", "message"][: 2 if most > 4 else 1] == [item.type for item in whole.output]
    assert min(4, most) == whole.usage.output_tokens_details.reasoning_tokens
    assert whole.output[0].content[0].text
    assert whole.output_text == done.output_text
    assert [*range(len(events))] == [event.sequence_number for event in events]
    for kind, texts in (("reasoning", [whole.output[0].content[0].text]), ("output", [whole.output_text])):
        deltas = [event.delta for event in events if event.type == f"response.{kind}_text.delta"]
        assert "".join(texts) == "".join(deltas)


@pytest.mark.parametrize("most", [12, 3], ids=["whole", "cut amid the reasoning"])
async def test_reasoning_of_messages(fleet: Fleet, most: int) -> None:
    """The message of a stream is that without one: a signed block with the reasoning, then the text."""
    asked: Any = {"model": "tiny", "max_tokens": most, "messages": [{"role": "user", "content": "Why?"}]}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with anthropic_at(fleet.frontends[0].url) as client:
        whole: Any = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed: Any = await stream.get_final_message()

    shown = [
        [(block.type, getattr(block, "thinking", ""), getattr(block, "text", "")) for block in one.content]
        for one in (whole, streamed)
    ]
    assert shown[0] == shown[1]
    assert ["thinking", "text"][: 2 if most > 4 else 1] == [kind for kind, *_ in shown[0]]
    assert all(
        block.signature for one in (whole, streamed) for block in one.content if block.type == "thinking"
    )
    assert whole.stop_reason == streamed.stop_reason


async def test_openai_choices(fleet: Fleet) -> None:
    """`n` choices with their logprobs; the prompt counts once."""
    async with openai_at(fleet.frontends[0].url) as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=3, logprobs=True, max_tokens=4
        )
        text = await client.completions.create(model="tiny", prompt=[7] * 20, n=2, logprobs=1, max_tokens=4)

    assert [0, 1, 2] == [choice.index for choice in chat.choices]
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) <= 4
    assert text.usage is not None
    assert (2, 20) == (len(text.choices), text.usage.prompt_tokens)
