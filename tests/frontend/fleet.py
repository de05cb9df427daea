"""A frontend in this process, with scripted workers that announce themselves over a real NATS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import structlog

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.tenants import _Use
from kvrouter.core.wire.heartbeats import Card, RankBeat, State, WorkerBeat
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import PoolId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import COMMAND, FrontendOptions
from kvrouter.settings.read import Loaded, load
from tests.frontend.clients import Client, Response, ask, connected, get
from tests.frontend.workers import OK, FakeWorker, Script, until

POOL = PoolId("m-12345678")
BODY = {"model": "m", "prompt": list(range(64)), "max_tokens": 4}
STREAM = {**BODY, "stream": True}
FOR_OPERATORS = (
    "/clients",
    "/tenants",
    "/deadly_prompts",
    "/fleet",
    "/routing",
    "/workers",
    "/decisions",
    "/busy_threshold",
    "/v1/route",
)
"""Paths that `get` requests from the admin listener."""


def settings_of(namespace: str, flags: tuple[str, ...]) -> Loaded[FrontendOptions]:
    """The settings of a frontend in this namespace."""
    loaded = load(COMMAND, flags, {}) if _reads_a_file(flags) else _load_once(flags)
    return replace(
        loaded,
        settings=replace(loaded.settings, namespace=namespace),
        values={**loaded.values, "namespace": namespace},
        words=(*flags, "--namespace", namespace),
    )


def _reads_a_file(flags: Sequence[str]) -> bool:
    pairs = zip(("", *flags), flags, strict=False)
    return any("/" in flag and before not in {"--nats", "--model-path"} for before, flag in pairs)


@cache
def _load_once(flags: tuple[str, ...]) -> Loaded[FrontendOptions]:
    """Reading takes three times as long as all else that a frontend does to start."""
    return load(COMMAND, flags, {})


class Trouble:
    """Errors in the log and exceptions in the event loop, which no test may cause."""

    def __init__(self) -> None:
        self.loop_errors: list[dict[str, Any]] = []
        self.records: list[logging.LogRecord] = []
        self.logs: list[Any] = []

    def all(self) -> list[Any]:
        """Everything of level error and above."""
        loud = [entry for entry in self.logs if entry["log_level"] in {"error", "critical"}]
        return [*self.loop_errors, *(record.getMessage() for record in self.records), *loud]


@contextlib.contextmanager
def no_trouble() -> Iterator[Trouble]:
    """Fail if there was any trouble inside."""
    trouble = Trouble()
    handler = logging.Handler(logging.ERROR)
    handler.emit = trouble.records.append  # type: ignore[assignment, method-assign]
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: trouble.loop_errors.append(context))
    logging.getLogger().addHandler(handler)
    try:
        with structlog.testing.capture_logs() as trouble.logs:
            yield trouble
    finally:
        logging.getLogger().removeHandler(handler)
        loop.set_exception_handler(None)
    assert not trouble.all(), trouble.all()[:3]


@dataclass
class Fleet:
    """Frontends (most tests have one), workers, and their bus."""

    bus: Bus
    subjects: Subjects
    trouble: Trouble
    flags: Sequence[str] = ()
    """Of each frontend."""
    frontends: list[RunningFrontend] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)

    def new_frontend(self) -> contextlib.AbstractAsyncContextManager[RunningFrontend]:
        """One more, in the same namespace."""
        loaded = settings_of(self.subjects.namespace, tuple(self.flags))
        return running_frontend(loaded.settings, loaded=loaded)

    @property
    def frontend(self) -> RunningFrontend:
        """The first."""
        return self.frontends[0]

    @property
    def url(self) -> str:
        """The first frontend's address, for clients."""
        return self.frontend.url

    def url_of(self, path: str) -> str:
        """The URL of the first frontend's listener for this path."""
        return self.frontend.admin_url if path.startswith(FOR_OPERATORS) else self.url

    @property
    def requests(self) -> list[str]:
        """The ids of the workers that got a request, once for each."""
        return [worker.id for worker in self.workers for _ in worker.requests]

    def announce(
        self, worker: FakeWorker, state: State = "up", ranks_heard: Sequence[RankBeat] = (), **card: Any
    ) -> None:
        """Publish the worker's heartbeat, as its agent would."""
        facts = {"model": "m", "block_size": 16, "publishes_events": False, "started_at_us": 1, **card}
        whole = Card(worker_id=worker.id, url=worker.url, **facts)
        beat = WorkerBeat(VERSION, 1, state, POOL, list(ranks_heard), 1, whole)
        self.bus.publish(self.subjects.live_worker(WorkerId(worker.id)), encode_beat(beat))

    def targets(self, frontend: RunningFrontend) -> list[Target]:
        """The targets that a frontend may choose from."""
        routers = frontend.replica.routers.values()
        return [target for router in routers for target in router.pool.targets]

    def bookings(self) -> int:
        """Requests in flight as each replica sees them, added up."""
        pools = [router.pool for each in self.frontends for router in each.replica.routers.values()]
        return sum(sum(pool.active.owners().values()) for pool in pools)

    async def until_free(self, within_s: float = 10.0) -> None:
        """Return when no replica counts any request in flight."""
        await until(lambda: not self.bookings(), "all bookings are freed", within_s)

    async def ask(self, body: Any = None, *headers: str, path: str = "/v1/completions") -> Response:
        """One request on a new connection."""
        return await ask(self.url_of(path), BODY if body is None else body, *headers, path=path)

    async def get(self, path: str) -> Response:
        """One GET on a new connection."""
        return await get(self.url_of(path), path)

    def connected(self) -> contextlib.AbstractAsyncContextManager[Client]:
        """A connection to the first frontend."""
        return connected(self.url)

    def logged(self, event: str) -> list[Any]:
        """The log events with this name."""
        return [entry for entry in self.trouble.logs if entry["event"] == event]

    def check_nothing_is_left(self) -> None:
        """Raise if a request left a booking or a connection."""
        for frontend in self.frontends:
            assert {} == frontend.completions.in_flight.running
            assert frontend.completions.in_flight.idle.is_set()
            for router in frontend.replica.routers.values():
                router.pool.active.check()
                assert router.bookings.is_empty


def use_of(replica: Replica, tenant: str = "a") -> _Use:
    """What a replica counts of a tenant, which clients see in parts: what is left, or a 429."""
    return replica.tenants._uses[tenant]


def hears_itself(replica: Replica) -> bool:
    """Whether one of its own heartbeats has come back, so that the server has its subscriptions."""
    return replica._returned_round > 0


class FleetOf(Protocol):
    """Opens a fleet: flags of the frontend first, then a script for each worker, and parts of their card."""

    def __call__(
        self,
        *flags: str,
        scripts: tuple[Script, ...] = ...,
        replicas: int = 1,
        worker_tls: ssl.SSLContext | None = None,
        **card: Any,
    ) -> contextlib.AbstractAsyncContextManager[Fleet]:
        """Use with `async with`."""
        ...


@contextlib.asynccontextmanager
async def running_fleet(
    nats: str,
    *flags: str,
    scripts: tuple[Script, ...] = (OK,),
    replicas: int = 1,
    worker_tls: ssl.SSLContext | None = None,
    **card: Any,
) -> AsyncIterator[Fleet]:
    """A fleet with one known worker per script. Trouble inside fails the test."""
    namespace = uuid.uuid4().hex
    common = ["--host", "127.0.0.1", "--port", "0", "--nats", nats]
    common += ["--lease-s", "60", "--drain-timeout-s", "5", "--router-mode", "round-robin"]
    # most tests count what workers receive, and a probe of /tokenize would be one more
    common += ["--tokenizer", "local"]
    # at its start each frontend would compare fastokens with the reference, for 0.3 s of CPU time
    common += ["--tokenizer-backend", "huggingface"]
    # the names in requests that tests write by hand
    common += ["--admin-allowed-host", "test", "--admin-allowed-host", "t", *flags]
    async with contextlib.AsyncExitStack() as stack:
        trouble = stack.enter_context(no_trouble())
        bus = await stack.enter_async_context(Bus.open(NatsOptions((nats,)), name="test"))
        fleet = Fleet(bus, Subjects(namespace), trouble, common)
        for number, script in enumerate(scripts):
            worker = FakeWorker(f"w{number}", script, tls=worker_tls)
            fleet.workers.append(await stack.enter_async_context(worker.serving()))
        for _ in range(replicas):
            fleet.frontends.append(await stack.enter_async_context(fleet.new_frontend()))
        await until(lambda: bus.connected, "the test is connected")
        await until(
            lambda: all(hears_itself(each.replica) for each in fleet.frontends), "every frontend hears itself"
        )
        for worker in fleet.workers:
            fleet.announce(worker, **card)
        count = len(scripts) * card.get("ranks", 1)
        await until(
            lambda: all(len(fleet.targets(each)) == count for each in fleet.frontends), "workers seen"
        )
        yield fleet
        await fleet.until_free()
        await until(lambda: all(each.completions.in_flight.idle.is_set() for each in fleet.frontends), "idle")
        fleet.check_nothing_is_left()
