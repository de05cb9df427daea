"""What we answer ourselves, as bytes; and what is left to do for a client's connection after an answer."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from msgspec import Struct

from kvrouter.errors import KvRouterError
from kvrouter.relay.exchange import Rejected


class Served(Struct, frozen=True):
    """A request has been answered, by whomever: its client has it all, or as much as there is."""

    status: int
    keeps_alive: bool
    needs_reset: bool = False
    """The answer is not whole, and its client could not be told: the connection has to be torn."""


class Answer(Struct, frozen=True):
    """An answer of our own."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    """In lower case; `content-type` is JSON unless it is said here."""

    @property
    def fields(self) -> dict[str, str]:
        """All headers of the answer itself."""
        return {"content-type": "application/json", **self.headers}

    def encode(self, *, keeps_alive: bool) -> bytes:
        """Head and body."""
        fields = self.fields
        fields["content-length"] = str(len(self.body))
        fields["connection"] = "keep-alive" if keeps_alive else "close"
        lines = [f"HTTP/1.1 {self.status} {_reason(self.status)}", *map(": ".join, fields.items()), "\r\n"]
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + self.body


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""  # a worker may say anything


def error_headers(error: KvRouterError, request_id: str) -> dict[str, str]:
    """The headers of an answer whose body is this error."""
    headers = {"x-request-id": request_id}
    if error.status == 503:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def rejected_answer(request_id: str, refusal: Rejected) -> Answer:
    """The last worker's own refusal, passed on."""
    headers = {
        "x-request-id": request_id,
        "content-type": refusal.content_type.decode("utf-8", "surrogateescape"),
    }
    if refusal.retry_after or refusal.status == 503:
        headers["retry-after"] = refusal.retry_after.decode("utf-8", "surrogateescape") or str(
            KvRouterError.retry_after_s
        )
    return Answer(refusal.status, refusal.body, headers)


def internal_error() -> KvRouterError:
    """What a client is told of a bug of ours."""
    return KvRouterError("internal error; the log of this replica has the details")
