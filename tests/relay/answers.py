"""Streams of the four APIs, event by event, as vLLM and SGLang write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


def sse(value: Any, name: str = "") -> bytes:
    """One event with JSON data, without blanks, as engines write it."""
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def typed(kind: str, **more: Any) -> bytes:
    """One event of an API whose events have types."""
    return sse({"type": kind, **more}, kind)


def delta(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    """A part of a chat."""
    fields = {"content": text, **more} if text or more else {}
    return sse({"id": "c", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def part(text: str, finish: str | None = None) -> bytes:
    """A part of a completion."""
    return sse({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


DONE = b"data: [DONE]\n\n"
USAGE = sse({"choices": [], "usage": {"prompt_tokens": 3}})


@dataclass(frozen=True)
class ApiStream:
    """A good stream in parts, and errors as this API reports them."""

    path: str
    opening: tuple[bytes, ...]
    outputs: tuple[bytes, ...]
    end: tuple[bytes, ...]
    errors: tuple[bytes, ...]
    """Each with a status of 500 or more, or none."""
    body: dict[str, Any]

    @property
    def whole(self) -> bytes:
        return b"".join((*self.opening, *self.outputs, *self.end))


_OVERLOADED = {"message": "no room", "type": "ServiceUnavailableError", "code": 503}
_CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}
APIS = (
    ApiStream(
        "/v1/chat/completions",
        (delta(role="assistant", content="") + delta(role="assistant", content=None, tool_calls=[]),),
        (delta("a"), delta(reasoning_content="b"), delta(tool_calls=[{"index": 0, "id": "t"}]), delta("c")),
        (delta(finish="stop"), USAGE, DONE),
        (sse({"error": _OVERLOADED}), sse({"error": {"message": "died"}}), delta(finish="error")),
        _CHAT,
    ),
    ApiStream(
        "/v1/completions",
        (),
        (part("a"), part(""), part("c")),
        (part("", "length"), DONE),
        (sse({"error": _OVERLOADED}), sse({"object": "error", **_OVERLOADED}), part("", "abort")),
        {"model": "m", "stream": True, "prompt": [1, 2, 3]},
    ),
    ApiStream(
        "/v1/messages",
        (typed("message_start", message={"role": "assistant", "content": [], "stop_reason": None}),),
        (
            typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
        ),
        (
            typed("content_block_stop", index=0),
            typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1}),
            typed("message_stop"),
        ),
        (
            typed("error", error={"type": "overloaded_error", "message": "no room"}),
            sse({"type": "error", "error": {"type": "api_error", "message": "died"}}),
        ),
        {**_CHAT, "max_tokens": 4},
    ),
    ApiStream(
        "/v1/responses",
        (
            typed("response.created", response={"id": "r", "error": None}),
            typed("response.in_progress", response={"id": "r", "error": None}),
        ),
        (
            typed("response.output_item.added", item={"id": "i"}),
            typed("response.output_text.delta", delta="a"),
        ),
        (typed("response.completed", response={"id": "r", "error": None, "status": "completed"}),),
        (
            typed(
                "response.failed", response={"id": "r", "status": "failed", "error": {"code": "server_error"}}
            ),
            typed("error", code="server_error", message="died"),
        ),
        {"model": "m", "stream": True, "input": "x"},
    ),
)
QUIET = (b": keep-alive\n\n", b":\n", b": ping\n: ping\n\n", typed("ping"), sse({"type": "ping"}))
"""What keeps a connection open."""
