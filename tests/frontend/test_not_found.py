"""A worker that is up and answers 404 to everything: named in /ready, /workers and the log."""

from __future__ import annotations

import pytest

from kvrouter.core.routing.first_answers import FEWEST
from tests.frontend.fleet import BODY, Fleet, FleetOf
from tests.frontend.workers import OK, Received, Script, Wire, answer, says, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NO_ROUTE = answer(b'{"detail":"Not Found"}', 404)
NO_MODEL = answer(b'{"error":{"message":"The model `m` does not exist.","code":404}}', 404)


def healing(reply: bytes, is_healed: list[bool]) -> Script:
    """Answers with this until it is healed."""

    async def script(received: Received, wire: Wire) -> None:
        await (OK if is_healed[0] else says(reply))(received, wire)

    return script


async def shown(fleet: Fleet, *, is_named: bool = False) -> tuple[list[str], list[str]]:
    """The reasons of /ready, and the problems of the first worker, once audits agree."""
    audit = fleet.frontend.audit
    await until(lambda: audit.run() and ("404" in str(audit.degrading())) == is_named, "the audit")
    while (ready := (await fleet.get("/ready")).json)["status"] == "starting":
        pass
    (row, *_) = [one for one in (await fleet.get("/workers")).json["targets"] if one["worker_id"] == "w0"]
    return ready["reasons"], row["problems"]


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
@pytest.mark.parametrize("reply", [NO_ROUTE, NO_MODEL], ids=["no route", "no model"])
async def test_only_404(fleet_of: FleetOf, mode: str, reply: bytes) -> None:
    """It is named after FEWEST requests, with the remedy, and no longer after the first good answer."""
    is_healed = [False]
    async with fleet_of("--router-mode", mode, scripts=(healing(reply, is_healed),)) as fleet:
        for number in range(FEWEST):
            reasons, problems = await shown(fleet)
            assert not [one for one in reasons + problems if "404" in one]
            path, body = ("/v1/completions", BODY) if number % 2 else ("/v1/chat/completions", CHAT)
            assert 404 == (await fleet.ask(body, path=path)).status

        reasons, problems = await shown(fleet, is_named=True)
        (reason,) = [one for one in reasons if "404" in one]
        (problem,) = [one for one in problems if "404" in one]
        assert f"m-12345678: worker w0 {problem}" == reason
        for part in (f"first {FEWEST} requests", fleet.workers[0].url, "(m)", "--engine-url", "gateway"):
            assert part in problem
        assert "degraded" == (await fleet.get("/ready")).json["status"]
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'kvrouter_worker_problem{pool="m-12345678",problem="not_found",worker="w0"} 1.0' in metrics

        is_healed[0] = True
        assert 200 == (await fleet.ask(BODY)).status
        reasons, problems = await shown(fleet)
        assert not [one for one in reasons + problems if "404" in one]


async def test_next_to_a_good_worker(fleet_of: FleetOf) -> None:
    """Requests are served by the other worker, and the bad one is named all the same."""
    async with fleet_of("--router-mode", "round-robin", scripts=(says(NO_ROUTE), OK)) as fleet:
        while sum(name == "w0" for name in fleet.requests) < FEWEST:
            assert 200 == (await fleet.ask(BODY)).status

        assert "404" in str((await shown(fleet, is_named=True))[1])


async def test_other_routes_do_not_count(fleet_of: FleetOf) -> None:
    """Many engines lack embeddings or Anthropic's API: their 404 says nothing of the worker."""
    async with fleet_of(scripts=(says(NO_ROUTE),)) as fleet:
        for _ in range(FEWEST):
            await fleet.ask({"model": "m", "input": "hi"}, path="/v1/embeddings")
            await fleet.ask({**CHAT, "max_tokens": 1}, path="/v1/messages")
            await fleet.ask({"model": "m", "input": "hi"}, path="/v1/responses")

        assert not [one for one in (await shown(fleet))[1] if "404" in one]
