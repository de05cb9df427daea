"""A mocker with a tokenizer: text in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers import models, pre_tokenizers

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.lab.mocker.text import spoken_words
from kvrouter.tokens.tokenizer import Tokenizer

QUESTION: Any = {"role": "user", "content": "Which modules does Python have? " * 10}


@pytest.fixture
async def mocker(tiny: Path) -> AsyncIterator[Mocker]:
    """A fast mocker of that model."""
    async with running_mocker(MockerConfig(model_path=tiny, speedup=10_000)) as mocker:
        yield mocker


@pytest.fixture
async def client(mocker: Mocker) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    async with openai.AsyncOpenAI(base_url=f"{mocker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def chat(client: openai.AsyncOpenAI, messages: list[Any], max_tokens: int | None = 40) -> Any:
    """One turn."""
    return await client.chat.completions.create(model="mock", messages=messages, max_tokens=max_tokens)


async def test_chat(client: openai.AsyncOpenAI) -> None:
    """A chat is rendered, encoded, and answered in words."""
    answer = await chat(client, [QUESTION])

    assert answer.id.startswith("chatcmpl-")
    assert "length" == answer.choices[0].finish_reason
    assert 40 == len(answer.choices[0].message.content.split())


async def test_chat_stream_begins_with_the_role(client: openai.AsyncOpenAI) -> None:
    """First the role with empty content, then words, then usage."""
    stream = await client.chat.completions.create(
        model="mock",
        messages=[QUESTION],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )

    first, *words, usage = [chunk async for chunk in stream]

    assert ("assistant", "") == (first.choices[0].delta.role, first.choices[0].delta.content)
    assert 3 == len([word.choices[0].delta.content for word in words])
    assert usage.usage is not None
    assert 3 == usage.usage.completion_tokens


async def test_next_turn_finds_the_answer_in_the_cache(client: openai.AsyncOpenAI) -> None:
    """An answer sent back as text has the generated tokens."""
    first = await chat(client, [QUESTION])
    answer = {"role": "assistant", "content": first.choices[0].message.content}

    second = await chat(client, [QUESTION, answer, QUESTION])

    computed = first.usage.prompt_tokens + 39
    assert computed // 16 * 16 == second.usage.prompt_tokens_details.cached_tokens


async def test_chat_ends_by_itself(client: openai.AsyncOpenAI) -> None:
    """Without max_tokens the model stops in the end, and its end token has no text."""
    answer = await chat(client, [QUESTION], max_tokens=None)

    assert "stop" == answer.choices[0].finish_reason
    assert answer.usage.completion_tokens - 1 == len(answer.choices[0].message.content.split())


async def test_text_completion(client: openai.AsyncOpenAI) -> None:
    """Prompts may be text, one or several."""
    answer = await client.completions.create(model="mock", prompt=["import", "from"], max_tokens=2)

    assert [0, 1] == [choice.index for choice in answer.choices]


async def test_tokenize(mocker: Mocker) -> None:
    """The same tokens as in a request with the same messages."""
    async with (
        aiohttp.ClientSession(mocker.url) as client,
        client.post("/tokenize", json={"messages": [QUESTION]}) as response,
        client.post("/v1/chat/completions", json={"messages": [QUESTION], "max_tokens": 1}) as other,
    ):
        tokens, answer = await response.json(), await other.json()

    assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["prompt_tokens"]
    assert 32_768 == tokens["max_model_len"]


def test_spoken_words_survive_a_round_trip(tiny: Path) -> None:
    """Any sequence of them decodes to text that encodes to the same tokens."""
    with Tokenizer.load(tiny) as tokenizer:
        words = spoken_words(tokenizer)

        assert len(words) > 100
        assert [*words] == tokenizer.encode_now("".join(words.values()), add_special_tokens=False)


@pytest.mark.parametrize(
    "vocabulary", [{"a": 0, "b": 1, "?": 2}, {"\u6f22": 0, "\u5b57": 1, "?": 2}, {"?": 0}]
)
async def test_no_words(tmp_path: Path, vocabulary: dict[str, int]) -> None:
    """A tokenizer without a word after a space answers with its other tokens."""
    tokenizer = Tokenizers(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    body = {"model": "mock", "prompt": [0, 0, 0], "max_tokens": 5}
    async with (
        running_mocker(MockerConfig(model_path=tmp_path, speedup=10_000)) as mocker,
        aiohttp.ClientSession(mocker.url) as client,
        client.post("/v1/completions", json=body) as response,
    ):
        assert 200 == response.status
        assert 5 == (await response.json())["usage"]["completion_tokens"]
