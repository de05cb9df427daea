"""An engine whose last message says what it answers: a call, an object, an error, a stream that breaks."""

from __future__ import annotations

import json
from typing import Any

from tests.frontend.workers import LAST_CHUNK, SSE_HEAD, Received, Wire, answer, chunk

ERROR = {"message": "the engine says no", "type": "x", "code": 0}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
PARTS = ('{"ci', 'ty":"Par', 'is"}')


def wants_a_call(body: dict[str, Any]) -> bool:
    """Whether there are tools, and none has answered yet."""
    return bool(body.get("tools")) and body["messages"][-1]["role"] != "tool"


def name_of_the_tool(body: dict[str, Any]) -> str:
    """The first tool's name."""
    tools = body.get("tools") or [{"function": {"name": "weather"}}]
    return str(tools[0]["function"]["name"])


def whole_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The same as one answer; a refusal if the client asks for it."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(PARTS), "refusal": None}
    if body["messages"][-1]["content"] == "refuse":
        message |= {"content": None, "refusal": "I will not."}
    if wants_a_call(body):
        function = {"name": name_of_the_tool(body), "arguments": "".join(PARTS)}
        call = {"id": "call_1", "type": "function", "function": function}
        message |= {"content": None, "tool_calls": [call]}
    reason = "tool_calls" if wants_a_call(body) else "stop"
    choices = [{"index": 0, "message": message, "finish_reason": reason}]
    whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
    return {**whole, "usage": USAGE}


def chat_events(body: dict[str, Any]) -> list[Any]:
    """The chunks of a chat: a call if there are tools, else the parts as text; usage if it is wanted."""
    base: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def event(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return base | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    calls = [{"index": 0, "function": {"arguments": part}} for part in PARTS]
    first: dict[str, Any] = {"index": 0, "id": "call_1", "type": "function"}
    first["function"] = {"name": name_of_the_tool(body), "arguments": ""}
    deltas: list[dict[str, Any]] = [{"content": part} for part in PARTS]
    if wants_a_call(body):
        deltas = [{"tool_calls": [call]} for call in (first, *calls)]
    last = event({}, "tool_calls" if wants_a_call(body) else "stop")
    usage = [base | {"choices": [], "usage": USAGE}] if body.get("stream_options") else []
    return [event({"role": "assistant", "content": ""}), *map(event, deltas), last, *usage]


def message_events() -> list[Any]:
    """Thinking, text and a call, as Anthropic's API streams them."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [{"type": "thinking_delta", "thinking": "hm"}, {"type": "signature_delta", "signature": "s"}],
        ),
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "I look."}]),
        (
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {}},
            [{"type": "input_json_delta", "partial_json": part} for part in PARTS],
        ),
    ]
    message: dict[str, Any] = {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
    }
    message |= {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 0}}
    events: list[Any] = [{"type": "message_start", "message": message}]
    for index, (block, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": "tool_use", "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ending, "usage": {"output_tokens": 3}})
    return [*events, {"type": "message_stop"}]


def sse(event: dict[str, Any]) -> bytes:
    named = f"event: {event['type']}\n" if "type" in event else ""
    return chunk(f"{named}data: {json.dumps(event)}\n\n".encode())


async def engine(received: Received, wire: Wire) -> None:
    """The last message says what to answer: a status, `break` for an error amid a stream, or an answer.

    A status may be followed by the seconds of its Retry-After.
    """
    body, is_message = received.json, received.head.startswith(b"POST /v1/messages ")
    wanted = body["messages"][-1]["content"]
    status, _, seconds = wanted.partition(" ")
    if status.isdigit():
        error: dict[str, Any] = {"error": {**ERROR, "code": int(status)}}
        advice = f"retry-after: {seconds or 7}\r\n".encode()
        await wire.send(answer(json.dumps(error).encode(), int(status), advice))
        return
    if not body.get("stream"):
        await wire.send(answer(json.dumps(whole_chat(body)).encode()))
        return
    events = message_events() if is_message else chat_events(body)
    if wanted == "break":
        kind = {"type": "error"} if is_message else {}
        events = [*events[: 7 if is_message else 3], {**kind, "error": {**ERROR, "code": 500}}]
    tail = b"" if is_message else chunk(b"data: [DONE]\n\n")
    await wire.send(SSE_HEAD, *map(sse, events), tail + LAST_CHUNK)
