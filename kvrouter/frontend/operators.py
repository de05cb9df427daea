"""Who may ask what is for operators.

    admin listener    every client: --admin-host limits who can connect
    clients' port     none; with --admin-key-file those that send `Authorization: Bearer KEY`

For operators are the views of a replica's state, what changes it, and dry runs.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvrouter.errors import OperatorsOnlyError, WrongAdminKeyError

Gate: TypeAlias = Callable[[str, Mapping[str, str]], None]
"""Called with what is asked for and the request's headers. Raises KvRouterError if this client may not."""


def open_gate(_asked: str, _headers: Mapping[str, str]) -> None:
    """The gate of the admin listener: every client may."""


def gate_of(key: str | None) -> Gate:
    """The gate of the clients' port; without a key it is closed."""
    if key is None:
        return _closed_gate
    expected = key.encode()

    def keyed_gate(asked: str, headers: Mapping[str, str]) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), expected)
        if scheme.lower() != "bearer" or not is_right:
            raise WrongAdminKeyError(
                f"{asked} is for operators: send `Authorization: Bearer KEY` with the key of "
                "--admin-key-file, or ask on the admin listener (--admin-port)"
            )

    return keyed_gate


def _closed_gate(asked: str, _headers: Mapping[str, str]) -> None:
    raise OperatorsOnlyError(
        f"{asked} is for operators and not served on this port: ask on the replica's admin listener "
        "(--admin-port, by default --port + 100 on 127.0.0.1; logged at start as frontend.listening)"
    )
