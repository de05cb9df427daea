"""`kvrouter router` over HTTP: choosing, reserving, reporting, leases, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.errors import RequestTooLargeError
from kvrouter.relay.request import Request, RequestHead
from kvrouter.router.asked import PlacementAsk
from kvrouter.router.bodies import MOST_BODY_BYTES, read
from tests.frontend.fleet import Fleet, running_fleet
from tests.frontend.workers import OK, until, until_found
from tests.router.routers import Router, routers_of

PROMPT = list(range(100))
CHAIN = sequence_hashes(block_hashes(PROMPT, 16))
PLACE = {"worker_id": "w0", "dp_rank": 0}


@contextlib.asynccontextmanager
async def fleet_of(
    nats: str, *flags: str, workers: int = 1, routers: int = 2
) -> AsyncIterator[tuple[Fleet, list[Router]]]:
    """A frontend that shares bookings, workers, and routers with these flags."""
    async with (
        running_fleet(nats, "--router-replica-sync", scripts=(OK,) * workers) as fleet,
        routers_of(fleet, nats, *flags, count=routers) as found,
    ):
        yield fleet, found


async def until_loads(router: Router, wanted: dict[Any, tuple[int, int, int]]) -> None:
    """Return when its loads are these."""
    await until_found(router.loads, wanted.__eq__)


async def test_from_the_choice_to_the_end(nats_url: str) -> None:
    """It is charged, decodes, grows and ends: the peer's loads show each step, and the frontend's digests."""
    async with fleet_of(nats_url) as (fleet, (a, b)):
        placed = await a.ok("/select_and_reserve", {"token_ids": PROMPT, "selection_id": "r1"})
        assert PLACE == {name: placed[name] for name in PLACE}
        assert ("r1", "r1", 100, 100) == (
            placed["selection_id"], placed["reservation_id"], placed["isl_tokens"],
            placed["effective_prefill_tokens"],
        )  # fmt: skip
        assert fleet.workers[0].url == placed["endpoint"]
        await until_loads(b, {"w0": (100, 6, 1)})
        await a.ok("/reservations/r1/prefill_complete")
        await until_loads(b, {"w0": (0, 6, 1)})
        await a.ok("/reservations/r1/output_block", {"decay_fraction": 0.5})
        await a.ok("/reservations/r1/output_block")
        await until_loads(b, {"w0": (0, 8, 1)})
        await a.ok("/reservations/r1/output_block", {"output_tokens": 64})
        await until_loads(b, {"w0": (0, 10, 1)})
        owner = a.running.replica.router_id
        replicas = [one.replica for one in (fleet.frontend, a.running, b.running)]

        def digests() -> list[tuple[int, int]]:
            routers = [router for replica in replicas for router in replica.routers.values()]
            return [router.pool.active.digest(owner) for router in routers]

        await until(lambda: 1 == len({*digests()}), "all have the same booking")
        assert 1 == digests()[0][0]
        await a.ok("/reservations/r1", method="DELETE")
        await until_loads(b, {"w0": (0, 0, 0)})


async def test_every_form_of_a_prompt_has_the_same_hashes(nats_url: str, tiny: Path) -> None:
    """Tokens, hashes, signed hashes, text and a client's body are hashed as a frontend hashes them."""
    async with fleet_of(nats_url, "--model-path", str(tiny), routers=1) as (_, (a,)):
        signed = [one - (1 << 64) if one >= 1 << 63 else one for one in CHAIN]
        blocks = block_hashes(PROMPT, 16)
        for form in (
            {"token_ids": PROMPT},
            {"block_hashes": blocks, "isl_tokens": 100},
            {"sequence_hashes": signed, "isl_tokens": 100},
            {"block_hashes": blocks, "sequence_hashes": CHAIN, "isl_tokens": 100, "unknown": 1},
            {"request": {"model": "m", "prompt": PROMPT}},
        ):
            found = await a.ok("/select", form)
            assert (signed, 100) == (found["sequence_hashes"], found["isl_tokens"]), form
        text = "The same text, however it is sent. " * 20
        forms = ({"text": text}, {"model_name": "m", "request": {"model": "m", "prompt": text}})
        one, other = [await a.ok("/select", form) for form in forms]
        assert one["sequence_hashes"] == other["sequence_hashes"]
        assert 10 < len(one["sequence_hashes"])
        messages = [{"role": "user", "content": text}]
        chat = await a.ok("/select", {"messages": messages})
        assert chat["isl_tokens"] > one["isl_tokens"]
        whole = await a.ok("/select", {"request": {"model": "m", "messages": messages}})
        assert chat["sequence_hashes"] == whole["sequence_hashes"]
        await a.ok("/select_and_reserve", {"text": text, "selection_id": "t"})
        (booked,) = fleet_bookings(a)
        assert [*booked.hashes] == [hash_ & (1 << 64) - 1 for hash_ in one["sequence_hashes"]]
        await a.ok("/reservations/t", method="DELETE")


def fleet_bookings(router: Router) -> list[Any]:
    """What it has booked."""
    replica = router.running.replica
    return [one for each in replica.routers.values() for one in each.pool.active.bookings(replica.router_id)]


async def test_a_selection_books_nothing_until_it_is_reserved(nats_url: str) -> None:
    """Then on the same worker, once. Without an id nothing is kept."""
    async with fleet_of(nats_url, workers=3, routers=1) as (_, (a,)):
        chosen = await a.ok("/select", {"token_ids": PROMPT, "selection_id": "s"})
        assert {(0, 0, 0)} == {*(await a.loads()).values()}
        status, placed = await a.ask("/reservations", {"selection_id": "s"})
        assert (201, chosen["worker_id"]) == (status, placed["worker_id"])
        assert (100, 6, 1) == (await a.loads())[chosen["worker_id"]]
        assert 404 == (await a.ask("/reservations", {"selection_id": "s"}))[0]
        explicit = {"selection_id": "e", "sequence_hashes": CHAIN, "isl_tokens": 100, "worker_id": "w2"}
        assert 201 == (await a.ask("/reservations", {**explicit, "dp_rank": 0}))[0]
        assert 1 <= (await a.loads())["w2"][2]
        for name in ("s", "e"):
            await a.ok(f"/reservations/{name}", method="DELETE")


async def test_the_caller_limits_the_choice(nats_url: str) -> None:
    """To workers, to one of them; without a charge it only decodes; a session stays together."""
    async with fleet_of(nats_url, workers=3, routers=1) as (_, (a,)):
        for name in ("w0", "w1", "w2"):
            found = await a.ok("/select", {"token_ids": PROMPT, "allowed_worker_ids": [name, "gone", 7]})
            pinned = await a.ok("/select", {"token_ids": PROMPT, "pinned_worker": {"worker_id": name}})
            assert {name} == {found["worker_id"], pinned["worker_id"]}
        override = {"track_prefill_tokens": False, "overlap_score_credit": 0.0, "assume_kv_reuse": False}
        body = {"token_ids": PROMPT, "router_config_override": override, "selection_id": "d"}
        placed = await a.ok("/select_and_reserve", body)
        assert (0, 6, 1) == (await a.loads())[placed["worker_id"]]
        await a.ok("/reservations/d", method="DELETE")


async def test_a_caller_that_is_gone_leaves_nothing(nats_url: str) -> None:
    """Its reservations end at every replica with their leases; one that calls keeps its own."""
    async with fleet_of(nats_url, "--lease-s", "0.5") as (_, (a, b)):
        for number in range(50):
            await a.ok("/select_and_reserve", {"token_ids": PROMPT, "selection_id": f"dead{number}"})
        other = list(range(1000, 1100))
        await a.ok("/select_and_reserve", {"token_ids": other, "selection_id": "alive", "lease_s": 60})
        await until_loads(b, {"w0": (100, 6, 1)})
        status, found = await a.ask("/reservations/dead7/prefill_complete")
        assert (404, True) == (status, "its lease has ended" in found["error"]["message"])
        await a.ok("/reservations/alive", method="DELETE")


async def test_callers_are_bounded(nats_url: str) -> None:
    """429 with the flag; another caller, by its name, has room of its own."""
    async with fleet_of(nats_url, "--reservations-per-caller", "2", "--lease-s", "600", routers=1) as (
        _,
        (a,),
    ):
        for number in range(2):
            await a.ok("/select_and_reserve", {"token_ids": PROMPT, "selection_id": f"r{number}"})
        status, found = await a.ask("/select_and_reserve", {"token_ids": PROMPT})
        assert (429, True) == (status, "--reservations-per-caller" in found["error"]["message"])
        body = {"token_ids": PROMPT, "selection_id": "other"}
        await a.ok("/select_and_reserve", body, x_kvrouter_caller="gateway-2")
        for name in ("r0", "r1", "other"):
            await a.ok(f"/reservations/{name}", method="DELETE")


ENGINE = {"worker_id": 1, "endpoint": "http://a:1", "block_size": 16}
BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/select", {"token_ids": PROMPT, "model_name": "gpt"}, 404, "`gpt` does not exist; served: m"),
    ("POST", "/select", {"token_ids": PROMPT, "text": "a"}, 400, "give one of"),
    ("POST", "/select", {"token_ids": PROMPT, "routing_group": "b"}, 404, "start a router with --namespace"),
    (
        "POST",
        "/select",
        {"token_ids": PROMPT, "pinned_worker": {"worker_id": 77}},
        404,
        "no worker 77 serves",
    ),
    ("POST", "/select", {"token_ids": PROMPT, "worker_id": "w0", "dp_rank": 3}, 404, "w0 with rank 3"),
    ("POST", "/select", {"token_ids": PROMPT, "sequence_hashes": [1]}, 400, "give one of"),
    ("POST", "/select", {"text": "a", "block_hashes": [1]}, 400, "give one of"),
    ("POST", "/select", {"token_ids": PROMPT, "allowed_worker_ids": []}, 503, "none of allowed_worker_ids"),
    ("POST", "/select", {"token_ids": PROMPT, "allowed_worker_ids": ["gone"]}, 503, "see GET /workers"),
    ("POST", "/select", {"token_ids": PROMPT, "lora_name": "none"}, 404, "has the adapter 'none'"),
    ("POST", "/select", {"token_ids": [-1] * 16}, 400, "from 0 to 4294967295"),
    ("POST", "/select", {"token_ids": [1 << 32] * 16}, 400, "from 0 to 4294967295"),
    ("POST", "/select", {"token_ids": ["1"]}, 400, "token_ids"),
    ("POST", "/select", {"sequence_hashes": "abc"}, 400, "sequence_hashes"),
    ("POST", "/select", {"sequence_hashes": [1.5]}, 400, "sequence_hashes"),
    ("POST", "/select", {"sequence_hashes": [1 << 64]}, 400, "64 bits"),
    ("POST", "/select", {"sequence_hashes": [-(1 << 63) - 1]}, 400, "64 bits"),
    ("POST", "/select", {"sequence_hashes": [1, 2, 1]}, 400, "named twice"),
    ("POST", "/select", {"sequence_hashes": [1, 2, 3], "isl_tokens": 47}, 400, "3 blocks of 16 tokens"),
    ("POST", "/select", {"sequence_hashes": [1, 2], "block_hashes": [1, 2]}, 400, "not the chain"),
    ("POST", "/select", {"sequence_hashes": [1], "block_size": 32}, 400, "the workers have 16"),
    ("POST", "/select", {"isl_tokens": 1 << 60}, 400, "isl_tokens"),
    ("POST", "/select", {"token_ids": PROMPT, "selection_id": "a\nb"}, 400, "selection_id"),
    ("POST", "/select", {"token_ids": PROMPT, "selection_id": "a" * 257}, 400, "selection_id"),
    ("POST", "/select", {"token_ids": PROMPT, "lease_s": 0}, 400, "lease_s"),
    ("POST", "/select", {"token_ids": PROMPT, "lease_s": 1e9}, 400, "lease_s"),
    ("POST", "/select", {"router_config_override": {"router_temperature": -1}}, 400, "router_temperature"),
    ("POST", "/select", [1], 400, "what this call takes"),
    ("POST", "/select", {"request": 7}, 400, "body"),
    ("POST", "/reservations", {"token_ids": PROMPT}, 400, "selection_id"),
    ("POST", "/reservations", {"selection_id": "never"}, 404, "no selection 'never' is kept"),
    ("POST", "/reservations/never/prefill_complete", None, 404, "no reservation 'never'"),
    ("POST", "/reservations/never/output_block", None, 404, "no reservation 'never'"),
    ("POST", "/reservations/r/output_block", {"output_tokens": -1}, 400, "output_tokens"),
    ("POST", "/reservations/r/burn", None, 400, "use …/prefill_complete or …/output_block"),
    ("POST", "/select_and_reserve", {"token_ids": PROMPT, "selection_id": "r"}, 409, "give another id"),
    ("DELETE", "/reservations/never", None, 404, "no reservation 'never'"),
    ("PATCH", "/workers/w0", {"block_size": 32}, 404, "was not registered here"),
    ("DELETE", "/workers/w0", None, 404, "was not registered here"),
    ("POST", "/workers", {"worker_id": "a b", "endpoint": "http://a:1", "block_size": 16}, 400, "worker_id"),
    ("POST", "/workers", {"worker_id": 1, "endpoint": "", "block_size": 16}, 400, "`endpoint`"),
    ("POST", "/workers", {"worker_id": 1, "endpoint": "http://a:1", "block_size": 0}, 400, "block_size"),
    ("POST", "/workers", ENGINE | {"data_parallel_size": 257}, 400, "data_parallel_size"),
    ("POST", "/workers", ENGINE | {"kv_events_endpoint": "tcp://a"}, 400, "use tcp://HOST:PORT"),
    ("POST", "/workers", ENGINE | {"kv_events_endpoint": "tcp://a:70000"}, 400, "use tcp://HOST:PORT"),
    ("POST", "/workers", ENGINE | {"kv_events_endpoint": "tcp://a:5/x"}, 400, "use tcp://HOST:PORT"),
    ("POST", "/workers", ENGINE | {"replay_endpoint": "tcp://a:5\n7"}, 400, "use tcp://HOST:PORT"),
    (
        "POST",
        "/workers",
        {"worker_id": "w0", "endpoint": "http://a:1", "block_size": 16},
        409,
        "'w0' has an agent of its own",
    ),
    ("GET", "/select", None, 405, "use POST"),
    ("GET", "/loads?model_name=gpt", None, 404, "does not exist"),
    ("POST", "/query", {"token_ids": "x"}, 400, "token_ids"),
    ("POST", "/internal/route", {"model": "gpt", "prompt": "x"}, 404, "does not exist"),
    ("POST", "/v1/chat/completions", {"model": "m", "messages": []}, 404, "Not Found"),
]


async def test_bad_input(nats_url: str) -> None:
    """Each has its status and says what to change; nothing is left over, and what is reserved stays."""
    async with fleet_of(nats_url, "--lease-s", "600", routers=1) as (_, (a,)):
        await a.ok("/select_and_reserve", {"token_ids": PROMPT, "selection_id": "r"})
        for method, path, body, wanted, text in BAD:
            status, found = await a.ask(path, body, method=method)
            assert wanted == status, (method, path, body, found)
            assert text in found["error"]["message"], (path, body, found)
        assert {"w0": (100, 6, 1)} == await a.loads()
        assert 1 == len(a.site.placing.table)
        await a.ok("/reservations/r", method="DELETE")


async def test_bodies_that_are_no_json(nats_url: str) -> None:
    """400 and 415, as everywhere."""
    async with fleet_of(nats_url, routers=1) as (_, (a,)):
        for body, kind, status in (
            (b"{", "application/json", 400),
            (b"\xff\xfe", "application/json", 400),
            (b"[" * 100_000, "application/json", 400),
            (b"{}", "text/plain", 415),
        ):
            url, headers = f"{a.running.url}/select_and_reserve", {"content-type": kind}
            async with a.http.post(url, data=body, headers=headers) as answer:
                assert status == answer.status, await answer.text()
        assert 0 == len(a.site.placing.table)


async def test_a_body_that_is_too_large() -> None:
    """It is not decoded: that would hold up all others."""
    head = RequestHead("POST", "/select", [], wants_keep_alive=True)
    with pytest.raises(RequestTooLargeError, match="8388608 at most"):
        await read(Request(head, None, b" " * (MOST_BODY_BYTES + 1)), PlacementAsk)  # type: ignore[arg-type]


async def test_who_may_ask(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers on loopback, and others with the key; no page of another site; probes are open."""
    (key := tmp_path / "key").write_text("s3cret")
    bearer = {"authorization": "Bearer s3cret"}
    async with fleet_of(nats_url, "--admin-key-file", str(key), routers=1) as (_, (a,)):
        body = {"token_ids": PROMPT}
        assert 200 == (await a.ask("/select", body))[0]
        assert 403 == (await a.ask("/select", body, Host="evil.example"))[0]
        assert 403 == (await a.ask("/select", body, Origin="http://evil.example"))[0]
        assert 401 == (await a.ask("/select", body, X_Forwarded_For="10.0.0.1"))[0]
        assert 200 == (await a.ask("/select", body, X_Forwarded_For="10.0.0.1", **bearer))[0]
        assert 200 == (await a.ask("/select", body, Host="router.internal", **bearer))[0]
        monkeypatch.setattr("kvrouter.frontend.operators.rights.is_loopback", lambda _host: False)
        for path, method in (("/select", "POST"), ("/loads", "GET"), ("/workers", "GET"), ("/query", "POST")):
            assert (await a.ask(path, body, method=method))[0] in {401, 403}, path
        assert 200 == (await a.ask("/health", method="GET"))[0]
        assert "ready" in (await a.ask("/ready", method="GET", Host="probe"))[1]


async def test_what_the_service_knows(nats_url: str) -> None:
    """Workers, readiness, loads and overlaps, in Dynamo's forms."""
    async with fleet_of(nats_url, workers=2, routers=1) as (fleet, (a,)):
        workers = await a.ok("/workers", method="GET")
        assert [("w0", "m", "schedulable", 16), ("w1", "m", "schedulable", 16)] == [
            (one["worker_id"], one["model_name"], one["lifecycle"], one["block_size"]) for one in workers
        ]
        _, ready = await a.ask("/ready", method="GET")
        assert 2 == ready["schedulable_workers"]
        assert {"status": "ok"} == await a.ok("/health", method="GET")
        potential = await a.ok("/potential_loads", {"token_ids": PROMPT})
        assert [(100, 6)] * 2 == [
            (one["potential_prefill_tokens"], one["potential_decode_blocks"]) for one in potential
        ]
        scores = await a.ok("/overlap_scores", {"token_ids": PROMPT})
        assert (16, 6, [0, 0]) == (
            scores["block_size"], scores["num_blocks"], [one["device_blocks"] for one in scores["workers"]]
        )  # fmt: skip
        (model,) = await a.ok("/loads?model_name=m", method="GET")
        assert ("m", "default", 0, 0) == (
            model["model_name"], model["routing_group"], model["pending_count"], model["pending_isl_tokens"]
        )  # fmt: skip
        fleet.announce(fleet.workers[0], "draining")
        await until(lambda: 1 == len(fleet.targets(a.running)), "w0 drains")
        lives = [one["lifecycle"] for one in await a.ok("/workers", method="GET")]
        assert ["draining", "schedulable"] == lives


async def test_without_nats(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last known state answers, and the header says that it is stale."""
    async with fleet_of(nats_url, routers=1) as (_, (a,)):
        for is_connected, header in ((True, None), (False, "nats")):
            monkeypatch.setattr(type(a.running.admin), "is_connected", Mock(return_value=is_connected))
            for path, body in (
                ("/select", {"token_ids": PROMPT}),
                ("/overlap_scores", {"token_ids": PROMPT}),
                ("/internal/route", {"model": "m", "prompt": "x"}),
                ("/query", {"model": "m", "token_ids": PROMPT}),
            ):
                async with a.http.post(f"{a.running.url}{path}", json=body) as answer:
                    assert (200, header) == (answer.status, answer.headers.get("x-kvrouter-stale")), path


async def test_a_proxy_asks_as_rays_does(nats_url: str) -> None:
    """The client's body and session in, host and port out; a truncated body is placed by load."""
    async with fleet_of(nats_url, workers=2, routers=1) as (fleet, (a,)):
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        found = await a.ok("/internal/route", body, x_session_id="s1")
        hosts = {worker.id: worker.url for worker in fleet.workers}
        assert f"http://{found['host']}:{found['port']}" == hosts[found["replica_id"].partition("/")[0]]
        assert {} == found["request_headers"]
        headers = {"content-type": "application/json", "x-body-truncated": "1"}
        url = f"{a.running.url}/internal/route"
        async with a.http.post(url, data=b'{"model": "m", "mess', headers=headers) as answer:
            other = await answer.json()
            assert 200 == answer.status, other
        assert other["replica_id"] != found["replica_id"], "the other one has fewer requests"
        for one in (found, other):
            await a.ok(f"/reservations/{one['reservation_id']}", method="DELETE")


async def test_mooncakes_query(nats_url: str) -> None:
    """Tenant, instance, tokens per tier."""
    async with fleet_of(nats_url, workers=2, routers=1) as (_, (a,)):
        nothing = {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}
        found = await a.ok("/query", {"model": "m", "token_ids": PROMPT, "block_size": 16})
        assert {"default": {"w0": nothing, "w1": nothing}} == found
        one = {"model": "m", "seq_hashes": CHAIN, "tenant_id": "default", "instance_id": "w1"}
        assert {"default": {"w1": nothing}} == await a.ok("/query_by_hash", one)
