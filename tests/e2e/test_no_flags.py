"""The published line, `--router-mode kv` and no other flag: every turn of a conversation finds its cache."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import Fleet, running_fleet, until

TURNS = 12
SAID = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 8


@dataclass
class Conversation:
    """Over one API; `said` is what was said so far, by turns."""

    api: str
    said: list[tuple[str, str]] = field(default_factory=list)

    def request(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the next turn."""
        messages = [{"role": role, "content": text} for role, text in self.said]
        text = " ".join(text for _, text in self.said)
        match self.api:
            case "chat":
                return "/v1/chat/completions", {"messages": messages, "max_tokens": 8}
            case "completions":
                return "/v1/completions", {"prompt": text, "max_tokens": 8}
            case "messages":
                return "/v1/messages", {"messages": messages, "max_tokens": 8}
            case _:
                return "/v1/responses", {"input": messages, "max_output_tokens": 8}

    def answered(self, answer: dict[str, Any]) -> str:
        """The text of the answer."""
        match self.api:
            case "chat":
                return str(answer["choices"][0]["message"]["content"])
            case "completions":
                return str(answer["choices"][0]["text"])
            case "messages":
                return "".join(part["text"] for part in answer["content"] if part["type"] == "text")
            case _:
                parts = [part for item in answer["output"] for part in item.get("content", ())]
                return "".join(part["text"] for part in parts if part["type"] == "output_text")

    def cached_tokens(self, answer: dict[str, Any]) -> int:
        """As the engine reports them."""
        usage = answer["usage"]
        if self.api == "messages":
            return int(usage.get("cache_read_input_tokens") or 0)
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


def knows(fleet: Fleet, tokens: int) -> bool:
    """Whether every replica has the events of the only conversation so far, and knows that its turn ended."""
    pools = [frontend.replica.router_for("tiny").pool for frontend in fleet.frontends]
    return all(len(pool.index) >= tokens // pool.block_size and not pool.active.owners() for pool in pools)


def written(usage: dict[str, Any]) -> int:
    """The tokens in the cache: all but the last one of the answer."""
    read = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    return int(read + usage.get("completion_tokens", usage.get("output_tokens", 0)) - 1)


@pytest.mark.parametrize("api", ["chat", "completions", "messages", "responses"])
async def test_a_growing_conversation(nats_url: str, tiny: Path, api: str) -> None:
    """12 turns through two replicas: all on one worker, each predicted exactly."""
    default = ("--tokenizer-backend=auto",)
    fleet_of_two = running_fleet(nats_url, uuid.uuid4().hex, mockers=2, engine_model=tiny, flags=default)
    async with fleet_of_two as fleet:
        conversation = Conversation(api)
        workers, predicted, cached = set(), [], []
        for number in range(TURNS):
            conversation.said.append(("user", f"{number}: {SAID}"))
            path, body = conversation.request()
            url = fleet.frontends[number % len(fleet.frontends)].url
            async with fleet.http.post(url + path, json={"model": "tiny", **body}) as response:
                answer = await response.json()
            conversation.said.append(("assistant", conversation.answered(answer)))
            await until(partial(knows, fleet, written(answer["usage"])))
            workers.add(response.headers["x-kvrouter-worker"])
            predicted.append(int(response.headers["x-kvrouter-overlap-blocks"]) * 16)
            cached.append(conversation.cached_tokens(answer))

        assert predicted == cached
        assert all(predicted[1:])
        assert 1 == len(workers)
