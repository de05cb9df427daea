"""--model-alias, on whole frontends: workers get the names that they serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrouter.frontend.requests.engine_routes import PASSED
from tests.frontend.clients import get
from tests.frontend.fleet import FleetOf
from tests.frontend.test_passthrough import AUDIO, form, join_second_pool
from tests.frontend.workers import OK, OK_BODY

FLAGS = ("--model-alias", "gpt=m", "--model-alias", "small=gpt", "--model-alias", "tuned=my-lora")
MESSAGES = [{"role": "user", "content": "hi", "model": "gpt"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": [1, 2, 3]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "store": False},
    **{path: {"input": "hi"} for method, path in PASSED if method == "POST"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_json(fleet_of: FleetOf, path: str) -> None:
    """Every route takes an alias; the worker gets its model's name, and the client the worker's answer."""
    async with fleet_of(*FLAGS, scripts=(OK,)) as fleet:
        for alias in ("gpt", "small", "m"):
            answer = await fleet.ask({**BODIES[path], "model": alias}, path=path)
            assert (200, OK_BODY) == (answer.status, answer.body)

        assert [{**BODIES[path], "model": "m"}] * 3 == [one.json for one in fleet.workers[0].requests]


async def test_overrides_and_alias(fleet_of: FleetOf) -> None:
    """The router's own fields are removed from a body that names an alias as well."""
    async with fleet_of(*FLAGS, scripts=(OK,)) as fleet:
        body = {"kvrouter": {"session": "s"}, "model": "gpt", "prompt": [1]}
        assert 200 == (await fleet.ask(body)).status

        assert {"model": "m", "prompt": [1]} == fleet.workers[0].requests[0].json


async def test_large_body(fleet_of: FleetOf) -> None:
    """A body whose token ids are not parsed at once."""
    body = {"prompt": list(range(1000, 60_000)), "model": "gpt"}
    async with fleet_of(*FLAGS, scripts=(OK,)) as fleet:
        assert 200 == (await fleet.ask(body)).status

        (received,) = fleet.workers[0].requests
        assert {**body, "model": "m"} == received.json


async def test_forms_and_queries(fleet_of: FleetOf) -> None:
    """Audio routes name the model in a form, others may in the query; later requests are not affected."""
    async with fleet_of(*FLAGS, scripts=(OK,)) as fleet:
        body, header = form(file=AUDIO, model="gpt", language="gpt")
        await fleet.ask(body, header, path="/v1/audio/transcriptions")
        for name in ("gpt", "m", "gpt"):
            await fleet.ask({"input": "hi"}, path=f"/v1/embeddings?x=1&model={name}")
        await get(fleet.url, "/version?model=small")

        (audio, *others, version) = fleet.workers[0].requests
        assert form(file=AUDIO, model="m", language="gpt")[0] == audio.body
        assert [b"POST /v1/embeddings?x=1&model=m"] * 3 == [one.head.split(b" HTTP")[0] for one in others]
        assert version.head.startswith(b"GET /version?model=m ")


async def test_adapters(fleet_of: FleetOf) -> None:
    """An alias of a LoRA adapter is placed and hashed as the adapter is."""
    flags = (*FLAGS, "--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(OK,), lora_names=("my-lora",)) as fleet:
        prompt = list(range(64))
        first = await fleet.ask({"model": "my-lora", "prompt": prompt})
        again = await fleet.ask({"model": "tuned", "prompt": prompt})
        other = await fleet.ask({"model": "gpt", "prompt": prompt})

        found = [int(one.header("x-kvrouter-overlap-blocks")) for one in (first, again, other)]
        assert [0, 3, 0] == found
        assert ["my-lora", "my-lora", "m"] == [one.json["model"] for one in fleet.workers[0].requests]


async def test_lists(fleet_of: FleetOf) -> None:
    """/v1/models has the aliases of what is served, each also alone; metrics have the model."""
    flags = (*FLAGS, "--model-alias", "org/gone=nothing", "--model-alias", "org/big=m")
    async with fleet_of(*flags, scripts=(OK,)) as fleet:
        listed = {one["id"]: one for one in (await get(fleet.url, "/v1/models")).json["data"]}

        assert ["m", "gpt", "small", "org/big"] == list(listed)
        assert {**listed["m"], "id": "gpt"} == listed["gpt"]
        assert listed["org/big"] == (await get(fleet.url, "/v1/models/org/big")).json
        assert 404 == (await get(fleet.url, "/v1/models/org/gone")).status
        refused = await fleet.ask({"model": "org/gone", "prompt": [1]})
        assert (404, "The model `nothing` does not exist") == (
            refused.status,
            refused.json["error"]["message"].partition(";")[0],
        )
        await fleet.ask({"model": "gpt", "prompt": [1]})
        metrics = (await get(fleet.frontend.admin_url, "/metrics")).body.decode()
        assert 'kvrouter_requests_total{code="200",mode="round-robin",model="m"' in metrics
        assert "gpt" not in metrics.replace("--model-alias", "")


async def test_precedence(fleet_of: FleetOf) -> None:
    """An alias goes before a model of its name, also in the list."""
    async with fleet_of("--model-alias", "other=m", scripts=(OK, OK)) as fleet:
        await join_second_pool(fleet)
        await fleet.ask({"model": "other", "prompt": [1]})
        (entry,) = [one for one in (await get(fleet.url, "/v1/models")).json["data"] if one["id"] == "other"]

        assert ["w0"] == fleet.requests
        assert "m" == entry["root"]


async def test_dry_runs(fleet_of: FleetOf) -> None:
    """A preview takes the alias, too."""
    async with fleet_of(*FLAGS, scripts=(OK,)) as fleet:
        found = await fleet.ask({"model": "gpt", "prompt": [1], "path": "/v1/completions"}, path="/v1/route")

        assert (200, "m") == (found.status, found.json["model"])


async def test_reload(fleet_of: FleetOf, tmp_path: Path) -> None:
    """Aliases change while the frontend runs."""
    config = tmp_path / "kvrouter.toml"
    config.write_text('[frontend]\nmodel-alias = ["a=m"]\n')
    async with fleet_of("--config", str(config), scripts=(OK,)) as fleet:
        assert 200 == (await fleet.ask({"model": "a", "prompt": [1]})).status

        config.write_text('[frontend]\nmodel-alias = ["b=m"]\n')
        assert fleet.frontend.reload is not None
        await fleet.frontend.reload.reload()
        assert [404, 200] == [(await fleet.ask({"model": one, "prompt": [1]})).status for one in "ab"]
        assert ["m", "b"] == [one["id"] for one in (await get(fleet.url, "/v1/models")).json["data"]]
