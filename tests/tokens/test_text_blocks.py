"""Routing by text: equal beginnings have equal hashes, and the lengths fit the blocks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.routing.policy import Prompt
from kvrouter.core.wire.hashes import block_hashes
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt
from kvrouter.tokens.text_blocks import text_blocks


def hashed(text: str, **identity: Any) -> Prompt:
    """One text, in blocks of two tokens: eight characters."""
    given = {"lora_name": None, "salt": None, **identity}
    (prompt,) = text_blocks(TextPrompt([text]), 2, **given)
    return prompt


@given(st.text("ab", min_size=1, max_size=40), st.text("ab", max_size=40))
def test_blocks_fit_the_length(text: str, more: str) -> None:
    """There is a hash for each full block, and a longer text keeps the hashes of its beginning."""
    short, long = hashed(text), hashed(text + more)

    assert len(short.hashes) == len(text) // 8 == short.isl // 2
    assert list(short.hashes) == list(long.hashes[: len(short.hashes)])


def test_identity() -> None:
    """LoRA and salt change every hash, and hashes of text differ from hashes of tokens."""
    text = "0123456789abcdef"
    named = [hashed(text), hashed(text, lora_name="a"), hashed(text, salt="a"), hashed(text[::-1])]

    assert 8 == len({hash_ for prompt in named for hash_ in prompt.hashes})
    tokens = [int.from_bytes(text[start : start + 4].encode(), "little") for start in range(0, 16, 4)]
    assert not set(block_hashes(tokens, 2)) & set(named[0].hashes)


def test_chat() -> None:
    """Two turns of a chat share the first; another role, tool or image makes another prompt."""
    system = {"role": "system", "content": "You are of very great help to everyone."}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    def first(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> tuple[int, ...]:
        (prompt,) = text_blocks(ChatPrompt(messages, tools=tools), 2, lora_name=None, salt=None)
        return tuple(prompt.hashes[:4])

    plain = first([system, {"role": "user", "content": "hi"}])
    assert plain == first([system, {"role": "user", "content": "hello"}])
    others = [
        first([{**system, "role": "user"}]),
        first([system], [{"type": "function", "function": {"name": "f"}}]),
        first([{"role": "system", "content": [image, {"type": "text", "text": system["content"]}]}]),
    ]
    assert 4 == len({plain, *others})


def test_half_a_surrogate_pair() -> None:
    """Text without a UTF-8 form has hashes, too; the engine decides whether to reject it."""
    assert 1 == len(hashed("\ud800" * 8).hashes)
