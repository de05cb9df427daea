"""What is learnt of an engine, which is an encoder of the same template behind vLLM's two flags."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.errors import KvRouterError
from kvrouter.tokens.chat_options import ChatOptions, Ids, learn
from kvrouter.tokens.prompt import ChatPrompt, PromptEncoder, TokenIds
from kvrouter.tokens.template import ChatTemplate
from kvrouter.tokens.tokenizer import Tokenizer

TEMPLATE = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{{ 'Think: ' ~ (reasoning_effort if reasoning_effort in ['none', 'low', 'max'] else 'much') }}"
)
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def printing(tiny: Path, tmp_path: Path) -> Iterator[PromptEncoder]:
    """An encoder whose template prints tools and effort; `TEMPLATE` knows three efforts."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with PromptEncoder.load(tmp_path) as encoder:
        yield encoder


def ids_of(encoder: PromptEncoder, *, excludes: bool = False, **efforts: str) -> Ids:
    """A vLLM with --exclude-tools-when-tool-choice-none and --reasoning-effort-map."""

    async def ids(chat: ChatPrompt) -> TokenIds:
        if excludes and chat.tool_choice == "none":
            chat = replace(chat, tools=None)
        chat = replace(chat, effort=efforts.get(chat.effort or "", chat.effort))
        (found,) = await encoder.encode(chat) or [[]]
        return found

    return ids


@pytest.mark.parametrize("excludes", [False, True])
async def test_tools(printing: PromptEncoder, excludes: bool) -> None:
    """Whether an engine leaves out the tools is learnt, and holds for `tool_choice: none` only."""
    options = await learn(ids_of(printing), ids_of(printing, excludes=excludes))
    none, auto = ChatPrompt(HI, TOOLS, tool_choice="none"), ChatPrompt(HI, TOOLS, tool_choice="auto")

    assert ChatOptions(leaves_tools_out=excludes) == options
    assert replace(none, tools=None if excludes else TOOLS) == options.applied(none)
    assert auto == options.applied(auto)
    assert "" == options.unknown()


async def test_efforts(printing: PromptEncoder) -> None:
    """An effort that the engine replaces is replaced by one with the same ids."""
    options = await learn(ids_of(printing), ids_of(printing, medium="low", xhigh="max", high="medium"))

    assert {"medium": "low", "xhigh": "max"} == options.efforts
    for asked, used in {"medium": "low", "high": "high", "odd": "odd", None: None}.items():
        found = options.applied(ChatPrompt(HI, effort=asked))
        assert found is not None
        assert used == found.effort


async def test_what_nothing_explains(printing: PromptEncoder) -> None:
    """Chats with other ids than any that are made here are unknown, and named."""
    own = ids_of(printing)

    async def odd(chat: ChatPrompt) -> TokenIds:
        return [*await own(chat), 7] if chat.tools or chat.effort in {"low", "high"} else await own(chat)

    options = await learn(own, odd)

    assert ChatOptions(knows_tools=False, efforts={"low": None, "high": None}) == options
    assert ChatPrompt(HI) == options.applied(ChatPrompt(HI))
    assert None is options.applied(ChatPrompt(HI, TOOLS)) is options.applied(ChatPrompt(HI, effort="low"))
    assert "chats with tools and chats with the reasoning effort low or high have other" in options.unknown()


async def test_tokenize_that_knows_no_effort(printing: PromptEncoder) -> None:
    """Efforts that only the chat route knows, as for gpt-oss, are unknown: `here` is /tokenize."""
    own = ids_of(printing)

    async def tokenize(chat: ChatPrompt) -> TokenIds:
        return await own(replace(chat, effort=None))

    options = await learn(tokenize, own, by_template=False)

    assert {"none": None, "low": None, "max": None} == options.efforts
    assert ChatOptions() == await learn(tokenize, tokenize, by_template=False)
    assert ChatOptions() == await learn(tokenize, own), "a template that prints no effort: nothing is asked"


async def test_probes_that_fail(printing: PromptEncoder) -> None:
    """What the engine refuses, or does not answer, is taken as vLLM does it without flags."""

    async def refuses(_: ChatPrompt) -> TokenIds:
        raise KvRouterError("no")

    assert ChatOptions() == await learn(ids_of(printing), refuses) == await learn(refuses, ids_of(printing))


async def test_template_that_prints_neither(tokenizer: Tokenizer) -> None:
    """An engine is not asked about options that change nothing in this model's prompts."""
    encoder = PromptEncoder(tokenizer, ChatTemplate("{{ messages[0].content }}"))
    asked: list[Any] = []

    async def engine(chat: ChatPrompt) -> TokenIds:
        asked.append(chat)
        return []

    assert (ChatOptions(), []) == (await learn(ids_of(encoder), engine), asked)
