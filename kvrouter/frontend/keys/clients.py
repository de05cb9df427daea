"""Who a client is, by its key, and the request as engines get it: without the key.

head ──key──> KnownHead (kept with the head, which requests of one client share) ──> Caller
                └── a head without the client's key, and with the engines' own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvrouter.errors import HeadTooLargeError, UnknownKeyError
from kvrouter.frontend.keys.keys_file import Key, Keys, given_key, now_utc
from kvrouter.frontend.requests.owners import CREDENTIALS, owner_of
from kvrouter.relay.request import Field, Request, RequestHead

_HOW = "send `Authorization: Bearer KEY` or `x-api-key: KEY`"


class Caller(Struct, frozen=True):
    """What the client of a request may do and see."""

    may_override: bool = True
    """Whether its overrides count; else they are ignored."""
    sees_workers: bool = True
    """Whether it may see which worker answers."""
    key: Key | None = None
    """None: an operator, or no keys are in use."""

    def owner(self, headers: Mapping[str, str]) -> str:
        """Whose its sessions and responses are."""
        return self.key.owner if self.key is not None else owner_of(headers)

    @property
    def forbidden(self) -> frozenset[str]:
        """The overrides that are an error."""
        return self.key.forbidden if self.key is not None else frozenset()


ALL = Caller()


class ClientKeys:
    """The keys that count now. None: clients need none, and engines get what clients send."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.now = keys

    def change(self, keys: Keys | None) -> bool:
        """Use these keys from now on; returns whether they are others."""
        if keys == self.now:
            return False
        self.now = keys  # another object: what heads have kept of the former one counts no longer
        return True


class KnownHead(Struct, frozen=True):
    """What was found out of a head. Counts while `keys` are in use. Each port has heads of its own."""

    keys: Keys
    client: Caller
    bare: RequestHead
    expiring: Key | None
    """The client's key, if that expires."""


def key_in(headers: Mapping[str, str], keys: Keys) -> Key:
    """The key of a request. Raises UnknownKeyError."""
    given = given_key(headers)
    key = keys.find(given) if given else None
    if key is None:
        raise UnknownKeyError(f"the API key is unknown: {_HOW}" if given else f"no API key: {_HOW}")
    check_expiry(key)
    return key


def check_expiry(key: Key) -> None:
    """Raise UnknownKeyError if the key has expired."""
    if key.expires is not None and key.has_expired(now_utc()):
        raise UnknownKeyError(f"the API key has expired: {_HOW}")


def check_head(key: Key, fields: Sequence[Field]) -> None:
    """Raise HeadTooLargeError if the lines of the headers have more bytes than the key allows."""
    most = key.max_header_bytes
    if (
        most
        and sum([len(f"{name}: {value}\r\n".encode("utf-8", "replace")) for name, value in fields]) > most
    ):
        raise HeadTooLargeError(f"the headers have more than {most} bytes (max-header-bytes of the key)")


def without_key(request: Request, keys: Keys) -> RequestHead:
    """The head as engines get it."""
    engines = [("authorization", f"Bearer {keys.engine_key}")] if keys.engine_key is not None else []
    return request.head.without(*CREDENTIALS, more=engines)
