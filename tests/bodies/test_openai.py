from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrouter.bodies import messages
from kvrouter.bodies.openai import (
    CompletionRequest,
    error_body,
    error_event,
    parse_chat,
    parse_completion,
)
from kvrouter.errors import BadRequestError, KvRouterError, NoWorkersError, UnknownModelError
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt, TokenPrompt

HELLO = [{"role": "user", "content": "hello"}]
FIELDS = [
    "model",
    "stream",
    "n",
    "prompt",
    "messages",
    "tools",
    "cache_salt",
    "session_id",
    "chat_template_kwargs",
]

texts = st.text('a{"\\ é\ud800\x00', max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), json_values).map(lambda body: json.dumps(body).encode())


def chat(**body: Any) -> CompletionRequest:
    """The request of a chat body with these fields."""
    request = parse_chat(json.dumps({"messages": HELLO, **body}).encode())
    if not isinstance(request.prompt, ChatPrompt):
        return request
    return replace(request, prompt=replace(request.prompt, for_sglang=None))  # test_sglang.py has this


def completion(**body: Any) -> CompletionRequest:
    """The request of a completion body with these fields."""
    return parse_completion(json.dumps(body).encode())


def chat_prompt(**body: Any) -> ChatPrompt:
    """The prompt of a chat body with these fields."""
    prompt = chat(**body).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_plain_chat() -> None:
    """A chat body with nothing but messages has the engine's defaults."""
    expected = CompletionRequest(
        None, stream=False, prompt=ChatPrompt(HELLO), cache_salt=None, session_id=None, n=1, may_be_ids=True
    )

    assert expected == chat()


def test_full_chat() -> None:
    """All fields that shape the prompt are read; all others are ignored."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = chat(
        model="m",
        stream=True,
        n=2,
        cache_salt="s",
        session_id="abc",
        tools=tools,
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template_kwargs={"x": 1},
        temperature=0.5,
        unheard_of=[{"deep": 1}],
    )

    prompt = ChatPrompt(
        HELLO,
        tools=tools,
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"x": 1},
        add_special_tokens=True,
    )
    assert CompletionRequest("m", True, prompt, "s", "abc", 2, may_be_ids=True) == request


def test_prompts_that_are_computed_whole() -> None:
    """Requests for the prompt's logprobs do not read the cache."""
    assert not completion(prompt="x", prompt_logprobs=0).reads_cache
    assert not completion(prompt="x", echo=True, logprobs=0).reads_cache
    assert not chat(prompt_logprobs=1).reads_cache
    assert not chat(echo=True).reads_cache
    assert completion(prompt="x", echo=True).reads_cache
    assert completion(prompt="x", echo=False, logprobs=2).reads_cache
    assert completion(prompt="x", prompt_logprobs=None).reads_cache


def test_beam_search() -> None:
    """`use_beam_search` in the body requests a beam search."""
    assert [True, False] == [chat(use_beam_search=wanted).is_beam_search for wanted in (True, False)]


def test_null_is_absent() -> None:
    """Clients send null for absent fields."""
    nulls = dict.fromkeys([*FIELDS, "add_generation_prompt", "continue_final_message", "add_special_tokens"])

    assert chat() == chat(**{**nulls, "messages": HELLO})
    assert completion(prompt="a") == completion(**{**nulls, "prompt": "a"})


def test_empty_salt_is_absent() -> None:
    """An empty cache salt equals no salt."""
    assert chat(cache_salt="").cache_salt is None


def test_empty_tools_are_absent() -> None:
    """No tools and an empty list of tools are the same prompt."""
    assert chat() == chat(tools=[])


def test_fields_that_the_template_sees() -> None:
    """Documents and reasoning effort reach the template as in vLLM; `enable_thinking` of a client wins."""
    documents = [{"title": "t", "text": "x"}]

    assert {"documents": documents} == chat_prompt(documents=documents).chat_template_kwargs
    assert {"enable_thinking": True, "reasoning_effort": "low"} == chat_prompt(
        reasoning_effort="low"
    ).variables()
    assert {"enable_thinking": True, "reasoning_effort": "none"} == chat_prompt(
        reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    ).variables()


def test_own_template() -> None:
    """A template sent with the request is not run here: the prompt is unknown."""
    assert chat(chat_template="{{ 1 }}").prompt is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", TextPrompt(["a"])),
        (["a", ""], TextPrompt(["a", ""])),
        ([0, 1, 2**32 - 1], TokenPrompt([[0, 1, 2**32 - 1]])),
        ([[1, 2], [3]], TokenPrompt([[1, 2], [3]])),
    ],
)
def test_four_shapes_of_prompt(prompt: object, expected: object) -> None:
    """A prompt is a text, texts, token ids, or lists of token ids."""
    assert expected == completion(prompt=prompt).prompt


def test_special_tokens_of_a_completion() -> None:
    """By default completions add special tokens, and chats do not."""
    assert (
        TextPrompt(["a"], add_special_tokens=False) == completion(prompt="a", add_special_tokens=False).prompt
    )
    assert not chat_prompt().add_special_tokens


def test_prompt_embeddings() -> None:
    """A prompt given as embeddings has no token ids: None."""
    assert completion(prompt_embeds="aGk=").prompt is None


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        ({}, None),
        ({"truncate_prompt_tokens": 8}, slice(-8, None)),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, slice(-8, None)),
        ({"truncate_prompt_tokens": 8, "truncation_side": "right"}, slice(8)),
        ({"truncate_prompt_tokens": -1}, None),
    ],
)
def test_truncation(truncation: dict[str, Any], kept: slice | None) -> None:
    """The engine keeps a truncated prompt's end, or its start on request; -1 is the engine's own limit."""
    assert kept == chat_prompt(**truncation).kept_tokens
    assert TokenPrompt([[1]], kept) == completion(prompt=[1], **truncation).prompt


@pytest.mark.parametrize(
    "prompt",
    [
        [[]],
        [[1], []],
        [1, "a"],
        ["a", 1],
        ["a", [1]],
        [[1], 1],
        [-1],
        [2**32],
        [[2**32]],
        1,
        {},
    ],
)
def test_unreadable_prompt(prompt: object) -> None:
    """A mixed list or an invalid token id has no prompt here: the engine judges it."""
    assert completion(prompt=prompt).prompt is None


def test_no_prompt() -> None:
    """Without a prompt a completion is rejected with the name of the field, as by every engine."""
    with pytest.raises(BadRequestError) as caught:
        completion(prompt=None)
    assert "prompt" == caught.value.param


def test_no_messages() -> None:
    """Without messages a chat is rejected with the name of the field."""
    with pytest.raises(BadRequestError) as caught:
        chat(messages=None)
    assert "messages" == caught.value.param


def test_empty_prompts() -> None:
    """The engine judges them: a tokenizer or a template may begin with tokens of its own."""
    assert all(
        each.prompt is None for each in (completion(prompt=""), completion(prompt=[]), chat(messages=[]))
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "hello"),
        ("messages", ["hello"]),
        ("tools", {}),
        ("cache_salt", 1),
        ("chat_template_kwargs", []),
        ("add_generation_prompt", "perhaps"),
        ("truncate_prompt_tokens", "two"),
    ],
)
def test_unreadable_field_of_the_prompt(field: str, value: object) -> None:
    """If a field on which the prompt depends cannot be read, the prompt is unknown; the engine decides."""
    asked = chat(**{"model": "m", "stream": True, field: value})

    assert (None, "m", True) == (asked.prompt, asked.model, asked.stream)


@pytest.mark.parametrize(("field", "value"), [("model", 1), ("stream", "perhaps"), ("n", "two"), ("n", 1.5)])
def test_unreadable_field(field: str, value: object) -> None:
    """Any other field that cannot be read is as if absent."""
    asked = chat(**{field: value})

    assert asked.is_odd
    assert chat() == replace(asked, is_odd=False)


@pytest.mark.parametrize("body", [b"", b" \n", b"{", b"null", b"[]", b'"a"', b"{]", b"hello", b"\xff\xfe"])
def test_not_a_json_object(body: bytes) -> None:
    """A body that is not a JSON object is rejected."""
    for parse in (parse_chat, parse_completion):
        with pytest.raises(BadRequestError):
            parse(body)


@given(st.binary() | bodies)
@example(b'{"prompt": "\\ud800"}')
@example(b'{"prompt": "\xed\xa0\x80"}')
@example(b'{"messages": [{"role": "user", "content": "\\udfff and on"}]}')
@example(b'{"model": "\xff", "prompt": "a"}')
@example(b'{"messages": ' + b"[" * 200_000)
@example(b'{"ignored": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")
@example(b'{"prompt": [NaN]}')
@example(b'{"prompt": [1e999]}')
@example(b'{"prompt": [' + b"9" * 10_000 + b"]}")
@example(b'{"n": ' + b"9" * 10_000 + b', "prompt": "a"}')
@example(b'{"messages": [{"role": ' + b"9" * 10_000 + b"}]}")
def test_any_bytes(body: bytes) -> None:
    """Any bytes are parsed or raise BadRequestError, and the error can be encoded."""
    for parse in (parse_chat, parse_completion):
        try:
            request = parse(body)
        except BadRequestError as error:
            answer = json.loads(error_body(error))
        else:
            answer = {"n": request.n}
        assert any(answer.values())


def test_long_message() -> None:
    """A name of a megabyte is not sent back whole."""
    for body in (error_body, messages.error_body):
        answer = json.loads(body(BadRequestError("the model " + "x" * 2**20)))

        assert 2_001 == len(answer["error"]["message"])


def test_error_body() -> None:
    """An error has OpenAI's fields."""
    expected = {"message": "no model 'x'", "type": "NotFoundError", "param": "model", "code": 404}

    assert {"error": expected} == json.loads(error_body(UnknownModelError("no model 'x'", param="model")))


@pytest.mark.parametrize("error", [NoWorkersError("a\n\nb"), KvRouterError("\ud800"), BadRequestError("é")])
def test_error_event(error: KvRouterError) -> None:
    """In a stream an error is one event of one line, even if its message contains newlines."""
    event = error_event(error)

    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert 2 == event.count(b"\n")
    assert error.status == json.loads(event.removeprefix(b"data: "))["error"]["code"]
