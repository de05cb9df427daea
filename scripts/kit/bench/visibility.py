"""Delay until a booking of one replica is visible at the others: only their shells, one process each.

    child 0: Router.route, with the time in the booking's request id ──frame──> NATS ──> child 1…N-1
    child n: the inbox applies the frame; the booking is in the active table: now - that time

Each booking is marked and freed a moment later, so a peer receives three frames, as for a request.

CLOCK_MONOTONIC is one clock for all processes of a machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import uvloop

from kvrouter.bus import Subjects
from kvrouter.bus.rights import FRONTEND
from kvrouter.config import open_bus
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.wire.hashes import pool_token
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import PoolId, SequenceHash, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.frontend.run import new_replica
from kvrouter.frontend.settings import parse_options
from kvrouter.replica.loop import ReplicaLoop
from kvrouter.replica.publishing import Publishing
from scripts.kit.bench.meter import cpu_ns
from scripts.kit.fleet import Fleet, FleetError

MODEL = "bench"
WORKER = WorkerId("w0")
POOL = PoolId(pool_token(MODEL))
BLOCKS, BLOCK_SIZE = 64, 16
PREFILL_S, HELD_S = 0.02, 0.1
_PATIENCE_S = 20.0
_TAIL_S = 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Measured by the children that do not book."""

    # Seconds from booking to visibility, for every booking at every other replica.
    latencies_ms: list[float]
    # CPU time for one booking of another replica, from AddRequest to Free, without heartbeats.
    cpu_us: float


async def measure(fleet: Fleet, nats_url: str, *, replicas: int, rate: float, seconds: float) -> Seen:
    """Start the children and read their figures."""
    files = [fleet.directory / f"visible-{number}.json" for number in range(replicas)]
    processes = []
    for number, file in enumerate(files):
        flags = [f"--nats={nats_url}", f"--number={number}", f"--replicas={replicas}", f"--file={file}"]
        flags += [f"--rate={rate}", f"--seconds={seconds}"]
        command = [sys.executable, "-m", "scripts.kit.bench.visibility", *flags]
        processes.append(await fleet.start(f"visible-{number}", command))
    for process in processes:
        if await process.wait():
            raise FleetError(f"{process.name} failed:\n{process.tail()}")
        fleet.processes.pop(process.name)
    peers = [json.loads(file.read_text()) for file in files[1:]]
    return Seen([ms for peer in peers for ms in peer["latencies_ms"]], mean(peer["cpu_us"] for peer in peers))


class Watcher:
    """Measures the delay when bookings may have changed."""

    def __init__(self, replica: Replica) -> None:
        self.latencies_ms: list[float] = []
        self._replica = replica
        self._last_number = 0

    def look(self) -> None:
        """Record the delay of new bookings."""
        now_ns = time.monotonic_ns()
        active = self._replica.router(POOL).pool.active
        for owner in active.owners():
            newest = self._last_number
            for booking in reversed(active.bookings(owner)):
                if booking.key.number <= newest:
                    break
                self.latencies_ms.append((now_ns - int(booking.request_id)) / 1e6)
                self._last_number = max(self._last_number, booking.key.number)


async def _child(flags: argparse.Namespace) -> None:
    namespace = f"visible-{flags.replicas}"
    options = parse_options(["--router-replica-sync", "--namespace", namespace])
    replica = new_replica(options)
    async with open_bus(flags.nats, name=f"visible-{flags.number}", user=FRONTEND) as bus:
        watcher = Watcher(replica)
        replica_loop = ReplicaLoop(replica, bus, Subjects(namespace), heartbeat_s=1.0, on_change=watcher.look)
        await replica_loop.subscribe()
        running = asyncio.create_task(replica_loop.run())
        async with asyncio.timeout(_PATIENCE_S):
            while len(replica.peers) < flags.replicas - 1:  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(0.01)
        await asyncio.sleep(_TAIL_S)  # all children know each other, including the last one
        gc.freeze()  # like a frontend
        rest = cpu_ns(os.getpid())
        await asyncio.sleep(_TAIL_S)
        before = cpu_ns(os.getpid())
        if flags.number == 0:
            await _book(replica, replica_loop.publishing, flags.rate, flags.seconds)
        else:
            await asyncio.sleep(flags.seconds)
        used = cpu_ns(os.getpid()) - before - (before - rest) * flags.seconds / _TAIL_S
        await asyncio.sleep(_TAIL_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    cpu_us = used / 1000 / max(1, len(watcher.latencies_ms))
    flags.file.write_text(json.dumps({"latencies_ms": watcher.latencies_ms, "cpu_us": cpu_us}))


async def _book(replica: Replica, publishing: Publishing, rate: float, seconds: float) -> None:
    """Book at random moments (a Poisson process), and free each a moment later."""
    router = _router(replica)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        await asyncio.sleep(random.expovariate(rate))
        hashes = [SequenceHash(random.getrandbits(64)) for _ in range(BLOCKS)]
        request = RouteRequest(str(time.monotonic_ns()), (Prompt(hashes, BLOCKS * BLOCK_SIZE),))
        placement = router.route(request, loop.time())
        publishing.flush_soon()
        loop.call_later(
            PREFILL_S, _tell, publishing, router.bookings.mark_prefill_completed, placement.key, 0.0
        )
        loop.call_later(HELD_S, _tell, publishing, router.bookings.free, placement.key)


def _tell(publishing: Publishing, change: Callable[..., None], *arguments: Any) -> None:
    change(*arguments)
    publishing.flush_soon()


def _router(replica: Replica) -> Router:
    """The pool's router, with one worker for all requests."""
    card = Card(worker_id=WORKER, url="http://127.0.0.1:1", model=MODEL, block_size=BLOCK_SIZE)
    beat = WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 1, 0)], 1, card)
    replica.worker_heartbeat(WORKER, encode(beat), 0.0)
    return replica.routers[POOL]


def main(arguments: Sequence[str] | None = None) -> int:
    """One child."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    kinds = {"nats": str, "number": int, "replicas": int, "rate": float, "seconds": float, "file": Path}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    uvloop.run(_child(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
