"""The published line, `--router-mode kv` and no other flag: every turn of a conversation finds its cache."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrouter.tokens.tiny import build_tiny_model
from tests.e2e.fleet import Fleet, running_fleet, until

TURN = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 8
TURNS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's directory, which only the engines know."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_model(path)
    return path


async def ask(fleet: Fleet, number: int, path: str, body: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
    """The worker, its predicted cached tokens, and the answer. The replicas are asked in turn."""
    url = fleet.frontends[number % len(fleet.frontends)].url
    async with fleet.http.post(f"{url}{path}", json={"model": "tiny", "max_tokens": 8, **body}) as response:
        assert 200 == response.status
        headers, answer = response.headers, await response.json()
    size = fleet.frontends[0].replica.router_for("tiny").pool.block_size
    return headers["x-kvrouter-worker"], int(headers["x-kvrouter-overlap-blocks"]) * size, answer


def cached_tokens(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens", 0))


def knows(fleet: Fleet, usage: dict[str, Any]) -> bool:
    """Whether every replica has the events of the only conversation so far."""
    pools = [frontend.replica.router_for("tiny").pool for frontend in fleet.frontends]
    written = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token is not computed
    return all(len(pool.index) >= written // pool.block_size for pool in pools)


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_a_growing_conversation(nats_url: str, model: Path, kind: str) -> None:
    """12 turns through two replicas: all on one worker, each predicted exactly."""
    async with running_fleet(nats_url, uuid.uuid4().hex, mockers=2, engine_model=model) as fleet:
        messages: list[dict[str, str]] = []
        text, workers, predicted, actual = "", [], [], []
        for number in range(TURNS):
            messages.append({"role": "user", "content": f"{number}: {TURN}"})
            text += f"{number}: {TURN}"
            body: dict[str, Any] = {"messages": messages} if kind == "chat" else {"prompt": text}
            path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
            worker, overlap, answer = await ask(fleet, number, path, body)
            choice = answer["choices"][0]
            text += choice.get("text", "")
            messages.append({"role": "assistant", "content": choice.get("message", {}).get("content", "")})
            await until(partial(knows, fleet, answer["usage"]))
            workers.append(worker)
            predicted.append(overlap)
            actual.append(cached_tokens(answer))

        assert predicted == actual
        assert all(predicted[1:])
        assert 1 == len(set(workers))
