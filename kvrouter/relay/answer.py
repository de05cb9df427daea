"""Answers that the router writes itself, and what to do with the client's connection afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from msgspec import Struct

from kvrouter.errors import (
    KvRouterError,
    RateLimitError,
    TrailingSlashError,
    UnknownKeyError,
    UnsupportedCodingError,
    WrongAdminKeyError,
    WrongMethodError,
)
from kvrouter.relay.codings import ACCEPTED
from kvrouter.relay.outcomes import Rejected


class Served(Struct, frozen=True):
    """A request has been answered, by a worker or by the router."""

    status: int
    keeps_alive: bool
    # The answer is incomplete, and only a reset of the connection can still show that.
    needs_reset: bool = False
    failure: str = ""
    """Why the answer broke off after its first byte; empty: it did not."""


class Answer(Struct, frozen=True):
    """An answer that the router writes. `headers` have lower-case names; the default type is JSON."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def fields(self) -> dict[str, str]:
        """All headers but `content-length` and `connection`."""
        return {"content-type": "application/json", **self.headers}

    def encode(self, *, keeps_alive: bool) -> bytes:
        fields = "".join([f"{name}: {value}\r\n" for name, value in self.fields.items()])
        connection = "keep-alive" if keeps_alive else "close"
        head = (
            f"HTTP/1.1 {self.status} {_reason(self.status)}\r\n{fields}"
            f"content-length: {len(self.body)}\r\nconnection: {connection}\r\n\r\n"
        )
        return head.encode("utf-8", "surrogateescape") + self.body


class AnswerLines(NamedTuple):
    """A long answer, made while it is sent: JSON lines. An empty one is a pause for other work."""

    lines: Iterator[bytes]


class Events(NamedTuple):
    """Server-sent events, for as long as the client stays. It gets the next one once it has read the last."""

    events: AsyncGenerator[bytes, None]


@lru_cache(maxsize=64)
def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""  # a rejected answer has the worker's status, which may be any number


def error_headers(error: KvRouterError, request_id: str) -> dict[str, str]:
    """The headers of an error answer. They do not depend on the API."""
    headers = {"x-request-id": request_id}
    if error.status in {429, 503}:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, RateLimitError):
        headers |= error.limits
    if isinstance(error, (WrongAdminKeyError, UnknownKeyError)):
        headers["www-authenticate"] = error.challenge
    if isinstance(error, UnsupportedCodingError):
        headers["accept-encoding"] = ACCEPTED
    if isinstance(error, WrongMethodError):
        headers["allow"] = error.allowed
    if isinstance(error, TrailingSlashError):
        headers["location"] = error.location
    return headers


def rejected_answer(request_id: str, rejected: Rejected) -> Answer:
    """The answer with which the last worker rejected the request."""
    headers = {
        "x-request-id": request_id,
        "content-type": rejected.content_type.decode("utf-8", "surrogateescape"),
    }
    for name, value in rejected.advice:
        headers[name.decode("latin-1")] = value.decode("utf-8", "surrogateescape")
    if rejected.status == 503:
        headers.setdefault("retry-after", str(KvRouterError.retry_after_s))
    return Answer(rejected.status, rejected.body, headers)


def internal_error() -> KvRouterError:
    """What a client gets for a bug in the router."""
    return KvRouterError("internal error; the log of this replica has the details")
