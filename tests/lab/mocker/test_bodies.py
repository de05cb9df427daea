"""Valid and invalid request bodies."""

from __future__ import annotations

import pytest

from kvrouter.lab.mocker.bodies import (
    ChatBody,
    CompletionBody,
    SchemaError,
    parse,
    text_prompts,
    token_prompts,
)


def test_defaults() -> None:
    """Completions have 16 tokens, chats have no limit."""
    assert 16 == parse(CompletionBody, b'{"prompt": [1]}').answer_tokens
    assert parse(ChatBody, b'{"messages": []}').answer_tokens is None


def test_newer_name_of_the_limit_wins() -> None:
    """`max_completion_tokens` has priority over `max_tokens`."""
    body = parse(ChatBody, b'{"messages": [], "max_tokens": 1, "max_completion_tokens": 2}')

    assert 2 == body.answer_tokens


def test_unknown_fields_are_ignored() -> None:
    """As in vLLM."""
    assert [1] == parse(CompletionBody, b'{"prompt": [1], "bogus": {}}').prompt


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff", "body"),
        (b"[]", "body"),
        (b"{}", "body.messages"),
        (b'{"messages": 3}', "body.messages"),
        (b'{"messages": [], "max_tokens": "a"}', "body.max_tokens"),
        (b'{"messages": [], "stream_options": {}}', "stream_options"),
        (b'{"messages": [], "cache_salt": ""}', "cache_salt"),
    ],
)
def test_wrong_shape(raw: bytes, param: str) -> None:
    """The error names the wrong field."""
    with pytest.raises(SchemaError) as caught:
        parse(ChatBody, raw)

    assert param == caught.value.param


def test_prompts_of_ids() -> None:
    """One list of ids is one prompt, a list of lists is several; text is not accepted here."""
    assert [[1, 2]] == [prompt.tokens.tolist() for prompt in token_prompts([1, 2]) or []]
    assert [[1], [2]] == [prompt.tokens.tolist() for prompt in token_prompts([[1], [2]]) or []]
    assert token_prompts("text") is None
    assert token_prompts(["text"]) is None


def test_prompts_of_text() -> None:
    """One string is one prompt."""
    assert ["a"] == text_prompts("a")
    assert ["a", "b"] == text_prompts(["a", "b"])


@pytest.mark.parametrize("prompt", [[1, "a"], [[1], 2], [-1], [1 << 32]])
def test_prompts_that_are_neither(prompt: object) -> None:
    """Ids must all be unsigned 32-bit integers."""
    with pytest.raises(SchemaError):
        token_prompts(prompt)


@pytest.mark.parametrize("prompt", ["", [], [""], None, 7, ["a", 1]])
def test_no_prompt(prompt: object) -> None:
    """An empty or missing prompt is rejected."""
    with pytest.raises(SchemaError):
        text_prompts(prompt)
