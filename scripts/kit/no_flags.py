"""`python -m kvrouter.frontend --router-mode kv` and no flag about tokens, before two mockers.

A conversation of 12 turns over each API, the two replicas in turn. Each turn after the first must be placed
where the last one ran, with the overlap that the engine then reports.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import aiohttp
from rich.table import Table

from scripts.kit.deployment import Plan, open_stage
from scripts.kit.http_client import HttpError
from scripts.kit.replicas import Replica
from scripts.kit.script import new_console, run, table_of

TURNS = 12
BLOCK_SIZE = 16
SETTLE_S = 10.0
SAID = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 8

Json: TypeAlias = dict[str, Any]


@dataclass
class Conversation:
    """One conversation over one API; `said` is what was said so far, by turns."""

    api: str
    said: list[tuple[str, str]] = field(default_factory=list)

    def request(self) -> tuple[str, Json]:
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

    def answered(self, answer: Json) -> str:
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

    def cached_tokens(self, answer: Json) -> int:
        """As the engine reports them."""
        usage = answer["usage"]
        if self.api == "messages":
            return int(usage.get("cache_read_input_tokens") or 0)
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


@dataclass(frozen=True, slots=True)
class Turn:
    worker: str
    predicted_tokens: int
    cached_tokens: int


APIS = ("chat", "completions", "messages", "responses")


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a turn was placed or predicted otherwise."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kit.no_flags", description=__doc__)
    parser.parse_args(arguments)
    return run("no_flags", _run())


async def _run() -> int:
    async with open_stage("no-flags") as stage, aiohttp.ClientSession() as http:
        plan = Plan("kv", stage.model_path, engines=2, speedup=20.0, block_size=BLOCK_SIZE, gives_model=False)
        deployed = await stage.deploy(plan)
        found = {api: await _converse(http, deployed.replicas, api) for api in APIS}
    new_console().print(_table(found))
    wrong = list(_faults(found))
    for fault in wrong:
        print(f"no_flags: {fault}", file=sys.stderr)
    return 1 if wrong else 0


async def _converse(http: aiohttp.ClientSession, replicas: Sequence[Replica], api: str) -> list[Turn]:
    conversation, turns = Conversation(api), []
    for number in range(TURNS):
        conversation.said.append(("user", f"{api} {number}: {SAID}"))
        path, body = conversation.request()
        url = replicas[number % len(replicas)].url
        async with http.post(url + path, json={"model": "mock", **body}) as response:
            answer = await response.json()
            if response.status != 200:
                raise HttpError(f"{path}: {response.status} {answer}")
        overlap = int(response.headers["x-kvrouter-overlap-blocks"])
        cached = conversation.cached_tokens(answer)
        turns.append(Turn(response.headers["x-kvrouter-worker"], overlap * BLOCK_SIZE, cached))
        conversation.said.append(("assistant", conversation.answered(answer)))
        await _until_settled(replicas)
    return turns


async def _until_settled(replicas: Sequence[Replica]) -> None:
    """Return when all replicas have the same blocks, twice in a row: the events of the turn have arrived."""
    before: list[Any] = []
    async with asyncio.timeout(SETTLE_S):
        while True:
            views = [await replica.view() for replica in replicas]
            now = [(view.index, view.in_flight) for view in views]
            if now == before and all(one == now[0] for one in now):
                return
            before = now
            await asyncio.sleep(0.1)


def _faults(found: dict[str, list[Turn]]) -> Iterator[str]:
    for api, turns in found.items():
        for number, turn in enumerate(turns, 1):
            if turn.predicted_tokens != turn.cached_tokens:
                yield f"{api}, turn {number}: {turn.predicted_tokens} predicted, {turn.cached_tokens} cached"
            if turn.worker != turns[0].worker:
                yield f"{api}, turn {number}: on {turn.worker} instead of {turns[0].worker}"
            if number > 1 and not turn.predicted_tokens:
                yield f"{api}, turn {number}: no overlap"


def _table(found: dict[str, list[Turn]]) -> Table:
    rows = []
    for api, turns in found.items():
        exact = sum(turn.predicted_tokens == turn.cached_tokens for turn in turns)
        cached = " ".join(str(turn.cached_tokens) for turn in turns)
        rows.append([f"/v1/{api}", len({turn.worker for turn in turns}), f"{exact} of {len(turns)}", cached])
    title = f"{TURNS} turns, two replicas in turn, two mockers, no flag about tokens"
    return table_of(title, ("API", "workers used", "exact", "cached tokens reported, by turn"), rows)


if __name__ == "__main__":
    sys.exit(main())
