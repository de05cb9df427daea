"""Large bodies: which token ids are read, and how few of them in one step."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from kvrouter.bodies.edits import without_overrides
from kvrouter.bodies.large import (
    LARGE_BYTES,
    MARK,
    MOST_UNREAD_TOKENS,
    MOST_VALUES,
    SLICE_BYTES,
    STRING_SLICE_BYTES,
    LargeBody,
)
from kvrouter.bodies.openai import CompletionRequest, parse_chat, parse_completion
from kvrouter.errors import BadRequestError
from kvrouter.tokens.prompt import TokenPrompt

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
    """Ids read in slices equal those of the whole body, and most of it is not parsed in one step."""
    fields = {"kvrouter": {"mode": "kv"}, "prompt": IDS, "max_tokens": 3, "n": 2}
    body = json.dumps(fields, separators=separators).encode()

    asked, most_bytes = await read(body)
    assert msgspec.structs.asdict(parse_completion(body)) == msgspec.structs.asdict(asked)
    assert most_bytes < 1000


async def test_ids_that_end_with_a_slice() -> None:
    """No id is split or lost where a slice ends."""
    for digits in (1, 2, 5, 9):
        ids = [10**digits - 1] * (2 * LARGE_BYTES // (digits + 1))
        asked, _ = await read(json.dumps({"prompt": ids}, separators=(",", ":")).encode(), len(ids))
        assert asked.prompt == TokenPrompt([ids])


async def test_longer_than_any_context() -> None:
    """More ids than any context are rejected without parsing them."""
    with pytest.raises(BadRequestError, match=f"{len(IDS)} token ids; the longest context .* 4096"):
        await read(encoded(prompt=IDS), 4096)


async def test_longer_and_unread() -> None:
    """If the engine may accept them anyway, the ids are not parsed and the request is placed by load."""
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
    """Other large bodies are parsed like small ones, and the engine gets them byte for byte."""
    body = encoded(**fields)
    large = await LargeBody.read(body)
    wanted = parse_completion(body)

    asked, _ = await read(body)
    if fields["prompt"] != [MARK]:
        assert msgspec.structs.asdict(wanted) == msgspec.structs.asdict(asked)
    assert body == large.edited([])
    assert (asked.prompt is None) is (fields["prompt"] == [*IDS, "a"])


@pytest.mark.parametrize("fields", [{"prompt": IDS}, {"prompt": [IDS, [MARK], IDS]}, {"prompt": [1]}])
async def test_edited(fields: dict[str, Any]) -> None:
    """Edits get the body without its ids; afterwards the ids are in their places."""
    body = encoded(**fields, kvrouter={"mode": "kv"}, max_tokens=5)
    large = await LargeBody.read(body)

    assert without_overrides(body) == large.edited([without_overrides])


@pytest.mark.parametrize("odd", ["4294967296", "1 2", "01"])
async def test_odd_ids(odd: str) -> None:
    """A value that is not a token id is rejected at any place."""
    ids = ",".join(map(str, IDS))
    with pytest.raises(BadRequestError):
        await read(f'{{"prompt": [{ids},{odd},{ids}]}}'.encode(), 10**6)


async def read_chat(body: bytes) -> CompletionRequest:
    """The request of a chat."""
    large = await LargeBody.read(body)
    return await large.with_ids(parse_chat(large.rest), parse_chat, 0)


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""', '{"a":[1]}', '"\\\\"', "null"])
async def test_too_many_values(value: str) -> None:
    """A body with too many values is rejected before it is decoded."""
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
    """Brackets and commas in strings do not count as values, wherever slices end."""
    body = encoded(messages=[{"role": "user", "content": text}])

    assert [{"role": "user", "content": text}] == getattr((await read_chat(body)).prompt, "messages", None)
