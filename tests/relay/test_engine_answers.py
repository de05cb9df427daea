"""The usage at the end of an answer, and the advice of a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.core.tables.predictions import Usage
from kvrouter.relay.engine_answers import MOST_REST_S, TAIL_BYTES, advice_in, find_usage, rest_s
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


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        ({"retry-after": "20"}, 20.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "20", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:16:50 GMT"}, 10.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:16:30 GMT"}, 0.0),
        ({"retry-after": "999999999999"}, MOST_REST_S),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, MOST_REST_S),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "nan"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": "\xff"}, 0.0),
        ({"retry-after-ms": ""}, 0.0),
        ({}, 0.0),
    ],
)
def test_rests(advice: dict[str, str], expected: float) -> None:
    """A worker rests for as long as it asks, in any form that clients know, within a limit."""
    fields = {name.encode(): value.encode("latin-1") for name, value in advice.items()}

    assert expected == rest_s(fields, now=1000.0)


def test_advice() -> None:
    """What tells a client when to ask again reaches it, and nothing else of a refusal's head."""
    headers = {
        b"retry-after": b"7",
        b"x-should-retry": b"false",
        b"x-ratelimit-remaining-tokens": b"0",
        b"server": b"x",
    }

    assert tuple(headers.items())[:3] == advice_in(headers)
