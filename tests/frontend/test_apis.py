"""/v1/messages: its place, its prediction and its errors, with scripted workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.tables.predictions import LEAST, PredictionKind
from tests.frontend.fleet import POOL, FleetOf
from tests.frontend.workers import LAST_CHUNK, OK, SSE_HEAD, answer, chunk, says, says_and_closes

MESSAGES = "/v1/messages"
LONG = "Tell me about the cache of a transformer, block by block. " * 8
BODY: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}
STOP = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
START = b'event: message_start\ndata: {"type": "message_start"}\n\n'

KV = ("--router-mode", "kv", "--no-use-kv-events")


async def test_placed_as_a_chat(fleet_of: FleetOf, tiny: Path) -> None:
    """A request finds the blocks of an equal chat, and its body reaches the worker unchanged."""
    async with fleet_of("--model-path", str(tiny), *KV, scripts=(OK, OK)) as fleet:
        first = await fleet.ask(BODY, path="/v1/chat/completions")
        second = await fleet.ask({**BODY, "stream": True}, path=MESSAGES)

        assert first.header("x-kvrouter-worker") == second.header("x-kvrouter-worker")
        assert int(second.header("x-kvrouter-overlap-blocks")) > 3
        (worker,) = (one for one in fleet.workers if one.requests)
        assert [BODY, {**BODY, "stream": True}] == [received.json for received in worker.requests]


async def test_unreadable(fleet_of: FleetOf, tiny: Path, tmp_path: Path) -> None:
    """What cannot be converted, or what the template here rejects, goes to a worker by load."""
    template = tmp_path / "rejecting.jinja"
    template.write_text("{{ raise_exception('no') }}")
    async with fleet_of("--model-path", str(tiny), "--chat-template", str(template)) as fleet:
        for body in ({**BODY, "system": 7}, BODY):
            response = await fleet.ask(body, path=MESSAGES)

            assert (200, "0") == (response.status, response.header("x-kvrouter-overlap-blocks"))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({**BODY, "model": "gpt-4"}, "not_found_error"),
        ({**BODY, "kvrouter": {"mode": "unheard-of"}}, "invalid_request_error"),
    ],
)
async def test_errors(fleet_of: FleetOf, body: dict[str, Any], kind: str) -> None:
    """Errors of the router have Anthropic's form."""
    async with fleet_of() as fleet:
        response = await fleet.ask(body, path=MESSAGES)

        error = json.loads(response.body)
        assert ("error", kind) == (error["type"], error["error"]["type"])


async def test_broken_stream(fleet_of: FleetOf) -> None:
    """A stream whose worker breaks off ends in Anthropic's error event."""
    async with fleet_of(scripts=(says_and_closes(SSE_HEAD + chunk(START)),)) as fleet:
        response = await fleet.ask({**BODY, "stream": True}, path=MESSAGES)

        assert response.body.startswith(START + b'event: error\ndata: {"type":"error","error":{"type":')


async def test_engine_without_the_route(fleet_of: FleetOf) -> None:
    """A 404 for the path is the engine's answer: it does not mean that the worker is at fault."""
    async with fleet_of(scripts=(says(answer(b'{"detail":"Not Found"}', 404)),) * 2) as fleet:
        response = await fleet.ask(BODY, path=MESSAGES)

        assert (404, 1) == (response.status, len(fleet.requests))


async def test_prediction(fleet_of: FleetOf, tiny: Path) -> None:
    """The usage of an answer is compared with the prediction."""
    usage = b'event: message_delta\ndata: {"usage":{"input_tokens":3,"cache_read_input_tokens":4}}\n\n'
    script = says(SSE_HEAD, chunk(START), chunk(usage), chunk(STOP) + LAST_CHUNK)
    async with fleet_of("--model-path", str(tiny), *KV, scripts=(script,)) as fleet:
        for _ in range(LEAST):
            await fleet.ask({**BODY, "stream": True}, path=MESSAGES)

        (record,) = fleet.frontend.replica.routers[POOL].predictions.records.values()
        assert [PredictionKind("messages")] == list(record.kinds)
        assert record.last_lengths[0] == 7
