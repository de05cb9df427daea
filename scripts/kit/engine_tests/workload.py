"""Requests as one company's clients send them: shared system prompts, turns, tools, tenants, adapters.

Each group has its own system prompt, with which its requests begin. All groups together need
more blocks than the engines have, so the engines evict.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from scripts.kit.engine_tests.engines import Kind

Api: TypeAlias = Literal["chat", "messages", "responses"]
Json: TypeAlias = dict[str, Any]

GROUPS = 4
PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
Maker: TypeAlias = "Callable[[int], Request]"
APIS: tuple[Api, ...] = tuple(PATHS)
_PREFIX_WORDS = (60, 330)
_QUESTION_WORDS = (4, 60)
_MOST_TOKENS = 24
_MOST_TURNS = 3
# characters, about 1,000 tokens
_MOST_GROWN = 3_500
_SALTS = ("tenant-a", "tenant-b")
# Composed and decomposed accents, wide characters, joined emoji, right-to-left, odd spaces, markup.
_ODD_WORDS = (
    *("caf\u00e9", "cafe\u0301", "\u4f60\u597d\uff0c\u4e16\u754c", "\U0001f642", "\uff12\uff13"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0645\u0631\u062d\u0628\u0627", "\u0e2a\u0e27\u0e31"),
    *("\u0928\u092e\u0938\u094d\u0924\u0947", "\u00a0", "\u2028", "\u200b", "\t", "\n\n", "\\u0041"),
    *("<|im_end|>", "&lt;b&gt;", "{{jinja}}", "don't", '"quoted"'),
)
_PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string", "description": "of Bern \u2014 \u00e9"}},
    "required": ["town"],
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send. `kind` names its special property; requests with one `chain` use one replica."""

    kind: str
    path: str
    body: Json
    group: int
    chain: int | None = None

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    def encoded(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass(slots=True)
class Workload:
    """An endless, seeded sequence of requests. `add_answer` lets a conversation continue with its answer."""

    model: str
    adapters: tuple[str, ...]
    seed: int = 1
    kind: Kind = "vllm"
    _rng: random.Random = field(init=False)
    _words: list[str] = field(init=False)
    _prefixes: list[str] = field(init=False)
    # by kind and group: the turns so far, without the system prompt
    _turns: dict[tuple[str, int], list[Json]] = field(init=False, default_factory=dict)
    # by group: the response that the next request continues, and how many there were
    _responses: dict[int, tuple[str, int]] = field(init=False, default_factory=dict)
    _grown: dict[int, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._words = _vocabulary()
        self._prefixes = [self._text(_PREFIX_WORDS) for _ in range(GROUPS)]

    def __iter__(self) -> Iterator[Request]:
        """Every kind once, in random order, again and again."""
        makers = [
            self._text_prompt, self._ids, self._chat, self._messages, self._responses_input, self._previous,
            self._tools, self._parts, self._roles, self._salted, self._adapted, self._several, self._unicode,
            self._growing_system,
        ]  # fmt: skip
        if self.kind == "sglang":
            makers = [make for make in makers if make not in self._not_for_sglang()]
        while True:
            for make in self._rng.sample(makers, len(makers)):
                yield self._streamed(make(self._rng.randrange(GROUPS)))

    def _not_for_sglang(self) -> Sequence[Maker]:
        # With n = 2 it computes the prompt beforehand and reports all of it as cached.
        return (self._previous, self._adapted, self._several)

    def add_answer(self, request: Request, answer: str, response_id: str) -> None:
        """Continue a conversation with the answer, up to three turns."""
        if request.kind == "previous response":
            count = self._responses.get(request.group, ("", 0))[1] + 1
            self._responses[request.group] = (response_id, count % _MOST_TURNS)
            return
        turns = self._turns.get((request.kind, request.group))
        if turns is None:
            return
        turns.append({"role": "assistant", "content": answer})
        if len(turns) >= 2 * _MOST_TURNS:
            del self._turns[request.kind, request.group]

    def forget_responses(self) -> None:
        """An engine that died has lost the responses that it kept."""
        self._responses.clear()

    # One maker for each kind

    def _text_prompt(self, group: int) -> Request:
        prompt = f"{self._prefixes[group]} {self._text(_QUESTION_WORDS)}"
        return Request("text", "/v1/completions", self._completion(prompt), group)

    def _ids(self, group: int) -> Request:
        ids = random.Random(group)
        shared = [ids.randrange(300, 1900) for _ in range(64 + 32 * group)]
        own = [self._rng.randrange(300, 1900) for _ in range(self._rng.randrange(1, 80))]
        return Request("ids", "/v1/completions", self._completion(shared + own), group)

    def _chat(self, group: int) -> Request:
        return self._conversation("chat", "chat", group)

    def _messages(self, group: int) -> Request:
        return self._conversation("messages", "messages", group)

    def _responses_input(self, group: int) -> Request:
        return self._conversation("responses", "responses", group)

    def _previous(self, group: int) -> Request:
        """A response that continues the last one of its group by its id; only its own replica knows that."""
        before, count = self._responses.get(group, ("", 0))
        body = self._body("responses") | {"store": True}
        if count:
            body |= {"input": self._question(), "previous_response_id": before}
        else:
            body["input"] = f"{self._prefixes[group]} {self._question()}"
        return Request("previous response", PATHS["responses"], body, group, chain=group)

    def _tools(self, group: int) -> Request:
        """Over each API in its own form: definitions, a call with reasoning, its result, a question."""
        api = self._rng.choice(APIS)
        return self._conversation(f"tools, {api}", api, group, _called(api, self._prefixes[group]))

    def _parts(self, group: int) -> Request:
        """Contents as lists of parts, of one text and of several."""
        api = self._rng.choice(APIS)
        request = self._conversation("parts", api, group)
        turns = [_in_parts(api, turn) for turn in _turns_of(api, request.body)]
        return replace(request, body=request.body | {_list_of(api): turns})

    def _roles(self, group: int) -> Request:
        """System messages in between, a developer's message, a user's name."""
        messages = [
            {"role": "system", "content": self._prefixes[group]},
            {"role": "user", "name": "ann", "content": "Hello"},
            {"role": "assistant", "content": "Yes?"},
            {"role": self._rng.choice(("system", "developer")), "content": "Answer in one sentence."},
            {"role": "user", "name": "bob", "content": self._question()},
        ]
        if self._rng.random() < 0.5:
            return Request("roles", PATHS["chat"], self._body("chat") | {"messages": messages}, group)
        plain = [{name: value for name, value in message.items() if name != "name"} for message in messages]
        body = self._body("responses") | {"input": plain}
        return Request("roles", PATHS["responses"], body, group)

    def _salted(self, group: int) -> Request:
        # SGLang salts no request of /v1/messages.
        apis = APIS if self.kind == "vllm" else ("chat", "responses")
        request = self._conversation("salt", self._rng.choice(apis), group)
        return replace(request, body=request.body | {"cache_salt": self._rng.choice(_SALTS)})

    def _adapted(self, group: int) -> Request:
        request = self._conversation("lora", self._rng.choice(APIS), group)
        return replace(request, body=request.body | {"model": self._rng.choice(self.adapters)})

    def _several(self, group: int) -> Request:
        """Two answers, streamed: in a whole answer vLLM reports what the last of them found cached."""
        request = self._conversation("n", "chat", group)
        return replace(request, body=request.body | {"n": 2, "stream": True, "temperature": 0.7, "seed": 1})

    def _unicode(self, group: int) -> Request:
        api = self._rng.choice(APIS)
        odd = " ".join(random.Random(group).choices(_ODD_WORDS, k=60))
        return self._conversation("unicode", api, group, system=odd)

    def _growing_system(self, group: int) -> Request:
        """A system prompt that is one sentence longer each time, as when an agent adds what it has learnt."""
        api = self._rng.choice(APIS)
        before = self._grown.get(group) or self._prefixes[group]
        grown = f"{before} {self._text(_QUESTION_WORDS)}."
        self._grown[group] = grown if len(grown) < _MOST_GROWN else ""
        return self._conversation("growing system", api, group, system=grown)

    # What they share

    def _conversation(
        self,
        kind: str,
        api: Api,
        group: int,
        begun: tuple[Json, list[Json]] | None = None,
        *,
        system: str = "",
    ) -> Request:
        """The next turn of the conversation of this kind and group, after a fixed beginning."""
        about, beginning = begun or ({}, [])
        turns = self._turns.setdefault((kind, group), [])
        turns.append({"role": "user", "content": self._question()})
        messages = [*beginning, *turns]
        system = system or self._prefixes[group]
        match api:
            case "chat":
                about = about | {"messages": [{"role": "system", "content": system}, *messages]}
            case "messages":
                about = about | {"system": system, "messages": messages}
            case "responses":
                about = about | {"instructions": system, "input": [_as_item(each) for each in messages]}
        return Request(kind, PATHS[api], self._body(api) | about, group)

    def _streamed(self, request: Request) -> Request:
        """One in three as a stream that reports its usage; SGLang's of /v1/messages has no cached tokens."""
        if not request.is_stream and self._rng.random() < 2 / 3:
            return request
        if self.kind == "sglang" and request.path == PATHS["messages"]:
            return request
        body = request.body | {"stream": True}
        if request.path in {PATHS["chat"], "/v1/completions"}:
            body["stream_options"] = {"include_usage": True}
        return replace(request, body=body)

    def _completion(self, prompt: object) -> Json:
        return self._body("chat") | {"prompt": prompt}

    def _body(self, api: Api) -> Json:
        most = "max_output_tokens" if api == "responses" else "max_tokens"
        tokens = self._rng.randrange(1, _MOST_TOKENS)
        if self.kind == "sglang" and api == "responses":
            tokens += 2  # SGLang 0.5.23 gives two less (protocol.py), and refuses -1
        body: Json = {"model": self.model, most: tokens, "temperature": 0}
        return body if api == "messages" else body | {"ignore_eos": True}

    def _question(self) -> str:
        return self._text(_QUESTION_WORDS)

    def _text(self, words: tuple[int, int]) -> str:
        return " ".join(self._rng.choice(self._words) for _ in range(self._rng.randint(*words)))


def _called(api: Api, about: str) -> tuple[Json, list[Json]]:
    """Tool definitions, and turns with a call and its result."""
    described = {"name": "weather", "description": about[:200]}
    asked = {"role": "user", "content": "What is the weather in Bern?"}
    arguments = {"town": "Bern", "days": [1, 2.5, None], "note": "\u00fc"}
    match api:
        case "chat":
            call = {"name": "weather", "arguments": json.dumps(arguments)}
            turns: list[Json] = [
                asked,
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "It is a question.",
                    "tool_calls": [{"id": "c1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny \u2600"},
            ]
            return {
                "tools": [{"type": "function", "function": described | {"parameters": _PARAMETERS}}]
            }, turns
        case "messages":
            blocks = [
                {"type": "thinking", "thinking": "It is a question.", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": arguments},
            ]
            result = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny \u2600"}
            turns = [asked, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            return {"tools": [described | {"input_schema": _PARAMETERS}]}, turns
        case "responses":
            thought = {"type": "reasoning_text", "text": "It is a question."}
            call = {"type": "function_call", "call_id": "c1", "name": "weather"}
            turns = [
                asked,
                {"type": "reasoning", "id": "r1", "summary": [], "content": [thought]},
                call | {"arguments": json.dumps(arguments)},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny \u2600"},
            ]
            return {"tools": [{"type": "function", **described, "parameters": _PARAMETERS}]}, turns


def _as_item(turn: Json) -> Json:
    """An assistant's message as `/v1/responses` gave it out."""
    if turn.get("role") != "assistant":
        return turn
    part = {"type": "output_text", "text": turn["content"], "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def _list_of(api: Api) -> str:
    return "input" if api == "responses" else "messages"


def _turns_of(api: Api, body: Json) -> list[Json]:
    turns: list[Json] = body[_list_of(api)]
    return turns


def _in_parts(api: Api, turn: Json) -> Json:
    if not isinstance(turn["content"], str):
        return turn
    kind = "input_text" if api == "responses" else "text"
    first, _, rest = turn["content"].partition(" ")
    texts = [first, rest] if rest else [first]
    return turn | {"content": [{"type": kind, "text": text} for text in texts]}


def _vocabulary() -> list[str]:
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text("utf-8")
    return sorted({word for word in text.split() if word.isalpha()})
