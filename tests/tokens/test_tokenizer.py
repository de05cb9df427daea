from __future__ import annotations

import asyncio
import json
import threading
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model

from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.tokens.tokenizer import INLINE_CHARACTERS, Tokenizer

SHORT = "to be, or not to be"
LONG = "That is the question, and nobody answers it. " * 20


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
async def test_encodes_like_the_model(tokenizer: Tokenizer, tiny: Path, text: str) -> None:
    """Inline or in a thread, a text has the token ids that its tokenizer.json gives it."""
    model = Model.from_file(str(tiny / "tokenizer.json"))

    assert model.encode(text).ids == await tokenizer.encode(text, add_special_tokens=True)


@given(st.text().filter(lambda text: "<|" not in text))
def test_decodes_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """A byte-level tokenizer is lossless, apart from NFC normalization."""
    ids = tokenizer.encode_now(text, add_special_tokens=False)

    assert unicodedata.normalize("NFC", text) == tokenizer.decode(ids)


def test_special_tokens_in_the_text(tokenizer: Tokenizer) -> None:
    """A special token's name in the text is that token, as in the engine."""
    assert [1, 2] == tokenizer.encode_now("<|im_start|><|im_end|>", add_special_tokens=False)


def test_the_file_does_not_truncate(tiny: Path, tmp_path: Path) -> None:
    """Truncation and padding that tokenizer.json asks for are for training, not for prompts."""
    model = Model.from_file(str(tiny / "tokenizer.json"))
    model.enable_truncation(4)
    model.enable_padding(length=64)
    model.save(str(tmp_path / "tokenizer.json"))

    with Tokenizer.load(tmp_path) as tokenizer, Tokenizer.load(tiny) as plain:
        found = tokenizer.encode_now(LONG, add_special_tokens=True)

        assert plain.encode_now(LONG, add_special_tokens=True) == found


def test_adds_special_tokens_on_request(tiny: Path, tmp_path: Path) -> None:
    """What the post-processor adds, a start-of-text token here, comes only with add_special_tokens."""
    file = json.loads((tiny / "tokenizer.json").read_text())
    start = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": start},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))

    with Tokenizer.load(tmp_path) as tokenizer:
        plain = tokenizer.encode_now(SHORT, add_special_tokens=False)

        assert [1, *plain] == tokenizer.encode_now(SHORT, add_special_tokens=True)


async def test_half_a_surrogate_pair(tokenizer: Tokenizer) -> None:
    """A text without a UTF-8 form is a BadRequestError, inline and in a thread."""
    for text in ("\ud800", "\ud800" * (INLINE_CHARACTERS + 1)):
        with pytest.raises(BadRequestError, match="not valid Unicode"):
            await tokenizer.encode(text, add_special_tokens=False)


async def test_cancelled_while_waiting_for_a_thread(tiny: Path) -> None:
    """A job cancelled before a thread was free never runs, and the pool continues."""
    release, ran = threading.Event(), threading.Event()
    with Tokenizer.load(tiny, threads=1) as tokenizer:
        busy = asyncio.create_task(tokenizer.in_thread(release.wait, 1))
        waiting = asyncio.create_task(tokenizer.in_thread(ran.set, 1))
        await asyncio.sleep(0)  # one turn of the loop: both are in the pool now

        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        release.set()

        assert await busy
        assert await tokenizer.encode(LONG, add_special_tokens=False)
    assert not ran.is_set()


async def test_cancelled_while_encoding(tiny: Path) -> None:
    """A caller may be cancelled while its text is encoded: the result is dropped, nothing is logged."""
    started, release = threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        release.wait()
        raise ValueError("an error after the caller has gone")

    with Tokenizer.load(tiny, threads=1) as tokenizer:
        encoding = asyncio.create_task(tokenizer.in_thread(job, 1))
        await asyncio.to_thread(started.wait)

        encoding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await encoding
        release.set()


def test_no_tokenizer_file(tmp_path: Path) -> None:
    """A directory without tokenizer.json is a ConfigError with its name and the remedy."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing: --model-path must name"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", "not json"])
def test_broken_tokenizer_file(tmp_path: Path, content: str) -> None:
    """A tokenizer.json that is not a tokenizer is a ConfigError."""
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
