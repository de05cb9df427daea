from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from kvrouter.errors import BadRequestError
from kvrouter.tokens.messages import (
    Message,
    as_parts,
    as_string,
    conversation,
    developer_as_system,
    tool_definition,
)


def seen(message: Message) -> Message:
    """One message as the template sees it, content as a string."""
    return conversation([message], as_string)[0]


def content(parts: object, role: str = "user") -> object:
    """The content of one message as the template sees it."""
    return seen({"role": role, "content": parts})["content"]


def text(value: str) -> dict[str, Any]:
    """A part that is text."""
    return {"type": "text", "text": value}


def image(url: str) -> dict[str, Any]:
    """A part that is an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def test_parts_as_a_string() -> None:
    """The texts of a message are joined by line breaks, empty ones left out."""
    assert "a\nb\nc" == content([text("a"), "b", text(""), {"type": "input_text", "text": "c"}])


def test_string_as_parts() -> None:
    """For a template that loops over parts, a string becomes one part."""
    assert [{"role": "user", "content": [text("a")]}] == conversation(
        [{"role": "user", "content": "a"}], as_parts
    )


def test_no_content() -> None:
    """A message that only calls tools has empty content."""
    assert "" == content(None, "assistant")


def test_refusals_and_thoughts_are_text() -> None:
    """Every kind of part that is text to the engine is text here; one without its text is skipped."""
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}, {"type": "text"}]

    assert "no\nhm" == content(parts, "assistant")


def test_equal_images_are_equal_text() -> None:
    """An image is replaced by a name: equal for equal images, different for others."""
    first, again, other = (content([text("see"), image(url)]) for url in ("a.png", "a.png", "b.png"))

    assert first == again != other


def test_tool_answers_are_strings() -> None:
    """A tool's answer is one string even where the template loops over parts."""
    message = {"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "7"}

    assert [{"role": "tool", "content": "a\nb", "tool_call_id": "7"}] == conversation([message], as_parts)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("not json", {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
    ],
)
def test_arguments_of_tool_calls_are_objects(arguments: object, expected: dict[str, Any]) -> None:
    """Templates get a tool call's arguments as an object, an empty one if they are not an object."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}, "id": "7", "index": 0}

    message = seen({"role": "assistant", "content": "", "tool_calls": [call]})

    assert [{"id": "7", "function": {"arguments": expected, "name": "f"}, "type": "function"}] == message[
        "tool_calls"
    ]


@pytest.mark.parametrize("names_first", [False, True])
def test_fields_of_tool_calls(names_first: bool) -> None:
    """Templates print calls as JSON: of chats in the schema's order, of responses with the name first."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [{"role": "assistant", "tool_calls": [call]}]

    (message,) = conversation(given, as_string, names_first=names_first)

    (made,) = message["tool_calls"]
    assert ["id", "function", "type"] == list(made)
    assert (["name", "arguments"] if names_first else ["arguments", "name"]) == list(made["function"])


def test_no_tool_calls() -> None:
    """An empty list of calls is left out, for templates that only test whether the field exists."""
    assert "tool_calls" not in seen({"role": "assistant", "content": "a", "tool_calls": []})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_two_names(name: str) -> None:
    """The template finds the reasoning under both names, independently of the one a client uses."""
    message = seen({"role": "assistant", "content": "a", name: "hm"})

    assert ("hm", "hm") == (message["reasoning"], message["reasoning_content"])


def test_unknown_fields_are_dropped() -> None:
    """A template that prints whole messages prints the fields that the engine keeps, in its order."""
    message = {"name": "bob", "cache_control": 1, "tool_calls": [], "content": "a", "role": "user"}

    assert '{"role": "user", "content": "a", "name": "bob"}' == str(seen(message)).replace("'", '"')


def test_the_clients_messages_are_left_alone() -> None:
    """Nothing is changed in what the client sent."""
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[Message] = [
        {"role": "system", "content": [text("x-anthropic-billing-header: 1\nhi")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "developer", "content": "b"},
    ]
    before = deepcopy(messages)

    developer_as_system(conversation(messages, as_parts))

    assert before == messages


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("x-anthropic-billing-header: cch=5;\nYou are Claude.", "You are Claude."),
        ("x-anthropic-billing-header: cch=5;", ""),
        ("Say x-anthropic-billing-header", "Say x-anthropic-billing-header"),
    ],
)
def test_billing_header(said: str, expected: str) -> None:
    """Claude Code's header line differs in every request; it is dropped as in the engine."""
    assert expected == content(said, "system")


def test_developer_becomes_system() -> None:
    """For a template without the role, developer and system messages become one, the first."""
    messages = [{"role": role, "content": role} for role in ("user", "developer", "assistant", "system")]

    found = developer_as_system(conversation(messages, as_string))

    assert ["system", "user", "assistant"] == [message["role"] for message in found]
    assert "developer\n\nsystem" == found[0]["content"]


def test_a_developer_message_in_front_keeps_its_place() -> None:
    """One developer message in front only changes its name, and keeps its shape."""
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]

    found = developer_as_system(conversation(messages, as_parts))

    assert {"role": "system", "content": [text("a")]} == found[0]


def test_tool_definition_has_the_engines_fields() -> None:
    """A tool is printed with the engine's fields in the engine's order; other fields are dropped."""
    tool = {"function": {"parameters": {}, "name": "f", "strict": True, "color": "red"}, "cache_control": 1}

    function = "{'name': 'f', 'description': None, 'parameters': {}, 'strict': True}"
    assert f"{{'type': 'function', 'function': {function}}}" == str(tool_definition(tool))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": "a"},
        {"role": 1, "content": "a"},
        {"role": "user", "content": 1},
        {"role": "user", "content": [1]},
        {"role": "user", "content": {"type": "text"}},
        {"role": "user", "content": [{"type": "text", "text": 1}]},
        {"role": "assistant", "tool_calls": 1},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
    ],
    ids=str,
)
def test_malformed(message: Message) -> None:
    """A malformed message is a BadRequestError."""
    with pytest.raises(BadRequestError) as caught:
        seen(message)
    assert "messages" == caught.value.param


def test_malformed_tool() -> None:
    """A tool without a function is a BadRequestError."""
    with pytest.raises(BadRequestError) as caught:
        tool_definition({"type": "web_search"})
    assert "tools" == caught.value.param
