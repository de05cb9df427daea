"""Anthropic's /v1/messages: the chat that an engine makes of it, the usage, and the form of errors.

    system, messages, tools  ──as vLLM 0.32 converts them──>  ChatPrompt  ──>  the same road as a chat's

The client's own bytes go to the worker. A body that cannot be read here has no prompt: it is placed by load,
and its engine rejects it with its own reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from kvrouter.bodies import lax, sglang
from kvrouter.bodies.nvext import Nvext
from kvrouter.bodies.openai import (
    CompletionRequest,
    error_message,
    priority_of,
    read,
    salt_of,
)
from kvrouter.core.tables.predictions import Usage
from kvrouter.errors import BadRequestError, KvRouterError
from kvrouter.relay.engine_answers import last_number
from kvrouter.tokens.messages import BILLING_HEADER, Message
from kvrouter.tokens.prompt import ChatPrompt

_BlockType: TypeAlias = Literal[
    "text",
    "image",
    "tool_use",
    "tool_result",
    "tool_reference",
    "thinking",
    "redacted_thinking",
    "tool_addition",
    "tool_removal",
]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _ToolChange(msgspec.Struct):
    """What a `tool_addition` or `tool_removal` adds or removes: a tool by its name, or by its definition."""

    type: Literal["tool_reference", "tool_definition"]
    name: str = ""
    definition: _Tool | None = None


class _ContentBlock(msgspec.Struct):
    type: _BlockType
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None
    tool: _ToolChange | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_ContentBlock]


class _Thinking(msgspec.Struct):
    type: str


class _OutputConfig(msgspec.Struct):
    effort: str | None = None


class _MessagesFields(lax.Guarded):
    """What placing needs besides the prompt."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    kvrouter: dict[str, Any] | None = None
    nvext: Nvext | None = None
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _MessagesRequest(_MessagesFields):
    messages: list[_Message] = msgspec.field(default_factory=list)
    system: str | list[_ContentBlock] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_BODY = msgspec.json.Decoder(_MessagesRequest)
FIELDS = lax.names(_MessagesRequest)


def parse(body: bytes) -> CompletionRequest:
    """Parse a /v1/messages body. Raises BadRequestError for bytes that are not a JSON object."""
    return read(_BODY, _MessagesRequest, body, _of_body)


def _of_body(asked: _MessagesRequest, *, is_doubtful: bool) -> CompletionRequest:
    try:
        prompt = None if is_doubtful else _prompt(asked)
    except (BadRequestError, RecursionError):
        prompt = None  # the engine has its own reason to reject it
    return _request(asked, prompt)


def error_body(error: KvRouterError, request_id: str = "") -> bytes:
    """The JSON that Anthropic's clients expect with a status of 400 and above."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error_message(error)}}
    return msgspec.json.encode({**body, "request_id": request_id} if request_id else body)


def error_event(error: KvRouterError) -> bytes:
    """The same as a server-sent event."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


# https://docs.anthropic.com/en/api/errors
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def find_usage(tail: bytes) -> Usage:
    """The last usage in these bytes. Its `input_tokens` are without those read from or written to a cache."""
    # Only behind the last "usage": the arguments of a tool call are JSON, and may contain any name.
    usage = tail[max(0, tail.rfind(b'"usage":')) :]
    rest = last_number(usage, b'"input_tokens":')
    cached = last_number(usage, b'"cache_read_input_tokens":')
    created = last_number(usage, b'"cache_creation_input_tokens":')
    return Usage(None if rest is None else rest + (cached or 0) + (created or 0), cached)


def _request(fields: _MessagesFields, prompt: ChatPrompt | None) -> CompletionRequest:
    return CompletionRequest(
        model=fields.model,
        stream=bool(fields.stream),
        prompt=prompt,
        cache_salt=salt_of(fields.cache_salt, fields.nvext),
        session_id=fields.session_id or None,
        n=1,
        kvrouter=fields.kvrouter,
        nvext=fields.nvext,
        priority=priority_of(None, fields.nvext),
        engine_arguments=fields.vllm_xargs,
        asked_output=max(0, fields.max_tokens or 0),
    )


def _prompt(body: _MessagesRequest) -> ChatPrompt | None:
    if not body.messages:
        return None
    system = _system_texts(body.system)
    inline = [text for message in body.messages if message.role == "system" for text in _texts(message)]
    chat = [message for message in body.messages if message.role != "system"]
    effort = body.output_config.effort if body.output_config is not None else None
    is_quiet = body.thinking is not None and body.thinking.type == "disabled"
    return ChatPrompt(
        messages=_chat(system, body.messages),
        tools=[_tool_definition(tool) for tool in _tools_in_effect(body)] or None,
        chat_template_kwargs=body.chat_template_kwargs or {},
        # for templates that allow no later system message
        system_first=_chat([*system, *inline], chat) if inline else None,
        effort="none" if is_quiet else effort,
        least_effort="low" if is_quiet else None,
        tool_choice="none" if _calls_no_tool(body.tool_choice) else None,
        for_sglang=sglang.Later(_for_sglang, (body,)),
    )


def _calls_no_tool(choice: object) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "none"


def _for_sglang(body: _MessagesRequest) -> ChatPrompt:
    return sglang.messages(
        msgspec.to_builtins(body.system or []),
        msgspec.to_builtins(body.messages),
        tools=msgspec.to_builtins(body.tools or []),
        choice=body.tool_choice,
        effort=body.output_config.effort if body.output_config is not None else None,
        is_thinking=body.thinking.type != "disabled" if body.thinking is not None else None,
    )


def _chat(system: list[str], messages: Iterable[_Message]) -> list[Message]:
    chat: list[Message] = [{"role": "system", "content": "".join(system)}] if system else []
    for message in messages:
        _add(chat, message)
    return chat


def _system_texts(system: str | list[_ContentBlock] | None) -> list[str]:
    if isinstance(system, str):
        return [system] if system else []
    return _block_texts(system or [])


def _texts(message: _Message) -> list[str]:
    """The text of a system message among the others."""
    if isinstance(message.content, list):
        return _block_texts(message.content)
    is_kept = message.content and not message.content.startswith(BILLING_HEADER)
    return [message.content] if is_kept else []


def _block_texts(blocks: list[_ContentBlock]) -> list[str]:
    """Without Claude Code's billing header, which differs in every request and would end every overlap."""
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _add(chat: list[Message], message: _Message) -> None:
    """Append a message, behind the tool results in it: each is a message of its own."""
    if message.role == "system":
        if texts := _texts(message):
            chat.append({"role": "system", "content": "".join(texts)})
        return
    if isinstance(message.content, str):
        chat.append({"role": message.role, "content": message.content})
        return
    fields = _fields(chat, message.role, message.content)
    if "content" in fields or message.role != "user":
        chat.append({"role": message.role, **fields})


def _fields(chat: list[Message], role: str, blocks: list[_ContentBlock]) -> Message:
    """Content, tool calls and reasoning of one message. Tool results of users go to `chat`."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in blocks:
        if block.type == "text" and block.text:
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image" and block.source:
            parts.append(_image(block.source))
        elif block.type == "thinking" and block.thinking is not None:
            reasoning.append(block.thinking)
        elif block.type == "tool_use":
            calls.append(_tool_call(block))
        elif block.type == "tool_result" and role == "user":
            chat += _tool_result(block)
        elif block.type == "tool_result":
            # vLLM, too, prints a list in Python's form here
            parts.append({"type": "text", "text": f"Tool result: {block.content or ''}"})
    fields: Message = {"reasoning": "".join(reasoning)} if reasoning else {}
    if calls:
        fields["tool_calls"] = calls
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        fields["content"] = parts[0]["text"] if is_text else parts
    return fields


def _image(source: object) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise BadRequestError("`source` of an image must be an object", param="messages")
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: _ContentBlock) -> dict[str, Any]:
    # vLLM, too, escapes what is not ASCII here; it does not in /v1/responses
    called = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
    return {"id": block.id or "", "type": "function", "function": called}


def _tool_result(block: _ContentBlock) -> list[Message]:
    """The text of a result, then its images, then the tools that it names."""
    answer = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    if not isinstance(block.content, list):
        return [{**answer, "content": block.content or ""}]
    of_type = {kind: [item for item in block.content if item.get("type") == kind] for kind in _RESULT_TYPES}
    texts = [_text(item) for item in of_type["text"]]
    images = [_image(item.get("source") or {}) for item in of_type["image"]]
    names = [item.get("tool_name") or item.get("name") for item in of_type["tool_reference"]]
    references = [{"type": "tool_reference", "name": name} for name in names if name]
    messages: list[Message] = [{**answer, "content": "\n".join(texts)}]
    if images := [image for image in images if image["image_url"]["url"]]:
        messages.append({"role": "user", "content": images})
    if references:
        messages.append({**answer, "content": references})
    return messages


_RESULT_TYPES = ("text", "image", "tool_reference")


def _text(item: dict[str, Any]) -> str:
    text = item.get("text", "")
    if not isinstance(text, str):
        raise BadRequestError("`text` of a tool result must be a string", param="messages")
    return text


_CHANGES = frozenset({"tool_addition", "tool_removal"})


def _tools_in_effect(body: _MessagesRequest) -> list[_Tool]:
    """The tools after all additions and removals: a template prints one list."""
    of_messages = [message.content for message in body.messages if isinstance(message.content, list)]
    changes = [block for blocks in of_messages for block in blocks if block.type in _CHANGES]
    if not changes:
        return body.tools or []
    tools = {tool.name: tool for tool in body.tools or []}
    removed: set[str] = set()
    for block in changes:
        name = _change(tools, block)
        if block.type == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _change(tools: dict[str, _Tool], block: _ContentBlock) -> str:
    """Declare the tool of an addition by value; returns the name of the tool."""
    change = block.tool
    if change is None or (change.definition is None and change.name not in tools):
        raise BadRequestError(f"{block.type} names no declared tool", param="messages")
    if change.definition is not None:
        tools[change.definition.name] = change.definition
        return change.definition.name
    if block.type == "tool_addition":
        tools[change.name] = msgspec.structs.replace(tools[change.name], defer_loading=None)
    return change.name


def _tool_definition(tool: _Tool) -> dict[str, Any]:
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema,
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": function}
