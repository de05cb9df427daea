"""The prompts of bodies against those that SGLang's own code made (tests/data/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.bodies.apis import BY_PATH
from kvrouter.errors import BadRequestError
from kvrouter.tokens.prompt import ChatPrompt
from kvrouter.tokens.template import ChatTemplate

RECORDED = json.loads((Path(__file__).parents[1] / "data/sglang_chats_0.5.23.json").read_text("utf-8"))


def chat(path: str, body: dict[str, Any]) -> ChatPrompt:
    """The chat of a body."""
    parse = BY_PATH[path].parse
    assert parse is not None
    prompt = parse(json.dumps(body | {"model": "m"}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def printed(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The text of a chat as SGLang prints it."""
    dialect = template.dialect = template.dialects[-1]
    assert prompt.for_sglang is not None
    own = prompt.for_sglang()
    is_merged = own.system_first is not None and dialect.wants_system_first
    return template.render(
        own.system_first if is_merged and own.system_first else own.messages,
        tools=own.tools,
        continue_final_message=own.continue_final_message,
        chat_template_kwargs=own.chat_template_kwargs,
    )


@pytest.mark.parametrize("name", RECORDED["templates"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_recorded(name: str, path: str) -> None:
    """Every prompt is SGLang's. What it rejects may be a prompt here: the engine answers it."""
    template = ChatTemplate(RECORDED["templates"][name], special_tokens=RECORDED["special_tokens"])
    cases = [case for case in RECORDED["cases"] if case["path"] == path and case["prompts"][name] is not None]

    assert len(cases) >= 10
    for case in cases:
        assert case["prompts"][name] == printed(template, chat(path, case["body"])), case["body"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": ["plain"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "system", "content": "a", "tools": [1]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
    ],
    ids=str,
)
def test_rejected(body: dict[str, Any]) -> None:
    """A body that SGLang rejects is a BadRequestError, so that its engine answers it."""
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")

    with pytest.raises(BadRequestError):
        printed(template, chat("/v1/chat/completions", body))


def test_images_end_the_overlap() -> None:
    """An image is a name in the prompt: equal for equal images, different for others."""
    template = ChatTemplate("{# image #}{{ messages | tojson }}")
    parts = [[{"type": "image_url", "image_url": {"url": url}}] for url in ("a", "a", "b")]
    bodies = [{"messages": [{"role": "user", "content": part}]} for part in parts]

    first, again, other = (printed(template, chat("/v1/chat/completions", body)) for body in bodies)

    assert first == again != other


def test_thinking_of_messages() -> None:
    """Thinking that is asked for, or off, is both of the variables that templates read."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    template = ChatTemplate("{{ thinking }} {{ enable_thinking }}")

    for kind, expected in (("disabled", "False False"), ("adaptive", "True True")):
        assert expected == printed(template, chat("/v1/messages", body | {"thinking": {"type": kind}}))
