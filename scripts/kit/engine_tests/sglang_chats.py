"""Records the prompts that SGLang's own code makes of many bodies, with several chat templates.

    DIR/sglang/bin/python scripts/kit/engine_tests/sglang_chats.py tests/data/sglang_chats_0.5.23.json
    … sglang_chats.py FILE --random 2000 --seed 7     random bodies only, to compare many

with the Python of an environment that has SGLang, which needs no engine and no GPU for this.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Json = dict[str, Any]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

_EVERYTHING = """\
{{ bos_token }}{{ [thinking, enable_thinking, reasoning_effort] }}
{{ [mood, documents, add_generation_prompt] }}
{{ tools | tojson }}
"""
# Each shows something that the others hide.
TEMPLATES = {
    "chatml": """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' + call.function.name + call.function.arguments | tojson }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "everything": _EVERYTHING
    + """\
{%- for message in messages %}
{{ message | tojson }}
{%- endfor %}{% if add_generation_prompt %}
assistant:{% endif %}""",
    "loop over message": _EVERYTHING
    + """\
{%- for message in messages %}{{ '\\n' + message.role }}:
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message['content'] | list %}[{{ part | tojson }}]{% endfor %}{% endif %}
{%- for name, value in message.items() if name != 'content' %} {{ name }}={{ value | tojson }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}
assistant:{% endif %}""",
    "loop over turn": """\
{%- for turn in messages %}{{ '\\n' + turn.role }}:
{%- if turn.content is string %}{{ turn.content }}{% else %}
{%- for part in turn.content %}[{{ part | tojson }}]{% endfor %}{% endif %}
{%- for name, value in turn.items() if name != 'content' %} {{ name }}={{ value | tojson }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}
assistant:{% endif %}""",
    "vision": """\
{#- An image is never printed. -#}
{%- for message in messages %}{{ '\\n' + message | tojson }}{% endfor %}
{%- if add_generation_prompt %}
assistant:{% endif %}""",
    "strict": """\
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for tool in tools or [] %}{{ '[' + tool.name + tool.parameters | tojson + ']' }}{% endfor %}
{%- for m in rest %}
{%- if m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('only user, assistant and tool') }}
{%- endif %}
{%- if m.role == 'user' %}{{ '[INST]' + ns.system + m.content + '[/INST]' }}
{%- else %}{{ m.role + ':' + m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endif %}
{%- endfor %}""",
    "no later system": """\
{%- for message in messages %}
{%- if message.role != 'system' or loop.first %}
{{- '<' + message.role + '>' + message.content + (message.reasoning_content or '') }}{% endif %}
{%- endfor %}""",
}

_PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
_FUNCTION: Json = {"name": "weather", "description": "Of a town \u2014 \u00e9", "parameters": _PARAMETERS}
TOOLS: list[Json] = [
    {"type": "function", "function": _FUNCTION},
    {"type": "function", "function": {**_FUNCTION, "strict": True}},
    {"function": {"parameters": {"type": "object"}, "strict": False, "name": "sorted", "more": 1}},
    {"type": "function", "function": {"name": "bare"}, "more": 2},
    {"type": "function", "function": {"name": "later", "description": None}, "defer_loading": True},
    {"type": "function", "function": {"name": "own", "defer_loading": False}, "defer_loading": True},
]
_ARGUMENTS = [
    '{"town": "Bern", "days": [1, 2.5, null]}',
    {"a": {"b": "\u00fc"}},
    "{}",
    {},
    "",
    "[1]",
    "{bad",
    None,
]


def _call(number: int, arguments: object, **more: Any) -> Json:
    return {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
        **more,
    }


def _text(value: str) -> Json:
    return {"type": "text", "text": value}


def chats() -> Iterator[Json]:
    """Bodies of /v1/chat/completions, each with one special property."""
    hi = {"role": "user", "content": "Hi"}
    said = {"role": "assistant", "content": "Hello."}
    yield {"messages": [hi]}
    yield {"messages": [{"role": "system", "content": "Be brief."}, hi, said, {**hi, "name": "ann"}]}
    yield {"messages": [{"role": "developer", "content": "Rules", "name": "dev"}, hi]}
    yield {"messages": [hi, {"role": "System", "content": "Later", "name": "sys"}, hi]}
    yield {"messages": [hi, {"role": "developer", "content": "Later", "tools": [TOOLS[0]]}, hi]}
    yield {"messages": [hi, said]}
    yield {"messages": [hi, said], "add_generation_prompt": False}
    yield {"messages": [hi, said], "continue_final_message": True, "add_generation_prompt": False}
    yield {"messages": [hi, {"role": "assistant", "content": [_text("a"), _text("b")]}]}
    yield {"messages": [{"role": "user", "content": [_text("One"), _text(""), _text("Two")]}]}
    yield {"messages": [{"role": "user", "content": []}]}
    yield {"messages": [{"role": "user", "content": ["plain"]}]}
    yield {
        "messages": [
            hi,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, _text("a")]},
            hi,
        ]
    }
    yield {
        "messages": [hi, {**said, "reasoning_content": "hm", "reasoning": "no", "phase": "commentary"}, hi]
    }
    for arguments in _ARGUMENTS:
        calls = [_call(1, arguments), _call(2, "{}", index=1)]
        called = {"role": "assistant", "content": None, "tool_calls": calls}
        yield {"messages": [hi, called, {"role": "tool", "tool_call_id": "c1", "content": "sunny"}, hi]}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": [_text("a"), _text("b")]} for n in (2, 1)]
    called = {"role": "assistant", "tool_calls": [_call(1, "{}"), _call(2, "{}")]}
    yield {"messages": [hi, called, *results], "tools": TOOLS[:1]}
    yield {"messages": [hi, {"role": "assistant", "content": "x", "tool_calls": []}, hi]}
    for tool in TOOLS:
        yield {"messages": [hi], "tools": [tool]}
    for choice in ("none", "auto", "required", None, {"type": "function", "function": {"name": "bare"}}):
        yield {"messages": [hi], "tools": TOOLS[:4:3], "tool_choice": choice}
    for effort in ("none", "low", "high"):
        yield {"messages": [hi], "reasoning_effort": effort}
    yield {"messages": [hi], "reasoning": {"effort": "low"}}
    yield {"messages": [hi], "reasoning": {"enabled": True}}
    yield {
        "messages": [hi],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"reasoning_effort": "max", "thinking": 0},
    }
    yield {"messages": [hi], "chat_template_kwargs": {"mood": "\u2600"}, "documents": [{"text": "d"}]}


def messages() -> Iterator[Json]:
    """Bodies of /v1/messages."""
    hi = {"role": "user", "content": "Hi"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    used = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"town": "Bern"}}
    result: Json = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    several = [_text("a"), {"type": "tool_reference", "tool_name": "weather"}, _text("b"), _text("c")]
    tool = {"name": "weather", "description": "Of a town", "input_schema": {"properties": {}}}
    yield {"messages": [hi]}
    yield {"messages": [hi], "system": "Be brief."}
    yield {"messages": [hi], "system": [_text("Be"), _text("brief."), _text("")]}
    yield {"messages": [hi], "system": [_text("x-anthropic-billing-header: 1\nx"), _text("brief.")]}
    yield {"messages": [hi, {"role": "system", "content": " Later. "}, hi], "system": "First."}
    yield {"messages": [hi, {"role": "system", "content": [_text("Later."), _text("")]}, hi]}
    yield {
        "messages": [
            hi,
            {"role": "assistant", "content": [thought, _text("Let me see."), used]},
            {"role": "user", "content": [result]},
            hi,
        ],
        "tools": [tool],
    }
    yield {
        "messages": [
            hi,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [_text("before"), result, _text("after")]},
        ]
    }
    yield {
        "messages": [
            hi,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [{**result, "content": several}]},
        ]
    }
    yield {
        "messages": [
            hi,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [{**result, "content": [_text("a"), _text("b")]}]},
        ]
    }
    yield {"messages": [hi, {"role": "assistant", "content": [result]}, hi]}
    yield {"messages": [hi, {"role": "assistant", "content": [thought]}, hi]}
    yield {
        "messages": [
            hi,
            {"role": "assistant", "content": [_text("")]},
            {"role": "user", "content": [_text("a"), _text("b")]},
        ]
    }
    yield {"messages": [hi, {"role": "assistant", "content": "Begun"}]}
    yield {
        "messages": [hi, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, hi]
    }
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "bare"}):
        bare = {"name": "bare", "input_schema": _PARAMETERS, "strict": True, "defer_loading": True}
        yield {"messages": [hi], "tools": [tool, bare], "tool_choice": choice}
    for effort in ("low", "high", "xhigh", "max"):
        yield {"messages": [hi], "output_config": {"effort": effort}}
    yield {"messages": [hi], "chat_template_kwargs": {"mood": 1}}


def responses() -> Iterator[Json]:
    """Bodies of /v1/responses."""
    hi = {"role": "user", "content": "Hi"}
    said = {"type": "message", "id": "m1", "role": "assistant", "status": "completed"}
    answer = said | {"content": [{"type": "output_text", "text": "Hello.", "annotations": []}]}
    thought = {
        "type": "reasoning",
        "id": "r1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town": "Bern"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    tool = {"type": "function", "name": "weather", "description": "Of a town", "parameters": _PARAMETERS}
    yield {"input": "Hi"}
    yield {"input": "Hi", "instructions": "Be brief."}
    yield {"input": [hi, answer, hi], "instructions": "Be brief."}
    yield {
        "input": [
            {
                "role": "user",
                "name": "ann",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            }
        ]
    }
    yield {
        "input": [
            {"role": "developer", "content": "Rules"},
            hi,
            {"role": "system", "content": "Later", "name": "s"},
            hi,
        ]
    }
    yield {
        "input": [hi, {"role": "developer", "content": [{"type": "input_text", "text": "Rules"}]}, hi],
        "instructions": "First.",
    }
    yield {"input": [hi, thought, call, output, hi], "tools": [tool]}
    yield {
        "input": [hi, {**thought, "summary": [{"type": "summary_text", "text": "s"}]}, answer, call, output]
    }
    yield {"input": [hi, {**thought, "content": []}, answer, hi]}
    yield {"input": [hi, answer, answer, call, {**call, "call_id": "c2"}, output, hi]}
    for arguments in ("{bad", "", "[1]"):
        yield {"input": [hi, {**call, "arguments": arguments}, output]}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    yield {"input": [hi, call, {**output, "output": parts}]}
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "text \u00e9"}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    tools = [
        {"type": "custom", "name": "patch", "description": "Edits", "format": grammar},
        {**tool, "strict": True},
    ]
    yield {
        "input": [hi, custom, {**output, "type": "custom_tool_call_output"}],
        "tools": [*tools, {"type": "web_search"}],
    }
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
    yield {"input": [hi, {**call, "namespace": "n"}, output], "tools": [space, tool]}
    for choice in ("none", "required", {"type": "function", "name": "weather"}, {"type": "web_search"}):
        yield {"input": "Hi", "tools": tools, "tool_choice": choice}
    for effort in ("none", "low", "high"):
        yield {"input": "Hi", "reasoning": {"effort": effort}}
    yield {"input": "Hi", "reasoning": {}}
    yield {"input": "Hi", "chat_template_kwargs": {"mood": 1, "thinking": True}}
    yield {"input": [hi, {**answer, "status": "in_progress"}]}


MADE: dict[str, Callable[[], Iterator[Json]]] = {CHAT: chats, MESSAGES: messages, RESPONSES: responses}


def random_chat(rng: random.Random) -> Json:
    """A body of /v1/chat/completions with any mixture."""

    def content() -> object:
        texts = [_text(rng.choice(["a", "", "b c", "\u2600", " d "])) for _ in range(rng.randrange(4))]
        return rng.choice([rng.choice(["x", "", "y z"]), texts, None])

    def message() -> Json:
        role = rng.choice(
            ["system", "user", "user", "assistant", "assistant", "tool", "developer", "Assistant"]
        )
        made: Json = {"role": role, "content": content()}
        for name, values in (
            ("name", ["ann", None, ""]),
            ("tool_call_id", ["c1", None]),
            ("reasoning_content", ["hm", None, ""]),
            ("reasoning", ["no"]),
            ("prefix", [True]),
            ("phase", ["commentary"]),
            ("tools", [TOOLS[:1], []]),
            ("tool_calls", [[_call(1, rng.choice(_ARGUMENTS)), _call(2, "{}", index=3)], []]),
        ):
            if rng.random() < 0.15:
                made[name] = rng.choice(values)
        return made

    body: Json = {"messages": [message() for _ in range(rng.randint(1, 5))]}
    for name, values in (
        ("tools", [rng.sample(TOOLS, 2), [], None]),
        ("tool_choice", ["none", "auto", "required", {"type": "function", "function": {"name": "bare"}}]),
        ("reasoning_effort", ["none", "low", None]),
        ("reasoning", [{"effort": "high"}, {"enabled": "yes"}, {}]),
        ("chat_template_kwargs", [{"mood": 1}, {"thinking": False, "reasoning_effort": "max"}, {}]),
        ("continue_final_message", [True]),
        ("add_generation_prompt", [True, False]),
    ):
        if rng.random() < 0.25:
            body[name] = rng.choice(values)
    return body


class Defaults(SimpleNamespace):
    """SGLang's settings: all are off but those that are given."""

    def __getattr__(self, _name: str) -> None:
        return None


class Recorder:
    """SGLang's servings of one template, with one token for each character."""

    def __init__(self, template: str) -> None:
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
        from sglang.srt.entrypoints.openai import serving_base, serving_chat, serving_responses
        from sglang.srt.parser.template_manager import TemplateManager
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        class Characters(PreTrainedTokenizerFast):  # type: ignore[misc]
            def encode(self, text: str, **_options: object) -> list[int]:
                return [*map(ord, text)]

            def decode(self, ids: list[int], **_options: object) -> str:
                return "".join(map(chr, ids))

        settings = Defaults(disaggregation_mode="null")
        for module in (serving_base, serving_chat, serving_responses):
            for name in ("get_serving", "get_model", "get_disagg", "get_observability"):
                if hasattr(module, name):
                    setattr(module, name, lambda: settings)
        tokenizer = Characters(tokenizer_object=Tokenizer(WordLevel({}, unk_token="?")), bos_token="<s>")
        tokenizer.chat_template = template
        about = SimpleNamespace(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
        config = SimpleNamespace(
            hf_config=about, is_multimodal=False, get_default_sampling_params=dict, context_len=4096
        )
        manager = SimpleNamespace(
            tokenizer=tokenizer,
            processor=None,
            model_config=config,
            model_path="m",
            served_model_name="m",
            server_args=None,
            config_value=lambda _name: None,
        )
        templates = TemplateManager()
        templates._python_chat_template = None
        templates._jinja_template_content_format = _content_format(template)
        templates._run_template_detection(template, tokenizer)
        self._chat = serving_chat.OpenAIServingChat(manager, templates)
        self._messages = AnthropicServing(self._chat)
        self._responses = serving_responses.OpenAIServingResponses(manager, templates)
        self._tokenizer = tokenizer

    def prompt(self, path: str, body: Json) -> str | None:
        """The prompt; None if SGLang rejects the body."""
        copied = json.loads(json.dumps(body)) | {"model": "m"}
        made = {CHAT: self._of_chat, MESSAGES: self._of_messages, RESPONSES: self._of_responses}
        try:
            return self._tokenizer.decode(made[path](copied))
        except ValueError:  # pydantic's errors too
            return None

    def _of_chat(self, body: Json) -> list[int]:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        return self._ids(ChatCompletionRequest(**body))

    def _of_messages(self, body: Json) -> list[int]:
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

        request = AnthropicMessagesRequest(max_tokens=9, **body)
        return self._ids(self._messages._convert_to_chat_completion_request(request))

    def _ids(self, request: Any) -> list[int]:
        if reason := self._chat._validate_request(request):
            raise ValueError(reason)
        made, _ = self._chat._convert_to_internal_request(request)
        return made.input_ids  # type: ignore[no-any-return]

    def _of_responses(self, body: Json) -> list[int]:
        from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

        made = self._responses._make_request(ResponsesRequest(**body), None, self._tokenizer)
        return asyncio.run(made)[2][0]  # type: ignore[no-any-return]


def _content_format(template: str) -> Any:
    from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

    return detect_jinja_template_content_format(template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    bodies = [(path, body) for path, made in MADE.items() for body in made()]
    if options.random:
        bodies = [(CHAT, random_chat(rng)) for _ in range(options.random)]
    recorders = {name: Recorder(text) for name, text in TEMPLATES.items()}
    cases = [
        {
            "path": path,
            "body": body,
            "prompts": {name: each.prompt(path, body) for name, each in recorders.items()},
        }
        for path, body in bodies
    ]
    about = {"engine": "sglang", "version": version("sglang"), "licence": "Apache-2.0"}
    found = {**about, "templates": TEMPLATES, "special_tokens": {"bos_token": "<s>"}, "cases": cases}
    options.file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
