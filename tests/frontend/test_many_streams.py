"""Thousands of slow streams through one replica in another process: every event arrives, in little memory.

`scripts/test --long -s` opens 9,000, about what 20,000 descriptors allow, and shows the bytes per stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.core.wire.heartbeats import Card, WorkerBeat
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.processes.descriptors import raise_limit
from tests.frontend.clients import get
from tests.frontend.workers import END, LAST_CHUNK, SSE_HEAD, chunk, event, until, until_found
from tests.long import IS_LONG

STREAMS = 9_000 if IS_LONG else 400
MOST_BYTES_PER_STREAM = 32 * 1024
"""Measured: 10 KB with 9,000 streams of small requests. A request is kept until its end."""
WITHIN_S = 120.0
AT_ONCE = 200
"""Connections opened together."""
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 43\r\n\r\n"
    b'{"model":"m","prompt":[1,2],"stream":true }'
)


class SlowWorker(asyncio.Protocol):
    """One stream at a worker: an event at once, the others when the test asks for them."""

    streams: ClassVar[set[SlowWorker]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.streams.add(self)

    def data_received(self, _data: bytes) -> None:
        self.say(SSE_HEAD + chunk(event("first")))

    def say(self, data: bytes) -> None:
        """Send."""
        self.transport.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self.streams.discard(self)


class Reader(asyncio.Protocol):
    """One client: counts events."""

    def __init__(self) -> None:
        self.events = 0
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(REQUEST)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self.is_over = data.endswith(LAST_CHUNK)


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.asynccontextmanager
async def running(nats: str, port: int) -> AsyncIterator[int]:
    """A frontend in another process, which knows one slow worker; yields its pid."""
    namespace, url = uuid.uuid4().hex, f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvrouter.frontend", "--host=127.0.0.1", f"--port={port}"]
    command += [
        "--admin-port=0",
        "--nats",
        nats,
        "--namespace",
        namespace,
        "--router-mode",
        "round-robin",
        "--drain-grace-s",
        "0",
    ]
    loop = asyncio.get_running_loop()
    async with Bus.open(NatsOptions((nats,)), name="test") as bus:
        server = await loop.create_server(SlowWorker, "127.0.0.1", 0, backlog=1024)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        card = Card(
            worker_id="w", url=address, model="m", block_size=16, publishes_events=False, started_at_us=1
        )
        beat = encode_beat(WorkerBeat(VERSION, 1, "up", PoolId("m-12345678"), [], 1, card))
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220  # it does not wait
        try:
            beating = asyncio.create_task(beat_on(bus, namespace, beat))
            await until_found(lambda: is_ready(url), within_s=30)
            yield process.pid
            beating.cancel()
        finally:
            process.kill()
            process.wait()
            server.close()


async def beat_on(bus: Bus, namespace: str, beat: bytes) -> None:
    """Announce the worker."""
    while True:
        bus.publish(Subjects(namespace).live_worker(WorkerId("w")), beat)
        await asyncio.sleep(1)


async def is_ready(url: str) -> bool:
    """Whether the frontend knows its worker."""
    try:
        return (await get(url, "/ready")).status == 200
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
async def test_many_slow_streams(nats_url: str, free_port: Callable[[], int]) -> None:
    """All streams get their events and their ends while all are open; each takes little memory."""
    if raise_limit() < 2 * STREAMS + 200:
        pytest.skip(f"{STREAMS} streams need {2 * STREAMS + 200} descriptors here")
    loop, port = asyncio.get_running_loop(), free_port()
    async with running(nats_url, port) as pid:
        before = resident_bytes(pid)
        clients: list[tuple[asyncio.BaseTransport, Reader]] = []
        while len(clients) < STREAMS:
            opening = [loop.create_connection(Reader, "127.0.0.1", port) for _ in range(AT_ONCE)]
            clients += await asyncio.gather(*opening)
        await until(lambda: all(reader.events for _, reader in clients), "all begun", WITHIN_S)
        grown = resident_bytes(pid) - before
        for stream in list(SlowWorker.streams):
            stream.say(chunk(event("second")))
        await until(lambda: all(reader.events == 2 for _, reader in clients), "second events", WITHIN_S)
        for stream in list(SlowWorker.streams):
            stream.say(END)
        await until(lambda: all(reader.is_over for _, reader in clients), "the ends", WITHIN_S)
        for transport, _ in clients:
            transport.close()
        print(f"{len(clients)} streams, {grown / len(clients):,.0f} bytes each")  # noqa: T201

        assert grown < len(clients) * MOST_BYTES_PER_STREAM
        assert (
            b'outcome="ok",route="/v1/completions"} %d.0' % len(clients)
            in (await get(f"http://127.0.0.1:{port}", "/metrics")).body
        )
