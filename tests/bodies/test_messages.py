"""/v1/messages as the chat that vLLM 0.32 makes of it: its own conversion gave the expected chats."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.bodies.messages import error_body, error_event, find_usage, parse
from kvrouter.core.tables.predictions import Usage
from kvrouter.errors import BadRequestError, KvRouterError, NoWorkersError, UnknownModelError
from kvrouter.tokens.prompt import ChatPrompt
from tests.bodies.test_openai_fuzz import mutated

HELLO = {"role": "user", "content": "hello"}
TOOL = {"name": "get", "description": "d", "input_schema": {"properties": {}}}
SHOWN_TOOL = {"properties": {}, "type": "object"}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def result(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **more}


def prompt(**body: Any) -> ChatPrompt:
    """The prompt of a body with these fields."""
    found = parse(json.dumps({"model": "m", "max_tokens": 8, "messages": [HELLO], **body}).encode()).prompt
    assert isinstance(found, ChatPrompt)
    return found


def call(arguments: str = "{}") -> dict[str, Any]:
    """The tool call of `USE`, in a chat."""
    return {"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}


USE = {"type": "tool_use", "id": "c1", "name": "get", "input": {}}
ANSWER = {"role": "tool", "tool_call_id": "c1"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
SHOWN_IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
DATA = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
SHOWN_DATA = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}

CHATS: dict[str, tuple[list[Any], list[Any]]] = {
    "text": ([user("a"), said("b"), user("c")], [user("a"), said("b"), user("c")]),
    "one part": ([user([text("a")])], [user("a")]),
    "parts": ([user([text("a"), text(""), text("b")])], [user([text("a"), text("b")])]),
    "nothing": ([HELLO, said([]), user([])], [HELLO, {"role": "assistant"}]),
    "thinking": (
        [said([{"type": "thinking", "thinking": "hm", "signature": "s"}, text("a")])],
        [{"role": "assistant", "reasoning": "hm", "content": "a"}],
    ),
    "redacted thinking": ([said([{"type": "redacted_thinking", "data": "x"}, text("a")])], [said("a")]),
    "tool call": (
        [said([text("a"), {**USE, "input": {"x": [1, None, "ü"]}}])],
        [{**said("a"), "tool_calls": [call('{"x": [1, null, "\\u00fc"]}')]}],
    ),
    "tool calls only": ([said([USE])], [{"role": "assistant", "tool_calls": [call()]}]),
    "tool result": ([user([result("42")])], [{**ANSWER, "content": "42"}]),
    "no tool result": ([user([result()])], [{**ANSWER, "content": ""}]),
    "tool result in parts": ([user([result([text("a"), text("b")])])], [{**ANSWER, "content": "a\nb"}]),
    "tool result, then text": ([user([text("c"), result("42")])], [{**ANSWER, "content": "42"}, user("c")]),
    "tool result with an image": (
        [user([result([text("a"), IMAGE])])],
        [{**ANSWER, "content": "a"}, user([SHOWN_IMAGE])],
    ),
    "tool result that names a tool": (
        [user([result([{"type": "tool_reference", "tool_name": "put"}])])],
        [{**ANSWER, "content": ""}, {**ANSWER, "content": [{"type": "tool_reference", "name": "put"}]}],
    ),
    "tool result of the assistant": ([said([result([text("a")])])], [said(f"Tool result: {[text('a')]}")]),
    "images": ([user([IMAGE, DATA])], [user([SHOWN_IMAGE, SHOWN_DATA])]),
    "system between": ([HELLO, system([BILLING, text("a"), text("b")])], [HELLO, system("ab")]),
    "billing header only": ([system(BILLING["text"]), HELLO], [HELLO]),
}


@pytest.mark.parametrize("case", CHATS)
def test_messages(case: str) -> None:
    """Each block becomes what the engine passes to its chat template."""
    messages, chat = CHATS[case]

    assert chat == prompt(messages=messages).messages


@pytest.mark.parametrize(
    ("given", "shown"),
    [("", []), ("be x", ["be x"]), ([BILLING, text("a"), text("b")], ["ab"]), ([text("")], [])],
)
def test_system(given: Any, shown: list[str]) -> None:
    """The system prompt comes first, without Claude Code's header that differs in every request."""
    assert [*map(system, shown), HELLO] == prompt(system=given).messages


def test_system_first() -> None:
    """For a template that allows no later system message, all of them are joined in the first."""
    found = prompt(system="a", messages=[HELLO, system("b"), said("c"), system([text("d")])])

    assert [system("abd"), HELLO, said("c")] == found.system_first
    assert prompt(system="a").system_first is None


def test_tools() -> None:
    """A tool's schema is an object's unless it says otherwise."""
    (tool,) = prompt(tools=[TOOL]).tools or ()

    expected = {"name": "get", "description": "d", "parameters": SHOWN_TOOL}
    assert expected == {name: value for name, value in tool["function"].items() if value is not None}
    assert prompt(tools=[]).tools is None


def test_tool_changes() -> None:
    """A template prints the tools that are in effect at the end."""
    put = {**TOOL, "name": "put", "defer_loading": True}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**TOOL, "name": "new"}}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "put"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get"}},
    ]

    tools = prompt(tools=[TOOL, put], messages=[HELLO, system(changes)]).tools or ()

    shown = [(tool["function"]["name"], tool["function"]["defer_loading"]) for tool in tools]
    assert [("put", None), ("new", None)] == shown


def test_thinking() -> None:
    """Effort and `disabled` become the template's variables; the client's own have priority."""
    high: Any = {"output_config": {"effort": "high"}}
    off: Any = {"thinking": {"type": "disabled"}}

    assert {"enable_thinking": True, "reasoning_effort": "high"} == prompt(**high).variables()
    quiet = prompt(**high, **off, chat_template_kwargs={"a": 1})
    assert {"a": 1, "enable_thinking": False, "reasoning_effort": "none"} == quiet.variables()
    assert "low" == quiet.least_effort
    kept = prompt(**high, chat_template_kwargs={"enable_thinking": False}).variables()
    assert {"enable_thinking": False, "reasoning_effort": "high"} == kept


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [user([{"type": "video"}])]},
        {"messages": [user([result([{"type": "text", "text": 1}])])]},
        {"messages": [HELLO, system([{"type": "tool_removal", "tool": None}])]},
        {"messages": [HELLO, system([{"type": "tool_removal", "tool": {"type": "tool_reference"}}])]},
        {"messages": [HELLO], "system": 3},
        {"messages": [HELLO], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
)
def test_unreadable(body: dict[str, Any]) -> None:
    """What cannot be converted has no prompt, and keeps all else: its engine answers it."""
    request = parse(json.dumps({"model": "m", "stream": True, "cache_salt": "s", **body}).encode())

    assert (None, "m", True, "s") == (request.prompt, request.model, request.stream, request.cache_salt)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 100_000, b'{"a": "\xff'])
def test_no_request(body: bytes) -> None:
    """What is not a JSON object of a request is rejected."""
    with pytest.raises(BadRequestError):
        parse(body)


def test_deep_nesting() -> None:
    """Arguments that are nested too deeply to be read raise nothing else."""
    deep = b'{"model":"m","messages":[{"role":"assistant","content":[{"type":"tool_use","input":{"a":%b}}]}]}'

    for depth in (10, 900, 1_000, 100_000):
        try:
            parse(deep % (b"[" * depth + b"]" * depth))
        except BadRequestError:
            assert depth > 100


@given(st.randoms(use_true_random=False))
def test_damaged_bodies(chance: random.Random) -> None:
    """A damaged body is parsed, or rejected with a message."""
    messages = [part for given, _ in CHATS.values() for part in given]
    body: Any = {"model": "m", "messages": messages, "system": [text("a")], "tools": [TOOL], "stream": True}
    for _ in range(3):
        body = mutated(body, chance)

    try:
        parse(json.dumps(body).encode())
    except BadRequestError as error:
        error_body(error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequestError("no"), "invalid_request_error"),
        (UnknownModelError("no"), "not_found_error"),
        (NoWorkersError("no"), "overloaded_error"),
        (KvRouterError("no"), "api_error"),
    ],
)
def test_errors(error: KvRouterError, kind: str) -> None:
    """Errors have Anthropic's form, whole and in a stream."""
    expected = {"type": "error", "error": {"type": kind, "message": "no"}}

    assert expected == json.loads(error_body(error))
    assert b"event: error\ndata: " + error_body(error) + b"\n\n" == error_event(error)


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage":{"input_tokens":9,"output_tokens":3}}', Usage(9, None)),
        (b'"usage":{"input_tokens":9,"output_tokens":3,"cache_read_input_tokens":32}}', Usage(41, 32)),
        (
            b'"usage": {"input_tokens": 9, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 0}}',
            Usage(14, 0),
        ),
        (b'"input":{"cache_read_input_tokens":7}}],"usage":{"input_tokens":9}}', Usage(9, None)),
        (b'"usage":{"input_tokens":9', Usage(None, None)),
        (b"", Usage(None, None)),
    ],
)
def test_usage(tail: bytes, usage: Usage) -> None:
    """All tokens of the prompt are counted: those from the cache are apart from `input_tokens`."""
    assert usage == find_usage(tail)
