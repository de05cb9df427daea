"""A client's request: its head, as it was read and as a worker gets it; its body; its id; its reply."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias
from urllib.parse import parse_qs, unquote

import httptools

from kvrouter.errors import BodiesFullError
from kvrouter.relay.answer import Answer, Served
from kvrouter.relay.codings import too_large
from kvrouter.relay.exchange import ClientSide
from kvrouter.relay.framing import hop_by_hop
from kvrouter.relay.hops import HOPS, hop_line

# Name in lower case, and value. Bytes that are not UTF-8 are lone surrogates in them, as in aiohttp's
# headers: encoding with "surrogateescape" gives a worker exactly the bytes that the client sent.
Field: TypeAlias = tuple[str, str]

_NOT_FOR_WORKERS = frozenset(
    {
        "host",
        "content-length",
        "content-encoding",  # the body has been decompressed
        "accept-encoding",  # the relay searches the answer for errors and usage: it must be uncompressed
        "expect",
        "x-request-id",
    }
)
TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
# SGLang takes fields of a request from these headers, for routers (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES).
OVERRIDES = "x-override-"
# A client that names its target may also name a rank that only the engine knows of.
_RANK = "x-data-parallel-rank"

# One head has an entry for each rank header of the pool's workers, usually one. The bound holds where
# forged cards name ever new headers.
_MOST_FORWARDED = 8

_MOST_ID_CHARACTERS = 128

_START = b"POST /"
END = b"\r\n\r\n"
# A client that ends its head like this waits for an answer, while the head never ends for us.
_LF_END = b"\n\n"
# The limit for one line, and so for the heads of plain requests.
MAX_LINE_BYTES = 8190

# Clients with more different heads than this are rare, and so are heads with more fields. 256 heads, and
# their fields, are 5 MiB at most.
MOST_HEADS, _MOST_FIELDS = 256, 64
_LENGTH = b"\r\ncontent-length:"
_MOST_DIGITS = 15
# With one of these the body is not simply the bytes after the head.
_CHANGES_BODY = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade"})

# llhttp (9.3) accepts more: several blanks, empty lines before it, no version at all.
REQUEST_LINE = re.compile(rb"[A-Z-]+ [!-~]+ HTTP/([0-9])\.[0-9]\r\n")
# One that needs no parser to be read.
_SIMPLE_LINE = re.compile(rb"(GET|POST|PUT|PATCH|DELETE) (/[\w./~-]*) HTTP/1\.1\r\n")
# RFC 3986: uri-host [ ":" port ], which may be empty.
HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::[0-9]*)?", re.ASCII)

# Unfinished bodies of all clients together, in bodies of the largest size. Without a common bound, twenty
# clients that stopped amid bodies of 60 MB held 1.2 GB.
ARRIVING_BODIES = 8


def host_error(hosts: Sequence[str], *, is_http_10: bool) -> str:
    """What is wrong with a request's `host` headers (RFC 9112, 3.2); empty if nothing is."""
    if len(hosts) > 1:
        return "more than one host header"
    if not hosts:
        return "" if is_http_10 else "HTTP/1.1 without a host header"
    return "" if HOST.fullmatch(hosts[0]) else f"host {hosts[0][:100]!r} is not HOST or HOST:PORT"


class RequestHead:
    """A request's method, path (query included) and headers, without the body's length.

    Requests whose heads are equal share one object (`PlainHeads`), so what a worker gets of it is
    written once, not for every request.
    """

    __slots__ = (
        "_forwarded", "fields", "has_overrides", "headers", "hops", "known", "method", "path", "route",
        "wants_keep_alive",
    )  # fmt: skip

    def __init__(self, method: str, path: str, fields: Sequence[Field], *, wants_keep_alive: bool) -> None:
        self.method = method
        self.path = path
        self.route = path.partition("?")[0]
        self.fields = fields
        self.headers = dict(reversed(fields))  # of several with one name the first
        self.wants_keep_alive = wants_keep_alive
        self.has_overrides = any(name.startswith(OVERRIDES) for name, _ in fields)
        self.hops = ", ".join([value for name, value in fields if name == HOPS])
        """The routers that the request has passed; empty: it comes from a client."""
        self.known: object = None
        """What the server has found out of it and keeps for the next request with it; None: nothing."""
        self._forwarded: dict[tuple[str, bool, bool], bytes] = {}

    def at(self, method: str, path: str) -> RequestHead:
        """The same fields with another method and path."""
        other = RequestHead.__new__(RequestHead)  # __init__ would read the fields again
        other.method, other.path, other.route = method, path, path.partition("?")[0]
        other.fields, other.headers, other.hops = self.fields, self.headers, self.hops
        other.wants_keep_alive, other.has_overrides = self.wants_keep_alive, self.has_overrides
        other.known, other._forwarded = None, self._forwarded
        return other

    def without(self, *names: str, more: Sequence[Field] = ()) -> RequestHead:
        """Without the fields of these names, and with `more`."""
        fields = [*(field for field in self.fields if field[0] not in names), *more]
        return RequestHead(self.method, self.path, fields, wants_keep_alive=self.wants_keep_alive)

    def for_worker(
        self,
        url: str,
        request_id: str,
        body_bytes: int,
        *,
        rank: int,
        rank_header: str,
        keeps_rank: bool,
        trace: str = "",
        router_id: str = "",
    ) -> bytes:
        """The request line and headers for the worker at `url`, closing empty line included.

        The path of the URL, if it has one, goes before that of the request.

        `keeps_rank`: if the worker's card names no rank header, the client's own rank reaches it.
        `trace`: whole lines that replace the client's trace context; empty: that reaches it as it is.
        `router_id`: of this replica, always the same; empty: no hop header is added.
        """
        is_traced = bool(trace)
        forwarded = self._forwarded.get((rank_header, keeps_rank, is_traced))
        if forwarded is None:
            left_out = self._left_out(rank_header, keeps_rank)
            forwarded = self._forwarded_lines(left_out | TRACE_HEADERS if is_traced else left_out, router_id)
            if len(self._forwarded) < _MOST_FORWARDED:
                self._forwarded[rank_header, keeps_rank, is_traced] = forwarded
        rank_line = f"{rank_header}: {rank}\r\n" if rank_header else ""
        host, prefix = _place_of(url)
        own = (
            f"{self.method} {prefix}{self.path} HTTP/1.1\r\nhost: {host}\r\n"
            f"content-length: {body_bytes}\r\nx-request-id: {request_id}\r\n{rank_line}{trace}"
        )
        return own.encode("utf-8", "surrogateescape") + forwarded

    def _forwarded_lines(self, left_out: frozenset[str], router_id: str) -> bytes:
        """The client's other headers, which every worker with this rank header gets, and the empty line.

        The hop header is among them: it costs the requests that share this head nothing.
        """
        lines = [
            f"{name}: {value}\r\n"
            for name, value in self.fields
            if name not in left_out and not name.startswith(("x-kvrouter-", OVERRIDES))
        ]
        hop = hop_line(self.hops, router_id) if router_id else ""
        return "".join([*lines, hop, "\r\n"]).encode("utf-8", "surrogateescape")

    def _left_out(self, rank_header: str, keeps_rank: bool) -> frozenset[str]:
        """The headers that are not for the worker, in lower case; `connection` may name some."""
        connection = ",".join(value for name, value in self.fields if name == "connection")
        # a client must not take the engines' own key away by naming its header
        named = hop_by_hop(connection.encode("utf-8", "surrogateescape")) - {b"authorization"}
        left_out = _NOT_FOR_WORKERS.union((name.decode("latin-1") for name in named), (rank_header.lower(),))
        return left_out if keeps_rank and not rank_header else left_out | {_RANK}


@lru_cache(maxsize=4096)
def _place_of(url: str) -> tuple[str, str]:
    """Host and port as the URL has them, and its path, which every target there begins with.

    Connecting shows whether host and port are valid, `url_error` has checked the path.
    """
    host, _, path = url.partition("//")[2].partition("/")
    return host.rpartition("@")[2], f"/{path}".rstrip("/")


class CollectedHead:
    """Collects what httptools reports of a head."""

    __slots__ = ("fields", "is_complete", "url")

    def __init__(self) -> None:
        self.url = b""
        self.fields: list[Field] = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.decode("ascii").lower(), value.rstrip().decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        self.is_complete = True


class PlainHeads:
    """Reads the heads of plain requests; all others are left to HeadReader.

    A plain request has HTTP/1.1, a path, a host, and nothing that changes how its body is read.

    Heads are remembered: those of one client differ only in the length of the body, or in the path.

    A head that equals a remembered one in all but the digits of its first `content-length` is plain as well,
    and so is one with a simple line before such fields. After `MOST_HEADS` all are forgotten.
    """

    def __init__(self, root_path: str = "") -> None:
        self._root_path = root_path
        # By the head without those digits and the blanks before them.
        self._known: dict[bytes, RequestHead] = {}
        self._alike: dict[bytes, RequestHead] = {}  # one of them by what follows its line

    def read(self, head: bytes) -> tuple[RequestHead, int] | None:
        """`parse_plain`, from memory if possible."""
        name, length, at = head, 0, head.lower().find(_LENGTH) + len(_LENGTH)
        if at >= len(_LENGTH):
            end = head.find(b"\r\n", at)
            digits = head[at:end].lstrip(b" ")
            if not digits.isdigit() or len(digits) > _MOST_DIGITS:
                return parse_plain(head, self._root_path)
            name, length = head[:at] + head[end:], int(digits)
        known = self._known.get(name) or self._read_new(head, name, length)
        return None if known is None else (known, length)

    def _read_new(self, head: bytes, name: bytes, length: int) -> RequestHead | None:
        line = _SIMPLE_LINE.match(name)
        rest = b"" if line is None else name[line.end() :]
        alike = self._alike.get(rest)
        if line is not None and alike is not None:
            new = alike.at(line[1].decode(), without_root(line[2].decode(), self._root_path))
        else:
            read = parse_plain(head, self._root_path)
            if read is None or read[1] != length:
                return None
            new = read[0]
        if len(new.fields) > _MOST_FIELDS:
            return new
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
            self._alike.clear()
        self._known[name] = new
        if line is not None:
            self._alike[rest] = new
        return new


def without_root(target: str, root_path: str) -> str:
    """A path with its query, without the prefix of a proxy, if that has not removed it itself."""
    rest = target.removeprefix(root_path) if root_path else target
    return rest if rest is not target and rest[:1] in {"", "/", "?"} else target


def parse_plain(head: bytes, root_path: str = "") -> tuple[RequestHead, int] | None:
    """Parse a head that ends with its empty line; returns it and its body's length, or None if not plain."""
    collected = CollectedHead()
    parser = httptools.HttpRequestParser(collected)
    try:
        parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    is_whole = collected.is_complete and parser.get_http_version() == "1.1" and collected.url[:1] == b"/"
    names = dict(collected.fields)  # llhttp rejects a second length; of the others only the presence matters
    if not is_whole or not REQUEST_LINE.match(head) or not _CHANGES_BODY.isdisjoint(names):
        return None
    hosts = [value for name, value in collected.fields if name == "host"]
    if b"#" in collected.url or host_error(hosts, is_http_10=False):
        return None
    fields = [field for field in collected.fields if field[0] != "content-length"]
    method, path = parser.get_method().decode("ascii"), without_root(collected.url.decode("ascii"), root_path)
    read = RequestHead(method, path, fields, wants_keep_alive="close" not in connection_words(fields))
    return read, int(names.get("content-length", 0))


def connection_words(fields: list[Field]) -> set[str]:
    """The words of the `connection` header.

    httptools (0.9) cannot be asked: `should_keep_alive` is reset as soon as a body of 0 bytes has ended.
    """
    values = [value for name, value in fields if name == "connection"]
    return {word.strip().lower() for word in ",".join(values).split(",")}


def content_encoding(fields: Sequence[Field]) -> str:
    """All `content-encoding` headers as one list."""
    return ",".join([value for name, value in fields if name == "content-encoding"])


def may_be_plain(data: bytes) -> bool:
    """Whether the beginning of a head may become a plain one."""
    is_post = data.startswith(_START) or _START.startswith(data)  # others are read piece by piece
    return is_post and len(data) <= MAX_LINE_BYTES and _LF_END not in data


class Request:
    """A request whose head has been read. While the body is still arriving, `body` is None: see `read`."""

    __slots__ = ("_allow", "_arriving", "body", "client", "head", "headers", "trace")

    def __init__(
        self,
        head: RequestHead,
        client: ClientSide,
        body: bytes | None = None,
        arriving: Callable[[], Awaitable[bytes]] | None = None,
        allow: Callable[[int, str], None] | None = None,
    ) -> None:
        """`arriving` waits for a body of which a part is still to come; `allow` bounds its length."""
        self.head = head
        self.headers = head.headers
        self.client = client
        self.body = body
        self.trace = ""
        """The trace context for its worker, see `RequestHead.for_worker`."""
        self._arriving = arriving
        self._allow = allow

    async def read(self) -> bytes:
        """The whole body. Raises BadRequestError, RequestTooLargeError or BodiesFullError."""
        if self.body is None:
            self.body = await self._arriving() if self._arriving is not None else b""
        return self.body

    async def read_at_most(self, most: int, by: str) -> bytes:
        """`read`, for a client with a limit of its own."""
        if self.body is None and self._allow is not None:
            self._allow(most, by)
        if len(body := await self.read()) > most:  # one that came with its head, or was packed
            raise too_large(most, by)
        return body

    @property
    def content_type(self) -> str:
        """The type of the body, in lower case, without parameters."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        return kind if "/" in kind else "application/octet-stream"

    def in_query(self, name: str) -> str | None:
        """The first value of this name in the query that is not empty."""
        return next(filter(None, self.query.get(name, ())), None)

    @property
    def query(self) -> Mapping[str, Sequence[str]]:
        """All values in the query, by name."""
        query = self.head.path.partition("?")[2]
        return parse_qs(query, keep_blank_values=True, errors="surrogateescape") if query else {}

    def path_after(self, start: str) -> str:
        """The part of the path after `start`, decoded."""
        return unquote(self.head.route.removeprefix(start))

    def reply(self, answer: Answer, *, closes: bool = False) -> Served:
        """Write an answer that no worker made. HEAD gets the headers only."""
        keeps_alive = self.head.wants_keep_alive and not closes
        data = answer.encode(keeps_alive=keeps_alive)
        if self.head.method == "HEAD":
            data = data[: len(data) - len(answer.body)]
        self.client.write(data)
        return Served(answer.status, keeps_alive)


# Serves a request to its end; the answer goes to the request's client.
Serve: TypeAlias = Callable[[Request], Awaitable[Served]]


def request_id_of(headers: Mapping[str, str]) -> str:
    """The request id that the client sent, or a new one if that is missing or not safe to log."""
    given = headers.get("x-request-id")
    return given if given and _is_plain_word(given) else new_request_id()


def _is_plain_word(text: str) -> bool:
    short = len(text) <= _MOST_ID_CHARACTERS
    return short and text.isascii() and text.isprintable() and " " not in text


def new_request_id() -> str:
    """32 hex digits: unique, but not secret."""
    # 0.1 µs. uuid4().hex asks the kernel for random bytes each time and takes 2 µs.
    return random.getrandbits(128).to_bytes(16, "big").hex()


class ArrivingBytes:
    """Counts the bytes of all clients' unfinished bodies, to bound them together."""

    def __init__(self, max_body_bytes: int) -> None:
        self.most = ARRIVING_BODIES * max_body_bytes
        self.count = 0

    def take(self, size: int) -> None:
        """Count `size` more bytes. Raises BodiesFullError."""
        if self.count + size > self.most:
            raise BodiesFullError(f"{self.count} bytes of unfinished request bodies wait here already")
        self.count += size

    def give_back(self, size: int) -> None:
        """Count `size` bytes less: their body is complete, or never will be."""
        self.count -= size
