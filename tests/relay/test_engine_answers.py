"""The usage at the end of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.core.tables.predictions import Usage
from kvrouter.relay.engine_answers import TAIL_BYTES, find_usage, has_failed, is_role_only
from tests.frontend.workers import LAST_CHUNK, chunk

VLLM = {
    "prompt_tokens": 90,
    "total_tokens": 94,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 64},
}


def body(usage: dict[str, Any] | None, text: str = "hi") -> bytes:
    """A complete answer."""
    return json.dumps({"choices": [{"text": text}], "usage": usage, "kv_transfer_params": None}).encode()


def event(usage: dict[str, Any]) -> bytes:
    """The usage event of a stream, and its end, in chunks."""
    data = json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode()
    return chunk(b"data: " + data + b"\n\n") + chunk(b"data: [DONE]\n\n") + LAST_CHUNK


CASES: dict[str, tuple[bytes, Usage]] = {
    "body": (body(VLLM), Usage(90, 64)),
    "indented body": (json.dumps({"usage": VLLM}, indent=1).encode(), Usage(90, 64)),
    "stream": (event(VLLM), Usage(90, 64)),
    "no details": (event({"prompt_tokens": 90, "prompt_tokens_details": None}), Usage(90, None)),
    "null": (event({"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": None}}), Usage(90, None)),
    "zero": (event({"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 0}}), Usage(90, 0)),
    "no usage": (chunk(b"data: [DONE]\n\n") + LAST_CHUNK, Usage()),
    "null usage": (body(None), Usage()),
    "the last of several": (event({"prompt_tokens": 1}) + event(VLLM), Usage(90, 64)),
    "text of the model": (body(None, '"cached_tokens": 7, "prompt_tokens": 8, '), Usage()),
    "text of the model as well": (body(VLLM, '"cached_tokens": 7}'), Usage(90, 64)),
    "cut within the number": (b'"prompt_tokens":90,"cached_tokens":6', Usage(90, None)),
    "torn by a chunk": (b'"prompt_tokens":90,"cached_tokens":6\r\n2\r\n4}\r\n', Usage(90, None)),
    "no number": (b'"prompt_tokens":"90","cached_tokens":-6}', Usage()),
    "an endless number": (b'"prompt_tokens":' + b"9" * 500 + b",", Usage()),
    "nothing": (b"", Usage()),
    "bytes": (bytes(range(256)), Usage()),
}


@pytest.mark.parametrize("case", CASES)
def test_usage(case: str) -> None:
    """Complete numbers are found, and nothing that only looks like one."""
    tail, usage = CASES[case]

    assert usage == find_usage(tail[-TAIL_BYTES:])


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
FAILED = b'data: {"choices":[{"delta":{},"finish_reason":"error"}]}\n\n'
OUTPUT = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FAILED, True),
        (ROLE + FAILED, True),
        (b'{"choices":[{"message":{"content":null},"finish_reason": "error"}]}', True),
        (b'{"choices":[{"text":"","finish_reason":"error"}]}', True),
        (ROLE + OUTPUT + FAILED, False),
        (b'{"choices":[{"text":"","finish_reason":"error"},{"text":"a","finish_reason":"stop"}]}', False),
        (b'{"choices":[{"text":"\\"finish_reason\\":\\"error\\"","finish_reason":"stop"}]}', False),
        (OUTPUT, False),
    ],
)
def test_has_failed(text: bytes, expected: bool) -> None:
    """An error as the reason to finish is a failure, unless there is output in any choice."""
    assert expected is has_failed(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(ROLE, True), (ROLE + OUTPUT, False), (ROLE + FAILED, False), (OUTPUT, False), (b": ping\n\n", False)],
)
def test_is_role_only(text: bytes, expected: bool) -> None:
    assert expected is is_role_only(text)
