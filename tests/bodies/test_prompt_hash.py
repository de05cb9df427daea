"""When two requests have the same prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.bodies.prompt_hash import LARGE_BYTES, hash_of, prompt_hash
from kvrouter.core.wire.ids import PoolId

POOL, CHATS = PoolId("m-12345678"), "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}


def of(body: Any, route: str = CHATS, pool: PoolId = POOL) -> bytes:
    """The hash of a request."""
    return hash_of(pool, route, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"user": "ada"},
        {"metadata": {"try": "2"}},
        {"request_id": "r2"},
        {"priority": 3},
        {"cache_salt": "s"},
    ],
)
def test_what_no_engine_computes_with(more: dict[str, Any]) -> None:
    """Who asks, and how the answer is sent, does not make another prompt; nor does the order of fields."""
    assert of(CHAT) == of({**more, **dict(reversed(CHAT.items()))})


def test_what_no_engine_reads() -> None:
    """Names that no engine knows, fields that are null, and the spelling of the JSON make no other prompt."""
    (message,) = CHAT["messages"]
    for n in range(20):
        unknown = {f"x_{n}": n, "trace": "a" * n, "seed": None}
        assert of(CHAT) == of({**unknown, **CHAT})
        assert of(CHAT) == of({**CHAT, "messages": [{**message, "id": n, f"x_{n}": [n]}]})
    assert of(CHAT) == of(json.dumps(CHAT, indent=n).replace("hi", "h\\u0069").encode())
    assert of({**CHAT, "x": {"deep": 1e300}}) == of({**CHAT, "x": "1e400"}) == of(CHAT)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "hi!"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": ""}]},
        {"temperature": 0.6},
        {"seed": 1},
        {"model": "adapter"},
        {"structured_outputs": {"regex": "(a+)+"}},
    ],
)
def test_another_prompt(change: dict[str, Any]) -> None:
    """A longer chat, and any option that an engine computes with, is another prompt."""
    assert of(CHAT) != of({**CHAT, **change})


def test_where() -> None:
    """The same body is another prompt on another route or for another pool."""
    assert 3 == len({of(CHAT), of(CHAT, "/v1/completions"), of(CHAT, pool=PoolId("n-12345678"))})


@pytest.mark.parametrize("body", [b"--form", b"[1]", b"{", b"\xff", b"[" * 5000])
def test_other_bodies(body: bytes) -> None:
    """What is no JSON object counts byte for byte."""
    assert of(body) == of(body)
    assert of(body) != of(body + b" ")


def test_parts_do_not_run_together() -> None:
    """Names and values are told apart by their lengths."""
    assert of({"k": 12, "n": 3}) != of({"k": 1, "n": 23})


async def test_a_large_body() -> None:
    """A large body is hashed in a thread, with the same result; a request without one has no hash."""
    body = json.dumps({"prompt": "x" * LARGE_BYTES}).encode()

    assert of(body) == await prompt_hash(POOL, CHATS, body)
    assert await prompt_hash(POOL, CHATS, b"") is None


@pytest.mark.parametrize("size", [10, LARGE_BYTES])
def test_messages_do_not_run_together(size: int) -> None:
    """Two messages are no other two, and not one, however long they are."""
    text = "x" * size
    chats: list[list[dict[str, str]]] = [
        [{"role": "user", "content": text}, {"role": "user"}],
        [{"role": "user", "content": text, "name": "user"}],
        [{"role": "user"}, {"content": text, "role": "user"}],
        [{"role": "user", "content": text}],
    ]

    assert 4 == len({of({**CHAT, "messages": chat}) for chat in chats})
    for chat in chats:
        told = [{**message, "trace": n} for n, message in enumerate(chat)]
        assert of({**CHAT, "messages": chat}) == of({**CHAT, "messages": told, "x": text})
