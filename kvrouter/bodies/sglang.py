"""The chats that SGLang 0.5.23 makes of bodies. The other modules here make those of vLLM.

They are made only where the engine turned out to be SGLang (tokens/dialects.py): `ChatPrompt.for_sglang`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from kvrouter.errors import BadRequestError
from kvrouter.tokens.messages import Message
from kvrouter.tokens.prompt import ChatPrompt

_Json = dict[str, Any]


class Later(Struct, frozen=True):
    """Makes the chat when it is called. Equal to another of equal fields, as requests are."""

    make: Callable[..., ChatPrompt]
    fields: tuple[Any, ...]

    def __call__(self) -> ChatPrompt:
        try:
            return self.make(*self.fields)
        except RecursionError as error:
            raise BadRequestError("the body is nested too deeply") from error


_DEVELOPER = "Developer instructions:"


def chat(
    messages: Sequence[Message],
    *,
    tools: list[_Json] | None,
    choice: object,
    variables: Mapping[str, Any] | None,
    effort: object,
    reasoning: object,
    is_continued: bool,
) -> ChatPrompt:
    """The chat of a /v1/chat/completions body, from its fields."""
    is_thinking = None
    if isinstance(reasoning, dict):
        given = reasoning.get("effort")
        effort = given if given is not None else reasoning.get("reasoning_effort", effort)
        enabled = reasoning.get("enabled")
        enabled = enabled if enabled is not None else reasoning.get("enable", False)
        is_on = (
            enabled.strip().lower() in {"1", "true", "yes", "y", "on"}
            if isinstance(enabled, str)
            else enabled
        )
        is_thinking = True if is_on else None  # off is as if not given: only effort "none" turns it off
    if effort is not None:
        is_thinking = effort != "none"
    return ChatPrompt(
        messages,
        _tools_in_effect(tools or [], choice),
        continue_final_message=is_continued,
        chat_template_kwargs=_variables(variables, effort, is_thinking),
    )


def _variables(given: Mapping[str, Any] | None, effort: object, is_thinking: bool | None) -> _Json:
    found = dict(given or {})
    if is_thinking is not None:
        # templates read the one (DeepSeek, Kimi) or the other (Qwen, GLM)
        found = {"thinking": is_thinking, "enable_thinking": is_thinking} | found
    if effort is not None:
        found.setdefault("reasoning_effort", effort)
    return found


def _tools_in_effect(tools: list[_Json], choice: object) -> list[_Json] | None:
    """No tool if the client wants no call; the one that it names."""
    if choice == "none":
        return None
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        tools = [tool for tool in tools if _function(tool).get("name") == name]
    return tools or None


def _function(tool: _Json) -> _Json:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}


# /v1/messages


def messages(
    system: str | list[_Json],
    turns: list[_Json],
    *,
    tools: list[_Json],
    choice: object,
    effort: str | None,
    is_thinking: bool | None,
) -> ChatPrompt:
    """The chat of a /v1/messages body, from its fields as JSON.

    What the model thought before is left out, as it is without a --reasoning-parser.
    """
    if isinstance(system, str):
        first = [system] if system.strip() else []
    else:
        first = [block["text"] for block in system if block["type"] == "text" and block.get("text")]
    later = [
        text for turn in turns if turn["role"] == "system" for text in [_stripped(turn["content"])] if text
    ]
    chat = [turn for turn in turns if turn["role"] != "system"]
    return ChatPrompt(
        [*_system("\n", first), *_turns(turns)],
        _tools_in_effect([_tool(tool) for tool in tools], _choice(choice)),
        # SGLang's efforts have no "xhigh"
        chat_template_kwargs=_variables(None, "max" if effort == "xhigh" else effort, is_thinking),
        system_first=[*_system("\n", [*first, *later]), *_turns(chat)] if len(chat) < len(turns) else None,
    )


def _choice(choice: object) -> object:
    match choice:
        case {"type": "tool", "name": name}:
            return {"function": {"name": name}}
        case {"type": "none"}:
            return "none"
    return None


def _tool(tool: _Json) -> _Json:
    schema = tool["input_schema"]
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": bool(tool.get("strict")),
    }
    return {"type": "function", "function": function, "defer_loading": tool.get("defer_loading")}


def _stripped(content: str | list[_Json]) -> str:
    texts = [content] if isinstance(content, str) else [_text(block) for block in content]
    return "\n".join(filter(None, map(str.strip, texts)))


def _text(block: _Json) -> str:
    return (block.get("text") or "") if block["type"] == "text" else ""


def _system(separator: str, texts: Sequence[str]) -> list[Message]:
    return [{"role": "system", "content": separator.join(texts)}] if texts else []


def _turns(turns: Iterable[_Json]) -> Iterator[Message]:
    for turn in turns:
        if isinstance(turn["content"], str):
            yield {"role": turn["role"], "content": turn["content"]}
        else:
            yield from _of_blocks(turn["role"], turn["content"])


def _of_blocks(role: str, blocks: list[_Json]) -> Iterator[Message]:
    """The messages of one turn: results of tools between what comes before and after them."""
    parts: list[_Json] = []
    calls: list[_Json] = []
    for block in blocks:
        match block["type"]:
            case "text" if block.get("text") is not None:
                parts.append({"type": "text", "text": block["text"]})
            case "image" if image := _image(block.get("source")):
                parts.append(image)
            case "tool_use":
                called = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": called})
            case "tool_result" if role == "user":
                if parts:
                    yield {"role": role, "content": _shortest(parts)}
                parts = []
                answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or block.get("id") or ""}
                yield from ({**answer, "content": content} for content in _results(block.get("content")))
            case "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {_result_text(block.get('content'))}"})
            case "redacted_thinking" if role == "assistant":
                raise BadRequestError("SGLang rejects redacted thinking", param="messages")
    # an empty turn stays, too: templates may reject two users in a row
    if parts or calls or role != "user":
        message: Message = {"role": role, "content": _shortest(parts) if parts else None if calls else ""}
        yield message | ({"tool_calls": calls} if calls else {})


def _results(content: str | list[_Json] | None) -> list[object]:
    """The contents of the messages of one result: references to tools have their own."""
    if not isinstance(content, list):
        return [content or ""]
    parts = [part for item in content for part in _result_part(item)]
    # apart, as GLM's templates expand references only at the beginning of a tool's message
    runs = itertools.groupby(parts, lambda part: part["type"] == "tool_reference")
    return [_shortest([*run]) for _, run in runs] or [""]


def _result_part(item: _Json) -> Iterator[_Json]:
    match item.get("type"):
        case "text" if item.get("text"):
            yield {"type": "text", "text": item["text"]}
        case "image" if image := _image(item.get("source")):
            yield image
        # Anthropic's clients write tool_name, templates read name
        case "tool_reference" if name := item.get("tool_name") or item.get("name"):
            yield {"type": "tool_reference", "name": name}


def _result_text(content: str | list[_Json] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(filter(None, _texts([item for item in content if item.get("type") == "text"])))


def _shortest(parts: list[_Json]) -> object:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _image(source: object) -> _Json | None:
    if not isinstance(source, dict):
        return None
    url = source.get("url")
    if source.get("type") == "base64":
        data = source.get("data")
        url = f"data:{source.get('media_type', 'image/png')};base64,{data}" if data else None
    return {"type": "image_url", "image_url": {"url": url}} if url else None


# /v1/responses


def responses(
    instructions: str | None,
    items: str | list[_Json],
    *,
    history: Sequence[Message],
    tools: list[_Json],
    choice: object,
    variables: Mapping[str, Any] | None,
    effort: str | None,
) -> ChatPrompt:
    """The chat of a /v1/responses body, from its fields. An unfinished answer is not continued."""
    first = _system("\n\n", [instructions] if instructions else [])
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    chat = _joined([*first, *history, *(message for item in items for message in _of_item(item))])
    others = [message for message in chat if message.get("role") != "system"]
    texts = [
        text for message in chat if message.get("role") == "system" for text in _texts(message.get("content"))
    ]
    offered = [definition for tool in tools for definition in _offered(tool)]
    named = choice if isinstance(choice, dict) and choice.get("type") in ("function", "custom") else {}
    name = named.get("name") or _function(named).get("name")
    return ChatPrompt(
        chat,
        _tools_in_effect(
            offered, {"function": {"name": name}} if name else choice if choice == "none" else None
        ),
        chat_template_kwargs=_variables(variables, effort, None if effort is None else effort != "none"),
        system_first=[*_system("\n\n", texts), *others],
    )


def _of_item(item: _Json) -> Iterator[Message]:
    """The message of an item of `input`; none for reasoning without a text."""
    kind = item.get("type")
    match kind:
        case "function_call":
            yield _call(item, _object(item.get("arguments")))
        case "custom_tool_call":
            yield _call(item, json.dumps({"input": item.get("input") or ""}, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output", "")
            content = "".join(_texts(output)) if isinstance(output, list) else output
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        case "reasoning":
            texts = [*filter(None, _texts(item.get("summary")))] or [
                *filter(None, _texts(item.get("content")))
            ]
            if item.get("encrypted_content") and not texts:
                raise BadRequestError("encrypted reasoning is not converted here", param="input")
            if texts:
                yield {"role": "assistant", "reasoning_content": "\n".join(texts)}
        case None | "message":
            yield _message(item)
        case _:
            raise BadRequestError(f"SGLang rejects items of type {kind!r}", param="input")


def _message(item: _Json) -> Message:
    role, content = item.get("role"), item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    if role == "developer":
        role, content = "system", _labelled(content)
    kept = {name: value for name, value in item.items() if name not in {"id", "status", "type"}}
    return kept | {"role": role, "content": content}


def _labelled(content: object) -> object:
    """The words of a developer, marked as such: templates know system messages only."""
    if isinstance(content, str):
        return f"{_DEVELOPER}\n{content}"
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            first = {**part, "text": f"{_DEVELOPER}\n{part['text']}"}
            return [*content[:index], first, *content[index + 1 :]]
    return [{"type": "text", "text": _DEVELOPER}, *content]


def _part(part: object) -> object:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    return part


def _call(item: _Json, arguments: str) -> Message:
    called = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": called}
    return {"role": "assistant", "tool_calls": [call]}


def _object(arguments: object) -> str:
    """The arguments of a call, or an empty object in the place of what is none."""
    if isinstance(arguments, str):
        try:
            return arguments if isinstance(json.loads(arguments), dict) else "{}"
        except (ValueError, RecursionError):
            return "{}"
    return json.dumps(arguments) if isinstance(arguments, dict) else "{}"


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def _joined(chat: list[Message]) -> list[Message]:
    """One message in the place of several of the assistant in a row, unless their phases differ."""
    joined: list[Message] = []
    for message in chat:
        last = joined[-1] if joined else {}
        is_more = "assistant" == message.get("role") == last.get("role")
        is_thought = last.keys() == {"role", "reasoning_content"}
        if is_more and (is_thought or last.get("phase") == message.get("phase")):
            joined[-1] = _sum(last, message)
        else:
            joined.append(message)
    return joined


def _sum(last: Message, message: Message) -> Message:
    found = dict(last)
    if message.get("phase") is not None:
        found["phase"] = message["phase"]
    if more := message.get("content"):
        before = last.get("content")
        if not before:
            found["content"] = more
        elif isinstance(before, str) and isinstance(more, str):
            found["content"] = f"{before}\n\n{more}"
        else:
            found["content"] = [*_as_parts(before), *_as_parts(more)]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [*(last.get("tool_calls") or []), *calls]
    if thought := message.get("reasoning_content"):
        before = last.get("reasoning_content")
        found["reasoning_content"] = f"{before}\n{thought}" if before else thought
    return found


def _as_parts(content: object) -> list[object]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else []


def _offered(tool: _Json) -> Iterator[_Json]:
    """The function of a tool; SGLang shows no other tools to the template."""
    description, parameters = tool.get("description"), tool.get("parameters")
    if tool.get("type") == "custom":
        payload = {"type": "string", "description": "The freeform text payload for this tool."}
        parameters = {
            "type": "object",
            "properties": {"input": payload},
            "required": ["input"],
            "additionalProperties": False,
        }
        description = "\n\n".join(filter(None, [*_texts(description), _grammar(tool.get("format"))])) or None
    elif tool.get("type") != "function":
        return
    function = {
        "name": tool.get("name"),
        "description": description,
        "parameters": parameters,
        "strict": bool(tool.get("strict")),
    }
    yield {"type": "function", "function": function}


def _grammar(form: object) -> str:
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return ""
    syntax = form.get("syntax") or "lark"
    return f"The payload must conform to this {syntax} grammar:\n{form.get('definition') or ''}"
