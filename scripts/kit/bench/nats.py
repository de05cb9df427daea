"""What the bundled NATS server carries: messages, bytes and cores, by workers and replicas.

Each worker publishes a heartbeat a second and frames of 5 blocks; each replica publishes a heartbeat and the
three frames of each of its requests, and receives everything. Sizes are those of real messages. Publishers
and receivers are plain sockets in this process, which write prepared bytes and count what they read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from rich.table import Table

from kvrouter.bus import Subjects
from kvrouter.bus.embedded import server_binary
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from scripts.kit.bench.meter import cpu_ns, machine
from scripts.kit.fleet import Fleet, FleetError, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.script import log_directory, new_console, until_signalled

TICK_S = 0.01
# Bytes of payloads, as a mocker's agent and a frontend send them.
WORKER_BEAT, REPLICA_BEAT, KV_FRAME, SYNC_FRAME = 160, 200, 110, 212
FRAMES_PER_REQUEST = 3
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Load:
    """What one run sends."""

    workers: int
    replicas: int
    frames_s: float
    """Of each worker."""
    requests_s: float
    """Of each replica."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What the server did, per second."""

    workers: int
    replicas: int
    in_messages: float
    in_mb: float
    out_messages: float
    out_mb: float
    cores: float
    late: float
    """Share of what was published and had not been delivered at the end."""


def messages_of(load: Load) -> list[bytes]:
    """One second of messages, in the order in which the ticks send them."""
    subjects, pool = Subjects("bench"), PoolId("model-12345678")
    made: list[bytes] = []
    for number in range(load.workers):
        worker = WorkerId(f"host-{number}-9000")
        made.append(_message(subjects.live_worker(worker), WORKER_BEAT))
        made += [_message(subjects.live_kv(pool, worker, 0), KV_FRAME)] * round(load.frames_s)
    for number in range(load.replicas):
        router = RouterId(f"{number:012x}")
        made.append(_message(subjects.live_router(router), REPLICA_BEAT))
        frames = round(load.requests_s * FRAMES_PER_REQUEST)
        made += [_message(subjects.live_sync(pool, router), SYNC_FRAME)] * frames
    return made


def _message(subject: str, size: int) -> bytes:
    return f"PUB {subject} {size}\r\n".encode() + bytes(size) + b"\r\n"


async def measure(fleet: Fleet, client: Client, load: Load, seconds: float) -> Carried:
    """One server, its publisher and its receivers, for a while."""
    port, http = free_ports(2)
    command = [str(server_binary()), "--addr", "127.0.0.1", "--port", str(port), "-m", str(http)]
    process = await fleet.start(f"nats-{load.workers}-{load.replicas}", command)
    varz = f"http://127.0.0.1:{http}/varz"
    await wait_until_ok(client, process, varz)
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(_receive(port)) for _ in range(load.replicas)]
        await asyncio.sleep(_SETTLE_S)
        writer = tasks.create_task(_publish(port, messages_of(load)))
        await asyncio.sleep(_SETTLE_S)
        figures = await _figures(client, process, varz, load, seconds)
        for task in (writer, *readers):
            task.cancel()
    await fleet.stop(process.name)
    return figures


async def _figures(client: Client, process: Process, varz: str, load: Load, seconds: float) -> Carried:
    before, cpu = await client.get_json(varz), cpu_ns(process.pid)
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    after, cpu = await client.get_json(varz), cpu_ns(process.pid) - cpu
    took = asyncio.get_running_loop().time() - began
    rates = {
        name: (after[name] - before[name]) / took for name in ("in_msgs", "in_bytes", "out_msgs", "out_bytes")
    }
    return Carried(
        load.workers,
        load.replicas,
        rates["in_msgs"],
        rates["in_bytes"] / 1e6,
        rates["out_msgs"],
        rates["out_bytes"] / 1e6,
        cpu / 1e9 / took,
        1 - rates["out_msgs"] / (rates["in_msgs"] * load.replicas),
    )


async def _publish(port: int, messages: Sequence[bytes]) -> None:
    """The messages of a second, in ticks, again and again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false}\r\n')
    ticks = round(1 / TICK_S)
    batches = [b"".join(messages[tick::ticks]) for tick in range(ticks)]
    loop = asyncio.get_running_loop()
    began, sent = loop.time(), 0
    with contextlib.closing(writer):
        while True:
            writer.write(batches[sent % ticks])
            await writer.drain()
            sent += 1
            await asyncio.sleep(max(0.0, began + sent * TICK_S - loop.time()))


async def _receive(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false}\r\nSUB kvrouter.bench.live.> 1\r\n')
    with contextlib.closing(writer):
        while await reader.read(1 << 20):
            pass
    raise FleetError("the server has closed a receiver's connection: it read too slowly")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench nats", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 200, 1000], metavar="N")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument(
        "--frames-s", type=float, default=20.0, metavar="N", help="of each worker (%(default)g)"
    )
    parser.add_argument(
        "--requests-s", type=float, default=50.0, metavar="N", help="of each replica (%(default)g)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of one run (%(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    flags = parser.parse_args(arguments)
    loads = [
        Load(workers, replicas, flags.frames_s, flags.requests_s)
        for workers in flags.workers
        for replicas in flags.replicas
    ]
    carried: list[Carried] = []
    try:
        code = uvloop.run(until_signalled("bench", _run(loads, flags.seconds, carried)))
    except FleetError as error:
        print(f"bench: failed: {error}", file=sys.stderr)
        return 1
    console = new_console()
    console.print(table(carried))
    about = {
        **machine(),
        "frames_s": flags.frames_s,
        "requests_s": flags.requests_s,
        "seconds": flags.seconds,
    }
    console.print(json.dumps(about), soft_wrap=True, highlight=False)
    if flags.json is not None:
        body = {**about, "nats": [asdict(one) for one in carried]}
        flags.json.write_text(json.dumps(body, indent=2) + "\n")
    return code


async def _run(loads: Sequence[Load], seconds: float, carried: list[Carried]) -> int:
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(log_directory("bench"))
        client = Client()
        stack.callback(client.close)
        fleet = await stack.enter_async_context(Fleet(directory))
        for load in loads:
            carried.append(await measure(fleet, client, load, seconds))
    return 0


def table(carried: Sequence[Carried]) -> Table:
    """One row for each fleet."""
    shown = Table(title="one NATS server, per second", title_justify="left")
    for name in (
        "workers",
        "replicas",
        "in",
        "in MB",
        "out",
        "out MB",
        "cores",
        "µs per message out",
        "late",
    ):
        shown.add_column(name, justify="right")
    for one in carried:
        shown.add_row(
            *map(str, (one.workers, one.replicas)),
            *(f"{one.in_messages:,.0f}", f"{one.in_mb:.2f}", f"{one.out_messages:,.0f}", f"{one.out_mb:.1f}"),
            f"{one.cores:.2f}",
            f"{1e6 * one.cores / one.out_messages:.1f}",
            f"{100 * one.late:.1f} %",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
