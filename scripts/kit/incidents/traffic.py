"""Chats about shared documents, as text: a wrong chat template changes their tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pydoc_data.topics import topics

from scripts.kit.load import LoadRequest
from scripts.kit.workload import MODEL

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
        """The documents: slices of Python's documentation, each with a beginning of its own."""
        chance, source = random.Random(self.seed), "\n".join(topics.values())
        length = round(self.tokens * _CHARACTERS_PER_TOKEN)
        starts = [chance.randrange(len(source) - length) for _ in range(self.count)]
        return [f"Document {n}.\n{source[start : start + length]}" for n, start in enumerate(starts)]

    def chats(self, count: int, *, stamped: bool = False) -> list[LoadRequest]:
        """So many streamed chats, to send at a rate. `stamped`: each begins with another time."""
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
