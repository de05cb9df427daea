"""The calls over NATS: the same answers as over HTTP, bounds, and who gets an answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from kvrouter.bus import Subjects
from kvrouter.router import over_nats
from tests.frontend.fleet import Fleet
from tests.router.routers import Router
from tests.router.test_service import BAD, CHAIN, PLACE, PROMPT, fleet_of, until_loads


class Caller:
    """A client of NATS, as a gateway has one."""

    def __init__(self, client: Client, subjects: Subjects) -> None:
        self.client = client
        self.subjects = subjects

    async def send(self, payload: bytes, router: str = "") -> Any:
        """The answer to this payload."""
        subject = f"{self.subjects.place}.{router}" if router else self.subjects.place
        return msgspec.json.decode((await self.client.request(subject, payload, timeout=10)).data)

    async def ask(self, call: str, body: Any = None, router: str = "") -> Any:
        """The answer to a call."""
        return await self.send(msgspec.json.encode({"call": call, "body": body}), router)


@contextlib.asynccontextmanager
async def called(
    nats: str, *flags: str, routers: int = 1
) -> AsyncIterator[tuple[Caller, Fleet, list[Router]]]:
    """Routers, and a caller of them."""
    async with fleet_of(nats, *flags, routers=routers) as (fleet, found):
        subjects = fleet.subjects
        client = Client()
        await client.connect(nats, inbox_prefix=subjects.placed("gw", "x").removesuffix(".x").encode())
        try:
            yield Caller(client, subjects), fleet, found
        finally:
            await client.close()


async def test_from_the_choice_to_the_end(nats_url: str) -> None:
    """Any router reserves; calls for it go to that one. Its peer shows each step."""
    async with called(nats_url, routers=2) as (caller, _, routers):
        body = {"token_ids": PROMPT, "selection_id": "r1"}
        answer = await caller.ask("POST /select_and_reserve", body)
        assert (200, PLACE) == (answer["status"], {name: answer["body"][name] for name in PLACE})
        own, peer = sorted(routers, key=lambda one: one.running.replica.router_id != answer["router"])
        await until_loads(peer, {"w0": (100, 6, 1)})
        (one,) = own.site.placing.table.of_worker("w0")
        assert "gw" == one.caller
        other = await caller.ask("DELETE /reservations/r1", router=peer.running.replica.router_id)
        assert (404, True) == (other["status"], "another router made it" in other["body"]["error"]["message"])
        done = await caller.ask("POST /reservations/r1/prefill_complete", router=answer["router"])
        assert {"status": 200, "router": answer["router"], "body": {"status": "ok"}} == done
        await until_loads(peer, {"w0": (0, 6, 1)})
        progress = "POST /reservations/r1/output_block", {"output_tokens": 32}, answer["router"]
        assert 200 == (await caller.ask(*progress))["status"]
        await until_loads(peer, {"w0": (0, 8, 1)})
        for call in ("POST /overlap_scores", "POST /potential_loads", "POST /select"):
            assert 200 == (await caller.ask(call, {"token_ids": PROMPT}))["status"]
        assert 200 == (await caller.ask("DELETE /reservations/r1", router=answer["router"]))["status"]
        await until_loads(peer, {"w0": (0, 0, 0)})
        loads = await caller.ask("GET /loads?model_name=m")
        assert ["w0"] == [one["worker_id"] for one in loads["body"][0]["loads"]]


async def test_errors_are_those_of_http(nats_url: str) -> None:
    """The same status and message for every wrong call; what changes workers is not offered at all."""
    async with called(nats_url, "--lease-s", "600") as (caller, _, (router,)):
        await router.ok("/select_and_reserve", {"token_ids": PROMPT, "selection_id": "r"})
        for method, path, body, _, _ in BAD:
            status, found = await router.ask(path, body, method=method)
            answer = await caller.ask(f"{method} {path}", body)
            if "/workers" in path:
                assert answer["status"] in {404, 405}, (path, answer)
            else:
                assert (status, found) == (answer["status"], answer["body"]), (path, body)
        assert {"w0": (100, 6, 1)} == await router.loads()


HOSTILE = [
    b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"call": 7}', b'{"call": "POST select"}', b'{"body": {}}',
    b'{"call": "POST /select\\r\\nhost: a"}', b'{"call": "' + b"A" * 4000 + b' /"}', b"[" * 100_000,
    b'{"call": "POST /select", "body": {"sequence_hashes": [' + b"[" * 50_000,
    b'{"call": "POST /select", "body": {"sequence_hashes": [' + b"1," * 200_000 + b"1]}}",
]  # fmt: skip


@pytest.mark.parametrize("payload", HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_payloads(nats_url: str, payload: bytes) -> None:
    """Each is answered by an error that says what is wrong, and the next call is served."""
    async with called(nats_url) as (caller, _, _):
        answer = await caller.send(payload)
        assert answer["status"] in {400, 413}, answer
        assert answer["body"]["error"]["message"]
        assert 200 == (await caller.ask("POST /select", {"block_hashes": CHAIN}))["status"]


async def test_answers_go_to_callers_only(nats_url: str) -> None:
    """A router must not publish for whoever asks: as a replica, or to an inbox that agents could use, too."""
    async with called(nats_url) as (caller, _, (router,)):
        subjects, start = caller.subjects, f"kvrouter.{caller.subjects.namespace}"
        of_replica = subjects.live_router(router.running.replica.router_id)
        elsewhere = [
            f"{start}.placed",
            f"{start}.placed.gw",
            f"{start}.placed.*.a",
            "kvrouter.other.placed.gw.a",
        ]
        for reply in ("", "_INBOX.a.b", subjects.hello, of_replica, *elsewhere):
            assert "" == subjects.caller(reply)
            await caller.client.publish(subjects.place, b'{"call": "GET /health"}', reply=reply)
        assert 200 == (await caller.ask("GET /health"))["status"]


async def test_bounds(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More calls at once than there is room for, and answers that NATS does not carry, get an error."""
    async with called(nats_url) as (caller, _, (router,)):
        with monkeypatch.context() as patch:
            patch.setattr(over_nats, "MOST_IN_FLIGHT", 0)
            answer = await caller.ask("GET /health")
        assert (503, True) == (answer["status"], "ask again" in answer["body"]["error"]["message"])
        router.running.admin.drain()
        answer = await caller.ask("GET /health")
        assert (503, True) == (answer["status"], "about to stop" in answer["body"]["error"]["message"])
        of_this = router.running.replica.router_id
        assert 200 == (await caller.ask("GET /health", router=of_this))["status"]
        answer = await caller.ask("POST /select", {"block_hashes": [*range(60_000)]}, router=of_this)
        assert (413, True) == (answer["status"], "use HTTP" in answer["body"]["error"]["message"])
