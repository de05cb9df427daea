"""OpenAI's /v1/responses: the chat that an engine makes of it, the usage, and the form of errors in a stream.

    instructions, input, tools  ──as vLLM 0.32 converts them──>  ChatPrompt  ──>  the same road as a chat's

One message of the assistant may be several items of `input`: reasoning, text, and tool calls. A body that
cannot be read here has no prompt: it is placed by load, and its engine answers it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvrouter.bodies import lax, sglang
from kvrouter.bodies.nvext import Nvext
from kvrouter.bodies.openai import (
    CompletionRequest,
    error_body,
    priority_of,
    read,
    salt_of,
)
from kvrouter.core.tables.predictions import Usage
from kvrouter.core.wire.values import valid_unicode
from kvrouter.errors import BadRequestError, KvRouterError
from kvrouter.relay.engine_answers import last_number
from kvrouter.tokens.messages import Message
from kvrouter.tokens.prompt import ChatPrompt

Item = dict[str, Any]

# An unfinished message at the end of `input` is continued, rather than followed by a new one.
_UNFINISHED = {"in_progress", "incomplete"}
# vLLM shows a custom tool, whose input is plain text, as a function with this one parameter.
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


class ResponseRequest(CompletionRequest, frozen=True):
    previous_id: str | None = None
    """The response that this one continues."""
    own_id: str | None = None
    """The id that the client chose for the response (vLLM's `request_id`)."""
    is_background: bool = False
    """Whether its engine answers at once, and goes on working."""
    is_kept: bool = True
    """Whether the engine may keep the response (`store`)."""
    fields: _ResponsesRequest | None = None
    """What its prompt is made of; None if only its engine can read them."""


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _ResponsesFields(lax.Guarded):
    """What placing needs besides the prompt."""

    model: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    extra_key: Any = None
    kvrouter: dict[str, Any] | None = None
    nvext: Nvext | None = None
    priority: int | None = None  # type: ignore[assignment]
    previous_response_id: str | None = None
    request_id: str | None = None
    background: bool | None = None  # type: ignore[assignment]
    store: bool | None = None
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _ResponsesRequest(_ResponsesFields):
    input: str | list[Item] | None = None
    instructions: str | None = None
    tools: list[Item] | None = None
    tool_choice: Any = None
    reasoning: _Reasoning | None = None
    previous_input_messages: list[Any] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Part(msgspec.Struct):
    text: str


class _OutputItem(msgspec.Struct):
    type: str
    content: list[_Part] | None = None


class _ResponseBody(msgspec.Struct):
    output: list[_OutputItem]


class _LastEvent(msgspec.Struct):
    response: _ResponseBody


_LAST_EVENT = b"\ndata: "
_decode_answer = msgspec.json.Decoder(_ResponseBody).decode
_decode_last_event = msgspec.json.Decoder(_LastEvent).decode
_BODY = msgspec.json.Decoder(_ResponsesRequest)
FIELDS = lax.names(_ResponsesRequest)


def parse(body: bytes, history: Sequence[Message] | None = None) -> ResponseRequest:
    """Parse a /v1/responses body. Raises BadRequestError for bytes that are not a JSON object.

    `history`: the chat up to the response that the body names as `previous_response_id`; None if not known.
    """
    return continued(read(_BODY, _ResponsesRequest, body, _of_body), history)


def continued(asked: ResponseRequest, history: Sequence[Message] | None) -> ResponseRequest:
    """The request, with its prompt behind the chat up to the response that it continues."""
    if asked.fields is None:
        return asked
    try:
        prompt = _prompt(asked.fields, history)
    except (BadRequestError, RecursionError):
        prompt = None  # the engine has its own reason to reject it
    return msgspec.structs.replace(asked, prompt=prompt)


def _of_body(asked: _ResponsesRequest, *, is_doubtful: bool) -> ResponseRequest:
    return _request(asked, None if is_doubtful else asked)


def error_event(error: KvRouterError) -> bytes:
    """The last event of a stream: the fields of OpenAI's own, and `error`, by which its clients raise."""
    event = {
        "type": "error",
        "code": error.code or str(error.status),
        "message": valid_unicode(str(error)),
        "param": None,
        "sequence_number": 0,
        **msgspec.json.decode(error_body(error)),
    }
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def find_usage(tail: bytes) -> Usage:
    """The last usage in these bytes."""
    usage = tail[max(0, tail.rfind(b'"usage":')) :]
    return Usage(last_number(usage, b'"input_tokens":'), last_number(usage, b'"cached_tokens":'))


def find_answer(tail: bytes) -> list[Message] | None:
    """The messages that vLLM puts into the history for an answer, whose last bytes these are: its texts.

    None if the answer is not all there.
    """
    end = tail.rfind(_LAST_EVENT)
    try:
        if end >= 0:
            line = tail[end + len(_LAST_EVENT) :].partition(b"\n")[0]
            output = _decode_last_event(line).response.output
        else:
            output = _decode_answer(tail.strip()).output
    except (ValueError, RecursionError):
        return None
    texts = [part.text for item in output if item.type == "message" for part in item.content or ()]
    return [{"role": "assistant", "content": text} for text in texts]


def _request(fields: _ResponsesFields, of_prompt: _ResponsesRequest | None) -> ResponseRequest:
    return ResponseRequest(
        model=fields.model,
        stream=bool(fields.stream),
        prompt=None,
        cache_salt=salt_of(fields.cache_salt, fields.nvext),
        session_id=fields.session_id or None,
        n=1,
        kvrouter=fields.kvrouter,
        nvext=fields.nvext,
        priority=max(-(2**31), min(2**31 - 1, priority_of(fields.priority, fields.nvext))),
        engine_arguments=fields.vllm_xargs,
        asked_output=max(0, fields.max_output_tokens or 0),
        extra_key=str(fields.extra_key) if fields.extra_key else None,
        previous_id=fields.previous_response_id,
        own_id=fields.request_id,
        is_background=bool(fields.background),
        is_kept=fields.store is not False,
        fields=of_prompt,
    )


def _prompt(body: _ResponsesRequest, history: Sequence[Message] | None) -> ChatPrompt | None:
    if not body.input or body.previous_input_messages is not None:
        return None
    if body.previous_response_id is not None and history is None:
        return None
    if body.truncation not in {None, "disabled"}:
        return None  # cut to the model's own limit, which only its engine knows
    is_continued = isinstance(body.input, list) and _is_unfinished(body.input[-1])
    return ChatPrompt(
        messages=_chat(body.instructions, history or (), body.input),
        tools=[definition for tool in body.tools or [] for definition in _definitions(tool)] or None,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        chat_template_kwargs=body.chat_template_kwargs or {},
        effort=body.reasoning.effort if body.reasoning is not None else None,
        tool_choice="none" if body.tool_choice == "none" else None,
        names_first=True,
        for_sglang=sglang.Later(_for_sglang, (body, body.input, history or ())),
    )


def _for_sglang(body: _ResponsesRequest, given: str | list[Item], history: Sequence[Message]) -> ChatPrompt:
    before = [message for message in history if message["role"] != "system"]
    return sglang.responses(
        body.instructions,
        given,
        history=before,
        tools=body.tools or [],
        choice=body.tool_choice,
        variables=body.chat_template_kwargs,
        effort=None if body.reasoning is None else body.reasoning.effort or "medium",
    )


def _is_unfinished(item: Item) -> bool:
    kind, status = str(item.get("type", "message")), str(item.get("status"))
    return kind in {"message", "reasoning"} and status in _UNFINISHED


def _chat(instructions: str | None, history: Sequence[Message], given: str | list[Item]) -> list[Message]:
    """Instructions hold for one response: those of `history` are dropped."""
    chat: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    chat += [message for message in history if message["role"] != "system"]
    if isinstance(given, str):
        return [*chat, {"role": "user", "content": given}]
    # no item joins a message of the history: that one is kept, and `_joined` would change it
    beginning = len(chat)
    for item in given:
        message = _message(item)
        last = chat[-1] if len(chat) > beginning else None
        if last is None or last["role"] != "assistant" or not _joined(last, message):
            chat.append(message)
    return chat


def _joined(last: Message, message: Message) -> bool:
    """Add an item of the assistant to the message before it, which lacks this field; calls are added up."""
    if message["role"] != "assistant":
        return False
    ((name, value),) = ((name, value) for name, value in message.items() if name != "role")
    if name == "tool_calls":
        last.setdefault(name, []).extend(value)
    elif last.get(name) is None:
        last[name] = value
    else:
        return False
    return True


def _message(item: Item) -> Message:
    kind, role = str(item.get("type", "message")), item.get("role")
    if kind == "function_call":
        namespace = item.get("namespace")
        name = _string(item, "name")
        return _call(item, f"{namespace}__{name}" if namespace else name, _string(item, "arguments"))
    if kind == "custom_tool_call":
        payload = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        return _call(item, _string(item, "name"), payload)
    if kind in {"function_call_output", "custom_tool_call_output"}:
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning": _reasoning(item)}
    if kind == "message" and role == "assistant":
        return {"role": "assistant", "content": _first_text(item.get("content"))}
    if kind == "message" and isinstance(role, str):
        return {name: value for name, value in item.items() if name != "type"}
    raise BadRequestError(f"items of type {kind!r} are not converted here", param="input")


def _call(item: Item, name: str, arguments: str) -> Message:
    call = {"id": _string(item, "call_id"), "type": "function"}
    return {
        "role": "assistant",
        "tool_calls": [{**call, "function": {"name": name, "arguments": arguments}}],
    }


def _reasoning(item: Item) -> str:
    """The first text of its content, else of its summary."""
    if item.get("encrypted_content"):
        raise BadRequestError("encrypted reasoning is not converted here", param="input")
    return _first_text(item.get("content") or item.get("summary") or "")


def _first_text(content: object) -> str:
    """A text, or the text of the first part: vLLM drops the others."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return _string(content[0], "text")
    raise BadRequestError("`content` must be a text or parts with `text`", param="input")


def _string(item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequestError(f"`{name}` of an item must be a string", param="input")
    return value


def _definitions(tool: Item) -> Iterator[Item]:
    """The functions of a tool; those that the engine runs itself (web search, …) have none."""
    kind = tool.get("type")
    if kind == "function":
        yield {"type": "function", "function": {name: part for name, part in tool.items() if name != "type"}}
    elif kind == "custom":
        shown = {"name": tool.get("name"), "description": tool.get("description")}
        yield {"type": "function", "function": {**shown, "parameters": _CUSTOM_PARAMETERS}}
    elif kind == "namespace":
        inner = tool.get("tools")
        for one in inner if isinstance(inner, list) else []:
            if isinstance(one, dict) and one.get("type") == "function":
                yield from _definitions({**one, "name": f"{tool.get('name')}__{_string(one, 'name')}"})
