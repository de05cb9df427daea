"""A prompt's text as Ray Serve takes it."""

from __future__ import annotations

from kvrouter.tokens.plain_text import plain_text
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt, TokenPrompt


def test_contents_are_joined_without_separator() -> None:
    """Roles and templates are no part of it; of parts only the texts are."""
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


def test_prompts() -> None:
    """Text is itself; token ids, and what only the engine knows, have none."""
    assert "xy" == plain_text(TextPrompt(["x", "y"]))
    assert "" == plain_text(TokenPrompt([[1, 2]])) == plain_text(None)
