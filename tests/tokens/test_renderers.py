from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvrouter.tokens.prompt import ChatPrompt, PromptEncoder, TextPrompt
from kvrouter.tokens.renderers import own_renderer

KIMI = json.dumps({"architectures": ["KimiK3ForConditionalGeneration"]})


@pytest.mark.parametrize(
    ("name", "text", "renderer"),
    [
        ("tekken.json", "{}", "mistral"),
        ("tokenizer.model.v3", "", "mistral"),
        ("tokenizer.model", "", ""),
        ("config.json", KIMI, "kimi_k3"),
        ("config.json", '{"architectures": ["Qwen2ForCausalLM"]}', ""),
        ("config.json", '{"architectures": null}', ""),
        ("config.json", "[" * 100_000, ""),
    ],
    ids=["tekken", "v3", "sentencepiece", "kimi", "qwen", "null", "broken"],
)
def test_renderer(tmp_path: Path, name: str, text: str, renderer: str) -> None:
    """The program that writes a model's chats shows in the names of files, and in the architecture."""
    (tmp_path / name).write_text(text)

    assert renderer == own_renderer(tmp_path)


async def test_chats_are_left_to_the_engines(tiny: Path, tmp_path: Path) -> None:
    """The template of such a directory is not used, unless it is given by hand. Texts have their ids."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(KIMI)
    template = tmp_path / "chat_template.jinja"
    chat = ChatPrompt([{"role": "user", "content": "hi"}])
    with PromptEncoder.load(tmp_path) as encoder, PromptEncoder.load(tmp_path, chat_template=template) as own:
        assert await encoder.encode(TextPrompt(["hi"]))
        assert None is await encoder.encode(chat)
        assert "tokenizer mode kimi_k3" in encoder.why_no_chats
        assert await own.encode(chat)
