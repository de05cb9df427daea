"""Compares token ids computed here with those of the engine, and suggests what to change.

`PROBES` are compared first. `shape_of` tells which chats one comparison speaks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from xxhash import xxh3_128_digest

from kvrouter.tokens.messages import Message
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt

# Double spaces, line breaks, an accent, Chinese, an emoji and a tag: tokenizers differ in these.
_TEXT = "Hello, world! It's  1234 tokens,\n\n\tcaf\u00e9 \u4f60\u597d \U0001f642 <b>x</b> done. "
_TURNS = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Go on"},
]
PROBES: dict[Literal["chat", "text"], Sequence[ChatPrompt | TextPrompt]] = {
    "text": [TextPrompt([_TEXT])],
    # Some templates reject a system message, and some of what differs is only there, or in parts.
    "chat": [
        ChatPrompt(_TURNS),
        ChatPrompt([{"role": "system", "content": "Be brief."}, *_TURNS]),
        ChatPrompt(
            [{"role": "user", "content": [{"type": "text", "text": each} for each in ("One", "Two")]}]
        ),
        # SGLang prints a last message of the assistant as one of the user. Parts show the dialect only if the
        # template takes texts; this shows it in the others, but for those that reject two users in a row.
        ChatPrompt(_TURNS[:2]),
    ],
}


def shape_of(chat: ChatPrompt) -> bytes:
    """Names all but texts and numbers that decides how an engine prints a chat.

    Chats of one shape have the same options, and their messages and tools the same fields, which engines know
    or do not know.
    """
    options = chat.chat_template_kwargs, chat.effort, chat.add_generation_prompt, chat.continue_final_message
    choice = chat.tool_choice if isinstance(chat.tool_choice, str) else type(chat.tool_choice).__name__
    messages = {_shape_of_message(message) for message in chat.messages}
    tools = {_fields(tool, tool.get("function")) for tool in chat.tools or ()}
    has_later_system = any(message.get("role") in {"system", "developer"} for message in chat.messages[1:])
    last = chat.messages[-1].get("role")
    found = (options, choice, chat.add_special_tokens, has_later_system, last, messages, tools)
    return xxh3_128_digest(repr([_sorted(each) for each in found]).encode("utf-8", "surrogatepass"))


def _shape_of_message(message: Message) -> tuple[object, ...]:
    content, calls = message.get("content"), message.get("tool_calls")
    plain = (message.get("role"), type(content).__name__, *message)
    if not isinstance(content, list) and not isinstance(calls, list):  # nearly all
        return plain
    parts = {_part(part) for part in content} if isinstance(content, list) else ()
    called = {_fields(call, call.get("function")) for call in calls} if isinstance(calls, list) else ()
    return (*plain, *sorted(parts), *sorted(called))


def _part(part: object) -> str:
    return f"{part.get('type')} {_fields(part)}" if isinstance(part, dict) else type(part).__name__


def _sorted(value: object) -> object:
    return sorted(map(repr, value)) if isinstance(value, set) else value


def _fields(*values: object) -> str:
    """Of what kind they are; of objects the names of the fields, and of what kind each of these is."""
    return repr(
        [
            [(name, type(each).__name__) for name, each in value.items()]
            if isinstance(value, dict)
            else type(value).__name__
            for value in values
        ]
    )


AROUND_TOKENS = 5
AROUND_CHARACTERS = 20

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which two tokenizations of one prompt differ."""

    position: int
    here_ids: Sequence[int]
    # The ids from AROUND_TOKENS before to AROUND_TOKENS after the position.
    engine_ids: Sequence[int]
    here_text: str
    # Their texts, cut to AROUND_CHARACTERS before and after the first character that differs.
    engine_text: str
    here_tokens: int
    engine_tokens: int
    remedy: str


def find_difference(
    here: Sequence[int], engine: Sequence[int], decode: Decode, *, is_chat: bool
) -> Difference | None:
    """None if the ids are equal."""
    position = _first_difference(here, engine)
    if position is None:
        return None
    around = slice(max(0, position - AROUND_TOKENS), position + AROUND_TOKENS + 1)
    here_text, engine_text = _shortened(_text(here[around], decode), _text(engine[around], decode))
    return Difference(
        position=position,
        here_ids=list(here[around]),
        engine_ids=list(engine[around]),
        here_text=here_text,
        engine_text=engine_text,
        here_tokens=len(here),
        engine_tokens=len(engine),
        remedy=_remedy(list(here), list(engine), decode, is_chat=is_chat),
    )


def _shortened(here: str, engine: str) -> tuple[str, str]:
    first = _first_difference(here, engine) or 0
    around = slice(max(0, first - AROUND_CHARACTERS), first + AROUND_CHARACTERS)
    return here[around], engine[around]


def _first_difference(here: Sequence[object], engine: Sequence[object]) -> int | None:
    for position, (ours, theirs) in enumerate(zip(here, engine, strict=False)):
        if ours != theirs:
            return position
    return None if len(here) == len(engine) else min(len(here), len(engine))


def _remedy(here: list[int], engine: list[int], decode: Decode, *, is_chat: bool) -> str:
    if engine[1:] == here or here[1:] == engine:
        side = "the engine" if engine[1:] == here else "only this frontend"
        first = engine[0] if engine[1:] == here else here[0]
        return (
            f"special tokens: {side} puts {_text([first], decode)!r} first; use the engine's"
            " tokenizer.json (its post_processor adds them)"
        )
    if _text(here, decode) == _text(engine, decode):
        return (
            "same text, other ids: another tokenizer; give --model-path the engine's own directory. Some"
            " engines rebuild the pre-tokenizer of a model type and ignore tokenizer.json:"
            " use --tokenizer remote for them"
        )
    if is_chat:
        return (
            "another chat template: give --chat-template the engine's, or --model-path the engine's own"
            " directory; a template that prints the date differs around midnight and between time zones"
        )
    return "another tokenizer or normalizer: give --model-path the engine's own directory"


def _text(ids: Sequence[int], decode: Decode) -> str:
    """The text of the ids; empty if this tokenizer does not know one of them."""
    try:
        return decode(ids)
    except (OverflowError, ValueError):
        return ""
