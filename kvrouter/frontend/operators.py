"""Which clients may use the routes for operators.

    admin listener    every client that can connect (--admin-host)
    clients' port     none; with --admin-key-file, clients that send `Authorization: Bearer KEY`, and browsers
                      whose user has given KEY as the password

Routes for operators show or change a replica's state, or reply with a decision (dry runs).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvrouter.errors import OperatorsOnlyError, WrongAdminKeyError

Gate: TypeAlias = Callable[[str, Mapping[str, str]], None]
"""Gets what is requested and the request's headers. Raises KvRouterError to reject the request."""

_READS = ("GET ", "HEAD ")


def open_gate(_requested: str, _headers: Mapping[str, str]) -> None:
    """The gate of the admin listener: it lets every client in."""


def has_operators_routes(gate: Gate) -> bool:
    """Whether a client with the right key, if one is needed, is let in."""
    try:
        gate("", {})
    except OperatorsOnlyError:
        return False
    except WrongAdminKeyError:
        pass
    return True


class KeyGate:
    """The gate of the clients' port. Without a key it rejects every client."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def change(self, key: str | None) -> bool:
        """Use this key from now on; returns whether it is another one."""
        changed, self._key = key != self._key, key
        return changed

    def __call__(self, requested: str, headers: Mapping[str, str]) -> None:
        if self._key is None:
            raise OperatorsOnlyError(
                f"{requested} is for operators and not served on this port: use the replica's admin "
                "listener (--admin-port, by default --port + 100 on 127.0.0.1; logged at start as "
                "frontend.listening)"
            )
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # A browser adds its password also to requests that another site makes it send: those may only read.
        if scheme.lower() == "basic" and requested.startswith(_READS):
            scheme, given = "bearer", _password(given)
        # compare_digest: the time it takes does not reveal how much of the key is right
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise WrongAdminKeyError(
                f"{requested} is for operators: send `Authorization: Bearer KEY` with the key of "
                "--admin-key-file, or use the admin listener (--admin-port)"
            )


def _password(credentials: str) -> str:
    """Of `Basic` credentials (RFC 7617); empty if they are not."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
