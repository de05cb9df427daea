"""The published line, `--router-mode kv` and no other flag: every turn of a conversation finds its cache."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scripts.kit.no_flags import APIS, SAID, Conversation
from tests.e2e.fleet import Fleet, running_fleet, until

TURNS = 12


def knows(fleet: Fleet, tokens: int) -> bool:
    """Whether every replica has the events of the only conversation so far, and knows that its turn ended."""
    pools = [frontend.replica.router_for("tiny").pool for frontend in fleet.frontends]
    return all(len(pool.index) >= tokens // pool.block_size and not pool.active.owners() for pool in pools)


def written(usage: dict[str, Any]) -> int:
    """The tokens in the cache: all but the last one of the answer."""
    read = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    return int(read + usage.get("completion_tokens", usage.get("output_tokens", 0)) - 1)


@pytest.mark.parametrize("api", APIS)
async def test_a_growing_conversation(nats_url: str, tiny: Path, api: str) -> None:
    """12 turns through two replicas: all on one worker, each predicted exactly."""
    async with running_fleet(nats_url, uuid.uuid4().hex, mockers=2, engine_model=tiny) as fleet:
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
