"""A client's connection: it serves requests one after another, in reads of any size."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouter.errors import KvRouterError
from kvrouter.frontend.requests.engine_routes import error_answer
from kvrouter.relay.answer import Served
from kvrouter.relay.connection import PIPELINED_BYTES, Connections
from kvrouter.relay.request import ArrivingBytes, Request
from kvrouter.relay.routes import Routes
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    OK_BODY,
    SSE_HEAD,
    Received,
    Wire,
    answer,
    chunk,
    event,
    says,
    says_and_stalls,
    stream,
    turns,
    until,
)

PATH = "/v1/completions"
MOST_BYTES = 1000


class FakeTransport(asyncio.Transport):
    """Records what is written and which calls are made."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        self.ended = False
        self.said_eof = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.said_eof = True


class Scene:
    """One connection without sockets. Its requests are answered with their own bodies."""

    def __init__(self, *, keep_alive_s: float = 60.0) -> None:
        self.served: list[tuple[str, bytes]] = []
        self.task: asyncio.Task[Any] | None = None
        """Which serves the newest request."""
        self.go_on = asyncio.Event()
        self.go_on.set()
        routes = Routes()
        routes.add("POST", PATH, self._echo)
        routes.add("GET", "/live", self._echo)
        self.connections = Connections(
            routes,
            error_answer,
            max_body_bytes=MOST_BYTES,
            arriving=ArrivingBytes(1000),
            keep_alive_s=keep_alive_s,
        )
        self.connection = self.connections.new()
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)

    async def _echo(self, request: Request) -> Served:
        self.task = asyncio.current_task()
        try:
            body = await request.read()
        except KvRouterError as error:
            return request.reply(error_answer(PATH, error, "id"), closes=error.is_body_left)
        await self.go_on.wait()
        self.served.append((request.head.path, body))
        request.client.write(body)
        return Served(200, request.head.wants_keep_alive)

    def read(self, *pieces: bytes) -> None:
        """Bytes arrive while the connection reads."""
        for piece in pieces:
            self.connection.data_received(piece)

    @property
    def statuses(self) -> list[int]:
        """Of the answers that the connection wrote itself."""
        return [int(each) for each in re.findall(rb"HTTP/1.1 ([0-9]{3}) ", self.transport.written)]

    async def settled(self, requests: int) -> None:
        """Return when this number of requests has been served."""
        await until(lambda: len(self.served) == requests, "the request is served")

    def end(self) -> None:
        """The client leaves."""
        self.connection.connection_lost(None)


def plain(body: bytes, *lines: bytes) -> bytes:
    """A plain request."""
    head = [b"POST /v1/completions HTTP/1.1", b"host: t", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


@st.composite
def pieces_of(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The data, cut at any places."""
    ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    cut = [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]
    return [piece for piece in cut if piece]


BODIES = (b"", b"{}", b"x" * 300, b"\r\n\r\nPOST /", b"y")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), slow=st.booleans())
async def test_any_cut(data: st.DataObject, slow: bool) -> None:
    """Requests that arrive in reads of any size are the same requests, answered in the same order."""
    scene = Scene()
    whole = b"".join(plain(body) for body in BODIES)
    for piece in data.draw(pieces_of(whole)):
        scene.read(piece)
        if slow:
            await turns(6)
    await until(lambda: len(scene.served) == len(BODIES), "all are served")

    assert [(PATH, body) for body in BODIES] == scene.served
    assert b"".join(BODIES) == scene.transport.written
    assert not scene.transport.ended
    scene.end()


async def test_every_byte_by_itself() -> None:
    """A request may arrive byte by byte."""
    scene = Scene()
    for byte in plain(b"whole"):
        scene.read(bytes([byte]))
    await scene.settled(1)

    assert [(PATH, b"whole")] == scene.served
    scene.end()


async def test_pipelined_bytes_are_bounded() -> None:
    """While a request is served, little of what follows it is read."""
    scene = Scene()
    scene.go_on.clear()
    scene.read(plain(b"1"), plain(b"2"), b"z" * PIPELINED_BYTES)
    reads_before = scene.transport.reads
    scene.go_on.set()
    await until(lambda: len(scene.served) == 2, "both are served")

    assert (False, True) == (reads_before, scene.transport.reads)
    assert [400] == scene.statuses
    scene.end()


async def test_pipelined_bytes_stay_bounded() -> None:
    """Waiting requests are served before more are read: a served one does not allow another read."""
    scene, one, given = Scene(), plain(b"x" * 100), 0
    burst = one * 2000

    def unserved() -> int:
        return given - len(scene.served) * len(one)

    for _ in range(20):
        if scene.transport.reads:
            scene.read(burst)
            given += len(burst)
        served = len(scene.served)
        await until(lambda: len(scene.served) > served, "another one is served")  # noqa: B023

    most = PIPELINED_BYTES + len(one)  # the one that is being served
    assert unserved() <= most + len(burst)
    await until(lambda: unserved() <= most, "they are served")
    assert scene.transport.reads
    scene.end()


async def test_unread_answers_are_bounded() -> None:
    """A client that reads no answers is served no further, and disconnected after the time of an idle one."""
    scene = Scene(keep_alive_s=0.2)
    scene.connection.pause_writing()
    scene.read(plain(b"1") + plain(b"2"))
    await scene.settled(1)
    await turns()
    served, reads = list(scene.served), scene.transport.reads
    scene.connection.resume_writing()
    await until(lambda: len(scene.served) == 2, "the second is served, too")
    scene.connection.pause_writing()
    scene.read(plain(b"3"))

    assert ([(PATH, b"1")], False) == (served, reads)
    await until(lambda: scene.transport.ended, "it is not waited for")
    scene.end()


async def test_cancelled_request_is_freed_at_once() -> None:
    """A request cancelled with its client is freed at once, not by the hourly garbage collection."""
    scene = Scene()
    scene.read(plain(b"whole")[:-2])
    await turns()
    assert scene.task is not None
    task = weakref.ref(scene.task)
    scene.task = None
    gc.disable()
    try:
        scene.end()
        await turns()
        assert task() is None
    finally:
        gc.enable()


async def test_client_leaves() -> None:
    """A client that disconnects cancels its request, with or without its whole body."""
    for sent in (plain(b"whole"), plain(b"whole")[:-2]):
        scene = Scene()
        scene.go_on.clear()
        scene.read(sent)
        await turns()
        task = scene.task
        assert task is not None
        scene.end()
        await asyncio.wait([task])

        assert task.cancelled()
        assert not scene.served
        assert not scene.connections.open


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", plain(b"whole")[:-2]], ids=["", "head", "body"])
async def test_slow_loris(sent: bytes) -> None:
    """A client that sends no head, or stops amid a body, is disconnected after the time of an idle client.

    In a body it gets 408 before.
    """
    scene = Scene(keep_alive_s=0.02)
    if sent:
        scene.read(sent)
    await until(lambda: scene.transport.ended or scene.transport.said_eof, "the connection is ended")

    assert ([408] if b"host" in sent else []) == scene.statuses
    scene.end()


async def test_dripping_head() -> None:
    """A head must be complete in that time: single bytes do not extend it."""
    scene = Scene(keep_alive_s=0.05)
    for byte in plain(b"whole")[:-6] * 50:
        if scene.transport.ended or scene.task:
            break
        scene.read(bytes([byte]))
        await asyncio.sleep(0.002)
    ended = scene.transport.ended
    scene.end()

    assert ended


async def test_long_request_keeps_its_connection() -> None:
    """A request that takes long does not lose its connection."""
    scene = Scene(keep_alive_s=0.01)
    scene.go_on.clear()
    scene.read(plain(b"long"))
    loop = asyncio.get_running_loop()
    later = loop.time() + 0.05
    await until(lambda: loop.time() > later, "the timer has run")
    scene.go_on.set()
    await scene.settled(1)

    assert [(PATH, b"long")] == scene.served
    assert not scene.transport.ended
    scene.end()


MIXED = (
    b"GET /live HTTP/1.1\r\nhost: t\r\n\r\n",
    plain(b"one"),
    b"\r\n" + plain(b"after an empty line"),
    b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3;a=b\r\ntwo\r\n5\r\n\r\n\r\nx\r\n0\r\nx-trailer: y\r\n\r\n",
    b"POST /v1/completions HTTP/1.0\r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\nthree",
    plain(gzip.compress(b"four"), b"content-encoding: gzip"),
    plain(b"five", b"expect: 100-continue"),
    plain(b"six", b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AA"),
    b"POST http://t/v1/completions?a=b HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\n\r\nseven",
    b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n\r\n",
    b"DELETE /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /nowhere HTTP/1.1\r\nhost: t\r\n\r\n",
    plain(b"last", b"x-" + b"long: " + b"y" * 8000, b"x: " + b"y" * 8000),
)


@given(data=st.data(), slow=st.booleans())
async def test_any_cut_of_all_kinds(data: st.DataObject, slow: bool) -> None:
    """Requests of every kind share a connection, pipelined, in reads of any size."""
    scene = Scene()
    for piece in data.draw(pieces_of(b"".join(MIXED))):
        scene.read(piece)
        if slow:
            await turns(6)
    await until(lambda: len(scene.served) == len(MIXED) - 2, "all are served")
    bodies = [body for _, body in scene.served]

    assert [b"", b"one", b"after an empty line", b"two\r\n\r\nx", b"three", b"four"] == bodies[:6]
    assert [b"five", b"six", b"seven", b"", b"last"] == bodies[6:]
    assert "/v1/completions?a=b" == scene.served[8][0]
    assert [100, 405, 404] == scene.statuses
    assert not scene.transport.ended
    assert not scene.transport.said_eof
    scene.end()


async def test_refused_client_may_go_on_sending() -> None:
    """What follows a refused request is read and dropped, so that the client can read the answer."""
    scene = Scene()
    scene.read(plain(b"x" * 2 * MOST_BYTES)[:-9])
    scene.read(b"x" * 9, plain(b"late"), b"GET /live HTTP/1.1\r\nhost: t\r\n\r\n")
    await turns()

    assert [413] == scene.statuses
    assert (True, True, False) == (scene.transport.said_eof, scene.transport.reads, scene.transport.ended)
    assert not scene.served
    scene.end()


async def test_refused_client_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused client that neither reads nor leaves is disconnected."""
    monkeypatch.setattr("kvrouter.relay.connection.LINGER_S", 0.01)
    scene = Scene()
    scene.read(b"nonsense\r\n")

    await until(lambda: scene.transport.ended, "the connection is ended")
    scene.end()


async def test_many_requests_without_a_route() -> None:
    """Thousands of pipelined requests for nothing are answered one after another."""
    scene = Scene()
    scene.read(b"GET /a HTTP/1.1\r\nhost: t\r\n\r\n" * 2000 + plain(b"last"))
    await until(lambda: scene.served, "the last is served")

    assert [404] * 2000 == scene.statuses
    scene.end()


# Through a frontend

ODD: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "chunked": (b"transfer-encoding: chunked", lambda data: b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)),
    "gzip": (b"content-encoding: gzip", gzip.compress),
}


@pytest.mark.parametrize("kind", ODD)
async def test_chunked_and_compressed_bodies(fleet_of: FleetOf, kind: str) -> None:
    """Chunked and compressed bodies are served, on a connection that serves requests before and after."""
    line, pack = ODD[kind]
    data = pack(json.dumps(BODY).encode())
    length = b"" if kind == "chunked" else b"content-length: %d\r\n" % len(data)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n" + length + line + b"\r\n\r\n"
    async with fleet_of() as fleet, fleet.connected() as client:
        before = await client.ask(BODY)
        client.writer.write(head + data)
        odd = await client.response()
        after = await client.ask(BODY)

        assert [OK_BODY] * 3 == [each.body for each in (before, odd, after)]
        assert [BODY] * 3 == [request.json for request in fleet.workers[0].requests]


async def test_all_routes_on_one_connection(fleet_of: FleetOf) -> None:
    """Admin routes work on a connection that serves completions, before and after, pipelined or not."""
    async with fleet_of(scripts=(says(stream("a")),)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        client.writer.write(b"GET /live HTTP/1.1\r\nhost: t\r\n\r\n")
        client.send(STREAM)
        client.writer.write(b"GET /nowhere HTTP/1.1\r\nhost: t\r\n\r\n")
        client.send(STREAM)
        statuses = [(await client.response()).status for _ in range(5)]

        assert [200, 200, 200, 404, 200] == statuses


async def test_half_closed(fleet_of: FleetOf) -> None:
    """A client that shuts down its sending side has left: its worker's connection is closed at once."""
    async with (
        fleet_of(scripts=(says_and_stalls(SSE_HEAD + chunk(event("a"))),)) as fleet,
        fleet.connected() as client,
    ):
        client.send(STREAM)
        await client.read_until(event("a"))
        client.writer.write_eof()

        await until(lambda: not fleet.workers[0].open_wires, "the worker's connection is closed", 0.2)


@pytest.mark.parametrize(("head_bytes", "status"), [(6_000, 200), (20_000, 431)])
async def test_giant_head(fleet_of: FleetOf, head_bytes: int, status: int) -> None:
    """A long head is served; one with a line too long is rejected."""
    async with fleet_of() as fleet:
        response = await fleet.ask(BODY, "x-long: " + "x" * head_bytes)

        assert status == response.status


async def test_many_long_headers(fleet_of: FleetOf) -> None:
    """A head above the limit of plain heads, with lines that are not too long, is served."""
    async with fleet_of() as fleet:
        response = await fleet.ask(BODY, *(f"x-{number}: " + "x" * 5_000 for number in range(4)))

        assert 200 == response.status


@pytest.mark.parametrize("sends_body", [True, False])
async def test_too_large(fleet_of: FleetOf, sends_body: bool) -> None:
    """A body above the limit is a 413 in OpenAI's form."""
    size = 1024 * 1024 + 1
    async with fleet_of("--max-body-mib", "1") as fleet, fleet.connected() as client:
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n" % size)
        client.writer.write(b"\r\n" + (b" " * size if sends_body else b"{" + b" " * (size - 2)) + b"}")
        response = await client.response()

        assert (413, 413) == (response.status, response.json["error"]["code"])
        assert not fleet.requests


async def test_body_in_pieces(fleet_of: FleetOf) -> None:
    """A body may arrive in pieces after its head, followed by the next request."""
    data = json.dumps({**BODY, "user": "u" * 200_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(data)
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write(head)
        await until(lambda: not fleet.frontend.completions.in_flight.idle.is_set(), "the request has begun")
        client.writer.write(data[:9])
        await turns(20)
        client.writer.write(data[9:] + head + data)

        assert [200, 200] == [(await client.response()).status for _ in range(2)]
        assert [data, data] == [request.body for request in fleet.workers[0].requests]


def break_accept(fleet: Fleet) -> None:
    """Make the request path raise before the answer begins."""

    async def work(*_: object) -> None:
        raise ZeroDivisionError

    fleet.frontend.completions.accept.work = work  # type: ignore[method-assign, assignment]


async def test_bug(fleet_of: FleetOf) -> None:
    """A bug is a 500 in OpenAI's form and a line in the log; the connection stays usable."""
    async with fleet_of() as fleet, fleet.connected() as client:
        before = fleet.frontend.completions.accept.work
        break_accept(fleet)
        broken = await client.ask(BODY)
        fleet.frontend.completions.accept.work = before  # type: ignore[method-assign]
        after = await client.ask(BODY)

        assert (500, 200) == (broken.status, after.status)
        assert broken.json["error"]["message"].startswith("internal error")
        assert ["/v1/completions"] == [entry["path"] for entry in fleet.logged("request.failed")]
        fleet.trouble.logs.clear()


async def test_bug_after_the_first_byte(fleet_of: FleetOf) -> None:
    """A bug amid an answer resets the connection: the answer must not look complete."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(answer())

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        fleet.frontend.completions._finish = None  # type: ignore[method-assign, assignment]
        client.send(BODY)
        await client.read_until(OK_BODY)
        with pytest.raises(ConnectionResetError):
            await client.reader.read()
        assert fleet.logged("request.failed")
        fleet.trouble.logs.clear()


class TlsTransport(FakeTransport):
    """A transport that claims to be TLS."""

    high: int | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return object() if name == "sslcontext" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high


async def test_unsent_bytes_are_bounded_over_tls() -> None:
    """A slow client's unsent bytes have the same bound over TLS, where uvloop's own is higher."""
    scene = Scene()
    scene.end()
    connection, transport = scene.connections.new(), TlsTransport()
    connection.connection_made(transport)
    connection.connection_lost(None)

    assert 64 * 1024 == transport.high


async def test_failed_handshake_leaves_no_timer() -> None:
    """A connection whose TLS handshake fails starts no timer."""
    scene = Scene()
    scene.end()
    never = weakref.ref(scene.connections.new())
    gc.collect()

    assert never() is None
