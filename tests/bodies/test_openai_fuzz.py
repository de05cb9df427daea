"""Damaged request bodies are parsed, or rejected with a message. Nothing else is raised."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.bodies.edits import apply, edits_of
from kvrouter.bodies.lax import kind_of
from kvrouter.bodies.openai import CompletionRequest, error_body, parse_chat, parse_completion
from kvrouter.errors import BadRequestError
from tests.long import examples

FULL = {"kv_cache_report_mode": "full"}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Grüße 🙂"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "cache_salt": "s",
    "truncate_prompt_tokens": -1,
    "vllm_xargs": {**FULL, "x": 1},
}
COMPLETIONS: list[dict[str, Any]] = [
    {"model": "tiny", "prompt": "Once upon", "max_tokens": 3, "stream": False, "vllm_xargs": FULL},
    {"model": "tiny", "prompt": [1, 2, 3], "add_special_tokens": False, "truncate_prompt_tokens": 2},
    {"model": "tiny", "prompt": [[1, 2], [3]], "temperature": 0.0},
    {"model": "tiny", "prompt": ["a", "b"], "logit_bias": {"1": 2}},
    {"model": "tiny", "prompt_embeds": "AAAA"},
]
PARSERS: list[Callable[[bytes], CompletionRequest]] = [parse_chat, parse_completion]
STRANGE: list[Any] = [
    None, True, 0, -1, 2**31, 2**32, 2**64, 10**40, 0.5, 1e300, "", "x", "\ud800", "\x00", "a" * 5000,
    [], {}, [[]], [None], [[1], "x"], {"": {}}, [2**32], FULL,
]  # fmt: skip


def mutated(value: Any, chance: random.Random) -> Any:
    """The value with one part of it replaced, removed or repeated."""
    if not isinstance(value, list | dict) or not value or chance.random() < 0.1:
        return chance.choice(STRANGE)
    if isinstance(value, dict):
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: mutated(value[key], chance)}
    place = chance.randrange(len(value))
    if chance.random() < 0.2:
        return [*value, value[place]]
    return [*value[:place], mutated(value[place], chance), *value[place + 1 :]]


def damaged(seed: int) -> bytes:
    """A valid body, damaged."""
    chance = random.Random(seed)
    content: Any = chance.choice([CHAT, *COMPLETIONS])
    for _ in range(chance.randint(0, 3)):
        content = mutated(content, chance)
    body = bytearray(json.dumps(content, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass"))
    for _ in range(chance.choice([0, 0, 0, 1, 3])):
        start = chance.randrange(len(body) + 1)
        end = min(len(body), start + chance.randint(0, 8))
        body[start:end] = chance.choice(
            [b"", bytes(body[start:end]) * 2, chance.randbytes(2), b'"', b"{", b"]"]
        )
    return bytes(body)


def is_read_or_refused(read: Callable[[bytes], object], body: bytes) -> bool:
    """Whether a body can be parsed. If not, its error must be one that can be sent to a client."""
    try:
        read(body)
    except BadRequestError as refusal:
        details = json.loads(error_body(refusal))["error"]
    else:
        return True
    assert (True, 400) == (bool(details["message"]), details["code"])
    return False


@examples(600)
@given(seed=st.integers(0, 2**48))
def test_damaged_bodies(seed: int) -> None:
    """A body with odd values or broken bytes is parsed or rejected by both parsers."""
    for parse in PARSERS:
        is_read_or_refused(parse, damaged(seed))


@examples(200)
@given(body=st.binary(max_size=300))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"messages": [' + b'{"content":' * 50_000)
@example(b'\xff\xfe{"model"')
@example(b'{"prompt": 1e999}')
@example(b'{"prompt": "\\ud800"}')
def test_any_bytes(body: bytes) -> None:
    """Any bytes are parsed or rejected."""
    for parse in PARSERS:
        is_read_or_refused(parse, body)


@pytest.mark.parametrize("parse", PARSERS)
def test_undamaged_bodies(parse: Callable[[bytes], CompletionRequest]) -> None:
    """The bodies can be parsed before they are damaged."""
    bodies = [CHAT] if parse is parse_chat else COMPLETIONS

    assert all(is_read_or_refused(parse, json.dumps(body).encode()) for body in bodies)


@examples(400)
@given(seed=st.integers(0, 2**48))
@example(0)
def test_report_mode(seed: int) -> None:
    """The report mode is removed; everything else stays as it was."""
    body = damaged(seed)
    for parse in PARSERS:
        content = read(body)
        if not is_read_or_refused(parse, body) or content is None:
            continue
        request = parse(body)
        without = read(apply(edits_of(request), body))

        kept = {name: value for name, value in content.items() if not kind_of(name)}
        assert {**kept, "vllm_xargs": 0} == {**without, "vllm_xargs": 0}
        arguments = without.get("vllm_xargs")
        assert not isinstance(arguments, dict) or "kv_cache_report_mode" not in arguments


def read(body: bytes) -> Any:
    """What an engine decodes; None if it would reject it."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
