"""One scrape for all processes on a port: what the asked process makes of the others' answers."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator

import pytest

from kvrouter.frontend.server import siblings
from kvrouter.frontend.server.siblings import Siblings

GAUGE = b"# HELP k A gauge\n# TYPE k gauge\nk 1.0\n"


async def own() -> bytes:
    """What this process says."""
    return GAUGE


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """The URL of a process that says this to each request; None: nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()  # until the other side gives up
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer with this body."""
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("answer", "scraped"),
    [
        (whole(GAUGE), b"1.0"),
        (None, b"0.0"),
        (b"", b"0.0"),
        (whole(b"", b"503 Service Unavailable"), b"0.0"),
        (whole(b"k 1.0\n" * 100), b"0.0"),
    ],
    ids=["answers", "hangs", "closes", "503", "too long"],
)
async def test_another_process(monkeypatch: pytest.MonkeyPatch, answer: bytes | None, scraped: bytes) -> None:
    """Whatever another process does, this one's samples come, and the other is marked."""
    monkeypatch.setattr(siblings, "TIMEOUT_S", 0.2 if answer is None else 10.0)
    monkeypatch.setattr(siblings, "MOST_BYTES", 100)
    async with answering(answer) as url:
        with tempfile.TemporaryFile() as file:
            Siblings(file.fileno(), 10, url)
            text = await Siblings(file.fileno(), 2, "http://own").metrics(own, ())

    assert b'k{process="2"} 1.0\n' in text
    assert (b'k{process="10"} 1.0\n' in text) is (scraped == b"1.0")
    assert b'kvrouter_process_scraped{process="10"} %b\n' % scraped in text


def test_restarted_process() -> None:
    """A process that starts again replaces its URL; processes are in the order of their numbers."""
    with tempfile.TemporaryFile() as file:
        for number, url in ((10, "http://c"), (1, "http://a-long-one"), (2, "http://b"), (1, "http://d")):
            known = Siblings(file.fileno(), number, url)
        urls = known.urls()

    assert [("1", "http://d"), ("2", "http://b"), ("10", "http://c")] == list(urls.items())
