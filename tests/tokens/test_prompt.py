from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.tokens.id_comparison import PROBES
from kvrouter.tokens.messages import Message
from kvrouter.tokens.prompt import (
    ChatPrompt,
    Prompt,
    PromptEncoder,
    TextPrompt,
    TokenPrompt,
    plain_text,
    text_characters,
)
from kvrouter.tokens.template import ChatTemplate
from kvrouter.tokens.tokenizer import Tokenizer

LONG = "It was the best of times, it was the worst of times. " * 50

texts = st.text('a{"\\ é\x00', max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "name", "reasoning"]),
    st.sampled_from(["user", "assistant", "tool", "developer", "system"]) | json_values,
)


def chat(text: str, **more: Any) -> ChatPrompt:
    """A chat of one message."""
    return ChatPrompt([{"role": "user", "content": text}], **more)


@pytest.mark.parametrize("text", ["hi", LONG], ids=["short", "long"])
async def test_chat(encoder: PromptEncoder, tokenizer: Tokenizer, text: str) -> None:
    """A chat has the ids of its rendered template; <|im_start|> and <|im_end|> are tokens."""
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    assert [tokenizer.encode_now(rendered, add_special_tokens=False)] == await encoder.encode(chat(text))


async def test_options_of_a_chat(encoder: PromptEncoder, tokenizer: Tokenizer) -> None:
    """The request's options of its prompt reach the template."""
    found = await encoder.encode(chat("hi", add_generation_prompt=False, continue_final_message=True))

    assert [tokenizer.encode_now("<|im_start|>user\nhi", add_special_tokens=False)] == found


@pytest.mark.parametrize("texts", [["a"], ["a", "b c", ""], ["a"] * 9, [LONG, "a"]], ids=len)
async def test_texts(encoder: PromptEncoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    """Each text of a completion has its own ids."""
    expected = [tokenizer.encode_now(text, add_special_tokens=True) for text in texts]

    assert expected == await encoder.encode(TextPrompt(texts))


async def test_token_ids(encoder: PromptEncoder) -> None:
    """Token ids are used as they are, also if this tokenizer does not know them."""
    assert [[1, 2], [2**32 - 1]] == await encoder.encode(TokenPrompt([[1, 2], [2**32 - 1]]))


async def test_unknown_prompt(encoder: PromptEncoder) -> None:
    """A prompt that only the engine can know has no token ids."""
    assert await encoder.encode(None) is None


async def test_truncated(encoder: PromptEncoder) -> None:
    """Tokens that the engine truncates at the client's request are truncated here, too."""
    whole = await encoder.encode(TextPrompt([LONG]))
    assert whole

    assert [whole[0][-5:]] == await encoder.encode(TextPrompt([LONG], kept_tokens=slice(-5, None)))
    assert [[1, 2]] == await encoder.encode(TokenPrompt([[1, 2, 3]], kept_tokens=slice(2)))


@pytest.mark.parametrize("prompt", [chat("hi"), TextPrompt(["hi"])], ids=["chat", "text"])
async def test_without_a_model_directory(prompt: Prompt) -> None:
    """Without a tokenizer text has no token ids, so it is routed by load; token ids are used as they are."""
    with PromptEncoder.load(None) as encoder:
        assert not encoder.can_encode_text
        assert await encoder.encode(prompt) is None
        assert [[1, 2]] == await encoder.encode(TokenPrompt([[1, 2]]))


async def test_without_a_template(tiny: Path, tmp_path: Path) -> None:
    """Without a chat template texts are encoded, but chats are not: the engine may have a template."""
    shutil.copy(tiny / "tokenizer.json", tmp_path)

    with PromptEncoder.load(tmp_path) as encoder:
        assert encoder.can_encode_text
        assert not encoder.can_encode_chats
        assert await encoder.encode(TextPrompt(["hi"]))
        assert await encoder.encode(chat("hi")) is None


def test_no_such_directory(tmp_path: Path) -> None:
    """A wrong --model-path is a ConfigError."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        PromptEncoder.load(tmp_path / "typo")


async def test_surrogates_in_a_tool_call(encoder: PromptEncoder) -> None:
    """Half a surrogate pair from JSON within JSON is a BadRequestError."""
    call = {"id": "1", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}

    with pytest.raises(BadRequestError, match="not valid Unicode"):
        await encoder.encode(ChatPrompt([{"role": "assistant", "content": "", "tool_calls": [call]}]))


@given(st.lists(messages, min_size=1, max_size=3), st.lists(st.dictionaries(texts, json_values), max_size=2))
async def test_any_messages(encoder: PromptEncoder, chat: list[Message], tools: list[dict[str, Any]]) -> None:
    """Messages and tools of any shape are encoded or a BadRequestError, never another error."""
    try:
        ids = await encoder.encode(ChatPrompt(chat, tools=tools or None))
    except BadRequestError:
        return
    assert ids


NAMESPACE = (
    "{% set ns = namespace(rest=messages) %}{% for m in ns.rest %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("text", ["[One][Two]", "One\nTwo"], ids=["0.33", "0.32"])
async def test_settle_namespaces(tiny: Path, tmp_path: Path, text: str) -> None:
    """The probe of parts tells how the engine shapes content, and other chats follow."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(NAMESPACE)
    probe, other = [
        ChatPrompt([{"role": "user", "content": [{"type": "text", "text": each} for each in texts]}])
        for texts in (("One", "Two"), ("1", "2"))
    ]
    with PromptEncoder.load(tmp_path) as encoder, Tokenizer.load(tiny) as tokenizer:

        def ids(text: str) -> list[int]:
            return tokenizer.encode_now(text, add_special_tokens=False)

        assert await encoder.settle(probe, ids(text))
        assert [ids(text.replace("One", "1").replace("Two", "2"))] == await encoder.encode(other)
        assert not await encoder.settle(probe, ids("One, Two"))
        assert [ids(text)] == await encoder.encode(probe), "nothing fits: what fitted before stays"


def test_text_characters() -> None:
    """All texts count; token ids and media do not, however large they are."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "x" * 10_000}}
    parts: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "abc"}, image]}

    assert 5 == text_characters(TextPrompt(["ab", "cde"]))
    assert 0 == text_characters(TokenPrompt([[1] * 1000]))
    assert 5 == text_characters(ChatPrompt([{"role": "system", "content": "ab"}, parts, {"role": "tool"}]))


def test_contents_are_joined_without_separator() -> None:
    """The plain text has neither roles nor the template, and of parts only the texts."""
    parts = [
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": "u"}},
        5,
        {"type": "text"},
    ]
    chat = ChatPrompt(
        [{"role": "system", "content": "a"}, {"role": "user", "content": parts}, {"content": None}]
    )

    assert "ab" == plain_text(chat)


def test_text_parts_as_ray_takes_them() -> None:
    """Any part with a text counts, whatever its type; one without counts by its content, at any depth."""
    deep: object = "h"
    for _ in range(5000):
        deep = [{"type": "tool_result", "content": deep}]
    parts = [
        {"type": "input_text", "text": "a"},
        "b",
        {"text": "c"},
        {"type": "output_text", "text": "d"},
        {"type": None, "text": "e"},
        {"text": 5, "content": "f"},
        {"text": "g", "content": "x"},
        deep,
        {"type": "image_url", "image_url": {"url": "x"}},
        {"text": 5},
        None,
    ]

    assert "abcdefgh" == plain_text(ChatPrompt([{"role": "user", "content": parts}]))


def test_plain_text_of_other_prompts() -> None:
    """The plain text of a text is itself; token ids and unknown prompts have no text."""
    assert "xy" == plain_text(TextPrompt(["x", "y"]))
    assert "" == plain_text(TokenPrompt([[1, 2]])) == plain_text(None)


PARTS = "{%- for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("text", [None, PARTS], ids=["texts", "parts"])
@pytest.mark.parametrize("number", [0, -1], ids=["vllm", "sglang"])
async def test_settle(tiny: Path, tokenizer: Tokenizer, text: str | None, number: int) -> None:
    """The probes show in which dialect an engine prints chats, if its template takes texts, or parts."""

    def model() -> tuple[ChatTemplate, PromptEncoder]:
        template = ChatTemplate(text) if text else ChatTemplate.load(tiny)
        assert template is not None
        return template, PromptEncoder(tokenizer, template)

    (engine_template, engine), (template, encoder) = model(), model()
    engine_template.dialect = engine_template.dialects[number]

    for probe in PROBES["chat"]:
        (ids,) = await engine.encode(probe) or [[]]
        assert [ids] == await encoder.encode(probe) or await encoder.settle(probe, ids)

    assert template.dialect is template.dialects[number]


async def test_no_dialect_fits(tiny: Path, tokenizer: Tokenizer) -> None:
    """Ids that no dialect leads to leave the dialect as it was."""
    template = ChatTemplate.load(tiny)
    encoder = PromptEncoder(tokenizer, template)

    assert not await encoder.settle(chat("hi"), [1, 2])
    assert not await PromptEncoder(tokenizer, None).settle(chat("hi"), [1, 2])
    assert template is not None
    assert template.dialect is template.dialects[0]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("{{ messages[-1].content }} {{ reasoning_effort }}", "between none"),
        ("{{ strftime_now('') }}{{ messages[-1].content }} {{ reasoning_effort }}", "first none"),
        ("{{ messages[-1].content }} {{ 'low' if 1 }}", "between low"),
    ],
)
def test_settled(tokenizer: Tokenizer, text: str, chosen: str) -> None:
    """The template decides between the variants of a chat that came as /v1/messages."""
    prompt = chat(
        "between",
        effort="none",
        system_first=[{"role": "user", "content": "first"}],
        least_effort="low",
    )
    encoder = PromptEncoder(tokenizer, ChatTemplate(text))

    settled = encoder.settled(prompt)

    assert (None, None) == (settled.system_first, settled.least_effort)
    assert chosen == f"{settled.messages[0]['content']} {settled.effort}"
    assert prompt == PromptEncoder(tokenizer, None).settled(prompt)
