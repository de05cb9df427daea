"""Connections to workers, read by read, with a fake transport."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.relay.events import MOST_EVENT_BYTES
from kvrouter.relay.framing import MAX_HEAD_BYTES
from kvrouter.relay.outcomes import Done, Limits, Lost, Rejected
from kvrouter.relay.upstream import IDLE_S, Upstream, WorkerUnreachableError
from tests.frontend.fleet import no_trouble
from tests.frontend.workers import (
    END,
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    FakeWorker,
    answer,
    chunk,
    event,
    stream,
    until,
)
from tests.relay.rig import FakeClient, Rig, attempt_on


@st.composite
def pieces_of(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The data, cut at any places."""
    ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


def run_in_loop(function: Callable[[], None]) -> None:
    """Run a plain function inside an event loop that fails the test on any logged error."""

    async def run() -> None:
        with no_trouble():
            function()

    asyncio.run(run())


WHOLE = [answer(), stream("a", "b"), SSE_HEAD + chunk(event("x", "stop")) + b"0\r\nt: 1\r\n\r\n"]


@given(st.data(), st.sampled_from(WHOLE), st.booleans())
def test_reads_of_any_size(data: st.DataObject, whole: bytes, is_http_10: bool) -> None:
    """In reads of any size the client gets the same bytes, and the connection becomes idle."""
    pieces = data.draw(pieces_of(whole))

    def check() -> None:
        cut, uncut = Rig(is_http_10=is_http_10), Rig(is_http_10=is_http_10)
        cut.read(*pieces)
        uncut.read(whole)

        assert uncut.client.got == cut.client.got
        assert uncut.outcome() == cut.outcome() == Done(200, not is_http_10 or whole == answer())
        assert [cut.connection] == list(cut.pool)
        assert uncut.marks == cut.marks == (whole != answer())

    run_in_loop(check)


async def test_chunk_by_chunk() -> None:
    """Reads of exactly one chunk, as in most streams, give the same result as any others."""
    chunks = [chunk(event(f"{number:x}")) for number in range(300)]
    apart, together = Rig(), Rig()
    apart.read(SSE_HEAD, *chunks)
    together.read(SSE_HEAD + b"".join(chunks))

    assert together.client.got == apart.client.got
    assert 300 == together.attempt.events == apart.attempt.events
    assert together.attempt.tail.endswith(apart.attempt.tail)
    assert apart.attempt.tail.endswith(b"".join(chunks[-3:]))


async def test_one_chunk_of_a_stream() -> None:
    """A chunk counts as activity, may pause the worker, and is not passed on if the worker aborts in it."""
    rig = Rig()
    rig.read(SSE_HEAD, chunk(event("a")), chunk(event("b")))
    rig.attempt._active_at = -1000.0
    rig.client.is_slow = True
    rig.read(chunk(event("c")))
    now = asyncio.get_running_loop().time()

    was_paused = rig.transport.paused
    rig.client.catch_up()

    assert rig.attempt.watch(now) > 0
    assert (True, False) == (was_paused, rig.transport.paused)
    rig.read(chunk(event("", "abort")))
    assert not isinstance(rig.outcome(), Lost)
    assert b"abort" in rig.client.got
    assert b'"abort"' not in rig.client.got


garbage = st.lists(
    st.binary(max_size=60)
    | st.sampled_from(
        [b"HTTP/1.1 200 OK\r\n", b"\r\n\r\n", SSE_HEAD, b"5\r\n", LAST_CHUNK, event("a"), b"data:"]
    ),
    max_size=8,
)


@given(garbage, st.sampled_from([None, ConnectionResetError("reset")]), st.booleans())
def test_any_garbage(pieces: list[bytes], error: Exception | None, is_http_10: bool) -> None:
    """For any bytes from a worker there is an outcome, and no exception in a callback."""

    def check() -> None:
        rig = Rig(is_http_10=is_http_10)
        rig.read(*pieces)
        rig.lose(error)

        assert isinstance(rig.outcome(), Done | Lost | Rejected)
        assert not rig.pool or rig.outcome() == Done(200, True)
        assert rig.client.got == b"" or isinstance(rig.outcome(), Done)

    run_in_loop(check)


@pytest.mark.parametrize("size", [20, 250, 256 * 1024])
async def test_endless_1xx(size: int) -> None:
    """Heads of 1xx without end are given up after a few, in reads of any size."""
    rig = Rig()
    heads = b"HTTP/1.1 100 Continue\r\n\r\n" * (256 * 1024 // 25)
    for read in range(1 + 17 * 25 // size):
        rig.read(heads[read * size :][:size])

    assert rig.outcome() == Lost("more than 16 heads of 1xx before the answer")


@pytest.mark.parametrize("size", [1, 100, 4096])
async def test_first_event_without_end(size: int) -> None:
    """So many bytes of it are held at most; then it is passed on."""
    rig = Rig()
    rig.read(SSE_HEAD)
    held = b"data: " + b"x" * MOST_EVENT_BYTES
    for at in range(0, len(held), size):
        rig.read(chunk(held[at : at + size]))
        if rig.client.got:
            break

    assert MOST_EVENT_BYTES < len(rig.client.got) <= MOST_EVENT_BYTES + 2 * size + 200
    assert rig.marks == 1


async def test_endless_head() -> None:
    """A head that does not end, or is very long, is rejected."""
    for rest in (b"a", b"a\r\n\r\n"):
        rig = Rig()
        rig.read(b"HTTP/1.1 200 OK\r\nx: " + b"a" * MAX_HEAD_BYTES + rest)
        assert rig.outcome() == Lost(f"the response head exceeds {MAX_HEAD_BYTES} bytes")


async def test_error_event_of_garbage() -> None:
    """A first event that only looks like an error is passed on, even invalid UTF-8 or deeply nested."""
    for payload in (b'{"error":"\xff"}', b'{"error":' + b"[" * 100_000, b'{"error":1e999}', b'"error"'):
        rig = Rig()
        rig.read(SSE_HEAD + chunk(b"data: " + payload + b"\n\n") + END)

        assert rig.outcome() == Done(200, True)
        assert payload in rig.client.got


async def test_cancelled_late() -> None:
    """A request cancelled after its answer was complete leaves the connection to the next request."""
    rig = Rig()
    first = rig.attempt
    rig.read(answer())
    second = rig.begin()

    first.cancel()
    rig.read(answer())

    assert not rig.transport.aborted
    assert second.outcome.result() == Done(200, True)


async def test_cancelled_while_complete() -> None:
    """The same if the task was cancelled first, and the answer arrived before it woke up."""
    rig = Rig()
    first = rig.attempt
    first.outcome.cancel()  # as cancelling the task does at once
    rig.read(answer())
    second = rig.begin()
    first.cancel()
    rig.read(answer())

    assert second.outcome.result() == Done(200, True)


async def test_paused_at_the_end() -> None:
    """A connection whose last bytes made the client slow reads again when it is idle."""
    rig = Rig()
    rig.read(SSE_HEAD)
    rig.client.is_slow = True
    rig.read(chunk(event("a")) + END)

    assert rig.outcome() == Done(200, True)
    assert [rig.connection] == list(rig.pool)
    assert not rig.transport.paused


async def test_late_resume() -> None:
    """A client that catches up late does not resume a connection that another client has paused."""
    rig = Rig()
    slow = rig.client
    rig.read(SSE_HEAD)
    slow.is_slow = True
    rig.read(chunk(event("a")))
    assert rig.transport.paused
    rig.read(END)
    rig.begin()
    rig.client.is_slow = True
    rig.read(SSE_HEAD + chunk(event("b")))
    slow.catch_up()
    for _ in range(5):
        await asyncio.sleep(0)

    assert rig.transport.paused
    rig.client.catch_up()
    await until(lambda: not rig.transport.paused, "the second client resumes it")


async def test_ended_attempts_leave_nothing() -> None:
    """Attempts that ended in any way leave no task and no timer."""
    loop_tasks = asyncio.all_tasks()
    rigs = [Rig() for _ in range(4)]
    for rig in rigs:
        rig.read(SSE_HEAD)
        rig.client.is_slow = True
        rig.read(chunk(event("a")))
    rigs[0].read(END)
    rigs[1].lose(ConnectionResetError())
    rigs[2].attempt.cancel()
    rigs[3].read(b"zz\r\n")
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert [False, True, True, True] == [timer(rig) is None for rig in rigs]  # the first one is idle
    assert loop_tasks == asyncio.all_tasks()


def timer(rig: Rig) -> asyncio.TimerHandle | None:
    """That of its connection."""
    return rig.connection._timer


async def test_requests_share_a_timer() -> None:
    """All requests of a connection share its timer."""
    rig = Rig()
    rig.read(answer())
    first = timer(rig)
    for _ in range(3):
        rig.begin()
        rig.read(answer())

    assert first is timer(rig) is not None


async def test_timer_follows_the_shorter_limit() -> None:
    """With a long first-byte limit and a short idle limit, the timer checks in time for the idle one."""
    rig = Rig()
    now = asyncio.get_running_loop().time()
    limits = Limits()
    assert limits.idle_s < limits.first_byte_s
    asked_again_s = rig.attempt.watch(now)
    rig.read(SSE_HEAD + chunk(event("a")))

    assert limits.idle_s == asked_again_s
    assert 0 < rig.attempt.watch(now + limits.idle_s - 1)
    assert 0 == rig.attempt.watch(now + limits.idle_s + 1)
    assert rig.client.got.count(b"GatewayTimeoutError") == 1


async def test_bytes_without_a_request() -> None:
    """Bytes on an idle connection, such as a 408 before the worker closes it, end it."""
    rig = Rig()
    rig.read(answer())
    rig.connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")

    assert rig.transport.aborted
    assert not rig.pool


async def test_connection_reused() -> None:
    """An idle connection serves the next request; a second request at once opens another one."""
    async with FakeWorker("w", OK).serving() as worker:
        upstream = Upstream()
        for _ in range(3):
            connection = upstream.idle(worker.url) or await upstream.connect(worker.url)
            attempt = attempt_on(connection, FakeClient())
            attempt.send(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
            await attempt.outcome
        assert [3] == [wire.requests for wire in worker.wires]
        fresh = await upstream.connect(worker.url)
        await until(lambda: len(worker.wires) == 2)
        fresh.close()
        upstream.close()

        await until(lambda: not worker.open_wires, "idle connections are closed")


async def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection is closed before the worker closes it."""
    monkeypatch.setattr("kvrouter.relay.upstream.IDLE_S", 0.01)
    async with FakeWorker("w", OK).serving() as worker:
        upstream = Upstream()
        connection = await upstream.connect(worker.url)
        attempt = attempt_on(connection, FakeClient())
        attempt.send(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        await attempt.outcome

        await until(lambda: not worker.open_wires, "the idle connection is closed")
        assert not connection.is_usable


async def test_idle_time_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is used before its idle time ends stays; it closes after a full idle time."""
    monkeypatch.setattr("kvrouter.relay.upstream.IDLE_S", 0.02)
    rig = Rig()
    rig.read(answer())
    rig.pool.clear()
    rig.begin()
    loop = asyncio.get_running_loop()
    later = loop.time() + 0.1
    await until(lambda: loop.time() > later, "the timer has run")
    served_on = not rig.transport.aborted
    rig.read(answer())
    rested = list(rig.pool)
    await until(lambda: rig.transport.aborted, "the connection is closed")

    assert (True, [rig.connection]) == (served_on, rested)
    assert not rig.pool


def test_idle_time() -> None:
    """It is shorter than the 5 s after which uvicorn, the server of vLLM, closes its side."""
    assert IDLE_S < 5


async def test_unreachable(free_port: Callable[[], int]) -> None:
    """A refused connection is an error that names the worker."""
    url = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(WorkerUnreachableError, match=url):
        await Upstream().connect(url)


async def test_cancelled_connects() -> None:
    """Cancelled at any moment, connecting leaves no connection open."""
    async with FakeWorker("w", OK).serving() as worker:
        upstream = Upstream()
        for turns_before in range(12):
            task = asyncio.ensure_future(upstream.connect(worker.url))
            for _ in range(turns_before):
                await asyncio.sleep(0)
            if task.cancel():
                await asyncio.wait([task])
            if not task.cancelled():
                task.result().close()
        del task
        gc.collect()

        await until(lambda: not worker.open_wires, "no connection is left")
