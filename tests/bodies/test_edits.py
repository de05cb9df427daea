"""What is changed in a client's body, and that nothing else is."""

from __future__ import annotations

import json

import pytest
from msgspec import UNSET

from kvrouter.bodies.edits import apply, edits_of, with_report_mode, without_overrides
from kvrouter.bodies.openai import parse_completion
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.errors import BadRequestError
from tests.frontend.fleet import BODY, Fleet, FleetOf


def edited(body: bytes) -> bytes:
    """A completion's body after the edits it needs."""
    return apply(edits_of(parse_completion(body)), body)


def test_values_keep_their_bytes() -> None:
    """Only the object `kvrouter` goes: 1.50 stays 1.50, escapes stay, and so does a number of any size."""
    body = b'{"a":1.50,"kvrouter":{"mode":"kv"},"b":"\\u00e9\\/","c":12345678901234567890123}'

    assert b'{"a":1.50,"b":"\\u00e9\\/","c":12345678901234567890123}' == without_overrides(body)


async def test_report_mode_is_removed(fleet_of: FleetOf) -> None:
    """The engine never gets a client's report mode: it would corrupt the counts of the engine's agent."""
    body = {**BODY, "vllm_xargs": {"kv_cache_report_mode": "full", "other": 1}}
    async with fleet_of() as fleet:
        await fleet.ask(body)

        assert {**BODY, "vllm_xargs": {"other": 1}} == fleet.workers[0].requests[0].json


def test_both_edits() -> None:
    """A body may need both; JSON's escapes do not hide a name."""
    body = b'{"prompt":[1],"vllm_xargs":{"kv\\u005fcache_report_mode":"full","n":1.50},"kvrouter":{}}'

    assert b'{"prompt":[1],"vllm_xargs":{"n":1.50}}' == edited(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "about kv_cache_report_mode"}',
        b'{"prompt": "x", "vllm_xargs": "kv_cache_report_mode"}',
        b'{"prompt": "x", "vllm_xargs": ["kv_cache_report_mode"]}',
        b'{"prompt": "x", "vllm_xargs": {"a": "kv_cache_report_mode"}}',
        b'{"prompt": "x", "vllm_xargs": null, "kvrouter": null}',
    ],
)
def test_other_bodies_stay(body: bytes) -> None:
    """A body that only mentions the mode stays as it is, to the byte."""
    assert body is edited(body)


def test_name_that_is_not_utf_8() -> None:
    """A body that was parsed but cannot be edited is a bad request."""
    with pytest.raises(BadRequestError, match="not valid JSON"):
        edited(b'{"prompt": "x", "kvrouter": {}, "\xff": 1}')


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (b'{"prompt": [1]}', {}),
        (b' {\n "prompt" : "vllm_xargs"}\n', {}),
        (b'{"prompt": "x", "vllm_xargs": null, "n": 1}', {}),
        (b'{"prompt": "x", "vllm_xargs": {"a": 1}}', {"a": 1}),
        (b'{"prompt": "x", "vllm\\u005fxargs": {"a": 1}}', {"a": 1}),
        (b'{"prompt": "x", "vllm_xargs": {"kv_cache_report_mode": "incremental", "a": []}}', {"a": []}),
    ],
)
def test_report_mode_is_added(body: bytes, arguments: dict[str, object]) -> None:
    """The mode joins the arguments that are there; nothing else changes."""
    wanted = json.loads(body) | {"vllm_xargs": arguments | {"kv_cache_report_mode": "full"}}
    has_arguments = parse_completion(body).engine_arguments is not UNSET

    assert wanted == json.loads(with_report_mode(body, has_arguments=has_arguments))


@pytest.mark.parametrize("arguments", [b'"x"', b"[1]", b"5"])
def test_report_mode_has_no_place(arguments: bytes) -> None:
    """Where `vllm_xargs` are not an object the body stays as it is, for the engine to reject."""
    body = b'{"vllm_xargs": %b}' % arguments

    assert body is with_report_mode(body, has_arguments=True)


@pytest.mark.parametrize(("is_partial", "wanted"), [(True, "full"), (False, None)])
@pytest.mark.parametrize("arguments", [{"vllm_xargs": {"kv_cache_report_mode": "full"}}, {}])
async def test_partial_rank_is_asked_to_report(
    fleet_of: FleetOf, is_partial: bool, wanted: str | None, arguments: dict[str, object]
) -> None:
    """Requests to a rank whose history was lost ask for a report of reused blocks; no others do."""
    async with fleet_of() as fleet:
        (worker,) = fleet.workers
        fleet.announce(worker, ranks_heard=[RankBeat(0, 1, 0, partial=is_partial)], repairs_by_report=True)
        while not any(known.card.repairs_by_report for known in known_workers(fleet)):
            await fleet.get("/live")

        await fleet.ask({"model": "m", "prompt": [1], **arguments})

        (request,) = worker.requests
        assert wanted == request.json.get("vllm_xargs", {}).get("kv_cache_report_mode")
        assert [1] == request.json["prompt"]
        assert [str(len(request.body))] == request.headers("content-length")


def known_workers(fleet: Fleet) -> list[Worker]:
    """The workers as the first frontend knows them."""
    routers = fleet.frontend.replica.routers.values()
    return [worker for router in routers for worker in router.pool.workers.values()]
