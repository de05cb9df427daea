"""Client: its choice of workers, and the error for each failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrouter import Candidate, Client
from kvrouter.errors import (
    BadRequestError,
    ConfigError,
    KvRouterError,
    NoWorkersError,
    WorkerDiedError,
    WorkerRefusedError,
    WorkerSilentError,
)
from kvrouter.prompts.settings import TokenOptions
from tests.certificates import Authority
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.workers import (
    OK,
    SSE_HEAD,
    answer,
    chunk,
    event,
    says,
    says_and_resets,
    says_and_stalls,
    stream,
    until,
)

BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4}
CHAT = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def opened(
    fleet: Fleet, nats_url: str, *, ranks: int = 1, **settings: Any
) -> AsyncIterator[Client]:  # settings: Client's own
    """A client in the fleet's namespace, which knows all its workers."""

    def announce(*_: object) -> None:
        for worker in fleet.workers:
            fleet.announce(worker, ranks=ranks, rank_header="X-data-parallel-rank" if ranks > 1 else "")

    await fleet.bus.subscribe(fleet.subjects.hello, announce)
    announce()  # as an agent does: the client may have said hello before the subscription was at the server
    settings.setdefault("tokens", TokenOptions(way="local"))  # or it would ask the scripts for token ids
    namespace = fleet.subjects.live.split(".")[1]
    async with Client(namespace, "m", nats=nats_url, ready_timeout_s=5, **settings) as client:
        await until(lambda: len(client.worker_ids()) == len(fleet.workers))
        yield client


async def all_of(answers: Any) -> list[dict[str, Any]]:
    """All answers."""
    return [one async for one in answers]


def candidates(client: Client) -> list[Candidate]:
    """The targets as the client's router sees them for a short prompt."""
    verdicts = client.router.explain([1]).verdicts
    return [one.candidate for one in verdicts if one.candidate is not None]


def in_flight(client: Client) -> int:
    """Bookings of the client's router."""
    return sum(one.requests for one in candidates(client))


async def test_choices(fleet_of: FleetOf, nats_url: str) -> None:
    """Round-robin takes turns, random reaches all workers, direct takes the named one. All are freed."""
    async with fleet_of(scripts=(OK, OK, OK)) as fleet, opened(fleet, nats_url) as client:
        for _ in range(6):
            await all_of(client.round_robin(BODY))
        assert {"w0": 2, "w1": 2, "w2": 2} == Counter(fleet.requests)
        for _ in range(60):
            await all_of(client.random(BODY))
        assert all(count > 4 for count in Counter(fleet.requests).values())
        before = Counter(fleet.requests)
        await all_of(client.direct(BODY, "w1"))
        assert {"w1": 1} == Counter(fleet.requests) - before
        assert not in_flight(client)


async def test_requests(fleet_of: FleetOf, nats_url: str) -> None:
    """The body determines the path; model, rank and custom headers are added."""
    headers = {"authorization": "Bearer k"}
    async with fleet_of() as fleet, opened(fleet, nats_url, ranks=2, headers=headers) as client:
        await all_of(client.direct({"messages": CHAT}, "w0", rank=1))
        await all_of(client.direct({**BODY, "model": "n"}, "w0", rank=0))

        chat, completion = fleet.workers[0].requests
        assert chat.head.startswith(b"POST /v1/chat/completions ")
        assert {"messages": CHAT, "model": "m"} == chat.json
        assert (["1"], ["Bearer k"]) == (chat.headers("x-data-parallel-rank"), chat.headers("authorization"))
        assert completion.head.startswith(b"POST /v1/completions ")
        assert "n" == completion.json["model"]


async def test_stream(fleet_of: FleetOf, nats_url: str) -> None:
    """Chunks without comments and [DONE], wherever the connection splits them."""
    whole = SSE_HEAD + chunk(b": ping\n\n") + stream("a", "b")[len(SSE_HEAD) :]
    pieces = [whole[place : place + 7] for place in range(0, len(whole), 7)]
    async with fleet_of(scripts=(says(*pieces),)) as fleet, opened(fleet, nats_url) as client:
        chunks = await all_of(client.generate({**BODY, "stream": True}))

        assert ["a", "b"] == [one["choices"][0]["text"] for one in chunks]


@pytest.mark.parametrize(
    ("script", "error", "status", "said"),
    [
        (says(answer(b'{"error": "full"}', 503)), WorkerRefusedError, 503, "w0 answered 503.*full"),
        (says(answer(b"no such", 404)), WorkerRefusedError, 404, "no such"),
        (says(SSE_HEAD + chunk(b'data: {"error": {"code": 400}}\n\n')), WorkerRefusedError, 400, "error"),
        (says(SSE_HEAD + chunk(b'data: {"error": "oh"}\n\n')), WorkerRefusedError, 500, "oh"),
        (says_and_resets(), WorkerDiedError, 502, "w0"),
        (says_and_resets(SSE_HEAD + chunk(event("a"))), WorkerDiedError, 502, "w0"),
        (says(SSE_HEAD + chunk(event("a")) + b"0\r\n\r\n"), WorkerDiedError, 502, "without .DONE."),
        (says(answer(b"{")), WorkerDiedError, 502, "w0"),
        (says_and_stalls(), WorkerSilentError, 504, "w0 sent nothing"),
        (says_and_stalls(SSE_HEAD + chunk(event("a"))), WorkerSilentError, 504, "w0 sent nothing"),
    ],
)
async def test_failures(
    fleet_of: FleetOf, nats_url: str, script: Any, error: type[KvRouterError], status: int, said: str
) -> None:
    """Each failure has its error with the worker's id and a status; nothing is retried."""
    limits: dict[str, Any] = {"first_byte_timeout_s": 0.3, "idle_timeout_s": 0.3}
    async with fleet_of(scripts=(script,)) as fleet, opened(fleet, nats_url, **limits) as client:
        with pytest.raises(error, match=said) as raised:
            await all_of(client.generate(BODY))

        assert status == raised.value.status
        assert ["w0"] == fleet.requests


async def test_worker_that_is_gone(fleet_of: FleetOf, nats_url: str) -> None:
    """The worker is announced, but its port is closed."""
    async with fleet_of(scripts=(OK,)) as fleet, opened(fleet, nats_url) as client:
        fleet.workers[0].url = "http://127.0.0.1:9"
        fleet.announce(fleet.workers[0])
        await until(lambda: candidates(client)[0].card.url == fleet.workers[0].url)
        with pytest.raises(WorkerDiedError):
            await all_of(client.generate(BODY))


async def test_no_worker(fleet_of: FleetOf, nats_url: str) -> None:
    """No live worker, an unknown target, a model that no worker serves, a client that is not open."""
    async with fleet_of(scripts=(OK,)) as fleet:
        async with opened(fleet, nats_url) as client:
            with pytest.raises(NoWorkersError, match="wanted target w9/0 takes no requests now"):
                await all_of(client.direct(BODY, "w9"))
            with pytest.raises(BadRequestError, match="messages"):
                await all_of(client.generate({}))
            fleet.announce(fleet.workers[0], "leave")
            await until(lambda: not client.worker_ids())
            with pytest.raises(NoWorkersError):
                await all_of(client.generate(BODY))
        with pytest.raises(ConfigError, match="open the Client first"):
            await all_of(Client("ns", "m", nats=nats_url).generate(BODY))
        with pytest.raises(NoWorkersError, match="not ready after"):
            async with Client("empty", "m", nats=nats_url, ready_timeout_s=0.2):
                pass


async def test_leaving_early(fleet_of: FleetOf, nats_url: str) -> None:
    """Closing the iterator, or cancelling its task, closes the connection, so that the engine stops."""
    script = says_and_stalls(SSE_HEAD + chunk(event("a")))
    async with fleet_of(scripts=(script,)) as fleet, opened(fleet, nats_url) as client:
        answers: Any = client.generate(BODY)
        assert "a" == (await anext(answers))["choices"][0]["text"]
        assert 1 == in_flight(client)
        await answers.aclose()
        assert not in_flight(client)
        await until(lambda: not fleet.workers[0].open_wires)

        task = asyncio.create_task(all_of(client.generate(BODY)))
        await until(lambda: fleet.workers[0].open_wires)
        task.cancel()
        await until(lambda: not fleet.workers[0].open_wires)


async def test_workers_behind_tls(fleet_of: FleetOf, nats_url: str, tmp_path: Path) -> None:
    """Requests go over TLS to workers whose authority is trusted, and only to those."""
    authority = Authority(tmp_path)
    async with fleet_of(worker_tls=authority.server()) as fleet:
        async with opened(fleet, nats_url, worker_tls_ca=authority.file) as client:
            assert 1 == len(await all_of(client.generate(BODY)))
        async with opened(fleet, nats_url) as client:
            with pytest.raises(WorkerDiedError, match="CERTIFICATE_VERIFY_FAILED"):
                await all_of(client.generate(BODY))
