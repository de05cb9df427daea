from __future__ import annotations

import json
from pathlib import Path

from kvrouter.tokens import tiny as module
from kvrouter.tokens.template import ChatTemplate
from kvrouter.tokens.tiny import MAX_MODEL_TOKENS, VOCABULARY_SIZE, build_tiny_model, main
from kvrouter.tokens.tokenizer import Tokenizer


def contents(path: Path) -> dict[str, bytes]:
    """Name to bytes of each file."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_same_every_time(tiny: Path, tmp_path: Path) -> None:
    """Two builds are the same byte for byte, so that hosts need not share the directory."""
    main([str(tmp_path / "deep" / "down")])

    assert contents(tiny) == contents(tmp_path / "deep" / "down")


def test_complete_directory_is_left_alone(tiny: Path) -> None:
    """Building a complete model again writes nothing."""
    before = {file: file.stat().st_mtime_ns for file in tiny.iterdir()}

    build_tiny_model(tiny)

    assert before == {file: file.stat().st_mtime_ns for file in tiny.iterdir()}


def test_incomplete_directory_is_completed(tiny: Path, tmp_path: Path) -> None:
    """Files that an interrupted build left out are added."""
    (tmp_path / "config.json").write_text("{}")

    build_tiny_model(tmp_path)

    assert contents(tiny) == contents(tmp_path)


def test_config_agrees_with_the_tokenizer(tiny: Path, tokenizer: Tokenizer) -> None:
    """The vocabulary has the size in config.json, and its end ids are the special tokens."""
    config = json.loads((tiny / "config.json").read_text())

    assert VOCABULARY_SIZE == config["vocab_size"] == tokenizer.vocabulary_size
    assert MAX_MODEL_TOKENS == config["max_position_embeddings"]
    assert [config["pad_token_id"]] == tokenizer.encode_now("<|endoftext|>", add_special_tokens=False)
    assert [config["eos_token_id"]] == tokenizer.encode_now("<|im_end|>", add_special_tokens=False)


def test_english_is_compressed(tokenizer: Tokenizer) -> None:
    """A token stands for more than two characters of English, so that prompts have lifelike lengths."""
    text = (module.__doc__ or "") * 4

    assert len(text) > 2 * len(tokenizer.encode_now(text, add_special_tokens=False))


def test_template_knows_tools(tiny: Path) -> None:
    """The demo's prompts contain the tools and the calls, one JSON object a line."""
    template = ChatTemplate.load(tiny)
    assert template
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    prompt = template.render(
        [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )

    assert prompt == (
        "<|im_start|>system\nTools:\n"
        '{"type": "function", "function": {"name": "add", "description": null, "parameters": null}}\n'
        "<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        '<|im_start|>assistant\n\n{"arguments": {"a": 1}, "name": "add"}<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
