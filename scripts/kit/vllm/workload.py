"""Requests like those of one company's clients: shared system prompts, turns, tenants, adapters.

Each group has its own system prompt, with which its requests begin. All groups together need
more blocks than the engines have, so the engines evict.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUPS = 6
_PREFIX_WORDS = (60, 330)
_QUESTION_WORDS = (4, 60)
_MOST_TOKENS = 24
_MOST_TURNS = 3
_SALTS = ("tenant-a", "tenant-b")


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send. `kind` names its special property."""

    kind: str
    path: str
    body: dict[str, Any]
    group: int

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.body.get("stream"))

    def encoded(self) -> bytes:
        """The body as sent."""
        return json.dumps(self.body).encode()


@dataclass(slots=True)
class Workload:
    """An endless, seeded sequence of requests. `add_answer` lets a chat continue with its answer."""

    model: str
    adapters: tuple[str, ...]
    seed: int = 1
    _rng: random.Random = field(init=False)
    _words: list[str] = field(init=False)
    _prefixes: list[str] = field(init=False)
    _chats: dict[int, list[dict[str, str]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._words = _vocabulary()
        self._prefixes = [self._text(_PREFIX_WORDS) for _ in range(GROUPS)]

    def __iter__(self) -> Iterator[Request]:
        makers = (self._chat, self._stream, self._text_prompt, self._ids, self._salted, self._adapted)
        while True:
            yield self._rng.choice(makers)(self._rng.randrange(GROUPS))

    def add_answer(self, request: Request, answer: str) -> None:
        """Continue a chat with the answer, up to three turns."""
        if request.kind not in {"chat", "stream"}:
            return
        turns = [*request.body["messages"], {"role": "assistant", "content": answer}]
        self._chats[request.group] = turns if len(turns) < 1 + 2 * _MOST_TURNS else []

    def _chat(self, group: int) -> Request:
        messages = self._chats.get(group) or [{"role": "system", "content": self._prefixes[group]}]
        body = self._body(messages=[*messages, {"role": "user", "content": self._text(_QUESTION_WORDS)}])
        return Request("chat", "/v1/chat/completions", body, group)

    def _stream(self, group: int) -> Request:
        body = {**self._chat(group).body, "stream": True, "stream_options": {"include_usage": True}}
        return Request("stream", "/v1/chat/completions", body, group)

    def _salted(self, group: int) -> Request:
        body = {**self._chat(group).body, "cache_salt": self._rng.choice(_SALTS)}
        return Request("salt", "/v1/chat/completions", body, group)

    def _adapted(self, group: int) -> Request:
        body = {**self._chat(group).body, "model": self._rng.choice(self.adapters)}
        return Request("lora", "/v1/chat/completions", body, group)

    def _text_prompt(self, group: int) -> Request:
        prompt = f"{self._prefixes[group]} {self._text(_QUESTION_WORDS)}"
        return Request("text", "/v1/completions", self._body(prompt=prompt), group)

    def _ids(self, group: int) -> Request:
        ids = random.Random(group)
        shared = [ids.randrange(300, 1900) for _ in range(64 + 32 * group)]
        own = [self._rng.randrange(300, 1900) for _ in range(self._rng.randrange(1, 80))]
        return Request("ids", "/v1/completions", self._body(prompt=shared + own), group)

    def _body(self, **prompt: object) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": self._rng.randrange(1, _MOST_TOKENS),
            "temperature": 0,
            "ignore_eos": True,
            **prompt,
        }

    def _text(self, words: tuple[int, int]) -> str:
        return " ".join(self._rng.choice(self._words) for _ in range(self._rng.randint(*words)))


def _vocabulary() -> list[str]:
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text("utf-8")
    return sorted({word for word in text.split() if word.isalpha()})
