"""A request's messages and tools in the form in which SGLang passes them to the chat template.

SGLang 0.5.23 reads them into its own models and passes on what these hold: known fields in the models' order,
without those that are None at the top of a message, but with those inside a tool call or a tool. This module
does the same. messages.py does what vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import nodes

from kvrouter.errors import BadRequestError
from kvrouter.tokens.messages import Message, Part, is_text, media_name, text_part

# Of every role but the user's, whose messages have role and content only.
_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix")
_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")
_ALWAYS_PRINTED = frozenset({"description", "name", "parameters"})
# A template that contains one of them anywhere gets parts.
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_MESSAGE_NAMES = frozenset({"message", "msg", "m"})


def wants_parts(text: str, template: nodes.Template) -> bool:
    """Whether the template gets content in parts: it names media, or loops over a message's content.

    Only loop variables with the usual names count as messages.
    """
    if any(word in text for word in _MEDIA_WORDS):
        return True
    return any(_is_content(loop.iter) for loop in template.find_all(nodes.For))


def conversation(messages: Sequence[Message], *, in_parts: bool) -> list[Message]:
    """The messages as the template receives them: new dicts, as the client's messages are still relayed.

    Raises BadRequestError for a message that SGLang rejects.
    """
    return [_message(message, in_parts) for message in messages]


def tool_definition(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that SGLang knows; those of its function in the client's order."""
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequestError("each of `tools` needs a `function` object", param="tools")
    deferred = tool.get("defer_loading")
    values = {name: function.get(name) for name in _FUNCTION_FIELDS}
    if values["defer_loading"] is None:
        values["defer_loading"] = deferred
    kept = {name for name, value in values.items() if value is not None} | _ALWAYS_PRINTED
    given = [name for name in function if name in kept]
    ordered = [*given, *(name for name in _FUNCTION_FIELDS if name in kept and name not in function)]
    return {
        "type": tool.get("type", "function"),
        "function": {name: values[name] for name in ordered},
        "defer_loading": deferred,
    }


def _message(message: Message, in_parts: bool) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequestError("each of `messages` needs a `role` that is a string", param="messages")
    role = role.lower()  # SGLang takes "System", too
    given = message.get("content")
    content = _content(given, in_parts)
    fields = {} if role == "user" else _fields(role, message)
    # SGLang puts parts behind the other fields: it shows where a template prints a whole message
    if in_parts and isinstance(given, list):
        found = {"role": role, **fields, "content": content}
    else:
        found = {"role": role, "content": content, **fields}
    if role == "tool" and isinstance(content, list) and all(part["type"] == "text" for part in content):
        found["content"] = " ".join(part["text"] for part in content)
    return found


def _content(content: object, in_parts: bool) -> str | list[Part]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError("`content` must be a string or a list of parts", param="messages")
    parts = [kept for part in content for kept in _part(part)]
    return parts if in_parts else " ".join(part["text"] for part in parts if "text" in part)


def _part(part: object) -> Iterator[Part]:
    """The part as the template sees it; none, if SGLang drops it. Media become text that names them."""
    if not isinstance(part, dict):
        raise BadRequestError("each part of `content` must be an object", param="messages")
    match part.get("type"):
        case "text":
            if not isinstance(text := part.get("text"), str):
                raise BadRequestError("`text` of a part of `content` must be a string", param="messages")
            yield text_part(text)
        case "tool_reference":
            yield {"type": "tool_reference", "name": part.get("name")}
        case _ if is_text(part) or part.get("type") == "reasoning":
            return
        case _:
            yield text_part(media_name(part))


def _fields(role: str, message: Message) -> Message:
    fields = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    for name, read in (("tool_calls", _tool_call), ("tools", tool_definition)):
        items = fields.get(name, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise BadRequestError(f"`{name}` of a message must be a list of objects", param="messages")
        if name in fields:
            fields[name] = [read(item) for item in items]
    if role == "assistant":
        for call in fields.get("tool_calls", []):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return fields


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise BadRequestError("each of `tool_calls` needs a `function` object", param="messages")
    called = {"name": function.get("name"), "arguments": function.get("arguments")}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": called}


def _arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise BadRequestError("`arguments` of a tool call must be an object", param="messages")
    return read


def _is_content(node: nodes.Node) -> bool:
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:
            return False
        node = node.node
    match node:
        case nodes.Getitem(arg=nodes.Const(value="content"), node=nodes.Name(name=name, ctx="load")):
            return name in _MESSAGE_NAMES
        case nodes.Getattr(attr="content", node=nodes.Name(name=name, ctx="load")):
            return name in _MESSAGE_NAMES
    return False
