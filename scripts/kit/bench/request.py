"""Cost of a short request, a streamed event and a chat of 12 turns in a frontend's code, without sockets.

A whole frontend runs in this process, with two replacements: this module writes the clients' bytes, and
answers for the workers at once. So the figure is CPU time of kvrouter's Python (and of the loop's callbacks),
repeatable to a few percent, and `--profile` shows its parts. It is lower than in `scripts/bench relay`
with real sockets: it has no kernel time, and warmer caches.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import kvrouter
from kvrouter.frontend.operators.rights import AdminKey, Rights, open_gate
from kvrouter.frontend.requests.engine_routes import error_answer
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.relay.connection import Connections
from kvrouter.relay.framing import LAST_CHUNK, chunk
from kvrouter.relay.request import ArrivingBytes
from kvrouter.relay.routes import Routes
from kvrouter.relay.upstream import Upstream, WorkerConnection
from kvrouter.telemetry.logs import set_up_logs
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.wire.routers import Workers
from scripts.kit.bench.wire.stage import FLAGS, Stage, namespace, open_stage
from scripts.kit.bench.wire.targets import OURS_PAIR, OURS_ROOM, PAIRS
from scripts.kit.bench.wire.works import SHORT_BODIES, conversations
from scripts.kit.script import table_of

CONCURRENCY = 32
WARM_REQUESTS = 2_000
PROFILE_LINES = 60
READY_S, RUN_S = 20.0, 120.0
_PACKAGE = f"{Path(kvrouter.__file__).parent}/"

_JSON = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "text": " hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 6, "total_tokens": 9, "completion_tokens": 3},
    }
).encode()
# The answer's chunks, as they arrive.
Answer = tuple[bytes, ...]

ANSWER: Answer = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 14:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%s" % (len(_JSON), _JSON),
)
# The cost of an event is the difference between two streams, one with this many more events.
EVENTS = 64
_EVENT = b"data: " + _JSON + b"\n\n"
_HEAD = (
    b"POST %s HTTP/1.1\r\nhost: 127.0.0.1:8000\r\naccept: */*\r\nuser-agent: bench/1\r\n"
    b"content-type: application/json\r\nauthorization: Bearer EMPTY\r\ncontent-length: %d\r\n\r\n"
)
_EXPECTED = (b"HTTP/1.1 200", chunk(_EVENT)[:16], chunk(_EVENT + b"data: [DONE]\n\n")[:16])
REQUESTS = [_HEAD % (b"/v1/completions", len(body)) + body for body in SHORT_BODIES]
CONVERSATIONS = {
    path.removeprefix("/v1/"): [_HEAD % (path.encode(), len(body)) + body for body in bodies]
    for path, bodies in conversations().items()
}


def streamed(events: int) -> Answer:
    """A stream in uvicorn's chunks: the head, then each event, the last one with the end of the body."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    last = chunk(_EVENT + b"data: [DONE]\n\n") + LAST_CHUNK
    return (head, *[chunk(_EVENT)] * (events - 1), last)


class FakeTransport(asyncio.Transport):
    """A fake transport: written bytes are passed to `on_write`."""

    def __init__(self, on_write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._on_write = on_write

    def write(self, data: Any) -> None:
        self._on_write(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Do nothing: clients send one request at a time, so no buffer fills."""

    def resume_reading(self) -> None:
        """Do nothing: reading is never paused."""

    def abort(self) -> None:
        """Do nothing: there is no socket to close."""


async def run(flags: argparse.Namespace) -> int:
    set_up_logs("info" if flags.flag else "error", "json")
    figures: dict[str, dict[str, float]] = {}
    async with open_stage() as stage:
        whole = await stage.workers(pace_ms=5)
        halves = await stage.workers(pace_ms=6, connector=PAIRS[OURS_PAIR])
        for name, own in FLAGS.items():
            if name == OURS_ROOM:  # its halves wait for each other, and a fake socket answers at once
                continue
            us, profile = await _measure(stage, halves if name == OURS_PAIR else whole, own, flags)
            event_us = (us["longer"] - us["stream"]) / EVENTS
            figures[name] = {"request": us["short"], "stream of 2": us["stream"], "event": event_us}
            figures[name] |= {path: us[path] for path in CONVERSATIONS}
            if profile is not None:
                profile.sort_stats("tottime").print_stats(PROFILE_LINES)
                figures[name] |= {part: us["short"] * share for part, share in shares(profile).items()}
    parts = list(dict.fromkeys(part for row in figures.values() for part in row))
    rows = [[name, *(f"{row.get(part, 0.0):.1f}" for part in parts)] for name, row in figures.items()]
    title = "CPU µs of our own code: a short request, a stream of 2 events, one event more, a chat"
    conclude(flags, [table_of(title, ["", *parts], rows)], machine(), us=figures)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=int, default=5, metavar="N", help="number of runs; figures are medians (%(default)s)")
    add("--requests", type=int, default=20_000, metavar="N", help="requests per run (%(default)s)")
    add("--flag", action="append", default=[], metavar="FLAG",
        help="one more flag of the frontends, as in --flag=--access-log=all; logs go to stderr then, in JSON",
    )  # fmt: skip
    add("--profile", action="store_true", help="also show the functions that take the time")


async def _measure(
    stage: Stage, workers: Workers, own: Sequence[str], flags: argparse.Namespace
) -> tuple[dict[str, float], pstats.Stats | None]:
    options = parse_options(
        [
            *own,
            *flags.flag,
            f"--nats={stage.nats_url}",
            f"--namespace={namespace(workers)}",
            f"--model-path={stage.model_path}",
            "--port=0",
        ]
    )
    engine, figures = _Engine(), {}
    works = {"short": ANSWER, "stream": streamed(2), "longer": streamed(2 + EVENTS)}

    def connect(upstream: Upstream, url: str) -> Coroutine[Any, Any, WorkerConnection]:
        return engine.connect(
            upstream,
            url,
            # a function around it: a bound method as a class attribute would not receive the Upstream
        )

    with mock.patch.object(Upstream, "connect", connect):
        async with running_frontend(options) as frontend:
            await _ready(frontend, len(workers.ports))
            clients = _Clients(frontend)
            for work, answer in works.items():
                engine.answer = answer
                requests = max(CONCURRENCY, flags.requests // len(answer))
                await clients.send(max(CONCURRENCY, WARM_REQUESTS // len(answer)), answer)
                figures[work] = median([await clients.send(requests, answer) for _ in range(flags.runs)])
            engine.answer = ANSWER
            for path, requests_of_path in CONVERSATIONS.items():
                clients.requests = requests_of_path
                await clients.send(WARM_REQUESTS // 10, ANSWER)
                runs = [await clients.send(flags.requests // 10, ANSWER) for _ in range(flags.runs)]
                figures[path] = median(runs)
            clients.requests = REQUESTS
            profile = cProfile.Profile()
            if flags.profile:
                engine.answer = ANSWER
                profile.enable()
                await clients.send(flags.requests, ANSWER)
                profile.disable()
    return figures, pstats.Stats(profile) if flags.profile else None


def shares(profile: pstats.Stats) -> dict[str, float]:
    """The shares of the time spent in each folder of kvrouter/ and in `other`; their sum is 1.

    Time in built-in functions and libraries counts for the code that called them. A profiler makes calls
    more expensive, so parts with many short calls are overstated.
    """
    found: dict[str, float] = {}

    def add(file: str, seconds: float) -> None:
        folder = file.removeprefix(_PACKAGE).split("/")[0] if file.startswith(_PACKAGE) else "other"
        found[folder] = found.get(folder, 0.0) + seconds

    for (file, _, _), (_, _, own_s, _, callers) in profile.stats.items():  # type: ignore[attr-defined]
        if file.startswith(_PACKAGE) or not callers:
            add(file, own_s)
            continue
        for (caller, _, _), (_, _, seconds, _) in callers.items():
            add(caller, seconds)
    whole = sum(found.values())
    return {part: found[part] / whole for part in sorted(found, key=lambda part: -found[part])}


async def _ready(frontend: RunningFrontend, workers: int) -> None:
    async with asyncio.timeout(READY_S):
        routers = frontend.replica.routers
        while not any(len(one.pool.targets) == workers for one in routers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class _Engine:
    """Fake workers without connections: requests are answered here, in later iterations of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer = ANSWER

    async def connect(self, upstream: Upstream, url: str) -> WorkerConnection:
        """Replaces `Upstream.connect`."""
        connection = WorkerConnection(upstream.pool(url))
        connection.connection_made(FakeTransport(lambda _: self._loop.call_soon(self._send, connection, 0)))
        return connection

    def _send(self, connection: WorkerConnection, number: int) -> None:
        if number + 1 < len(self.answer):
            self._loop.call_soon(self._send, connection, number + 1)
        connection.data_received(self.answer[number])


class _Clients:
    """Clients of the fast path, each with one request at a time."""

    def __init__(self, frontend: RunningFrontend) -> None:
        self._loop = asyncio.get_running_loop()
        routes = Routes()
        frontend.completions.add_routes(routes, Rights(open_gate, AdminKey(None)))
        self._connections = Connections(
            routes,
            error_answer,
            max_body_bytes=1 << 20,
            arriving=ArrivingBytes(1 << 20),
            keep_alive_s=3600,
        )
        self.requests = REQUESTS
        self._last = b""
        self._left = 0
        self._busy = 0
        self._done = asyncio.Event()
        self._clients = [self._new() for _ in range(CONCURRENCY)]

    async def send(self, requests: int, answer: Answer) -> float:
        """CPU µs per request; each receives `answer`."""
        self._left = requests
        self._last = answer[-1][-8:]
        self._done.clear()
        began = time.process_time()
        for number, receive in enumerate(self._clients):
            self._busy += 1
            self._left -= 1
            self._loop.call_soon(receive, self.requests[number])
        async with asyncio.timeout(RUN_S):
            await self._done.wait()
        return (time.process_time() - began) / requests * 1e6

    def _new(self) -> Callable[[bytes], None]:
        connection = self._connections.new()

        def answered(data: bytes) -> None:
            if not data.startswith(_EXPECTED):
                raise AssertionError(data[:200])
            if not data.endswith(self._last):
                return
            if self._left > 0:
                self._left -= 1
                self._loop.call_soon(connection.data_received, self.requests[self._left % len(self.requests)])
                return
            self._busy -= 1
            if not self._busy:
                self._done.set()

        connection.connection_made(FakeTransport(answered))
        return connection.data_received
