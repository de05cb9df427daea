"""The `openai` package with a frontend and its workers: the results of a program that uses it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from kvrouter.frontend.run import running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.worker.options import worker_id_of
from tests.e2e.fleet import Fleet, frontend_flags, running_fleet, until

CHAT: Any = [
    {"role": "system", "content": "You are a helpful assistant that answers in one sentence. " * 4},
    {"role": "user", "content": "What is a block hash?"},
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city, now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL: Any = {"id": "call_1", "type": "function"} | {
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}
}
# The mocker needs many seconds for it: an earlier end means that it was cancelled.
ENDLESS: Any = {"model": "tiny", "prompt": [7] * 64, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
AT_ONCE_S = 2.0

Answer = TypeVar("Answer")
Use = Callable[[openai.OpenAI], Answer]


@pytest.fixture
async def fleet(nats_url: str, tiny: Path) -> AsyncIterator[Fleet]:
    """One frontend in mode kv with two mockers."""
    async with running_fleet(nats_url, uuid.uuid4().hex, frontends=1, mockers=2, model_path=tiny) as running:
        yield running


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous client, without retries."""
    async with _async_client(fleet) as made:
        yield made


def _async_client(fleet: Fleet, *, max_retries: int = 0) -> openai.AsyncOpenAI:
    url = f"{fleet.frontends[0].url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=max_retries)


async def in_thread(fleet: Fleet, use: Use[Answer]) -> Answer:
    """The result of the synchronous client, in a thread: the fleet uses the event loop."""

    def run() -> Answer:
        url = f"{fleet.frontends[0].url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return use(client)

    return await asyncio.to_thread(run)


def bookings(fleet: Fleet) -> int:
    """Requests that the frontend has booked and not freed."""
    routers = fleet.frontends[0].replica.routers.values()
    return sum(sum(router.pool.active.owners().values()) for router in routers)


def is_at_rest(fleet: Fleet) -> bool:
    """Whether no booking is left and every engine is idle."""
    return not bookings(fleet) and not any(mocker.engine.has_work() for mocker in fleet.mockers)


async def until_at_rest(fleet: Fleet) -> None:
    """Return when no booking is left and every engine is idle; fail after the answer's own time."""
    async with asyncio.timeout(AT_ONCE_S):
        await until(lambda: is_at_rest(fleet))


async def knows_all_blocks(fleet: Fleet) -> None:
    """Return when the frontend's index has the engines' blocks."""
    (router,) = fleet.frontends[0].replica.routers.values()
    held = {worker_id_of(m.url): m.engine.cache for m in fleet.mockers}

    def is_so() -> bool:
        return is_at_rest(fleet) and all(
            router.pool.index.digest(target)[0] == len(set(held[target.worker_id].cached_hashes()))
            for target in router.pool.targets
        )

    await until(is_so)


# Answers


async def test_synchronous_client(fleet: Fleet) -> None:
    """Chats and completions, streamed or whole, give the same text."""

    def use(client: openai.OpenAI) -> tuple[Any, Any, Any, Any]:
        chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8)
        with client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=8, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        text = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=8)
        with client.completions.create(
            model="tiny", prompt="Once upon a time", max_tokens=8, stream=True
        ) as pieces:
            return chat, chunks, text, list(pieces)

    chat, chunks, text, pieces = await in_thread(fleet, use)

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chat.choices[0].message.content == streamed
    assert text.choices[0].text == "".join(piece.choices[0].text for piece in pieces)
    assert ("length", 8) == (chat.choices[0].finish_reason, chat.usage.completion_tokens)
    assert (8, chat.usage.prompt_tokens) == (
        chunks[-1].usage.completion_tokens,
        chunks[-1].usage.prompt_tokens,
    )


async def test_asynchronous_client(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    """Many requests at once, streamed and whole, share one client and its connections."""

    async def ask(number: int) -> int:
        messages: Any = [*CHAT, {"role": "assistant", "content": f"Answer {number}."}, CHAT[1]]
        if number % 2:
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=5, stream=True
            )
            return sum([1 async for chunk in stream if chunk.choices[0].delta.content])
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
        assert answer.usage is not None
        return answer.usage.completion_tokens

    assert [5] * 40 == await asyncio.gather(*(ask(number) for number in range(40)))
    await until(lambda: is_at_rest(fleet))


async def test_several_prompts(client: openai.AsyncOpenAI) -> None:
    """A list of texts, or of lists of token ids, gives a choice for each."""
    texts = await client.completions.create(model="tiny", prompt=["one", "two", "three"], max_tokens=2)
    ids = await client.completions.create(model="tiny", prompt=[[1, 2], [3]], max_tokens=2)

    assert [0, 1, 2] == sorted(choice.index for choice in texts.choices)
    assert [0, 1] == sorted(choice.index for choice in ids.choices)
    assert ids.usage is not None
    assert 3 == ids.usage.prompt_tokens


async def test_models(client: openai.AsyncOpenAI) -> None:
    """The models are listed, and a single one can be requested."""
    assert ["tiny"] == [model.id async for model in client.models.list()]
    assert "tiny" == (await client.models.retrieve("tiny")).id
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        await client.models.retrieve("org/other")


async def test_headers_have_the_decision(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    """`with_raw_response` has worker, replica and overlap; the request's own id comes back."""
    raw = client.chat.completions.with_raw_response
    first = await raw.create(
        model="tiny", messages=CHAT, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    await knows_all_blocks(fleet)
    second = await raw.create(model="tiny", messages=CHAT, max_tokens=2)
    usage = second.parse().usage

    assert "mine-1" == first.request_id
    assert first.parse().id.endswith("mine-1")
    assert fleet.router_ids() == [first.headers["x-kvrouter-router"]]
    assert first.headers["x-kvrouter-worker"] in {worker_id_of(mocker.url) for mocker in fleet.mockers}
    assert first.headers["x-kvrouter-worker"] == second.headers["x-kvrouter-worker"]
    assert "0" == first.headers["x-kvrouter-overlap-blocks"]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16 * int(second.headers["x-kvrouter-overlap-blocks"])
    assert (usage.prompt_tokens - 1) // 16 == int(second.headers["x-kvrouter-overlap-blocks"])


async def test_tools_are_part_of_the_prompt(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    """Tools and tool turns are tokenized like the engine does: it had cached the predicted blocks."""
    turn: Any = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 degrees"},
    ]
    plain = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2)
    asked = await client.chat.completions.create(model="tiny", messages=CHAT, tools=TOOLS, max_tokens=2)
    await knows_all_blocks(fleet)

    answer = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=turn, tools=TOOLS, max_tokens=2
    )
    usage = answer.parse().usage

    assert plain.usage is not None
    assert asked.usage is not None
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert plain.usage.prompt_tokens + 20 < asked.usage.prompt_tokens < usage.prompt_tokens
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert cached == 16 * int(answer.headers["x-kvrouter-overlap-blocks"])
    assert cached > asked.usage.prompt_tokens - 32


# Errors


async def test_unknown_model(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    """NotFoundError, streamed or not, with the served models, the parameter and the request's id."""
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="served: tiny") as caught:
            await client.chat.completions.create(model="gpt-4o", messages=CHAT, stream=stream)
        assert (404, "model", "NotFoundError") == (
            caught.value.status_code,
            caught.value.param,
            caught.value.type,
        )
        assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        await in_thread(fleet, lambda sync: sync.completions.create(model="gpt-4o", prompt="x"))


async def test_bad_requests(client: openai.AsyncOpenAI) -> None:
    """BadRequestError, from the frontend or from the engine, streamed or not."""
    with pytest.raises(openai.BadRequestError, match="must be given") as caught:
        await client.chat.completions.create(model="tiny", messages=None)  # type: ignore[call-overload]
    assert "messages" == caught.value.param
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="tiny", prompt=[1] * 40_000, stream=stream)
    with pytest.raises(openai.BadRequestError, match="x-kvrouter-temperature"):
        await client.completions.create(
            model="tiny", prompt="x", extra_headers={"x-kvrouter-temperature": "hot"}
        )


async def test_body_above_the_limit(nats_url: str) -> None:
    """APIStatusError 413, and no broken connection; the client is served again."""
    async with (
        running_fleet(
            nats_url, uuid.uuid4().hex, frontends=1, mockers=1, flags=["--max-body-mib", "1"]
        ) as fleet,
        _async_client(fleet) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="too large") as caught:
            await client.completions.create(model="tiny", prompt="x" * 2_000_000)
        assert 413 == caught.value.status_code

        answer = await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=1)
        assert "length" == answer.choices[0].finish_reason


async def test_no_worker(nats_url: str) -> None:
    """APIStatusError 503 with Retry-After before the first worker appears."""
    flags = frontend_flags(nats_url, uuid.uuid4().hex, None)
    async with (
        running_frontend(parse_options(flags)) as frontend,
        openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="no worker has been seen") as caught:
            await client.chat.completions.create(model="tiny", messages=CHAT)

    assert isinstance(caught.value, openai.InternalServerError)
    assert (503, "1") == (caught.value.status_code, caught.value.response.headers["retry-after"])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_own_retry(nats_url: str, stream: bool) -> None:
    """A full fleet gives 503, also if the engine reports it inside a stream, and the client retries."""
    async with (
        running_fleet(nats_url, uuid.uuid4().hex, frontends=1, mockers=1, max_num_queued_reqs=1) as fleet,
        _async_client(fleet, max_retries=5) as client,
    ):
        (mocker,) = fleet.mockers
        first = await client.completions.create(stream=True, **ENDLESS)
        create = client.completions.with_raw_response.create
        second = asyncio.ensure_future(create(model="tiny", prompt=[1] * 40, max_tokens=3, stream=stream))
        await until(lambda: mocker.service.rejections == 1)
        await first.close()

        answer = await second

        assert (200, 1) == (answer.status_code, answer.retries_taken)
        body = answer.parse()
        if isinstance(body, openai.AsyncStream):
            assert 3 == len([chunk async for chunk in body])
        await until_at_rest(fleet)


async def test_worker_ends_in_the_middle_of_a_stream(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    """APIError after the streamed part, so that the part cannot pass for the whole answer."""
    stream = await client.completions.create(stream=True, **ENDLESS)
    assert (await anext(stream)).choices[0].text

    for mocker in fleet.mockers:
        for rank in mocker.ranks:
            rank.shut_down()

    with pytest.raises(openai.APIError, match="the worker aborted the request"):
        async for _ in stream:
            pass
    await until(lambda: not bookings(fleet))


# Clients that leave


async def test_synchronous_stream_left_early(fleet: Fleet) -> None:
    """Leaving the `with` of a stream frees its booking and ends the engine's work."""

    def use(client: openai.OpenAI) -> int:
        with client.completions.create(stream=True, **ENDLESS) as stream:
            next(iter(stream))
            return bookings(fleet)

    assert 1 == await in_thread(fleet, use)
    await until_at_rest(fleet)


async def test_asynchronous_stream_cancelled(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    """A cancelled task ends its request."""
    started = asyncio.Event()

    async def listen() -> None:
        async for _ in await client.completions.create(stream=True, **ENDLESS):
            started.set()

    task = asyncio.create_task(listen())
    await started.wait()
    assert 1 == bookings(fleet)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_at_rest(fleet)


async def test_timeout(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    """A timeout before the first byte of an answer that is not streamed also frees everything."""
    impatient = client.with_options(timeout=1.0)
    asking = asyncio.create_task(impatient.completions.create(**ENDLESS))
    await until(lambda: bookings(fleet) == 1)

    with pytest.raises(openai.APITimeoutError):
        await asking
    await until_at_rest(fleet)
