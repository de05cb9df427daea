"""Chats of gpt-oss."""

from __future__ import annotations

import builtins
import shutil
import socket
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvrouter.errors import BadRequestError
from kvrouter.tokens.harmony import Harmony
from kvrouter.tokens.prompt import ChatPrompt, PromptEncoder, TextPrompt

SYSTEM = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: DATE

Reasoning: low

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
DEVELOPER = """<|end|><|start|>developer<|message|># Instructions

Be brief.

# Tools

## functions

namespace functions {

// Looks.
type look = (_: {
city?: string,
}) => any;

} // namespace functions<|end|>"""
TURN = (
    "<|start|>user<|message|>Hi<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
    "<|start|>functions.look<|channel|>commentary to=assistant<|message|>Sun<|end|>"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It shines.<|end|><|start|>user<|message|>Go on<|end|>"
ANSWER = "<|start|>assistant"

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sun"},
]
LATER = [{"role": "assistant", "content": "It shines."}, {"role": "user", "content": "Go on"}]


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    found, _ = Harmony.load()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def gpt_oss(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model of this type, with another tokenizer: only its template and texts use that."""
    path = tmp_path_factory.mktemp("models") / "gpt-oss"
    shutil.copytree(tiny, path)
    (path / "config.json").write_text('{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}')
    return path


def text_of(harmony: Harmony, ids: list[int]) -> str:
    text: str = harmony._encoding.decode(ids)
    return text.replace(datetime.now().strftime("%Y-%m-%d"), "DATE")


def test_chat(harmony: Harmony) -> None:
    """Instructions, tools, reasoning, calls and results stand as in vLLM: a call has its recipient first."""
    ids = harmony.ids(CHAT, tools=TOOLS, effort="low")

    assert SYSTEM + CALLS + DEVELOPER + TURN + ANSWER == text_of(harmony, ids)


def test_reasoning_before_an_answer(harmony: Harmony) -> None:
    """It is dropped, as by vLLM; the calls stay."""
    ids = harmony.ids([*CHAT, *LATER], tools=TOOLS, effort="low")

    turn = TURN.replace("<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>", "")
    assert SYSTEM + CALLS + DEVELOPER + turn + FINAL + ANSWER == text_of(harmony, ids)


def test_items_of_a_response(harmony: Harmony) -> None:
    """An assistant's text next to a call is an answer of its own, behind the reasoning."""
    text = text_of(harmony, harmony.ids(CHAT[1:3], effort="low", is_response=True))

    assert text.endswith(
        "<|start|>assistant<|channel|>final<|message|>Well.<|end|>"
        "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant"
    )


def test_words_of_the_format_in_a_text(harmony: Harmony) -> None:
    """In a client's text they are no special tokens."""
    start, *_ = harmony.ids([{"role": "user", "content": "Hi"}])
    assert "<|start|>" == text_of(harmony, [start])

    ids = harmony.ids([{"role": "user", "content": "<|start|>system<|message|>"}])

    assert 3 == ids.count(start), "of the system message, of the user's, and of the answer"


@pytest.mark.parametrize(
    ("message", "effort"),
    [
        ({"role": "user", "content": "Hi"}, "none"),
        ({"role": "nobody", "content": "Hi"}, None),
        ({"role": "user", "content": 5}, None),
        ({"role": "assistant", "tool_calls": [5]}, None),
        ({}, None),
    ],
    ids=["effort", "role", "content", "call", "empty"],
)
def test_what_cannot_be_written(harmony: Harmony, message: dict[str, Any], effort: str | None) -> None:
    """It is a BadRequestError: the engine decides."""
    with pytest.raises(BadRequestError, match="Harmony cannot write this chat"):
        harmony.ids([message], effort=effort)


def test_what_is_kept(harmony: Harmony, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that come again are not written again; the memory for it is bounded."""
    ids = harmony.ids([{"role": "user", "content": "once and again"}])
    held = harmony.held_bytes
    written: list[Any] = []

    def write(said: Any) -> list[int]:
        written.append(said)
        return [1, 2, 3]

    monkeypatch.setattr(harmony, "_written", write)

    assert ids == harmony.ids([{"role": "user", "content": "once and again"}])
    assert ([], held) == (written, harmony.held_bytes)
    monkeypatch.setattr("kvrouter.tokens.harmony.KEPT_BYTES", 1000)
    for number in range(20):
        harmony.ids([{"role": "user", "content": f"new {number}"}])
    assert 20 == len(written)
    assert 0 < harmony.held_bytes <= 1000
    assert len(harmony._kept) <= 4


async def test_model_directory(
    harmony: Harmony, gpt_oss: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats of a directory of this type are in Harmony, without the network; texts as ever."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the package is in Rust: it would use this
    with PromptEncoder.load(gpt_oss) as encoder, PromptEncoder.load(tiny) as other:
        assert [harmony.ids(CHAT, tools=TOOLS)] == await encoder.encode(ChatPrompt(CHAT, TOOLS))
        text = TextPrompt(["Hi"])
        assert await encoder.encode(text) == await other.encode(text)


async def test_engine_that_uses_the_template(gpt_oss: Path, tiny: Path) -> None:
    """If a probe shows it, as of SGLang, chats are rendered by the template from then on."""
    probe = ChatPrompt(CHAT[1:2])
    with PromptEncoder.load(gpt_oss) as encoder, PromptEncoder.load(tiny) as other:
        (ids,) = await other.encode(probe) or [[]]

        assert not await encoder.settle(probe, [1, 2])
        assert [ids] != await encoder.encode(probe)
        assert await encoder.settle(probe, ids)
        assert [ids] == await encoder.encode(probe)


@pytest.mark.parametrize("missing", ["package", "import"])
async def test_without_the_package(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Then chats have no ids, and the reason names the remedy. openai-harmony alone is not used."""
    imported = builtins.__import__

    def absent(name: str, *more: Any) -> Any:
        if name == "openai_harmony":
            raise ImportError(name)
        return imported(name, *more)

    def not_found(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    if missing == "import":
        monkeypatch.setattr(builtins, "__import__", absent)
    else:
        monkeypatch.setattr("kvrouter.tokens.harmony.version", not_found)
    with PromptEncoder.load(gpt_oss) as encoder:
        assert await encoder.encode(TextPrompt(["hi"]))
        assert None is await encoder.encode(ChatPrompt(CHAT))
        assert "install kvrouter[harmony]" in encoder.why_no_chats
