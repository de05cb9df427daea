"""vLLM's `kv_cache_report_mode` in request bodies."""

from __future__ import annotations

import json

import pytest

from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.errors import BadRequestError
from kvrouter.frontend.bodies.report_mode import with_report_mode, without_report_mode
from tests.frontend.fleet import BODY, Fleet, FleetOf


async def test_report_mode_is_stripped(fleet_of: FleetOf) -> None:
    """VLLM's report mode would corrupt its agent's counts, so a client's wish for it is dropped."""
    body = {**BODY, "vllm_xargs": {"kv_cache_report_mode": "full", "other": 1}}
    async with fleet_of() as fleet:
        await fleet.ask(body)

        assert {**BODY, "vllm_xargs": {"other": 1}} == fleet.workers[0].requests[0].json


def test_report_mode_in_disguise() -> None:
    """JSON's escapes do not get it through."""
    body = b'{"vllm_xargs":{"kv\\u005fcache_report_mode":"full"},"a":"\\u00e9"}'

    assert {"vllm_xargs": {}, "a": "é"} == json.loads(without_report_mode(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "about kv_cache_report_mode"}',
        b'{"vllm_xargs": "kv_cache_report_mode"}',
        b'{"vllm_xargs": {"a": "kv_cache_report_mode"}}',
        b'{"prompt": "\\u00e9 \\u0061"}',
    ],
)
def test_other_bodies_stay(body: bytes) -> None:
    """A body that only mentions it stays as it is, to the byte."""
    assert body is without_report_mode(body)


def test_broken_body() -> None:
    """A body that cannot be read as a whole is a bad request."""
    with pytest.raises(BadRequestError):
        without_report_mode(b'{"vllm_xargs":{"kv_cache_report_mode":"full"},')


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (b'{"prompt": [1]}', {}),
        (b' {\n "prompt" : "vllm_xargs"}\n', {}),
        (b"{}", {}),
        (b" { } ", {}),
        (b'{"vllm_xargs": null, "n": 1}', {}),
        (b'{"n": 1, "vllm_xargs": {"a": 1}}', {"a": 1}),
        (b'{"n": 1, "vllm\\u005fxargs": {"a": 1}}', {"a": 1}),
        (b'{"vllm_xargs": {"kv_cache_report_mode": "incremental", "a": []}}', {"a": []}),
    ],
)
def test_report_mode_is_added(body: bytes, arguments: dict[str, object]) -> None:
    """The argument joins those that are there; nothing else changes."""
    wanted = json.loads(body) | {"vllm_xargs": arguments | {"kv_cache_report_mode": "full"}}

    assert wanted == json.loads(with_report_mode(body))


@pytest.mark.parametrize("body", [b'{"vllm_xargs": "x"}', b"[1]", b"", b'{"vllm_xargs": {'])
def test_report_mode_has_no_place(body: bytes) -> None:
    """A body without an object for it stays as it is."""
    assert body is with_report_mode(body)


@pytest.mark.parametrize(("is_partial", "wanted"), [(True, "full"), (False, None)])
async def test_partial_rank_is_asked_to_report(
    fleet_of: FleetOf, is_partial: bool, wanted: str | None
) -> None:
    """Requests to a rank whose history was lost ask for a report of reused blocks; no others do."""
    async with fleet_of() as fleet:
        (worker,) = fleet.workers
        fleet.announce(worker, ranks_heard=[RankBeat(0, 1, 0, partial=is_partial)], repairs_by_report=True)
        while not any(known.card.repairs_by_report for known in known_workers(fleet)):
            await fleet.get("/live")

        await fleet.ask({"model": "m", "prompt": [1], "vllm_xargs": {"kv_cache_report_mode": "full"}})

        (request,) = worker.requests
        assert wanted == request.json.get("vllm_xargs", {}).get("kv_cache_report_mode")
        assert [str(len(request.body))] == request.headers("content-length")


def known_workers(fleet: Fleet) -> list[Worker]:
    """The workers as the first frontend knows them."""
    routers = fleet.frontend.replica.routers.values()
    return [worker for router in routers for worker in router.pool.workers.values()]
