"""/v1/responses as the chat that vLLM 0.32 makes of it: its own conversion gave the expected chats."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.bodies.responses import error_event, find_answer, find_usage, parse
from kvrouter.core.tables.predictions import Usage
from kvrouter.errors import BadRequestError, NoWorkersError
from kvrouter.tokens.prompt import ChatPrompt
from tests.bodies.test_openai_fuzz import mutated

HELLO = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "id": "fc", "call_id": "c1", "name": "get", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
MESSAGE = {"type": "message", "id": "m", "role": "assistant", "status": "completed"} | {
    "content": [
        {"type": "output_text", "text": "hey", "annotations": []},
        {"type": "output_text", "text": "b"},
    ]
}
REASONING = {
    "type": "reasoning",
    "id": "r",
    "summary": [{"type": "summary_text", "text": "sum"}],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
TOOL = {"type": "function", "name": "get", "description": "d", "parameters": {"type": "object"}}
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://x/y.png"}]


def prompt(given: Any, history: Any = None, **body: Any) -> ChatPrompt:
    """The prompt of a body with this input."""
    found = parse(json.dumps({"model": "m", "input": given, **body}).encode(), history).prompt
    assert isinstance(found, ChatPrompt)
    return found


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def call(name: str = "get", arguments: str = '{"x": 1}') -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWER = {"role": "tool", "content": "42", "tool_call_id": "c1"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c1", "name": "cc", "input": "raw ü"}
CHATS: dict[str, tuple[Any, list[Any]]] = {
    "text": ("hello", [HELLO]),
    "message": ([{"type": "message", **HELLO}], [HELLO]),
    "parts": ([{"role": "user", "content": PARTS}], [{"role": "user", "content": PARTS}]),
    "all roles": (
        [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, {**HELLO, "name": "bob"}],
        [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, {**HELLO, "name": "bob"}],
    ),
    "first part of an answer": ([HELLO, MESSAGE], [HELLO, said(content="hey")]),
    "text of an answer": ([HELLO, said(content="a")], [HELLO, said(content="a")]),
    "call": ([CALL, OUTPUT], [said(tool_calls=[call()]), ANSWER]),
    "call in a namespace": ([{**CALL, "namespace": "ns"}], [said(tool_calls=[call("ns__get")])]),
    "custom call": (
        [CUSTOM, {**OUTPUT, "type": "custom_tool_call_output"}],
        [said(tool_calls=[call("cc", '{"input": "raw ü"}')]), ANSWER],
    ),
    "items of one message": (
        [REASONING, MESSAGE, CALL, CALL, OUTPUT],
        [said(reasoning="hm", content="hey", tool_calls=[call(), call()]), ANSWER],
    ),
    "two messages": ([MESSAGE, MESSAGE], [said(content="hey"), said(content="hey")]),
    "reasoning twice": ([REASONING, REASONING], [said(reasoning="hm"), said(reasoning="hm")]),
    "summary": ([{**REASONING, "content": None}], [said(reasoning="sum")]),
}


@pytest.mark.parametrize("case", CHATS)
def test_input(case: str) -> None:
    """Each item becomes what the engine passes to its chat template."""
    given, chat = CHATS[case]

    assert chat == prompt(given).messages
    assert [{"role": "system", "content": "be x"}, *chat] == prompt(given, instructions="be x").messages
    assert prompt(given).names_first


def test_history() -> None:
    """A chat goes on after the response that it names, without the instructions of that time."""
    history = [{"role": "system", "content": "old"}, HELLO, said(content="a")]

    found = prompt([CALL], history, previous_response_id="resp_1", instructions="new")

    chat = [{"role": "system", "content": "new"}, HELLO, said(content="a"), said(tool_calls=[call()])]
    assert chat == found.messages
    assert [HELLO, said(content="a")] == history[1:]


def test_tools() -> None:
    """Functions as they are, custom tools with one parameter, and tools of a namespace with its name."""
    custom = {"type": "custom", "name": "cc", "description": "dd"}
    space = {"type": "namespace", "name": "ns", "tools": [TOOL]}

    tools = prompt("hi", tools=[TOOL, {"type": "web_search"}, custom, space]).tools or ()

    assert ["get", "cc", "ns__get"] == [tool["function"]["name"] for tool in tools]
    assert ["input"] == tools[1]["function"]["parameters"]["required"]
    assert TOOL == {"type": "function", **tools[0]["function"]}


@pytest.mark.parametrize("status", ["in_progress", "incomplete", "completed"])
def test_unfinished(status: str) -> None:
    """An unfinished message at the end is continued."""
    found = prompt([HELLO, {**MESSAGE, "status": status}])

    is_continued = status != "completed"
    assert (is_continued, not is_continued) == (found.continue_final_message, found.add_generation_prompt)


def test_effort() -> None:
    found = prompt("hi", reasoning={"effort": "none"}, chat_template_kwargs={"a": 1})

    assert {"a": 1, "enable_thinking": False, "reasoning_effort": "none"} == found.variables()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": 3},
        {"input": ["hi"]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{**REASONING, "encrypted_content": "zz"}]},
        {"input": [{**MESSAGE, "content": []}]},
        {"input": [{**MESSAGE, "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"input": [{**CALL, "arguments": {}}]},
        {"input": "hi", "tools": 3},
        {"input": "hi", "truncation": "auto"},
        {"input": "hi", "previous_input_messages": []},
        {"input": "hi", "previous_response_id": "resp_1"},
    ],
)
def test_unreadable(body: dict[str, Any]) -> None:
    """What cannot be converted has no prompt, and keeps all else: its engine answers it."""
    request = parse(json.dumps({"model": "m", "stream": True, "cache_salt": "s", **body}).encode())

    assert (None, "m", True, "s") == (request.prompt, request.model, request.stream, request.cache_salt)


@given(st.randoms(use_true_random=False))
def test_damaged_bodies(chance: random.Random) -> None:
    """A damaged body is parsed, or rejected with a message."""
    items = [part for given, _ in CHATS.values() if isinstance(given, list) for part in given]
    body: Any = {"model": "m", "input": items, "instructions": "a", "tools": [TOOL], "stream": True}
    for _ in range(3):
        body = mutated(body, chance)

    try:
        parse(json.dumps(body).encode())
    except BadRequestError as error:
        error_event(error)


def test_error_event() -> None:
    """The event of a broken stream has OpenAI's fields, and `error`, at which its package raises."""
    kind, data, *_ = error_event(NoWorkersError("no")).split(b"\n")

    event = json.loads(data.removeprefix(b"data: "))
    assert b"event: error" == kind
    assert ("error", "503", "no", "no") == (
        event["type"],
        event["code"],
        event["message"],
        event["error"]["message"],
    )


def test_usage() -> None:
    tail = b'"usage": {"input_tokens": 41,"input_tokens_details":{"cached_tokens":32},"output_tokens":3}}'

    assert Usage(41, 32) == find_usage(b'"cached_tokens":7}' + tail)
    assert Usage() == find_usage(b'"usage":null}')


ITEM = {"type": "message", "content": [{"type": "output_text", "text": text} for text in "ab"]}
ANSWERED = {"id": "resp_1", "output": [{"type": "reasoning", "content": []}, ITEM, CALL], "usage": None}


@pytest.mark.parametrize(
    ("tail", "texts"),
    [
        (json.dumps(ANSWERED), ["a", "b"]),
        (f'"}}\n\nevent: x\ndata: {json.dumps({"response": ANSWERED})}\n\n\r\n0\r\n\r\n', ["a", "b"]),
        (json.dumps({"output": []}), []),
        (json.dumps(ANSWERED)[9:], None),
        ('\ndata: {"response": {"outp', None),
        ("\ndata: [DONE]", None),
        ("", None),
    ],
)
def test_answer(tail: str, texts: list[str] | None) -> None:
    """The texts of an answer, if all of it is there; calls and reasoning are not part of the history."""
    expected = None if texts is None else [said(content=text) for text in texts]

    assert expected == find_answer(tail.encode())
