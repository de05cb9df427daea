"""The HTTP client of replicas: key, certificates, time-outs, bounded bodies, and the texts of errors.

ReplicaAccess ──open_replicas──> ReplicaClient ──fetch──> Fetched: whatever the server does
└──workers, fleet, lines──> document.py, or ReplicaError
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from kvrouter.bounded_answers import UNPACKED, engine_connector, no_answer, read_answer
from kvrouter.config import read_key
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.errors import KvRouterError
from kvrouter.observe.document import Fleet, Workers, out_of_range
from kvrouter.observe.settings import ReplicaAccess
from kvrouter.tls import tls_trouble, trusting

TIMEOUT_S, LINES_S, FLEET_S = 3.0, 60.0, 5.0
MIB = 1024 * 1024
# /workers of 1,000 workers with their feeds has about 2 MB, a page of blocks as much.
MOST_BYTES = 256 * MIB
# A clients' port answers 404 without operators' keys, and 401 with them; an admin listener 401 or 403.
_NOT_FOR_CLIENTS = (401, 403, 404)
_WHERE_TO_ASK = (
    "give the URL of the replica's admin listener (--admin-port, by default its --port + 100), "
    "and the operators' key with --admin-key-file if it is not on this machine's loopback"
)
# What a replica says about a worker that it does not know, and what is said of it here.
_LISTED, _NO_WORKER = b"/workers lists them", "the replica knows no such worker"

T = TypeVar("T")


class ReplicaError(KvRouterError):
    """A replica does not answer, or not as one of this version."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer, or why there is none. `skew_s`: the server's clock minus this one's, exact to a second."""

    status: int = 0
    body: bytes = b""
    trouble: str = ""
    is_tls_trouble: bool = False
    skew_s: float | None = None
    expires_s: float | None = None
    """Until the end of the server's certificate."""

    @property
    def reason(self) -> str:
        """The trouble; of TLS without its remedy, which is for agents."""
        return self.trouble.partition("; ")[0] if self.is_tls_trouble else self.trouble


@contextlib.asynccontextmanager
async def open_http(tls_ca: Path | None, flag: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for `fetch`. `flag`: the one that gives the authorities. Raises ConfigError."""
    async with aiohttp.ClientSession(
        headers=UNPACKED,
        timeout=aiohttp.ClientTimeout(total=None),  # each request has its own
        connector=engine_connector(trusting(tls_ca, flag), limit=256),
        auto_decompress=False,
    ) as session:
        yield session


async def fetch(
    http: aiohttp.ClientSession,
    url: str | URL,
    *,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = MIB,
    tls_name: str | None = None,
    timeout_s: float = TIMEOUT_S,
    json: object = None,
    follows: bool = False,
) -> Fetched:
    """The answer at `url`: of a GET, or of a POST of `json`. Never raises for what the server does.

    `follows`: redirects, as a proxy before a replica may send.
    """
    method, before = "GET" if json is None else "POST", time.time()
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.request(
                method, url, headers=headers, allow_redirects=follows, server_hostname=tls_name, json=json
            ) as response,
        ):
            expires_s = _until_expiry(response)  # first: a response that is read to its end has no connection
            body = await read_answer(response, most_bytes)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, UnicodeError) as error:
        if isinstance(error, TimeoutError):
            return Fetched(trouble=f"no answer within {timeout_s:g} s")
        trouble = tls_trouble(error.__cause__)  # aiohttp's own error wraps that of ssl
        return Fetched(trouble=trouble or no_answer(error), is_tls_trouble=bool(trouble))
    skew_s = _skew_s(response.headers.get("date", ""), before, time.time())
    return Fetched(response.status, body, skew_s=skew_s, expires_s=expires_s)


def _skew_s(date: str, before: float, after: float) -> float | None:
    """How far the server's clock is from this one's; 0 within the second that a Date header leaves open."""
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
    return theirs - after if theirs > after else min(0.0, theirs + 1 - before)


def _until_expiry(response: aiohttp.ClientResponse) -> float | None:
    connection = response.connection
    transport = connection.transport if connection is not None else None
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    if not certificate or "notAfter" not in certificate:
        return None
    return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()


def authorized(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def decoded(body: bytes, kind: type[T]) -> T | None:
    """The body of another process; None if it is not of this form."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE:
        return None


@dataclass(frozen=True, slots=True)
class ReplicaClient:
    """One replica. All but `fetch` raise ReplicaError."""

    url: str
    http: aiohttp.ClientSession
    key: str | None
    tls_name: str | None

    async def fetch(
        self,
        path: str,
        most_bytes: int = 4 * MIB,
        timeout_s: float = TIMEOUT_S,
        *,
        json: object = None,
        follows: bool = False,
    ) -> Fetched:
        """Whatever the replica answers at `path`."""
        return await fetch(
            self.http,
            f"{self.url}{path}",
            headers=authorized(self.key),
            most_bytes=most_bytes,
            tls_name=self.tls_name,
            timeout_s=timeout_s,
            json=json,
            follows=follows,
        )

    async def workers(self, timeout_s: float = LINES_S) -> Workers:
        """/workers."""
        return self._read("/workers", await self._body("/workers", timeout_s), Workers)

    async def fleet(self, timeout_s: float = FLEET_S) -> Fleet:
        """/fleet."""
        fleet = self._read("/fleet", await self._body("/fleet", timeout_s), Fleet)
        if wrong := out_of_range(fleet):
            raise ReplicaError(f"{self.url}/fleet is not in this version's format: {wrong}")
        return fleet

    async def lines(self, path: str, kind: type[T]) -> Iterator[T]:
        """An answer of lines, each a JSON object."""
        body = await self._body(path, LINES_S)
        return (self._read(path, line, kind) for line in body.splitlines())

    def _read(self, path: str, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise ReplicaError(f"{self.url}{path} is not in this version's format: {error}") from None
        except UNREADABLE as error:
            raise ReplicaError(f"{self.url}{path} is not JSON: {error}") from None

    async def _body(self, path: str, timeout_s: float) -> bytes:
        found = await self.fetch(path, MOST_BYTES, timeout_s, follows=True)
        if not found.status:
            raise ReplicaError(f"{self.url} cannot be reached: {found.reason}")
        if found.status == 200:
            return found.body
        why = _NO_WORKER if _LISTED in found.body else _WHERE_TO_ASK
        why = f": {why}" if found.status in _NOT_FOR_CLIENTS else ""
        raise ReplicaError(f"{self.url}{path} answers {found.status}{why}")


@contextlib.asynccontextmanager
async def open_replicas(urls: Sequence[str], access: ReplicaAccess) -> AsyncIterator[list[ReplicaClient]]:
    """Clients of the replicas at these URLs. Raises ConfigError."""
    key = read_key("--admin-key-file", access.admin_key_file)
    async with open_http(access.tls_ca, "--tls-ca") as http:
        yield [ReplicaClient(url, http, key, access.tls_name) for url in urls]
