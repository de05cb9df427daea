"""Both parts of an answer, with engines and clients that send anything."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.bodies.continuation import (
    Answered,
    Continuation,
    NotContinuedError,
    body_after,
    encode_event,
    last_events,
    stops_of,
    why_not,
    without_ids,
)
from kvrouter.relay.seam import RewriteError

FIRST = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
_SCALARS = st.none() | st.booleans() | st.integers(-1, 1 << 70) | st.text(max_size=3)
ANYTHING = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
CHOICES = st.dictionaries(
    st.sampled_from(["text", "delta", "token_ids", "prompt_token_ids", "finish_reason"]),
    ANYTHING | st.dictionaries(st.sampled_from(["content", "role"]), ANYTHING),
)
EVENTS = st.dictionaries(
    st.sampled_from(["choices", "usage", "id"]), ANYTHING | st.lists(CHOICES, max_size=2)
)


def event(text: str, *ids: int, **more: Any) -> bytes:
    return encode_event({**FIRST, "choices": [{"index": 0, "text": text, "token_ids": ids, **more}]})


def first_part(*texts: str) -> bytes:
    """Events with the tokens 10, 11 and so on."""
    rest = [event(text, 10 + at) for at, text in enumerate(texts[1:], start=1)]
    return b"".join([event(texts[0], 10, prompt_token_ids=[1, 2, 3]), *rest])


@given(st.lists(EVENTS, max_size=4), st.booleans())
def test_engines_that_send_anything(events: list[Any], is_chat: bool) -> None:
    """No event leads to an error but the one that keeps the stream at its worker."""
    content = b"".join(map(encode_event, events))
    without_ids(content)
    continued = Continuation(Answered.read(first_part("a"), is_chat=False), "", None, None)
    with contextlib.suppress(RewriteError):
        assert isinstance(continued(content), bytes)
    with contextlib.suppress(NotContinuedError):
        answered = Answered.read(first_part("a") + content, is_chat=is_chat)
        answered.seam([], None)
        last_events(answered, {"stream_options": {"include_usage": True}})
        body_after({"model": "m"}, answered)


@given(
    st.dictionaries(
        st.sampled_from(
            ["max_tokens", "min_tokens", "stop", "messages", "n", "seed", "response_format", "prompt"]
        ),
        ANYTHING | st.dictionaries(st.text(max_size=2), ANYTHING, max_size=2),
    ),
    st.booleans(),
)
def test_bodies_with_anything(body: dict[str, Any], is_chat: bool) -> None:
    if not why_not(body, is_chat=is_chat):
        stops_of(body)
        body_after(body, Answered.read(first_part("a"), is_chat=False))


@pytest.mark.parametrize(
    "events",
    [
        b"data: [1]\n\n",
        event("a"),  # text without ids
        event("a", 1),  # the ids of the prompt are missing
        first_part("a") + event("b", -1),
        first_part("a") + encode_event({"choices": [{"text": "b", "token_ids": "12"}]}),
    ],
)
def test_not_continued(events: bytes) -> None:
    with pytest.raises(NotContinuedError):
        body_after({}, Answered.read(events, is_chat=False))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "tool_calls", "function_call"])
def test_answers_with_more_than_text(name: str) -> None:
    """A parser of the engine would begin anew."""
    delta = {"content": None, name: "x"}
    events = encode_event({**FIRST, "choices": [{"index": 0, "delta": delta, "token_ids": [1]}]})
    with pytest.raises(NotContinuedError, match=name):
        Answered.read(events, is_chat=True)


def test_what_is_left() -> None:
    """Of `max_tokens` and `min_tokens`; completions without `max_tokens` have 16, chats as many as fit."""
    answered = Answered.read(first_part("a", "b"), is_chat=False)

    def left(body: Any, *, is_chat: bool = False) -> Any:
        answered.is_chat = is_chat
        new = body_after(body, answered)
        return None if new is None else [json.loads(new)[name] for name in ("max_tokens", "min_tokens")]

    assert left({"max_tokens": 9, "min_tokens": 5}) == [7, 3]
    assert left({}) == [14, 0]
    assert left({"max_tokens": None}) == [None, 0]
    assert left({"max_tokens": 2}) is None
    assert left({}, is_chat=True) == [None, 0]
    assert left({"max_tokens": 9, "max_completion_tokens": 4}, is_chat=True) == [2, 0]


def test_stop_strings() -> None:
    """With a tokenizer the text that was held back is shown, unless a stop string may have begun."""
    texts = {10: "ab", 11: "cd", 12: "ef"}
    answered = Answered.read(first_part("ab", "", ""), is_chat=False)

    def decode(ids: Any) -> str:
        return "".join(texts[one] for one in ids)

    assert answered.seam(["XY"], decode) == ("cdef", None)
    for stop in ("fX", "efgh", "cdefg"):
        with pytest.raises(NotContinuedError, match="stop string"):
            answered.seam([stop], decode)
    with pytest.raises(NotContinuedError, match="without a tokenizer"):
        answered.seam(["XY"], None)


def test_text_that_is_no_text() -> None:
    """Bytes that are no characters, long before: only the last tokens are decoded."""
    answered = Answered.read(first_part(*["\N{REPLACEMENT CHARACTER}?"] * 30, "x"), is_chat=False)
    text, unshown = answered.seam([], lambda ids: "".join("x" if one == 40 else "\ufffd?" for one in ids))
    assert (text, unshown) == ("", None)


def test_usage_of_both() -> None:
    answered = Answered.read(first_part("a", "b"), is_chat=False)
    continued = Continuation(answered, "", None, None)
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    (seen,) = [msgspec.json.decode(continued(encode_event({"choices": [], "usage": usage}))[6:], type=dict)]
    assert seen["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert seen["id"] == "c"
