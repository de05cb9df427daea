"""Requests for fleets of mockers, as streaming completions of token ids: generated chats, or a trace.

Chats about shared documents, for the demo:

    document, one of a few popular ones ─┐
    question ─┬─ answer ─ question ─┬─ … ┴─> each turn sends the whole chat so far

Arrivals are fixed (open loop): a chat begins at a random moment, and its next question comes some seconds
later. The tokens of answers in a chat are generated, too, so they are cached from the next turn on only.

The trace, for chaos and benchmarks: the excerpt of Mooncake's conversation trace, scaled down.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, Prompts, Scaling, read_trace, scaled, spread
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
        return [LoadRequest(at_s, _completion(prompt, count), count) for at_s, prompt, count in drawn]


def load_requests(count: int, *, output_divisor: int = OUTPUT_DIVISOR) -> list[LoadRequest]:
    """The first `count` requests of the trace, scaled."""
    scaling = Scaling(TOKENS_PER_ID, output_divisor, duration_s=count * SECONDS_PER_REQUEST)
    trace = spread(scaled(read_trace(CONVERSATION_EXCERPT, count), scaling))
    prompts = Prompts(tokens_per_id=TOKENS_PER_ID, vocabulary_size=VOCABULARY_SIZE)
    return [
        LoadRequest(
            at_s=request.arrival_s,
            body=_completion(prompts.token_ids(request), request.output_tokens),
            output_tokens=request.output_tokens,
        )
        for request in trace
    ]


def _completion(prompt: list[int], output_tokens: int) -> bytes:
    """A body with exactly so many output tokens."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()
