"""A request's messages in the form in which vLLM passes them to the chat template.

The engine does not pass the client's messages on unchanged: it keeps some fields, converts content to one
shape, and parses the arguments of tool calls. This module does what vLLM 0.32 does. A difference of one space
changes all block hashes from there on, so the predicted overlap would end at that place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from kvrouter.errors import BadRequestError

Message = dict[str, Any]
# {"type": "text", "text": ...}, or an `ImagePlaceholder`: `_part` converts or rejects all others.
Part = dict[str, Any]
ContentFormat = Callable[[list[Part]], str | list[Part]]

# The types of text parts, and the field that holds each one's text.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

# Starts a line of Claude Code's system prompt that differs in every request. vLLM drops the line, as
# otherwise no two requests would share a prefix.
BILLING_HEADER = "x-anthropic-billing-header"


class ImagePlaceholder(Part):
    """A part in the place of an image whose tokens are known. Templates see `{"type": "image"}`."""

    def __init__(self, text: str) -> None:
        super().__init__(type="image")
        self.placeholder = text


def as_string(parts: list[Part]) -> str:
    """Content as one string: the images, then the texts, without the empty ones."""
    images = [part.placeholder for part in parts if isinstance(part, ImagePlaceholder)]
    return "\n".join(filter(None, [*images, *(part.get("text") for part in parts)]))


def as_parts(parts: list[Part]) -> list[Part]:
    """Content as the list of its parts."""
    return parts


def conversation(
    messages: Sequence[Message], content_format: ContentFormat, *, names_first: bool = False
) -> list[Message]:
    """The messages as the template receives them: new dicts, as the client's messages are still relayed.

    `names_first`: in a tool call, which templates print as JSON, the name comes before the arguments, as in
    what vLLM makes of /v1/responses. Chats pass a schema, which puts the arguments first.

    Raises BadRequestError for a message without a role, or with content that is neither text nor parts.
    """
    chat = [_message(message, content_format) for message in messages]
    if names_first:
        for call in (call for message in chat for call in message.get("tool_calls", ())):
            call["function"] = dict(reversed(call["function"].items()))
    return chat


def without_media(messages: Sequence[Message]) -> list[Message]:
    """The messages with text in the places of images, audio and video."""
    return [_without_media(message) for message in messages]


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    """For a template that lacks the role `developer`: one system message first, from all of both roles."""
    if all(message["role"] != "developer" for message in messages):
        return list(messages)
    renamed = [_as_system(message) if message["role"] == "developer" else message for message in messages]
    if all(message["role"] != "system" for message in renamed[1:]):
        return renamed
    texts = [_text(message["content"]) for message in renamed if message["role"] == "system"]
    system = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [system, *(message for message in renamed if message["role"] != "system")]


def tool_definition(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that vLLM knows, in vLLM's order: templates print them as JSON.

    Raises BadRequestError for a tool without a function.
    """
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequestError("each of `tools` needs a `function` object", param="tools")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    set_ones = {
        name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None
    }
    return {"type": "function", "function": known | set_ones}


def text_part(text: str) -> Part:
    """A part of `content` that is text."""
    return {"type": "text", "text": text}


def media_name(part: Part) -> str:
    """Text that takes the place of an image, audio or video.

    For an item whose tokens only the engine knows (media.py says which), a hash of its contents is enough for
    routing: prompts that are equal up to and including this item have equal hashes, all others differ.
    """
    return f"<media {xxhash.xxh3_64_hexdigest(msgspec.json.encode(part))}>"


def _without_media(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    named = [
        text_part(media_name(part)) if isinstance(part, dict) and not is_text(part) else part
        for part in content
    ]
    return {**message, "content": named}


def _message(message: Message, content_format: ContentFormat) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequestError("each of `messages` needs a `role` that is a string", param="messages")
    parts = _parts(message.get("content"))
    if role == "system":
        parts = _without_billing_header(parts)
    content = content_format(parts)
    if role == "tool":
        content = _text(content)  # templates expect a tool's answer as a string, also if they loop over parts
    return {"role": role, "content": content, **_fields_of_role(role, message)}


def _fields_of_role(role: str, message: Message) -> Message:
    """The fields kept besides role and content, in vLLM's order: templates may print them."""
    fields: Message = {}
    if role == "assistant":
        fields |= _assistant_fields(message)
    if role == "tool" and "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    fields |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    if role == "developer":
        fields["tools"] = message.get("tools")
    return fields


def _assistant_fields(message: Message) -> Message:
    fields: Message = {}
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call) for call in _list(calls, "tool_calls")]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")  # the field's older name
    if reasoning is not None:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return fields


def _tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise BadRequestError("each of `tool_calls` needs a `function` object", param="messages")
    called = {"arguments": _arguments(function.get("arguments")), "name": function.get("name")}
    return {"id": call.get("id"), "function": called, "type": "function"}


def _arguments(arguments: object) -> dict[str, Any]:
    """A tool call's arguments as an object; empty if they are not, so that the chat can continue."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _parts(content: object) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)]
    return [part for item in _list(content, "content") if (part := _part(item)) is not None]


def is_text(part: Part) -> bool:
    """Whether a part of `content` is text, rather than an image, audio or video."""
    return str(part.get("type", "text")) in _TEXT_FIELDS


def _part(part: object) -> Part | None:
    if isinstance(part, str):
        return text_part(part)
    if not isinstance(part, dict):
        raise BadRequestError("each part of `content` must be a string or an object", param="messages")
    if isinstance(part, ImagePlaceholder):
        return part
    field = _TEXT_FIELDS.get(str(part.get("type", "text")))
    if field is None:
        return text_part(media_name(part))
    text = part.get(field)
    if text is None:
        return None  # vLLM skips it, too
    if not isinstance(text, str):
        raise BadRequestError(f"`{field}` of a part of `content` must be a string", param="messages")
    return text_part(text)


def _without_billing_header(parts: list[Part]) -> list[Part]:
    kept = []
    for part in parts:
        text = part["text"]
        rest = text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text
        if rest or rest is text:
            kept.append(text_part(rest))
    return kept


def _as_system(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequestError(f"`{name}` of a message must be a list", param="messages")
    return value
