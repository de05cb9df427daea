"""vLLM's HTTP interface, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio

from kvrouter.lab.mocker import events as event_wire
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker

CONFIG = MockerConfig(
    EngineConfig(num_blocks=64, max_model_len=1024), speedup=10_000, loras=("adapter",), topic="kv"
)
PROMPT = list(range(100))
Json = dict[str, Any]


@pytest.fixture
async def mocker() -> AsyncIterator[Mocker]:
    """A fast mocker without a tokenizer."""
    async with running_mocker(CONFIG) as mocker:
        yield mocker


@pytest.fixture
async def client(mocker: Mocker) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of that mocker."""
    async with aiohttp.ClientSession(mocker.url) as client:
        yield client


async def complete(client: aiohttp.ClientSession, prompt: object = PROMPT, **more: object) -> Json:
    """A completion that is not streamed."""
    async with client.post("/v1/completions", json={"prompt": prompt, **more}) as response:
        assert 200 == response.status
        answer: Json = await response.json()
        return answer


async def stream(client: aiohttp.ClientSession, path: str, body: Json, **headers: str) -> list[Any]:
    """The data of every server-sent event; [DONE] as it is."""
    async with client.post(path, json=body | {"stream": True}, headers=headers) as response:
        assert (200, "text/event-stream") == (response.status, response.content_type)
        events = (await response.text()).split("\n\n")
    assert "" == events.pop()
    data = [event.removeprefix("data: ") for event in events]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


async def test_completion(client: aiohttp.ClientSession) -> None:
    """The whole answer, in vLLM's shape."""
    answer = await complete(client, max_tokens=2, return_token_ids=True)

    (choice,) = answer["choices"]
    assert "text_completion" == answer["object"]
    assert "".join(f" t{token}" for token in choice["token_ids"]) == choice["text"]
    assert ("length", PROMPT) == (choice["finish_reason"], choice["prompt_token_ids"])
    assert {"prompt_tokens": 100, "total_tokens": 102, "completion_tokens": 2}.items() <= answer[
        "usage"
    ].items()


async def test_cached_tokens(client: aiohttp.ClientSession) -> None:
    """The same prompt again hits its six full blocks, and gets the same answer."""
    first, again = [await complete(client) for _ in range(2)]

    assert 0 == first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 96 == again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["choices"] == again["choices"]


async def test_several_prompts(client: aiohttp.ClientSession) -> None:
    """One choice for each prompt, in order; usage over all."""
    answer = await complete(client, [[1, 2], [3]], max_tokens=3)

    assert [0, 1] == [choice["index"] for choice in answer["choices"]]
    assert (3, 6) == (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])


async def test_stream(client: aiohttp.ClientSession) -> None:
    """A chunk for each token, then usage, then [DONE]; the id is the client's."""
    body = {"prompt": PROMPT, "max_tokens": 3, "stream_options": {"include_usage": True}}

    *chunks, last, done = await stream(client, "/v1/completions", body, **{"X-Request-Id": "mine"})

    whole = await complete(client, max_tokens=3)
    assert {"cmpl-mine"} == {chunk["id"] for chunk in chunks}
    assert whole["choices"][0]["text"] == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert [None, None, "length"] == [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ([], 0) == (last["choices"], last["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert "[DONE]" == done


async def test_continuous_usage(client: aiohttp.ClientSession) -> None:
    """Every chunk has usage, if requested."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 2, "stream_options": options}

    chunks = (await stream(client, "/v1/completions", body))[:2]

    assert [1, 2] == [chunk["usage"]["completion_tokens"] for chunk in chunks]


async def test_text_needs_a_tokenizer(client: aiohttp.ClientSession) -> None:
    """Without a model directory text is rejected with the way out."""
    for path, body in [
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ]:
        async with client.post(path, json=body) as response:
            error = (await response.json())["error"]
            assert (400, "BadRequestError") == (response.status, error["type"])
            assert "--model-path" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"prompt": PROMPT, "model": "other"}, 404, "NotFoundError", "The model `other` does not exist."),
        (
            {"prompt": [1] * 1025},
            400,
            "BadRequestError",
            "This model's maximum context length is 1024 tokens.",
        ),
        ({"prompt": [1] * 1025, "stream": True}, 400, "BadRequestError", "contains 1025 input tokens"),
        ({"prompt": [1] * 1024}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
        ({"prompt": PROMPT, "max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1"),
        (
            {"prompt": PROMPT, "max_tokens": 1025},
            400,
            "BadRequestError",
            "cannot be greater than max_model_len=1024",
        ),
        ({"prompt": PROMPT, "n": 129}, 400, "BadRequestError", "n must be between 1 and 128"),
        ({"prompt": []}, 400, "Bad Request", "prompt"),
        ({}, 400, "Bad Request", "prompt"),
        ({"prompt": PROMPT, "stream_options": {}}, 400, "Bad Request", "Stream options"),
    ],
)
async def test_errors(
    client: aiohttp.ClientSession, body: Json, status: int, kind: str, message: str
) -> None:
    """Status, type and message of vLLM's errors."""
    async with client.post("/v1/completions", json=body) as response:
        error = (await response.json())["error"]

    assert (status, status, kind) == (response.status, error["code"], error["type"])
    assert message in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_not_json(client: aiohttp.ClientSession, path: str) -> None:
    """A body that is not JSON gives 400, never 422 or 415."""
    for content_type in ("application/json", "text/plain"):
        async with client.post(path, data=b"{", headers={"Content-Type": content_type}) as response:
            assert (400, "Bad Request") == (response.status, (await response.json())["error"]["type"])


async def test_unknown_route(client: aiohttp.ClientSession) -> None:
    """An unknown route gives FastAPI's 404 body."""
    async with client.get("/nothing") as response:
        assert (404, {"detail": "Not Found"}) == (response.status, await response.json())


async def test_models(client: aiohttp.ClientSession) -> None:
    """The base model and its LoRAs."""
    async with client.get("/v1/models") as response:
        base, lora = (await response.json())["data"]

    assert ("mock", None, 1024) == (base["id"], base["parent"], base["max_model_len"])
    assert ("adapter", "mock", None) == (lora["id"], lora["parent"], lora["max_model_len"])


async def test_lora_is_chosen_by_model(client: aiohttp.ClientSession, mocker: Mocker) -> None:
    """An adapter shares no blocks with the base model."""
    await complete(client)

    answer = await complete(client, model="adapter")

    assert 0 == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert "adapter" == answer["model"]


async def test_health_and_version(client: aiohttp.ClientSession) -> None:
    """The routes of probes answer."""
    for path in ("/health", "/ping"):
        async with client.get(path) as response:
            assert (200, b"") == (response.status, await response.read())
    async with client.get("/version") as response:
        assert {"version": "0.32.0"} == await response.json()


async def test_metrics(client: aiohttp.ClientSession) -> None:
    """VLLM's names, with rank and model."""
    await complete(client)
    await complete(client)

    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()

    labels = '{engine="0",model_name="mock"}'
    assert f"vllm:prefix_cache_queries_total{labels} 200.0" in lines
    assert f"vllm:prefix_cache_hits_total{labels} 96.0" in lines
    assert f"vllm:num_requests_running{labels} 0.0" in lines
    (config,) = (line for line in lines if line.startswith("vllm:cache_config_info"))
    assert 'block_size="16",num_gpu_blocks="64"' in config
    assert any(line.startswith("process_start_time_seconds ") for line in lines)


async def test_reset_prefix_cache(client: aiohttp.ClientSession) -> None:
    """The cache is emptied."""
    await complete(client)

    async with client.post("/reset_prefix_cache") as response:
        assert {"success": True} == await response.json()

    assert 0 == (await complete(client))["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_speed(mocker: Mocker, client: aiohttp.ClientSession) -> None:
    """Another speed holds from the next step on; a wrong one changes nothing."""
    (rank,), timing = mocker.service.ranks, mocker.service.config.engine.timing
    async with client.post("/speed", json={"speedup": 0.5}) as response:
        assert {"speedup": 0.5} == await response.json()
    assert 2 * timing.base_s == rank.engine.timing.base_s

    for wrong in (0, -1, "fast", None):
        async with client.post("/speed", json={"speedup": wrong}) as response:
            assert response.status in {400, 422}
    assert 2 * timing.base_s == rank.engine.timing.base_s


async def test_nodelay(mocker: Mocker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted sockets have TCP_NODELAY, so small chunks leave at once."""
    seen: list[int] = []
    health = mocker.service.health

    async with running_mocker(CONFIG) as other:

        @aiohttp.web.middleware
        async def look(request: aiohttp.web.Request, handler: Any) -> aiohttp.web.StreamResponse:
            assert request.transport is not None
            accepted = request.transport.get_extra_info("socket")
            seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            return await health(request)

        app = other.service.app()
        app.middlewares.append(look)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        try:
            await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            async with aiohttp.ClientSession() as client, client.get(f"http://{host}:{port}/health"):
                pass
        finally:
            await runner.cleanup()

    assert [1] == [int(bool(value)) for value in seen]


# --- slow engines ---


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `is_so` holds; the test's time limit is the bound."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the engine has no event for what a test waits for
            await asyncio.sleep(0)


@pytest.fixture
async def slow() -> AsyncIterator[Mocker]:
    """A slow mocker: one step per millisecond, at most two requests."""
    async with running_mocker(replace(CONFIG, speedup=5, max_num_queued_reqs=2)) as mocker:
        yield mocker


@pytest.mark.parametrize("streams", [True, False])
async def test_disconnect_aborts(slow: Mocker, streams: bool) -> None:
    """A client that leaves frees its blocks, streamed or not."""
    body = {"prompt": PROMPT, "max_tokens": 900, "stream": streams}
    async with aiohttp.ClientSession(slow.url) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: slow.engine.num_running == 1)
        call.cancel() if not streams else (await call).close()

        await until(lambda: not slow.engine.has_work())

    assert 0 == slow.engine.kv_usage
    assert slow.engine.counters.generated < 900


async def test_overload(slow: Mocker) -> None:
    """Beyond the limit: 503; for a stream 200 with an error as the first event."""
    body = {"prompt": PROMPT, "max_tokens": 900}
    async with aiohttp.ClientSession(slow.url) as client:
        calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: slow.ranks[0].num_unfinished == 2)

        async with client.post("/v1/completions", json=body) as response:
            rejected = await response.json()
        first, done = await stream(client, "/v1/completions", body)
        for call in calls:
            call.cancel()

    assert (503, 503, "Service Unavailable") == (
        response.status,
        rejected["error"]["code"],
        rejected["error"]["type"],
    )
    assert (rejected, "[DONE]") == (first, done)
    assert 2 == slow.service.rejections


async def test_shutdown() -> None:
    """Running requests end with their partial output, HTTP 200 and "abort"; the port is closed."""
    body = {"prompt": PROMPT, "max_tokens": 900}
    async with aiohttp.ClientSession() as client:
        async with running_mocker(replace(CONFIG, speedup=5)) as mocker:
            url = f"{mocker.url}/v1/completions"
            whole = asyncio.create_task(client.post(url, json=body))
            streamed = await client.post(url, json=body | {"stream": True})
            await until(lambda: mocker.engine.num_running == 2)
            enough = mocker.engine.counters.steps + 3
            await until(lambda: mocker.engine.counters.steps > enough)
            reading = asyncio.create_task(streamed.text())

        answer = await (await whole).json()
        *_, last, done, _ = (await reading).split("\n\n")
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(mocker.url)

    assert "abort" == answer["choices"][0]["finish_reason"]
    assert 0 < answer["usage"]["completion_tokens"] < 900
    assert "abort" == json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"]
    assert "data: [DONE]" == done


# --- ranks and events ---


async def test_ranks() -> None:
    """The header selects a rank; each has a separate cache and separate endpoints."""
    pin = {"X-data-parallel-rank": "1"}
    async with (
        running_mocker(replace(CONFIG, data_parallel_size=2)) as mocker,
        aiohttp.ClientSession(mocker.url, headers=pin) as client,
    ):
        await complete(client)
        answer = await complete(client)
        async with client.get("/kv_event_sources") as response:
            sources = await response.json()

    assert 96 == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert [0, 200] == [engine.counters.prompt for engine in mocker.engines]
    assert ["0", "1"] == list(sources)
    assert 4 == len({sources[n][end] for n in sources for end in ("endpoint", "replay_endpoint")})


@pytest.mark.parametrize(("rank", "status"), [("2", 400), ("-1", 400), ("x", 200), ("0", 200)])
async def test_rank_header(client: aiohttp.ClientSession, rank: str, status: int) -> None:
    """A rank out of range is rejected; a value that is not an integer is ignored."""
    headers = {"X-data-parallel-rank": "5" if rank == "2" else rank}
    async with client.post("/v1/completions", json={"prompt": PROMPT}, headers=headers) as response:
        assert status == response.status


async def test_requests_spread_over_ranks() -> None:
    """Without the header the rank with the fewest requests is taken."""
    async with (
        running_mocker(replace(CONFIG, data_parallel_size=2, speedup=5)) as mocker,
        aiohttp.ClientSession(mocker.url) as client,
    ):
        await asyncio.gather(*(complete(client, max_tokens=50) for _ in range(2)))

    assert [100, 100] == [engine.counters.prompt for engine in mocker.engines]


async def test_replay_gives_the_cache(mocker: Mocker, client: aiohttp.ClientSession) -> None:
    """The replay socket names exactly the cached blocks."""
    for start in (0, 50, 0):
        await complete(client, [*range(start, start + 200)])

    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(mocker.kv_replay or "")
        await dealer.send_multipart([b"", event_wire.sequence_frame(0)])
        hashes: set[int] = set()
        while (message := await dealer.recv_multipart())[2] != event_wire.END_OF_REPLAY:
            for event in event_wire.decode(message[3]):
                hashes.update(event.block_hashes)  # type: ignore[union-attr]

    assert hashes == set(mocker.engine.cache.cached_hashes())


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"json": "not json"}},
        {"structured_outputs": {"json": {"type": []}}},
        {"structured_outputs": {"json": {"type": "object", "required": [None]}}},
        {"response_format": {"type": "json_schema", "json_schema": "x"}},
        {"response_format": {"type": ["json_schema"]}},
        {"tools": [{"function": "f"}], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
async def test_hostile_schemas(client: aiohttp.ClientSession, asked: Json) -> None:
    """An answer or a clear refusal, never an error of the mocker."""
    async with client.post("/v1/completions", json={"prompt": PROMPT, **asked}) as response:
        assert response.status in {200, 400}
        assert ("error" in await response.json()) == (response.status == 400)


async def test_json_of_a_completion(client: aiohttp.ClientSession) -> None:
    """It ends when the JSON is whole, or is cut off by the limit."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = {"structured_outputs": {"json": schema}}

    (whole,) = (await complete(client, **asked))["choices"]
    (cut,) = (await complete(client, **asked, max_tokens=1))["choices"]

    assert ('{"a":0}', "stop") == (whole["text"], whole["finish_reason"])
    assert ('{"a"', "length") == (cut["text"], cut["finish_reason"])


async def test_embeddings(client: aiohttp.ClientSession) -> None:
    """Of tokens: vectors in the order of the inputs, usage, and a bound."""
    asked = {"model": None, "input": [[1, 2], [3], [1, 2]], "dimensions": 8}
    async with client.post("/v1/embeddings", json=asked) as response:
        answer = await response.json()
    async with client.post("/v1/embeddings", json={"input": [[1]] * 100, "dimensions": 8192}) as refused:
        assert 400 == refused.status

    first, second, third = [one["embedding"] for one in answer["data"]]
    assert 8 == len(first)
    assert first == third != second
    assert {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0} == answer["usage"]
