"""NATS identities as `nsc` makes them: an operator vouches for accounts, an account for its users.

JWTs are those of NATS' JWT v2: claims signed with Ed25519 by the nkey of the operator or account above.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import nkeys  # type: ignore[import-untyped]

_UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
_ACCOUNT_LIMITS = {**_UNLIMITED, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
_CREDS = """\
-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class Identity:
    """A key pair that depends only on its name."""

    def __init__(self, name: str, kind: int) -> None:
        self.name = name
        self.seed: bytes = nkeys.encode_seed(hashlib.sha256(name.encode()).digest(), kind)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public: str = self._pair.public_key.decode().rstrip("=")

    def vouch(self, subject: Identity, claims: dict[str, Any]) -> str:
        """A JWT about `subject`, signed by this key pair."""
        body = {
            "jti": f"{self.name}-{subject.name}",
            "iat": 1_700_000_000,
            "iss": self.public,
            "name": subject.name,
            "sub": subject.public,
            "nats": {**claims, "version": 2},
        }
        signed = f"{_base64({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_base64(body)}"
        return f"{signed}.{_encode(self._pair.sign(signed.encode()))}"


def operator(name: str) -> Identity:
    """An operator."""
    return Identity(name, nkeys.PREFIX_BYTE_OPERATOR)


def account(name: str) -> Identity:
    """An account."""
    return Identity(name, nkeys.PREFIX_BYTE_ACCOUNT)


def user(name: str) -> Identity:
    """A user."""
    return Identity(name, nkeys.PREFIX_BYTE_USER)


def server_config(owner: Identity, member: Identity) -> str:
    """The configuration of a server that trusts this operator and knows one of its accounts."""
    trusted = owner.vouch(owner, {"type": "operator"})
    known = owner.vouch(member, {"type": "account", "limits": _ACCOUNT_LIMITS})
    return f"operator: {trusted}\nresolver: MEMORY\nresolver_preload: {{ {member.public}: {known} }}\n"


def creds(voucher: Identity, of: Identity, seed_of: Identity | None = None) -> str:
    """A .creds file: the account's JWT for the user, and the user's seed."""
    jwt = voucher.vouch(of, {"type": "user", "pub": {}, "sub": {}, **_UNLIMITED})
    return _CREDS.format(jwt=jwt, seed=(seed_of or of).seed.decode())


def _base64(value: dict[str, Any]) -> str:
    return _encode(json.dumps(value, separators=(",", ":")).encode())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
