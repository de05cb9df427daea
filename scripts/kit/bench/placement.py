"""`kvrouter router` next to Dynamo's selection service: a choice with its booking, and its end.

Both get the same engines (POST /workers, with the KV events of each over ZMQ) and the same calls at the same
rate: 4,000 tokens by hashes, of which some engines may hold the first half. They take
turns, in one run. Then: how soon another router shows what was booked, and what is left of callers that left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from rich.table import Table

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from scripts.kit.bench.meter import conclude, cpu_ns, machine
from scripts.kit.bench.wire.installs import DYNAMO
from scripts.kit.bench.wire.stage import open_stage
from scripts.kit.deployment import python
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import Fleet
from scripts.kit.ports import free_ports
from scripts.kit.script import ScriptError, table_of

BLOCK, TOKENS, PREFIXES, HOLDERS = 16, 4000, 32, 4
CONNECTIONS, BODIES, GONE, LEASE_S = 64, 512, 500, 2.0
LISTENS_S, SEEN_S = 30.0, 120.0


class Http:
    """One connection, with as little work per call as possible: the services are measured, not this."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Http:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer."""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        return int(answer[9:12]), await self._reader.readexactly(length)


@dataclass(slots=True)
class Side:
    """One service, and what was measured of it: in each turn one figure."""

    name: str
    port: int
    pid: int
    ids: itertools.count[int] = field(default_factory=itertools.count)
    cpu_ms: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    overlaps: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Engines:
    """What engines publish, without engines."""

    sockets: Sequence[zmq.asyncio.Socket]
    ports: Sequence[int]
    prefixes: Sequence[Sequence[int]]

    def specs(self) -> list[dict[str, Any]]:
        """For POST /workers."""
        facts = {"model_name": "m", "block_size": BLOCK, "total_kv_blocks": 65_536}
        facts |= {"max_num_batched_tokens": 8192, "data_parallel_size": 1}
        return [
            facts
            | {"worker_id": number, "endpoint": f"http://127.0.0.1:{port}", "data_parallel_start_rank": 0}
            | {"kv_events_endpoints": {"0": f"tcp://127.0.0.1:{port}"}}
            for number, port in enumerate(self.ports, 1)
        ]

    async def store(self) -> None:
        """Each prefix is stored on HOLDERS engines, in vLLM's form."""
        for number, tokens in enumerate(self.prefixes):
            blocks = len(tokens) // BLOCK
            event = ["BlockStored", [number << 32 | one for one in range(blocks)], None, tokens, BLOCK, None]
            batch = msgspec.msgpack.encode([time.time(), [event], 0])
            for at in range(HOLDERS):
                socket = self.sockets[(number * HOLDERS + at) % len(self.sockets)]
                sequence = (number // (len(self.sockets) // HOLDERS)).to_bytes(8, "big")
                await socket.send_multipart([b"", sequence, batch])

    def bodies(self) -> list[bytes]:
        """Calls that begin with a selection id to be added."""
        rng, found = random.Random(1), []
        for number in range(BODIES):
            rest = [rng.randrange(30_000) for _ in range(TOKENS // 2)]
            blocks = block_hashes([*self.prefixes[number % PREFIXES], *rest], BLOCK)
            signed = [[_signed(one) for one in each] for each in (blocks, sequence_hashes(blocks))]
            hashes = dict(zip(("block_hashes", "sequence_hashes"), signed, strict=True))
            found.append(msgspec.json.encode({"model_name": "m", "isl_tokens": TOKENS, **hashes})[1:])
        return found


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=64, help="engines (64)")
    parser.add_argument("--rate", type=float, default=1000, help="decisions a second (1000)")
    parser.add_argument("--seconds", type=float, default=6, help="of each turn (6)")
    parser.add_argument("--runs", type=int, default=4, help="turns of each service (4)")


async def run(flags: argparse.Namespace) -> int:
    dynamo = DYNAMO.find()
    if dynamo is None:
        raise ScriptError("ai-dynamo is not installed: scripts/bench peers --install")
    before = MachineTime.now()
    async with open_stage() as stage, _engines(flags.workers) as engines:
        ours, theirs, other, *admin = free_ports(5)
        words = [*python("kvrouter"), "router", "--nats", stage.nats_url]
        # the engines' agents are in the other one, as in a fleet they would be elsewhere
        for name, port, of_admin in (("other", other, admin[0]), ("kvrouter", ours, admin[1])):
            await stage.fleet.start(name, [*words, f"--port={port}", f"--admin-port={of_admin}"])
        serve = [str(dynamo), "-m", "dynamo.select_service", f"--port={theirs}"]
        await stage.fleet.start("dynamo", serve, {"PYTHONPATH": ""})
        for port in (other, theirs, ours):
            await _listens(port)
        for port in (other, theirs):
            http = await Http.open(port)
            for spec in engines.specs():
                status, answer = await http.ask("POST", "/workers", msgspec.json.encode(spec))
                if status != 201:
                    raise ScriptError(f"POST /workers: {status} {answer.decode()}")
        await asyncio.sleep(2)  # subscriptions of ZMQ have no answer
        await engines.store()
        bodies = engines.bodies()
        sides = [Side("kvrouter", ours, _pid(stage.fleet, "kvrouter"))]
        sides.append(Side("dynamo", theirs, _pid(stage.fleet, "dynamo")))
        for turn in range(flags.runs + 1):
            for side in sides:
                await _measure(side, bodies, flags, counts=turn > 0)
        async with asyncio.timeout(SEEN_S):
            seen = await _seen(ours, other, bodies)
            gone_s = await _gone(ours, other, bodies)
    rows = [_row(side) for side in sides]
    columns = ["", "CPU per decision, ms", "p50, ms", "p99, ms", "decisions/s", "tokens found"]
    tables = [table_of("a choice with its booking, and its end", columns, rows), _others(seen, gone_s)]
    conclude(flags, tables, machine(before), sides=[asdict(one) | {"ids": 0} for one in sides], seen=seen)
    return 0


def _row(side: Side) -> list[str]:
    shown = [side.cpu_ms, side.p50_ms, side.p99_ms, side.per_s]
    middle = [f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in shown]
    return [side.name, *middle, f"{statistics.mean(side.overlaps):.0f}"]


def _others(seen: Sequence[float], gone_s: float) -> Table:
    ends = statistics.quantiles(seen, n=100)
    booked = f"p50 {ends[49]:.1f}, p99 {ends[98]:.1f}, max {max(seen):.1f} ms ({len(seen)})"
    rows = [["booked at one router, in /loads of another", booked]]
    rows.append([f"{GONE} callers gone, nothing left at the other", f"{gone_s:.2f} s after {LEASE_S} s"])
    return table_of("routers", ["", ""], rows)


def _pid(fleet: Fleet, name: str) -> int:
    return fleet.processes[name].pid


@contextlib.asynccontextmanager
async def _engines(count: int) -> AsyncIterator[Engines]:
    context, ports, rng = zmq.asyncio.Context(), free_ports(count), random.Random(0)
    sockets = [context.socket(zmq.PUB) for _ in ports]
    try:
        for socket, port in zip(sockets, ports, strict=True):
            socket.bind(f"tcp://127.0.0.1:{port}")
        prefixes = [[rng.randrange(30_000) for _ in range(TOKENS // 2)] for _ in range(PREFIXES)]
        yield Engines(sockets, ports, prefixes)
    finally:
        context.destroy(linger=0)


async def _listens(port: int) -> None:
    async with asyncio.timeout(LISTENS_S):
        while True:
            with contextlib.suppress(OSError):
                await Http.open(port)
                return
            await asyncio.sleep(0.05)


async def _measure(side: Side, bodies: Sequence[bytes], flags: argparse.Namespace, *, counts: bool) -> None:
    """A turn: calls begin at their times, whatever those before take; each has a connection of its own."""
    free = asyncio.Queue[Http]()
    for _ in range(CONNECTIONS):
        free.put_nowait(await Http.open(side.port))
    took: list[float] = []

    async def one() -> None:
        http, number = await free.get(), next(side.ids)
        began = time.perf_counter()
        name = f"{side.name}-{number}"
        body = b'{"selection_id":"%b",' % name.encode() + bodies[number % len(bodies)]
        status, answer = await http.ask("POST", "/select_and_reserve", body)
        took.append(time.perf_counter() - began)
        if status != 200:
            raise ScriptError(f"{side.name}: {status} {answer.decode()[:500]}")
        side.overlaps.append(msgspec.json.decode(answer)["overlap"]["longest_matched"])
        status, answer = await http.ask("DELETE", f"/reservations/{name}")
        if status not in {200, 204}:
            raise ScriptError(f"{side.name}: DELETE: {status} {answer.decode()[:500]}")
        free.put_nowait(http)

    before, began = cpu_ns(side.pid), time.perf_counter()
    count = int(flags.rate * flags.seconds)
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / flags.rate - time.perf_counter()))
            group.create_task(one())
    per_s = count / (time.perf_counter() - began)
    if not counts:
        side.overlaps.clear()
        return
    ends = statistics.quantiles(took, n=100)
    side.cpu_ms.append((cpu_ns(side.pid) - before) / count / 1e6)
    side.p50_ms.append(1e3 * ends[49])
    side.p99_ms.append(1e3 * ends[98])
    side.per_s.append(per_s)


async def _booked(http: Http) -> int:
    """The requests of all workers."""
    models = msgspec.json.decode((await http.ask("GET", "/loads"))[1])
    return sum(one["active_requests"] for model in models for one in model["loads"])


async def _seen(ours: int, other: int, bodies: Sequence[bytes]) -> list[float]:
    """Milliseconds from a reservation's answer until the other router shows it."""
    a, b, found = await Http.open(ours), await Http.open(other), []
    for number in range(500):
        body = b'{"selection_id":"seen",' + bodies[number % len(bodies)]
        await a.ask("POST", "/select_and_reserve", body)
        began = time.perf_counter()
        while await _booked(b) != 1:
            pass
        found.append(1e3 * (time.perf_counter() - began))
        await a.ask("DELETE", "/reservations/seen")
        while await _booked(b):
            pass
    return found


async def _gone(ours: int, other: int, bodies: Sequence[bytes]) -> float:
    """Seconds after the last lease until the other router shows none of the callers that left."""
    a, b = await Http.open(ours), await Http.open(other)
    for number in range(GONE):
        body = b'{"selection_id":"gone%d","lease_s":%f,' % (number, LEASE_S) + bodies[number % len(bodies)]
        await a.ask("POST", "/select_and_reserve", body)
    last = time.perf_counter()
    while await _booked(b):  # noqa: ASYNC110  # another process
        await asyncio.sleep(0.005)
    return time.perf_counter() - last - LEASE_S
