"""Bodies of calls: slices equal the whole, others run meanwhile, all is bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from kvrouter.errors import BadRequestError, RequestTooLargeError
from kvrouter.router.asked import PlacementAsk, given_hashes
from kvrouter.router.bodies import MOST_BODY_BYTES, MOST_HASHES, MOST_TOKENS, decoded, read_body
from kvrouter.router.mooncake import Query
from kvrouter.router.registrations import Registration

MANY = [*range(20_000)]
SIGNED = [one * 461_168_601_842_738 - (1 << 62) for one in MANY]
LONG = 'a \\ "q" \u00e9\U0001f600\n' * 5_000
BODIES: list[dict[str, Any]] = [
    {"token_ids": MANY, "selection_id": "a", "lease_s": 3},
    {"sequence_hashes": SIGNED, "isl_tokens": 320_000, "block_hashes": SIGNED},
    {"block_hashes": [7] * 20_000},
    {"text": LONG, "model_name": "m"},
    {"messages": [{"role": "user", "content": LONG}]},
    {"request": {"model": "m", "prompt": MANY}},
    {"token_ids": [1, 2], "unknown": MANY, "another": LONG, "lora_name": "l"},
    {"allowed_worker_ids": MANY},
    {"token_ids": None, "text": LONG, "request": None},
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_slices_equal_the_whole(body: dict[str, Any], indent: int | None) -> None:
    """With spaces and without."""
    data = json.dumps(body, indent=indent).encode()
    whole = decoded(data, PlacementAsk)

    asked = await read_body(data, PlacementAsk)

    for name in PlacementAsk.__struct_fields__:
        one, other = getattr(whole, name), getattr(asked, name)
        if name.endswith("_hashes"):
            assert given_hashes(name, one) == given_hashes(name, other)
        elif isinstance(one, msgspec.Raw):
            assert bytes(one).strip() == bytes(other).strip()
        else:
            assert one == (list(other) if isinstance(one, list) else other), name


async def test_of_other_calls() -> None:
    """Mooncake's hashes; a registration has no prompt, and a change is no struct."""
    query = await read_body(json.dumps({"seq_hashes": MANY}).encode(), Query)
    assert MANY == [*given_hashes("seq_hashes", query.seq_hashes)]
    engine = {"worker_id": 1, "endpoint": "http://a:1", "block_size": 16, "token_ids": MANY}
    assert "1" == (await read_body(json.dumps(engine).encode(), Registration)).name
    assert engine == await read_body(json.dumps(engine).encode(), dict[str, Any])


WRONG: list[tuple[bytes, type[BadRequestError], str]] = [
    (json.dumps({"token_ids": [*MANY, -1]}).encode(), BadRequestError, "token_ids"),
    (json.dumps({"token_ids": [*MANY, 1 << 32]}).encode(), BadRequestError, "token_ids"),
    (json.dumps({"token_ids": [*MANY, "a"]}).encode(), BadRequestError, "token_ids"),
    (json.dumps({"token_ids": [[*MANY]]}).encode(), BadRequestError, "token_ids"),
    (json.dumps({"token_ids": LONG}).encode(), BadRequestError, "Expected `array"),
    (json.dumps({"sequence_hashes": [*MANY, 1.5]}).encode(), BadRequestError, "sequence_hashes"),
    (json.dumps({"sequence_hashes": [*MANY, 0]}).encode(), BadRequestError, "named twice"),
    (json.dumps({"text": [LONG]}).encode(), BadRequestError, "Expected `str"),
    (b'{"text": "' + b"\\ud83d" * 10_000 + b'"}', BadRequestError, "text"),
    (b'{"text": "' + b"a" * 40_000, BadRequestError, "the body is not"),
    (b'{"token_ids": [' + b"1," * 40_000, BadRequestError, "the body is not"),
    (b'{"token_ids": [' + b"1," * 40_000 + b"]}", BadRequestError, "token_ids"),
    (b'{"token_ids": [1' + b",1" * 40_000 + b"] junk}", BadRequestError, "token_ids: this is no JSON"),
    (b'{"token_ids": [1' + b",1" * 40_000 + b", " * 40_000 + b"]}", BadRequestError, "token_ids"),
    (b'{"block_hashes": [1' + b",1" * 40_000 + b"," + b" " * 70_000 + b"]}", BadRequestError, "no JSON"),
    (b'{"token_ids": [1' + b",1" * 40_000 + b"}", BadRequestError, "the body is not"),
    (b'{"text": "' + b"a" * 40_000 + b'" junk}', BadRequestError, "text: this is no JSON"),
    (b"[" * 100_000, BadRequestError, "the body is not"),
    (b'{"token_ids": [1' + b",1" * MOST_TOKENS + b"]}", RequestTooLargeError, "token_ids: 1048577 of them"),
    (b'{"seq_hashes": [], "block_hashes": [1' + b",1" * MOST_HASHES + b"]}", RequestTooLargeError, "65537"),
    (b'{"allowed_worker_ids": [1' + b",1" * 300_000 + b"]}", RequestTooLargeError, "524288 bytes"),
    (b" " * (MOST_BODY_BYTES + 1), RequestTooLargeError, "8388608 at most"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "error", "text"), WRONG, ids=range(len(WRONG)))
async def test_wrong_bodies(body: bytes, error: type[BadRequestError], text: str) -> None:
    """Each says what is wrong, and where."""
    with pytest.raises(error, match=text):
        await read_body(body, PlacementAsk)


async def test_one_name_twice() -> None:
    """The last one counts, as in a short body."""
    long = b"1" + b",1" * 40_000
    assert [2] == (await read_body(b'{"token_ids":[%b],"token_ids":[2]}' % long, PlacementAsk)).token_ids
    found = (await read_body(b'{"token_ids":[2],"token_ids":[%b]}' % long, PlacementAsk)).token_ids
    assert found is not None
    assert 40_001 == len(found)


async def test_others_run_meanwhile() -> None:
    """A million ids are read in a hundred steps."""
    turns, loop = 0, asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    body = json.dumps({"token_ids": [*range(1_000_000)]}).encode()
    loop.call_soon(turn)
    asked = await read_body(body, PlacementAsk)

    assert asked.token_ids is not None
    assert (1_000_000, True) == (len(asked.token_ids), turns > 100)
