"""Engines below a path of their URL: what all who ask them send, byte for byte, to a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.bounded_answers import address_below
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat, decode_worker_beat, encode
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.core.wire.values import url_error
from kvrouter.frontend.requests.hung_engines import probing
from kvrouter.observe.engine import Engines
from kvrouter.observe.replica import fetch
from kvrouter.relay.request import RequestHead, parse_plain
from kvrouter.relay.upstream import Upstream
from kvrouter.tokens.remote_tokenizer import EngineTokenizer
from kvrouter.worker.engines.http import EngineHttp
from tests.long import examples
from tests.relay.rig import FakeClient, attempt_on

PLAIN = string.ascii_letters + string.digits + "._~!$&'()*+,;=:@-"
BODY = b'{"data": [{"id": "m"}], "tokens": [1]}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(BODY),
    BODY,
)

segments = st.lists(
    st.sampled_from(PLAIN)
    | st.integers(0, 255).map("%{0:02x}".format)
    | st.integers(0, 255).map("%{0:02X}".format),
    max_size=6,
).map("".join)
paths = st.lists(segments, max_size=4).map(lambda parts: "".join(f"/{part}" for part in parts))
"""Paths in every form: also with trailing and doubled slashes, and needlessly encoded."""


@dataclass
class Engine:
    """Answers each request, and notes its method, target and host."""

    url: str = ""
    got: list[tuple[str, str, str]] = field(default_factory=list)
    open: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the connection ends."""
        self.open[writer] = asyncio.current_task()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
                headers = {name.lower(): value for name, value in (one.split(": ", 1) for one in fields)}
                await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = line.split(" ")
                self.got.append((method, target, headers["host"]))
                writer.write(ANSWER)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def serving(self, host: str) -> AsyncIterator[None]:
        """Listen while inside."""
        async with await asyncio.start_server(self.serve, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            yield
            for writer in self.open:
                writer.transport.abort()
            await asyncio.gather(*filter(None, self.open.values()))


async def send_through_relay(url: str, head: RequestHead) -> None:
    """Send a request as a frontend does."""
    upstream, client = Upstream(), FakeClient()
    attempt = attempt_on(await upstream.connect(url), client)
    attempt.send(head.for_worker(url, "id", 2, rank=0, rank_header="", keeps_rank=False) + b"{}")
    await attempt.outcome
    upstream.close()


async def ask_every_way(url: str, head: RequestHead) -> None:
    """All requests of agents, frontends, clients of the library and the doctor."""
    async with EngineHttp.open(url) as engine:
        await engine.models()
        assert await engine.trouble() is None
        await engine.find("server_info?config_format=json")
    async with probing(None) as probe:
        assert await probe(url)
    async with EngineTokenizer.open() as tokenizer:
        assert [[1]] == await tokenizer.answers(url, [b"{}"], 60.0)
        session = tokenizer._session
        doctor = Engines(session, None)
        await doctor.meet([Card(worker_id="w", url=url, model="m", block_size=16)])
        assert ("m",) == doctor.met[url].names
        assert 200 == (await fetch(session, address_below(url, "v1/completions"), json={})).status
    await send_through_relay(url, head)


TARGETS = [
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("GET", "/server_info?config_format=json"),
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/completions?a=%7e"),
]
"""What `ask_every_way` sends, without the path of the URL."""


def new_head() -> RequestHead:
    """The head of a client's request."""
    plain = parse_plain(
        b"POST /v1/completions?a=%7e HTTP/1.1\r\nhost: router\r\nx-a: b\r\ncontent-length: 2\r\n\r\n"
    )
    assert plain is not None
    return plain[0]


@examples(25)
@given(paths.filter(lambda path: not url_error(f"http://e{path}")))
@example("")
@example("/")
@example("/engine-1")
@example("/engine-1/")
@example("//a//b//")
@example("/a%2fb%2F%7e~%20")
def test_every_request(path: str) -> None:
    """Each request's target is the URL's path as it is written, without slashes at its end, then its own."""

    async def check() -> None:
        engine = Engine()
        async with engine.serving("127.0.0.1"):
            url = engine.url + path
            await ask_every_way(url, new_head())

            prefix, host = path.rstrip("/"), engine.url.removeprefix("http://")
            assert [(method, prefix + target, host) for method, target in TARGETS] == engine.got

    asyncio.run(check())


async def test_ipv6() -> None:
    """The path comes after an IPv6 host and its port, too."""
    engine = Engine()
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(engine.serving("::1"))
        except OSError:
            pytest.skip("no IPv6 here")
        await send_through_relay(f"{engine.url}/a/b", new_head())

    assert [("POST", "/a/b/v1/completions?a=%7e", engine.url.removeprefix("http://"))] == engine.got


def test_one_head_for_many_urls() -> None:
    """A head that several requests share keeps no path of one worker for the next, in any order."""
    head, urls = new_head(), [f"http://e:1{path}" for path in ("", "/a", "", "/b/", "/a")] * 2

    lines = [
        head.for_worker(url, "id", 2, rank=0, rank_header="", keeps_rank=False).split(b" ")[1] for url in urls
    ]

    assert [b"", b"/a", b"", b"/b", b"/a"] * 2 == [
        line.removesuffix(b"/v1/completions?a=%7e") for line in lines
    ]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://e/a", b"e"),
        ("https://e/a", b"e"),
        ("http://E.example:80/a", b"E.example:80"),
        ("https://[::1]:443/a", b"[::1]:443"),
    ],
)
def test_hosts(url: str, host: bytes) -> None:
    """The host header has host and port as the URL has them, the default port included."""
    head = new_head().for_worker(url, "id", 2, rank=0, rank_header="", keeps_rank=False)

    assert head.startswith(b"POST /a/v1/completions?a=%7e HTTP/1.1\r\nhost: " + host + b"\r\n")


@given(st.text(string.printable + "ä€\u2028", max_size=12).map("http://e:1/{}".format) | st.text(max_size=30))
def test_accepted_urls_can_be_sent(url: str) -> None:
    """A URL without an error fits a card, and a request line: three words without control characters."""
    if url_error(url):
        return
    card = Card(worker_id="w", url=url, model="m", block_size=16)
    beat = WorkerBeat(VERSION, 1, "up", PoolId("m-12345678"), [RankBeat(0, 1, 0, False)], 1, card)

    assert card == decode_worker_beat(encode(beat), WorkerId("w")).card
    line = new_head().for_worker(url, "id", 2, rank=0, rank_header="", keeps_rank=False).split(b"\r\n")[0]
    assert 3 == len(line.split())
    assert line.isascii()
    assert line.decode().isprintable()
    assert address_below(url, "v1/completions").raw_path.encode() == line.split()[1].partition(b"?")[0]
