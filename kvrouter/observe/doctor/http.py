"""One request to a server that may be anything: bounded in time and size, with its clock and certificate."""

from __future__ import annotations

import asyncio
import email.utils
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from kvrouter.bounded_answers import no_answer, read_answer
from kvrouter.tls import tls_trouble

TIMEOUT_S = 3.0
_DAY_S = 86_400.0
# Certificates are renewed a month before their end by default (certbot, cert-manager: a third of their life).
EXPIRES_SOON_S = 14 * _DAY_S


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer, or why there is none. `skew_s`: the server's clock minus this one's, exact to a second."""

    status: int = 0
    body: bytes = b""
    trouble: str = ""
    is_tls_trouble: bool = False
    is_refused: bool = False
    skew_s: float | None = None
    expires_s: float | None = None
    """Until the end of the server's certificate."""


async def fetch(
    http: aiohttp.ClientSession,
    url: str | URL,
    *,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = 1024 * 1024,
    tls_name: str | None = None,
    timeout_s: float = TIMEOUT_S,
    json: object = None,
) -> Fetched:
    """The answer at `url`: of a GET, or of a POST of `json`. Never raises for what the server does."""
    method, before = "GET" if json is None else "POST", time.time()
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.request(
                method, url, headers=headers, allow_redirects=False, server_hostname=tls_name, json=json
            ) as response,
        ):
            expires_s = _until_expiry(response)
            body = await read_answer(response, most_bytes)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, UnicodeError) as error:
        return _failed(error, timeout_s)
    skew_s = _skew_s(response.headers.get("date", ""), before, time.time())
    return Fetched(response.status, body, skew_s=skew_s, expires_s=expires_s)


def _failed(error: BaseException, timeout_s: float) -> Fetched:
    if trouble := tls_trouble(error.__cause__):
        return Fetched(trouble=trouble, is_tls_trouble=True)
    if isinstance(error, TimeoutError):
        return Fetched(trouble=f"no answer within {timeout_s:g} s")
    return Fetched(trouble=no_answer(error), is_refused=isinstance(error, aiohttp.ClientConnectorError))


def _skew_s(date: str, before: float, after: float) -> float | None:
    """How far the server's clock is from this one's; 0 within the second that a Date header leaves open."""
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
    if theirs > after:
        return theirs - after
    return min(0.0, theirs + 1 - before)


def _until_expiry(response: aiohttp.ClientResponse) -> float | None:
    connection = response.connection
    transport = connection.transport if connection is not None else None
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    if not certificate or "notAfter" not in certificate:
        return None
    return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()


def authorized(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
