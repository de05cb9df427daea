"""Whose a session or a response is: clients are told apart by the credentials that they send.

    authorization | x-api-key | api-key ──hash──> owner     none of them: all such clients are one

Without keys (--keys-file) the router does not check credentials, a gateway or the engines do; with keys the
owner is the tenant (keys/clients.py). Two clients with one key are one client.
The names of sessions go to all replicas, so they contain the hash and not the credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

CREDENTIALS = ("authorization", "x-api-key", "api-key")
_BYTES = 16


def owner_of(headers: Mapping[str, str]) -> str:
    """A hash of the credentials; empty: there are none."""
    given = next(filter(None, map(headers.get, CREDENTIALS)), "")
    return blake2b(given.encode("utf-8", "surrogateescape"), digest_size=_BYTES).hexdigest() if given else ""


def owned(session: str, owner: str) -> str:
    """A session's name as replicas know it: two clients may use one name for two sessions."""
    return f"{owner}\n{session}" if owner and session else session


def name_of(session: str) -> str:
    """The name that the client gave it."""
    return session.rpartition("\n")[2]
