"""Each NATS server that --nats names: what it says of itself, whether it lets this client in, whom it hears.

    INFO line ──> ServerInfo ──┐
    connection, round trip ────┼──> Server ──> findings
    heartbeats through it ─────┘

Servers that are not of one cluster pass on no messages to each other. Their INFO may not show that, so the
senders that each one hears are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.bus.connection import LEAST_PAYLOAD_BYTES
from kvrouter.bus.rights import VERIFY
from kvrouter.bus.server_info import INFO_S, ServerInfo, read_info
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.senders import RouterSource, WorkerSource
from kvrouter.errors import KvRouterError, counted
from kvrouter.observe.doctor.findings import Finding, clean, listed
from kvrouter.settings.declare import without_password

CONNECT_S = 3.0
ANSWER_S = 2.0
MOST_SERVERS = 16
MOST_HEARD = 20_000
# Slower, and a heartbeat's load is older than its interval suggests.
SLOW_S = 0.1
LEAST_VERSION = (2, 10)


@dataclass(slots=True)
class Server:
    """What was seen of one server. `trouble`: why it cannot be used, and `kind` of which finding."""

    url: str
    info: ServerInfo | None = None
    kind: str = ""
    trouble: str = ""
    round_trip_s: float | None = None
    reconnects: int = 0
    heard: set[str] = field(default_factory=set)
    denied: str = ""


async def meet(url: str) -> Server:
    """Read a server's INFO. Never raises."""
    server = Server(without_password(url))
    if url.startswith(("ws://", "wss://")):
        return server  # the connection shows what there is to see
    try:
        server.info = await read_info(url)
    except (OSError, TimeoutError) as error:
        server.kind = "nats.unreachable"
        is_slow = isinstance(error, TimeoutError)
        server.trouble = f"no answer within {INFO_S:g} s" if is_slow else _reason(error)
    except KvRouterError as error:
        server.kind, server.trouble = "nats.not_nats", clean(error)
    return server


def _reason(error: OSError) -> str:
    """Without the address, which asyncio's messages repeat."""
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)


async def connect(bus: Bus, server: Server) -> bool:
    """Wait until the bus is connected; otherwise note why it is not."""
    connected = asyncio.Event()
    bus.on_connect(connected.set)
    try:
        async with asyncio.timeout(CONNECT_S):
            await connected.wait()
    except TimeoutError:
        if not server.kind:
            server.kind = "nats.rejected"
            why = bus.outage_reason if bus.is_rejected else bus.last_error  # the first names the files
            server.trouble = why or f"no connection within {CONNECT_S:g} s"
        return False
    return True


async def answers(bus: Bus) -> bool:
    """Whether NATS answers a ping; a connection that hangs counts as connected for some seconds."""
    if not bus.connected:
        return False
    try:
        async with asyncio.timeout(2 * ANSWER_S):  # nats-py may wait longer for a connection that it has lost
            await bus.flush(ANSWER_S)
    except Exception:  # nats-py has many
        return False
    return True


async def measure(bus: Bus, server: Server) -> None:
    """The round trip to the server, the best of three; None without an answer."""
    took: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        with contextlib.suppress(Exception):
            await bus.flush(CONNECT_S)
            took.append(time.perf_counter() - started)
    server.round_trip_s = min(took, default=None)


@contextlib.asynccontextmanager
async def hearing(options: NatsOptions, server: Server, url: str, subjects: Subjects) -> AsyncIterator[None]:
    """Meanwhile collect in `server.heard` whose heartbeats come through this server."""

    def note(subject: str, _data: bytes, _reply: str) -> None:
        match subjects.parse_live(subject):
            case WorkerSource(name) | RouterSource(name) if len(server.heard) < MOST_HEARD:
                server.heard.add(name)
            case _:
                pass

    async with Bus.open(replace(options, servers=(url,)), name="doctor", user=VERIFY) as bus:
        if not server.kind and await connect(bus, server):
            await measure(bus, server)
            await bus.subscribe(subjects.live_worker(WorkerId(">")), note)
            await bus.subscribe(subjects.live_router(RouterId("*")), note)
            bus.publish(subjects.hello, b"")
        yield
        server.reconnects = max(0, bus.counters.connections - 1)
        server.denied = bus.last_error if bus.connected else ""


def check_servers(servers: Sequence[Server], namespace: str) -> Iterator[Finding]:
    """Findings about single servers, then about all of them together."""
    for server in servers:
        yield from _check_server(server)
    up = [server for server in servers if not server.kind]
    clusters = {server.info.cluster for server in up if server.info is not None}
    ids = {server.info.server_id for server in up if server.info is not None}
    if len(ids) > 1 and (len(clusters) > 1 or clusters == {""}):
        named = listed(f"{one.url} ({_cluster(one)})" for one in up)
        yield Finding("nats.clusters", "--nats", named)
    everyone = set().union(*(server.heard for server in up)) if up else set()
    for server in up if len(up) > 1 else ():
        if missing := everyone - server.heard:
            seen = f"no heartbeat of {listed(missing)}, which other servers pass on"
            yield Finding("nats.split", server.url, f"{seen} (namespace {namespace})")


def _cluster(server: Server) -> str:
    name = server.info.cluster if server.info is not None else ""
    return f"cluster {name}" if name else "no cluster"


def _check_server(server: Server) -> Iterator[Finding]:
    if server.kind:
        yield Finding(server.kind, server.url, server.trouble)
        return
    if server.denied:
        yield Finding("nats.denied", server.url, server.denied)
    if server.reconnects:
        yield Finding("nats.unstable", server.url, f"connected again {counted(server.reconnects, 'time')}")
    if server.round_trip_s is not None and server.round_trip_s > SLOW_S:
        yield Finding("nats.slow", server.url, f"a round trip takes {1000 * server.round_trip_s:.0f} ms")
    info = server.info
    if info is None:
        return
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})", info.version)
    if numbers and (int(numbers[1]), int(numbers[2])) < LEAST_VERSION:
        yield Finding("nats.old", server.url, f"version {info.version}")
    if 0 < info.max_payload < LEAST_PAYLOAD_BYTES:
        seen = f"max_payload is {info.max_payload} bytes; frames need {LEAST_PAYLOAD_BYTES}"
        yield Finding("nats.max_payload", server.url, seen)


def described(servers: Sequence[Server]) -> str:
    """What is well, in a line."""
    up = [server for server in servers if not server.kind]
    infos = [server.info for server in up if server.info is not None]
    versions = listed({info.version for info in infos})
    slowest = max((server.round_trip_s or 0.0 for server in up), default=0.0)
    payload = min((info.max_payload for info in infos), default=0)
    clusters = {info.cluster for info in infos} - {""}
    parts = [f"{len(up)} of {len(servers)} servers answer" if len(servers) > 1 else "the server answers"]
    parts += [f"version {versions}"] if versions else []
    parts += [f"cluster {listed(clusters)}"] if clusters else []
    parts += [f"max_payload {payload // 1024} KiB"] if payload else []
    return clean(", ".join([*parts, f"round trip {1000 * slowest:.1f} ms"]))
