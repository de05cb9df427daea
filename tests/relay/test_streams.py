"""Streams passed on in C are, byte for byte, what Python passes on; and they end as there."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from kvrouter.core.native import versions
from tests.frontend.clients import Client, connected
from tests.frontend.fleet import STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    END,
    LAST_CHUNK,
    SSE_HEAD,
    Received,
    Script,
    Wire,
    chunk,
    event,
    in_turn,
    turns,
    until,
    until_still,
)
from tests.long import IS_LONG

BATCHES, SEEDS = (25 if IS_LONG else 1), 40
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":64,"total_tokens":73,"completion_tokens":9}}\n\n'
FAILED = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
NAMED = b'event: error\ndata: {"message":"out of memory"}\n\n'
MIDDLES = (
    chunk(event("plain")),
    chunk(event('quotes: "abort" and "error"')),
    chunk(event("x" * 5000)),
    chunk(event("\u00e9\u4e16\U0001f600")),
    chunk(event("two") + event("in one")),
    chunk(b": comment\n\n"),
    chunk(b"event: ping\ndata: {}\n\n"),
    chunk(b"event: content_block_delta\ndata: {}\n\n"),
    chunk(event("in")[:9]) + chunk(event("in")[9:]),
    b"5;name=value\r\ndata:\r\n" + chunk(b" {}\n\n"),
    b"00%x\r\n%s\r\n" % (len(event("zeros")), event("zeros")),
    b"%X\r\n%s\r\n" % (len(event("upper" * 9)), event("upper" * 9)),
)
ENDS = (
    chunk(event("", "stop")) + END,
    chunk(event("", "stop")) + chunk(USAGE) + END,
    chunk(USAGE + b"data: [DONE]\n\n") + LAST_CHUNK,
    chunk(event("", "abort")) + END,
    chunk(event("", "ERROR")) + END,
    chunk(NAMED) + END,
    chunk(FAILED) + END,
    chunk(event("no reason")) + LAST_CHUNK,
    b"no chunk\r\n",
    LAST_CHUNK[:-2],
    b"",
)


@dataclass(frozen=True)
class Play:
    """What a worker sends, in these pieces, before it closes the connection or resets it."""

    pieces: tuple[bytes, ...]
    resets: bool

    async def script(self, _received: Received, wire: Wire) -> None:
        await wire.send(*self.pieces)
        if self.resets:
            await turns(20)
            wire.reset()
        else:
            wire.close()


def play_of(seed: int) -> Play:
    """A stream of events of all kinds, cut anywhere."""
    rng = random.Random(seed)
    middle = b"".join(rng.choices(MIDDLES, weights=(40, *[2] * (len(MIDDLES) - 1)), k=rng.randrange(3, 40)))
    data = SSE_HEAD + chunk(event("first")) + middle + rng.choice(ENDS)
    cuts = sorted(rng.randrange(len(SSE_HEAD), len(data)) for _ in range(rng.choice((0, 0, 3, 30))))
    places = [0, *(cuts or [found.end() for found in re.finditer(b"\n\n\r\n", data)]), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(places)]
    return Play(tuple(piece for piece in pieces if piece), resets=rng.random() < 0.2)


async def ask(fleet: Fleet) -> tuple[bytes, bool, list[str]]:
    """What a client gets: its bytes, whether its connection stays, and how the log says that it ended."""
    before = len(fleet.trouble.logs)
    async with fleet.connected() as client:
        response = await client.ask(STREAM)
    await fleet.until_free()
    logged = [str(one.get("reason") or one.get("detail")) for one in fleet.trouble.logs[before:]]
    return response.body, response.is_whole, logged


@pytest.mark.parametrize("batch", range(BATCHES))
async def test_same_bytes(fleet_of: FleetOf, batch: int, passes: list[int]) -> None:
    """The two versions pass on the same bytes of any stream, and end it alike."""
    native = versions.in_use()
    plays = [play_of(SEEDS * batch + number) for number in range(SEEDS)]
    # a prompt that has lost its worker would wait for a second before it is sent again
    flags = ("--retries", "0", "--deadly-prompt-ttl-s", "0")
    async with fleet_of(*flags, scripts=(in_turn(*(play.script for play in plays)),)) as fleet:
        found = [await ask(fleet) for _ in plays]
    versions.choose(versions.PYTHON)
    async with fleet_of(*flags, scripts=(in_turn(*(play.script for play in plays)),)) as fleet:
        expected = [await ask(fleet) for _ in plays]

    for play, one, other in zip(plays, found, expected, strict=True):
        assert one == other, play
    assert native == versions.PYTHON or len(passes) >= len(plays) / 2


def endless(word: str) -> Script:
    """Streams the same word until the router closes the connection."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        while True:
            await wire.send(chunk(event(word)))

    return script


async def drain(client: Client, events: int) -> bytes:
    """Some events more."""
    return b"".join([await client.read_until(b"\n\n\r\n") for _ in range(events)])


async def test_no_bytes_of_others(fleet_of: FleetOf, passes: list[int]) -> None:
    """A descriptor that is used again right after its client has left gets only its own stream."""
    words = [f"w{number}" for number in range(60 if IS_LONG else 20)]
    async with fleet_of(scripts=(in_turn(*map(endless, words)),)) as fleet:
        for word in words:
            async with connected(fleet.url) as client:
                client.send(STREAM)
                got = await drain(client, 8)
                assert got.count(f'"{word}"'.encode()) >= 7
                others = [other for other in words if other != word and f'"{other}"'.encode() in got]
                assert not others
                client.leave()
        await fleet.until_free()
        await until(lambda: not fleet.workers[0].open_wires, "the worker's connections are closed")
    assert versions.in_use() == versions.PYTHON or len(set(passes)) < len(passes), "none was used twice"


async def test_client_that_reads_late(fleet_of: FleetOf, passes: list[int]) -> None:
    """A client that does not read pauses its worker; then it gets everything, in order."""
    texts = [str(number) * 100 for number in range(1, 4000)]
    sent = 0

    async def script(_received: Received, wire: Wire) -> None:
        nonlocal sent
        await wire.send(SSE_HEAD)
        for text in texts:
            wire.writer.write(chunk(event(text)))
            await wire.writer.drain()
            sent += 1
        await wire.send(chunk(event("", "stop")) + END)

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.stop_reading()
        client.send(STREAM)
        await until(lambda: sent > 100)
        await until_still(lambda: sent)
        client.go_on_reading()
        response = await client.response()

        assert [*texts, ""] == [each["choices"][0]["text"] for each in response.events]
        assert response.is_whole


@pytest.mark.parametrize("last", [b"", chunk(event("b"))[:12]], ids=["at an event's end", "amid an event"])
async def test_silent_worker(fleet_of: FleetOf, last: bytes, passes: list[int]) -> None:
    """--idle-timeout-s counts from the last event, in C as well."""
    asked = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD, *[chunk(event("a"))] * 5, last)
        asked.set()
        await wire.until_left()

    async with fleet_of("--idle-timeout-s", "0.5", scripts=(script,)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await asked.wait()
        began = asyncio.get_running_loop().time()
        response = await client.response()
        took_s = asyncio.get_running_loop().time() - began

        assert took_s > 0.3
        assert 5 <= response.body.count(b'"a"')
        assert response.is_whole == (not last)
        assert (b"no output for 0.5 s" in response.body) == (not last)


@pytest.mark.parametrize("most", [1 << 24, 150_000])
def test_record(most: int) -> None:
    """Of a stream that may move, whole or, if it becomes too long, only its last bytes."""
    native = pytest.importorskip("kvrouter.relay.native.streams")
    (engine, worker), (client, reader) = socket.socketpair(), socket.socketpair()
    with engine, worker, client, reader:
        loop = native.StreamLoop(pytest.fail)
        stream = loop.add(worker.fileno(), client.fileno(), lambda: None, most)
        rng, sent = random.Random(1), b""
        for _ in range(300):
            one = chunk(event("x" * rng.choice((1, 9, 90, 900, 9000))))
            engine.sendall(one)
            loop.run()
            sent += one
            assert reader.recv(len(one), socket.MSG_WAITALL) == one
            assert sent.endswith(stream.tail())
            assert len(stream.tail()) >= min(len(sent), 2048)
        assert len(sent) > 1 << 18
        assert (stream.is_over, stream.record()) == ((False, sent) if most > len(sent) else (True, b""))
        loop.close()


@contextlib.contextmanager
def in_c(returned: Callable[[], None]) -> Iterator[tuple[socket.socket, socket.socket, Any, Any]]:
    """A stream that may move, which C passes on: its engine, what its client reads, the loop, the stream."""
    native = pytest.importorskip("kvrouter.relay.native.streams")
    (engine, worker), (client, reader) = socket.socketpair(), socket.socketpair()
    with engine, worker, client, reader:
        reader.setblocking(False)
        loop = native.StreamLoop(pytest.fail)
        yield engine, reader, loop, loop.add(worker.fileno(), client.fileno(), returned, 1 << 24)
        loop.close()


@pytest.mark.parametrize("seed", range(20))
def test_reads_cut_anywhere(seed: int) -> None:
    """Of a stream that may move, C passes on whole events, and keeps the beginning of the next one."""
    rng, back = random.Random(seed), list[bool]()
    with in_c(lambda: back.append(True)) as (engine, reader, loop, stream):
        texts = [event("x" * rng.choice((1, 9, 90, 900, 9000))) for _ in range(60)]
        data = b"".join([chunk(text[: len(text) // 2]) + chunk(text[len(text) // 2 :]) for text in texts])
        ends = [0, *[found.end() for found in re.finditer(rb"\n\n\r\n", data)]]
        cuts = sorted(rng.sample(range(1, len(data)), 50))
        got = b""
        for begin, end in pairwise([0, *cuts, len(data)]):
            engine.sendall(data[begin:end])
            loop.run()
            with contextlib.suppress(BlockingIOError):
                got += reader.recv(len(data))
            assert len(got) == max(one for one in ends if one <= end)
        assert not back
        assert data == got == stream.record()
        assert len(texts) == stream.events
        engine.sendall(data[:20])
        engine.shutdown(socket.SHUT_WR)
        loop.run()
        loop.run()
        assert back == [True]
        assert data[:20] == stream.received


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "word", [FAILED, NAMED, event("", "abort"), event("", "ERROR")], ids=["error", "event", "abort", "ERROR"]
)
def test_failure_in_any_chunks(seed: int, word: bytes) -> None:
    """Nothing of an event with a failure is passed on, however its chunks and reads are cut."""
    rng, back = random.Random(seed), list[bool]()
    with in_c(lambda: back.append(True)) as (engine, reader, loop, stream):
        good, most = (
            b"".join([chunk(event("x" * rng.randrange(9))) for _ in range(3)]),
            rng.choice((1, 3, 9, 90)),
        )
        places = [0, *sorted(rng.sample(range(1, len(word)), len(word) // (most + 1))), len(word)]
        data = good + b"".join([chunk(word[begin:end]) for begin, end in pairwise(places)])
        got, cuts = b"", sorted(rng.sample(range(1, len(data)), rng.choice((0, 2, 20))))
        for begin, end in pairwise([0, *cuts, len(data)]):
            if not back:
                engine.sendall(data[begin:end])
                loop.run()
                with contextlib.suppress(BlockingIOError):
                    got += reader.recv(len(data))
        assert back == [True]
        assert good.startswith(got)
        assert data.startswith(got + stream.received)


ENDINGS = {
    "an event a chunk": lambda one: [one],
    "its last line end as a chunk": lambda one: [one[:-1], one[-1:]],
    "its empty line as a chunk": lambda one: [one[:-2], one[-2:]],
    "CRLF, the last one as a chunk": lambda one: [one[:-2] + b"\r\n", b"\r\n"],
    "CRLF, both as a chunk": lambda one: [one[:-2], b"\r\n\r\n"],
    "CR": lambda one: [one[:-2] + b"\r\r"],
    "a byte a chunk": lambda one: [one[at : at + 1] for at in range(len(one))],
}


@pytest.mark.parametrize("way", ENDINGS)
def test_events_at_once(way: str) -> None:
    """Of a stream that may move, C passes on an event when it has ended, however it ends."""
    with in_c(pytest.fail) as (engine, reader, loop, _):
        for number in range(9):
            data = b"".join(map(chunk, ENDINGS[way](event(f"{number}"))))
            engine.sendall(data)
            loop.run()
            assert data == reader.recv(len(data) + 1)


def test_end_amid_a_chunk() -> None:
    """C gives a stream back whose chunks end amid the next event: whole events must not wait for it."""
    back = list[bool]()
    with in_c(lambda: back.append(True)) as (engine, _, loop, stream):
        data = chunk(event("a") + event("b")[:20])
        engine.sendall(data)
        loop.run()
        assert (back, stream.received) == ([True], data)
