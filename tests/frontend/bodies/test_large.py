"""Large bodies: what is read of their token ids, and how little of it in one step."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from kvrouter.errors import BadRequestError
from kvrouter.frontend.bodies.edits import without_overrides
from kvrouter.frontend.bodies.large import (
    LARGE_BYTES,
    MARK,
    MOST_UNREAD_TOKENS,
    MOST_VALUES,
    SLICE_BYTES,
    STRING_SLICE_BYTES,
    LargeBody,
)
from kvrouter.frontend.bodies.openai import CompletionRequest, parse_chat, parse_completion
from kvrouter.tokens.prompt import TextPrompt, TokenPrompt

IDS = [random.Random(1).randrange(200_000) for _ in range(LARGE_BYTES // 5)]


class Parsed:
    """parse_completion, and the longest body that it was given."""

    def __init__(self) -> None:
        self.most_bytes = 0

    def __call__(self, body: bytes) -> CompletionRequest:
        self.most_bytes = max(self.most_bytes, len(body))
        return parse_completion(body)


async def read(body: bytes, longest_context: int = 0) -> tuple[CompletionRequest, int]:
    """The request, and the most bytes that were parsed in one step."""
    parse = Parsed()
    large = await LargeBody.read(body)
    asked = parse(large.rest)
    if large.runs:
        asked = await large.with_ids(asked, parse, longest_context)
    return asked, parse.most_bytes


def encoded(**fields: Any) -> bytes:
    """A body."""
    return json.dumps({"model": "m", **fields}).encode()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n" + " " * 9, ":")])
async def test_ids(separators: tuple[str, str]) -> None:
    """A prompt of ids is what parsing it as a whole gives, and most of the body is not parsed in one step."""
    fields = {"kvrouter": {"mode": "kv"}, "prompt": IDS, "max_tokens": 3, "n": 2}
    body = json.dumps(fields, separators=separators).encode()

    asked, most_bytes = await read(body)
    assert msgspec.structs.asdict(parse_completion(body)) == msgspec.structs.asdict(asked)
    assert most_bytes < 1000


async def test_ids_that_end_with_a_slice() -> None:
    """Wherever slices end, no id is torn or lost."""
    for digits in (1, 2, 5, 9):
        ids = [10**digits - 1] * (2 * LARGE_BYTES // (digits + 1))
        asked, _ = await read(json.dumps({"prompt": ids}, separators=(",", ":")).encode(), len(ids))
        assert asked.prompt == TokenPrompt([ids])


async def test_longer_than_any_context() -> None:
    """More ids than any worker takes are refused, and none of them is parsed."""
    with pytest.raises(BadRequestError, match=f"{len(IDS)} token ids; the longest context .* 4096"):
        await read(encoded(prompt=IDS), 4096)


async def test_longer_and_unread() -> None:
    """Where the engine may take them all the same the request goes by load: its ids are not parsed."""
    for body, longest in (
        (encoded(prompt=IDS, truncate_prompt_tokens=100), 4096),
        (encoded(prompt=[7] * (MOST_UNREAD_TOKENS + 1)), 0),
        (encoded(prompt=[[7] * 1000] * (MOST_UNREAD_TOKENS // 1000 + 1)), 4096),
    ):
        asked, most_bytes = await read(body, longest)
        assert asked.prompt is None
        assert most_bytes < SLICE_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [IDS[:9000], IDS[9000:]]},
        {"prompt": [1, 2], "allowed_token_ids": IDS},
        {"prompt": "[" + ",".join(map(str, IDS)) + "]"},
        {"prompt": [*IDS, "a"]},
        {"prompt": "a" * LARGE_BYTES},
        {"prompt": [MARK], "allowed_token_ids": IDS, "max_tokens": 3},
    ],
    ids=["two prompts", "elsewhere", "text", "mixed", "no ids", "mark"],
)
async def test_others(fields: dict[str, Any]) -> None:
    """All other bodies are read as ever, as far as they are read; and the engine gets them byte for byte."""
    body = encoded(**fields)
    large = await LargeBody.read(body)
    try:
        wanted = parse_completion(body)
    except BadRequestError:
        with pytest.raises(BadRequestError):
            await read(body)
        return

    asked, _ = await read(body)
    if fields["prompt"] != [MARK]:
        assert msgspec.structs.asdict(wanted) == msgspec.structs.asdict(asked)
    assert body == large.edited([])
    assert isinstance(asked.prompt, TextPrompt | TokenPrompt)


@pytest.mark.parametrize("fields", [{"prompt": IDS}, {"prompt": [IDS, [MARK], IDS]}, {"prompt": [1]}])
async def test_edited(fields: dict[str, Any]) -> None:
    """An edit sees the body without its ids, and they are there afterwards."""
    body = encoded(**fields, kvrouter={"mode": "kv"}, max_tokens=5)
    large = await LargeBody.read(body)

    assert without_overrides(body) == large.edited([without_overrides])


@pytest.mark.parametrize("odd", ["4294967296", "1 2", "01"])
async def test_odd_ids(odd: str) -> None:
    """What is no token id is refused wherever it stands."""
    ids = ",".join(map(str, IDS))
    with pytest.raises(BadRequestError):
        await read(f'{{"prompt": [{ids},{odd},{ids}]}}'.encode(), 10**6)


async def read_chat(body: bytes) -> CompletionRequest:
    """The request of a chat."""
    large = await LargeBody.read(body)
    return await large.with_ids(parse_chat(large.rest), parse_chat, 0)


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""', '{"a":[1]}', '"\\\\"', "null"])
async def test_too_many_values(value: str) -> None:
    """Values in such numbers that decoding them would hold up all others are refused before."""
    content = ",".join([value] * (MOST_VALUES + LARGE_BYTES))
    body = f'{{"messages": [{{"role": "user", "content": [{content}]}}]}}'.encode()
    with pytest.raises(BadRequestError, match="more than 200000 JSON values"):
        await read_chat(body)


@pytest.mark.parametrize(
    "text",
    [
        '[{,"' * STRING_SLICE_BYTES,
        "\\" * (STRING_SLICE_BYTES + 1),
        "x" * (STRING_SLICE_BYTES - 1) + '\\"' * 9,
        "x" * (2 * STRING_SLICE_BYTES),
    ],
    ids=["marks", "backslashes", "backslash at the end of a slice", "whole slices"],
)
async def test_values_in_texts(text: str) -> None:
    """What stands in a text is no value, wherever slices end."""
    body = encoded(messages=[{"role": "user", "content": text}])

    assert [{"role": "user", "content": text}] == getattr((await read_chat(body)).prompt, "messages", None)
