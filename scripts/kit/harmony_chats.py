"""Compares `tokens/harmony.py` with what vLLM makes of random chats and responses for gpt-oss.

    cd CHECKOUT; VENV/bin/python -m scripts.kit.harmony_chats [--chats N]

VENV is that of a vLLM, with kvrouter's requirements. The exit code is 1 if the ids of one body differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from types import SimpleNamespace
from typing import Any

from kvrouter.bodies import openai, responses
from kvrouter.errors import BadRequestError
from kvrouter.tokens.harmony import Harmony
from kvrouter.tokens.prompt import ChatPrompt

_TEXTS = (
    "",
    "Hi",
    "One\ntwo  three.",
    "caf\u00e9 \u4f60\u597d \U0001f642",
    "<|start|>user<|message|>x<|end|>",
    "{}",
)
_EFFORTS = (None, None, "low", "medium", "high", "none", "minimal")
_TYPES = ("string", "integer", "number", "boolean")


def any_tool(chance: random.Random) -> dict[str, Any]:
    names = chance.sample(("city", "days", "unit", "tags", "where"), chance.randrange(4))
    properties: dict[str, Any] = {name: {"type": chance.choice(_TYPES)} for name in names}
    for schema in properties.values():
        if chance.random() < 0.4:
            schema["description"] = chance.choice(_TEXTS)
        if schema["type"] == "string" and chance.random() < 0.3:
            schema["enum"] = ["a", "b"]
    if "tags" in properties:
        properties["tags"] = {"type": "array", "items": {"type": "string"}}
    if "where" in properties:
        properties["where"] = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    function: dict[str, Any] = {"name": chance.choice(("look", "find_it", "ns.get"))}
    if chance.random() < 0.8:
        function["description"] = chance.choice(_TEXTS)
    if chance.random() < 0.8:
        function["parameters"] = {"type": "object", "properties": properties, "required": names[:1]}
    return function


def any_content(chance: random.Random) -> Any:
    if chance.random() < 0.7:
        return chance.choice(_TEXTS)
    return [{"type": "text", "text": chance.choice(_TEXTS)} for _ in range(chance.randrange(1, 3))]


def any_chat(chance: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.6:
        messages.append({"role": chance.choice(("system", "developer")), "content": any_content(chance)})
    for number in range(chance.randrange(1, 5)):
        messages.append({"role": "user", "content": any_content(chance)})
        if chance.random() < 0.2:
            messages.append({"role": "system", "content": any_content(chance)})
        if chance.random() < 0.8:
            messages += any_turn(chance, number)
    body: dict[str, Any] = {"model": "m", "messages": messages, "reasoning_effort": chance.choice(_EFFORTS)}
    if chance.random() < 0.5:
        body["tools"] = [
            {"type": "function", "function": any_tool(chance)} for _ in range(chance.randrange(1, 3))
        ]
        body["tool_choice"] = chance.choice(("auto", "none"))
    return body


def any_turn(chance: random.Random, number: int) -> list[dict[str, Any]]:
    said: dict[str, Any] = {"role": "assistant", "content": any_content(chance)}
    if chance.random() < 0.5:
        said[chance.choice(("reasoning", "reasoning_content"))] = chance.choice(_TEXTS)
    if chance.random() < 0.5:
        return [said]
    calls = [
        {
            "id": f"call_{number}{each}",
            "type": "function",
            "function": {"name": "look", "arguments": chance.choice(("{}", '{"a": 1}', ""))},
        }
        for each in range(chance.randrange(1, 3))
    ]
    if chance.random() < 0.5:
        said["content"] = None
    results = [{"role": "tool", "tool_call_id": call["id"], "content": any_content(chance)} for call in calls]
    return [{**said, "tool_calls": calls}, *results]


def any_response(chance: random.Random) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for number in range(chance.randrange(1, 4)):
        items.append({"role": "user", "content": chance.choice(_TEXTS)})
        if chance.random() < 0.5:
            content = [{"type": "reasoning_text", "text": chance.choice(_TEXTS)}]
            items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content})
        if chance.random() < 0.5:
            items.append({"role": "assistant", "content": chance.choice(_TEXTS)})
        if chance.random() < 0.5:
            call = {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}"}
            output = {
                "type": "function_call_output",
                "call_id": f"c{number}",
                "output": chance.choice(_TEXTS),
            }
            items += [call, output]
    body: dict[str, Any] = {"model": "m", "input": items if chance.random() < 0.9 else "Hi"}
    if chance.random() < 0.5:
        body["instructions"] = chance.choice(_TEXTS[1:])
    if chance.random() < 0.5:
        body["reasoning"] = {"effort": chance.choice(_EFFORTS[1:])}
    if chance.random() < 0.5:
        body["tools"] = [{"type": "function", "strict": None, "parameters": None, **any_tool(chance)}]
    return body


def by_vllm(body: dict[str, Any]) -> list[int] | None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.renderers.online_renderer import OnlineRenderer

    renderer: Any = SimpleNamespace(
        renderer=None,
        model_config=SimpleNamespace(max_model_len=100_000),
        supports_browsing=False,
        supports_code_interpreter=False,
        reasoning_effort_map={},
        adjust_harmony_request=lambda _: None,
        create_error_response=lambda *_, **__: None,
        _get_harmony_builtin_tool_descriptions=lambda *_: {},
        render_responses_harmony_messages=lambda messages, **_: messages,
    )
    try:
        if "messages" in body:
            request = ChatCompletionRequest.model_validate_json(json.dumps(body))
            _, (found,) = OnlineRenderer._make_request_with_harmony(
                renderer, request, request.tools is not None
            )
            return list(found["prompt_token_ids"])
        from vllm.entrypoints.openai.parser.harmony_utils import render_for_completion

        response = ResponsesRequest.model_validate_json(json.dumps(body))
        rendered = OnlineRenderer._render_responses_with_harmony(
            renderer, response, previous_messages=None, previous_response_outputs=None, tool_server=None
        )
        return None if rendered is None else render_for_completion(rendered.engine_input)
    except Exception:
        return None


def here(harmony: Harmony, body: dict[str, Any]) -> list[int] | None:
    parse = openai.parse_chat if "messages" in body else responses.parse
    prompt = parse(json.dumps(body).encode()).prompt
    if not isinstance(prompt, ChatPrompt):
        return None
    try:
        return harmony.ids(
            prompt.messages, tools=prompt.tools, effort=prompt.effort, is_response=prompt.names_first
        )
    except BadRequestError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chats", type=int, default=2000)
    options = parser.parse_args()
    logging.disable()
    chance, harmony = random.Random(36), Harmony.load()[0]
    assert harmony is not None, "oss-harmony is missing"
    bodies = [make(chance) for make in (any_chat, any_response) for _ in range(options.chats)]
    pairs = [(body, by_vllm(body), here(harmony, body)) for body in bodies]
    for kind in ("messages", "input"):
        found = [pair for pair in pairs if kind in pair[0]]
        known = sum(theirs is not None for _, theirs, _ in found)
        others = [pair for pair in found if None is not pair[2] != pair[1]]
        missing = [pair for pair in found if pair[2] is None is not pair[1]]
        sys.stdout.write(f"{kind}: {known} of {len(found)} written by vLLM, {len(others)} other ids here, ")
        sys.stdout.write(f"{len(missing)} not written here\n")
        for body, theirs, ours in [*others[:3], *missing[:3]]:
            sys.stdout.write(f"{json.dumps(body)}\n")
            for ids in (theirs, ours):
                sys.stdout.write(f"  {harmony._encoding.decode(ids) if ids else ids!r}\n")
    return int(any(ours is not None and ours != theirs for _, theirs, ours in pairs))


if __name__ == "__main__":
    raise SystemExit(main())
