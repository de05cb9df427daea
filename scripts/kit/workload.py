"""Requests for fleets of mockers, streamed: generated chats or a trace as token ids, chats as text.

Chats about shared documents, for the demo:

    document, one of a few popular ones ─┐
    question ─┬─ answer ─ question ─┬─ … ┴─> each turn sends the whole chat so far

Arrivals are fixed (open loop): a chat begins at a random moment, and its next question comes some seconds
later. The tokens of answers in a chat are generated, too, so they are cached from the next turn on only.

The trace, for chaos and benchmarks: the excerpt of Mooncake's conversation trace, scaled down. Chats about
shared documents as text, for alerts and pictures: a wrong chat template changes their tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pydoc_data.topics import topics

from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from kvrouter.tokens.tiny import VOCABULARY_SIZE
from scripts.kit.load import LoadRequest

MODEL = "mock"
SECONDS_PER_REQUEST = 35.0 / 640
TOKENS_PER_ID = 64
OUTPUT_DIVISOR = 8


@dataclass(frozen=True, slots=True)
class Chats:
    """What is generated: tokens, seconds. Documents are chosen by Zipf's law."""

    requests: int
    seconds: float
    documents: int = 32
    document_tokens: tuple[int, int] = (1_000, 5_000)
    zipf: float = 0.8
    turns: int = 4
    question_tokens: tuple[int, int] = (16, 64)
    answer_tokens: tuple[int, int] = (16, 48)
    think_s: tuple[float, float] = (2.0, 6.0)
    seed: int = 7

    def drawn(self) -> list[LoadRequest]:
        """The requests in order of arrival; the same each time."""
        chance = random.Random(self.seed)

        def tokens(span: tuple[int, int]) -> list[int]:
            length = round(math.exp(chance.uniform(*map(math.log, span))))
            return [chance.randrange(VOCABULARY_SIZE) for _ in range(length)]

        documents = [tokens(self.document_tokens) for _ in range(self.documents)]
        weights = [rank**-self.zipf for rank in range(1, self.documents + 1)]
        drawn: list[tuple[float, list[int], int]] = []
        while len(drawn) < self.requests:
            (prompt,) = chance.choices(documents, weights)
            at_s = chance.uniform(-self.turns * self.think_s[1], self.seconds)
            for _ in range(self.turns):
                prompt = prompt + tokens(self.question_tokens)
                answer = tokens(self.answer_tokens)
                if 0 <= at_s <= self.seconds:  # a chat may have begun before, or go on after the end
                    drawn.append((at_s, prompt, len(answer)))
                prompt = prompt + answer
                at_s += chance.uniform(*self.think_s)
        drawn = sorted(drawn, key=lambda one: one[0])[: self.requests]
        return [LoadRequest(at_s, completion(prompt, count), count) for at_s, prompt, count in drawn]


def load_requests(count: int, *, output_divisor: int = OUTPUT_DIVISOR) -> list[LoadRequest]:
    """The first `count` requests of the trace, scaled."""
    trace = read_trace(CONVERSATION_EXCERPT, count)
    pace = count * SECONDS_PER_REQUEST / (trace[-1].arrival_s or 1.0)
    made = []
    for at_s, request in zip(_spread([pace * one.arrival_s for one in trace]), trace, strict=True):
        length = max(1, request.prompt_tokens * TOKENS_PER_ID // request.id_tokens)
        prompt = [token for id_ in request.hash_ids for token in _tokens_of(id_)][:length]
        output_tokens = max(1, request.output_tokens // output_divisor)
        made.append(LoadRequest(at_s, completion(prompt, output_tokens), output_tokens))
    return made


def _spread(times: list[float]) -> Iterator[float]:
    """Equal times spread evenly until the next one: as recorded, in steps of 3 s, requests come in bursts."""
    bursts = [list(burst) for _, burst in itertools.groupby(times)]
    for burst, following in itertools.zip_longest(bursts, bursts[1:]):
        gap = following[0] - burst[0] if following else 0.0
        yield from (at + gap * place / len(burst) for place, at in enumerate(burst))


def _tokens_of(hash_id: int) -> list[int]:
    """A trace has no text: an id stands for the same tokens on any machine, so prompts share as they did."""
    noise = hashlib.shake_128(struct.pack("<Q", hash_id)).digest(4 * TOKENS_PER_ID)
    return [number % VOCABULARY_SIZE for number in struct.unpack(f"<{TOKENS_PER_ID}I", noise)]


def completion(prompt: list[int], output_tokens: int) -> bytes:
    """A body that asks for exactly `output_tokens`."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()


# About this many characters of the documentation are one token of the demo's tokenizer.
_CHARACTERS_PER_TOKEN = 3.3
_QUESTIONS = ("What does it say?", "Who has to care?", "Give an example.", "And if it fails?", "Why?")


@dataclass(frozen=True, slots=True)
class Documents:
    """Texts of `tokens` tokens, about. Each chat asks about one of them, chosen by Zipf's law."""

    count: int = 24
    tokens: int = 2_000
    zipf: float = 0.7
    seed: int = 7

    def texts(self) -> list[str]:
        """The documents: slices of Python's documentation, each with its own beginning."""
        chance, source = random.Random(self.seed), "\n".join(topics.values())
        length = round(self.tokens * _CHARACTERS_PER_TOKEN)
        starts = [chance.randrange(len(source) - length) for _ in range(self.count)]
        return [f"Document {n}.\n{source[start : start + length]}" for n, start in enumerate(starts)]

    def chats(self, count: int, *, stamped: bool = False) -> list[LoadRequest]:
        """`count` streamed chats, to send at a rate. `stamped`: each begins with another time."""
        chance, texts = random.Random(self.seed + 1), self.texts()
        weights = [rank**-self.zipf for rank in range(1, self.count + 1)]
        drawn = chance.choices(texts, weights, k=count)
        return [
            chat(
                f"Now: {timedelta(seconds=n)}.\n{text}" if stamped else text,
                f"{chance.choice(_QUESTIONS)} ({n})",
            )
            for n, text in enumerate(drawn)
        ]


def chat(document: str, question: str, output_tokens: int = 24) -> LoadRequest:
    """A streamed chat about a document."""
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": document}, {"role": "user", "content": question}],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return LoadRequest(0.0, json.dumps(body).encode(), output_tokens, "/v1/chat/completions")


def of_team(team: int, requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """The requests as they come through a load balancer, from three addresses of a team: 10.0.TEAM.7 to 9."""
    return [
        replace(one, headers={"X-Forwarded-For": f"10.0.{team}.{7 + number % 3}"})
        for number, one in enumerate(requests)
    ]


def of_two_teams(requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """Every second request is of team 1, the others are of team 2."""
    pairs = zip(of_team(1, requests[::2]), of_team(2, requests[1::2]), strict=True)
    return [one for pair in pairs for one in pair]
