"""An answer of two workers: what the second one is asked, and how its events go on with those of the first.

    events that the client has ──> Answered ──> body for /v1/completions, its prompt: all ids so far
                                      │                   │ events
                                      └──> Continuation <─┘ ──> events as the client's API has them

The seam is exact: one id, one finish reason, the usage of both, and text without a gap. A request for which
that cannot be promised is refused (`why_not`, `Answered.why_not`), and its client gets an error event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from kvrouter.core.wire.values import TokenId
from kvrouter.relay.events import Event, EventKind, EventReader
from kvrouter.relay.seam import RewriteError

Json: TypeAlias = dict[str, Any]
Decode: TypeAlias = Callable[[Sequence[int]], str]

PATH = "/v1/completions"
SHOW_IDS = b'"return_token_ids":true'
# Tokens that are decoded at the seam, as many as engines do and those of several characters; and characters
# of them that must be what the client has.
_WINDOW, _COMPARED = 24, 8
# What a decoder writes for bytes that are not (yet) a character.
_HALF = "\N{REPLACEMENT CHARACTER}"
# Engines generate as many without `max_tokens`, but in chats (OpenAI's API, as vLLM and SGLang have it).
_COMPLETION_TOKENS = 16
_LAST_EVENT = b"data: [DONE]\n\n"
_FROM_FIRST = ("id", "created", "model", "system_fingerprint")
_GUIDED = (
    "ebnf", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema",
    "regex", "structural_tag", "structured_outputs",
)  # fmt: skip
# Of a chat, what a completion has as well.
_KEPT_NAMES = """
    cache_salt ignore_eos include_stop_str_in_output logit_bias min_p model priority repetition_penalty seed
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream_options temperature top_k
    top_p user
"""
# Of a chat, what made its prompt or says nothing of its answer, or what is set anew or refused.
_OTHER_NAMES = """
    add_generation_prompt add_special_tokens best_of chat_template chat_template_kwargs
    continue_final_message documents echo frequency_penalty functions include_reasoning kv_transfer_params
    logprobs max_completion_tokens max_tokens messages metadata min_tokens n parallel_tool_calls
    presence_penalty prompt_logprobs reasoning_effort request_id response_format return_token_ids store
    stream tool_choice tools top_logprobs truncate_prompt_tokens use_beam_search
"""
_KEPT = frozenset(_KEPT_NAMES.split())
_KNOWN = _KEPT.union(_OTHER_NAMES.split(), _GUIDED)


class NotContinuedError(Exception):
    """Why no other worker goes on with an answer."""


def why_not(body: Mapping[str, Any], *, is_chat: bool, is_inexact: bool = False) -> str:
    """Which feature of a request keeps its stream at its worker; empty: none.

    `is_inexact`: the second part may differ from what the first worker would have sent.
    """
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if not isinstance(body.get(name), int | None):
            return f"`{name}` that is no number"
    feature = _refused(body)
    if feature:
        return feature
    if not is_inexact and body.get("seed") is not None and body.get("temperature", 1.0) != 0:
        return "a seed with a temperature"
    if not is_chat:
        return "" if _is_one_prompt(body.get("prompt")) else "several prompts, or none"
    unknown = sorted(name for name in body.keys() - _KNOWN if body[name] is not None)
    return f"the field `{unknown[0][:80]}`" if unknown else ""


def _refused(body: Mapping[str, Any]) -> str:
    for name in sorted(_REFUSED.keys() & body.keys()):
        feature, harmless = _REFUSED[name]
        value = body[name]
        is_harmless = value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
        if value is not None and not is_harmless:  # 0 log probabilities are some
            return feature
    if _is_formatted(body):
        return "guided decoding"
    return "" if _are_text(body.get("messages")) else "images or other media"


def _is_one_prompt(prompt: object) -> bool:
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    return isinstance(prompt, str) or is_ids


def _is_text(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and part.get("type", "text") == "text" for part in parts)


def _are_text(messages: object) -> bool:
    return messages is None or (isinstance(messages, list) and all(map(_is_text, messages)))


def _is_formatted(body: Mapping[str, Any]) -> bool:
    form = body.get("response_format")
    return form is not None and not (isinstance(form, dict) and form.get("type") == "text")


_REFUSED: Mapping[str, tuple[str, object]] = {
    **dict.fromkeys(("n", "best_of"), ("several answers", 1)),
    "use_beam_search": ("beam search", False),
    "echo": ("echo", False),
    "suffix": ("a suffix", ""),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), ("logprobs", False)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), ("a frequency or presence penalty", 0)),
    **dict.fromkeys(_GUIDED, ("guided decoding", None)),
    **dict.fromkeys(("tools", "functions"), ("tools", [])),
    "kv_transfer_params": ("parameters of a hand-over", None),
    "prompt_embeds": ("prompt embeddings", None),
}
"""What keeps a stream at its worker: the sampler's state is not restored, or it shows more than text. By the
field that asks for it, with a value that does not, as null does not."""


class Answered(Struct):
    """What a client has of an answer."""

    is_chat: bool
    first: Json
    """What all events of it say alike."""
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    lacks_text: bool = False
    """Whether the last token has shown no text: perhaps it is a part of a character."""
    finish_reason: str | None = None
    has_usage: bool = False
    """Whether the event with the usage was sent, the last but one."""

    @classmethod
    def read(cls, content: bytes, *, is_chat: bool) -> Answered:
        """From whole events, of an engine that was asked for token ids. Raises NotContinuedError."""
        found = cls(is_chat, {}, [], [], "")
        try:
            for event in EventReader().feed(content):
                if event.error is not None:
                    raise NotContinuedError("its engine has ended it with an error")
                if event.data and event.kind is not EventKind.END:
                    found.add(_json_of(event))
        except (AttributeError, TypeError, LookupError) as error:
            raise NotContinuedError(f"its engine's events are of another form: {error}") from None
        return found

    def add(self, event: Json) -> None:
        """Add an event of the first worker. Raises NotContinuedError."""
        choices = event.pop("choices", None)
        self.first = self.first or {name: event[name] for name in (*_FROM_FIRST, "object") if name in event}
        self.has_usage = self.has_usage or (not choices and bool(event.get("usage")))
        for choice in choices or ():
            if choice.get("index", 0) != 0:
                raise NotContinuedError("its engine sends several answers")
            ids = _ids(choice.get("token_ids"))
            prompt_ids = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
            self.prompt_ids = self.prompt_ids or _ids(prompt_ids)
            text = self._text_of(choice)
            if text and not ids:
                raise NotContinuedError("its engine sends text without token ids")
            self.output_ids += ids
            self.text += text
            self.lacks_text = not text if ids else self.lacks_text
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _text_of(self, choice: Json) -> str:
        if not self.is_chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        if more := [name for name in delta if name not in {"role", "content"} and delta[name]]:
            raise NotContinuedError(f"its answer has more than text: {more[0][:80]}")
        return delta.get("content") or ""

    def seam(self, stop: Sequence[str], decode: Decode | None) -> tuple[str, Unshown | None]:
        """The text that the client lacks, or the tokens of a character that is not complete.

        Raises NotContinuedError. `stop`: the strings that end it. `decode`: None without a tokenizer.
        """
        if stop:
            return self._held_back(stop, decode), None
        unshown = None if decode is None else self._unshown(decode)
        if unshown is None and (self.lacks_text or self.text.endswith(_HALF)):
            raise NotContinuedError("its last character is not complete, and there is no tokenizer")
        return "", unshown if unshown is not None and unshown.is_any else None

    def _held_back(self, stop: Sequence[str], decode: Decode | None) -> str:
        """The text that its engine held back, as it might have begun a stop string."""
        whole = decode(self.output_ids) if decode is not None else ""
        if not whole.startswith(self.text):
            raise NotContinuedError("stop strings, without a tokenizer")
        if whole.endswith(_HALF) or any(
            whole.endswith(one[:size]) for one in stop for size in range(1, len(one))
        ):
            raise NotContinuedError("its text ends as a stop string begins, or amid a character")
        return whole[len(self.text) :]

    def _unshown(self, decode: Decode) -> Unshown | None:
        """The last tokens, if they are a part of a character; None if this is not the engine's tokenizer.

        As engines do, only the last tokens are decoded: what came before may be no valid text.
        """
        ids, prompt = [*self.prompt_ids, *self.output_ids], len(self.prompt_ids)
        start, at = max(0, len(ids) - _WINDOW), len(ids)
        while at > max(prompt, start) and decode(ids[start:at]).endswith(_HALF):
            at -= 1
        shown = decode(ids[start:at])
        own = shown[len(decode(ids[start:prompt])) :] if start < prompt else shown
        is_same = self.text.endswith(own.lstrip(_HALF)[-_COMPARED:])
        return Unshown(start, len(shown), is_any=at < len(ids)) if is_same else None


class Unshown(Struct, frozen=True):
    """Tokens that an engine had not shown: what is decoded from `start` on has `characters` that it had."""

    start: int
    characters: int
    is_any: bool


def _ids(value: object) -> list[int]:
    """Raises NotContinuedError if these are no token ids."""
    if value is None:
        return []
    try:
        return msgspec.convert(value, list[TokenId])
    except msgspec.ValidationError:
        raise NotContinuedError("its engine sends token ids that are none") from None


def _json_of(event: Event) -> Json:
    try:
        return msgspec.json.decode(event.data, type=dict)
    except (msgspec.DecodeError, RecursionError):
        raise NotContinuedError("its engine sends what is no JSON object") from None


def stops_of(body: Mapping[str, Any]) -> list[str]:
    """The strings that end an answer."""
    stop = body.get("stop")
    strings = stop if isinstance(stop, list) else [stop]
    return [one for one in strings if isinstance(one, str) and one]


def body_after(body: Mapping[str, Any], answered: Answered) -> bytes | None:
    """What the next worker is asked on PATH; None: all that was asked for is there.

    Raises NotContinuedError.
    """
    if not answered.prompt_ids:
        raise NotContinuedError("its engine sends no token ids")
    done = len(answered.output_ids)
    if answered.is_chat:
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        new = {name: value for name, value in body.items() if name in _KEPT}
    else:
        most = body.get("max_tokens", _COMPLETION_TOKENS)
        new = {name: value for name, value in body.items() if name != "truncate_prompt_tokens"}
    if answered.finish_reason is not None or (most is not None and most <= done):
        return None
    new |= {
        "prompt": answered.prompt_ids + answered.output_ids,
        "max_tokens": None if most is None else most - done,  # null: up to the end of the context
        "min_tokens": max(0, (body.get("min_tokens") or 0) - done),
        "stream": True,
        "return_token_ids": True,
    }
    return msgspec.json.encode(new)


class Continuation:
    """Rewrites the events of the next worker.

    `gap`, `unshown`: see Answered.seam; `strips`: clients get no token ids.
    """

    def __init__(
        self,
        answered: Answered,
        gap: str,
        unshown: Unshown | None,
        decode: Decode | None,
        *,
        strips: bool = False,
    ) -> None:
        self.answered = answered
        self._gap = gap
        self._unshown = unshown
        self._decode = decode
        self._strips = strips
        self._prompt_tokens, self._had_tokens = len(answered.prompt_ids), len(answered.output_ids)

    def __call__(self, content: bytes) -> bytes:
        """Whole events in the client's API. Raises RewriteError if one cannot be read."""
        return b"".join(map(self._event, EventReader().feed(content)))

    def _event(self, event: Event) -> bytes:
        if not event.data or event.kind in {EventKind.END, EventKind.ERROR}:
            return event.text
        try:
            return self._rewritten(_json_of(event))
        except (NotContinuedError, AttributeError, TypeError) as error:
            self.answered.prompt_ids = []  # nobody can go on after it
            raise RewriteError(f"its events cannot be read: {error}") from None

    def _rewritten(self, new: Json) -> bytes:
        answered = self.answered
        new |= answered.first
        new["choices"] = [self._choice(choice) for choice in new.get("choices") or ()]
        if new.get("usage"):
            new["usage"] = self._usage(new["usage"])
        return encode_event(stripped(new) if self._strips else new)

    def _choice(self, choice: Json) -> Json:
        answered, ids = self.answered, _ids(choice.get("token_ids"))
        if choice.get("text") and not ids:
            answered.prompt_ids = []  # this engine shows no ids, so nobody can go on after it
        answered.output_ids += ids
        answered.finish_reason = choice.get("finish_reason")
        text = self._next_text(choice.get("text") or "")
        answered.text += text
        if not answered.is_chat:
            return choice | {"text": text, "prompt_token_ids": None}
        kept = {
            name: choice[name] for name in ("finish_reason", "stop_reason", "token_ids") if name in choice
        }
        return {"index": 0, "delta": {"content": text}, "logprobs": None} | kept

    def _next_text(self, text: str) -> str:
        """What the client lacks: an engine shows no text of its prompt, not even the end of a character."""
        unshown, answered = self._unshown, self.answered
        if unshown is None or self._decode is None:
            gap, self._gap = self._gap, ""
            return gap + text
        ids = [*answered.prompt_ids, *answered.output_ids]
        whole = self._decode(ids[unshown.start :])
        if whole.endswith(_HALF) and answered.finish_reason is None:
            return ""
        self._unshown = None
        return whole[unshown.characters :]

    def _usage(self, usage: Json) -> Json:
        prompt, both = self._prompt_tokens, self._had_tokens + usage.get("completion_tokens", 0)
        return usage | {"prompt_tokens": prompt, "completion_tokens": both, "total_tokens": prompt + both}


def last_events(answered: Answered, body: Mapping[str, Any]) -> bytes:
    """The end of an answer to which no worker has to add a token."""
    events, first = [], answered.first
    if answered.finish_reason is None:
        choice: Json = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"delta": {"content": ""}} if answered.is_chat else {"text": ""}
        events.append(first | {"choices": [choice]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") and not answered.has_usage:
        prompt, output = len(answered.prompt_ids), len(answered.output_ids)
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        events.append(first | {"choices": [], "usage": counts})
    return b"".join(map(encode_event, events)) + _LAST_EVENT


def encode_event(event: Json) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


def stripped(event: Json) -> Json:
    """The event without the fields that SHOW_IDS adds."""
    event.pop("prompt_token_ids", None)
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    return event


def without_ids(content: bytes) -> bytes:
    """Whole events, without token ids."""
    kept = []
    for event in EventReader().feed(content):
        if b"token_ids" not in event.text or not event.data.startswith(b"{"):
            kept.append(event.text)
            continue
        try:
            kept.append(encode_event(stripped(msgspec.json.decode(event.data, type=dict))))
        except (msgspec.DecodeError, RecursionError):
            kept.append(event.text)
    return b"".join(kept)
