"""The keys of clients: `kvr_ID_SECRET`, and the TOML file that knows of each its SHA-256 and what it may.

    [alice]                               kvr_ 16 hex digits _ 43 characters for 256 random bits
    id = "…"                                    └── looked up by the id ──> one SHA-256 ──> compared
    sha256 = "…"
    tenant = "research"                   an unknown id costs as much as a wrong secret

The file has no secret: who reads it can use no key.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.tables.tenants import NO_LIMITS, KeyLimits
from kvrouter.core.wire.values import SettingText
from kvrouter.errors import ConfigError

Override: TypeAlias = Literal["target", "mode", "weights", "priority", "dry-run"]
OVERRIDES: dict[Override, frozenset[str]] = {
    "target": frozenset({"target"}),
    "mode": frozenset({"mode"}),
    "weights": frozenset({"overlap_weight", "temperature"}),
    "priority": frozenset({"priority"}),
    "dry-run": frozenset({"dry_run"}),
}
"""What a key may be allowed, and the fields of a request's `Overrides` that each stands for."""
_FIELDS = frozenset[str]().union(*OVERRIDES.values())

# Tenants travel in bookings, where a name has at most 64 characters, and are labels of metrics.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_PREFIX, _ID_BYTES, _SECRET_BYTES = "kvr_", 8, 32
_ID = slice(len(_PREFIX), len(_PREFIX) + 2 * _ID_BYTES)
# More than any client's key; what is longer is not hashed.
_MOST_CHARACTERS = 1024
_MOST_FILE_BYTES = 16 << 20
_OWNER_BYTES = 16
_Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]
_Amount = Annotated[int, Meta(ge=0, le=1 << 40)]


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab", dict=True):
    """One table of the file. 0 and empty: no limit, all models, no expiry."""

    id: Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * _ID_BYTES}}}\Z")]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    tenant: _Name
    """Whose it is: counts, sessions, responses and costs are the tenant's, whichever of its keys is used."""
    models: tuple[SettingText, ...] = ()
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    requests_per_minute: _Amount = 0
    tokens_per_minute: _Amount = 0
    requests_at_once: _Amount = 0
    max_body_bytes: _Amount = 0
    max_header_bytes: _Amount = 0
    priority: Annotated[int, Meta(ge=-(10**6), le=10**6)] = 0
    """Of its requests that name none; lower goes first."""
    weight: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    """Its tenant's share when requests wait."""
    cache_salt: Annotated[str, Meta(max_length=256, pattern=r"\A[^:]*\Z")] = ""
    """With --tenant-cache-salt keys with one salt share prefixes; empty: it shares with none."""
    overrides: tuple[Override, ...] = ()

    @cached_property
    def limits(self) -> KeyLimits:
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.requests_at_once)

    def has_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires

    @cached_property
    def owner(self) -> str:
        """Whose its sessions and responses are, in the form of owners.py."""
        return blake2b(f"tenant\n{self.tenant}".encode(), digest_size=_OWNER_BYTES).hexdigest()

    def salted(self, own: str | None) -> str:
        """The salt of a prompt that has this one of its own. Others cannot guess it, and so not name it."""
        salt = self.cache_salt or self.sha256[:32]
        return f"{salt}:{own}" if own else salt

    @cached_property
    def forbidden(self) -> frozenset[str]:
        """The fields of `Overrides` that its requests must not have."""
        return _FIELDS.difference(*[OVERRIDES[one] for one in self.overrides])

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether it may use a model that has these names."""
        return not self.models or not set(self.models).isdisjoint(names)


class Keys:
    """All keys that are known now. Never changed: a reload makes another one.

    `single`: a key that may do all, in any form; empty: there is none. `engine_key`: what engines get in
    place of a client's key; None: nothing.
    """

    def __init__(self, keys: Mapping[str, Key], single: str = "", engine_key: str | None = None) -> None:
        self.by_name = keys
        self.engine_key = engine_key
        self._by_id = {key.id: key for key in keys.values()}
        self._single = _single(single) if single else None
        self.limited = frozenset({key.tenant for key in keys.values() if key.limits != NO_LIMITS})
        """The tenants with a limit."""
        self.weights: dict[str, float] = {}
        """Of each tenant: the largest of its keys."""
        for key in (*keys.values(), *filter(None, [self._single])):
            self.weights[key.tenant] = max(key.weight, self.weights.get(key.tenant, 0.0))

    def find(self, given: str) -> Key | None:
        """The key that a client has sent; None: it is unknown."""
        if len(given) > _MOST_CHARACTERS:
            return None
        digest = _sha256(given)
        key = self._by_id.get(given[_ID]) if given.startswith(_PREFIX) else None
        if key is None:
            key = self._single
        # compare_digest: the time does not reveal how much of a digest is right
        is_right = hmac.compare_digest(digest, key.sha256 if key is not None else "0" * 64)
        return key if is_right else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> tuple[object, ...]:
        return dict(self.by_name), self._single, self.engine_key


def _single(text: str) -> Key:
    return Key(id="0" * 2 * _ID_BYTES, sha256=_sha256(text), tenant="default", overrides=tuple(OVERRIDES))


def _sha256(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(tenant: str, rights: Mapping[str, Any]) -> tuple[str, Key]:
    """A new key's text, which is kept nowhere, and its entry. Raises msgspec.ValidationError."""
    key_id = secrets.token_hex(_ID_BYTES)
    text = f"{_PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return text, msgspec.convert({"id": key_id, "sha256": _sha256(text), "tenant": tenant, **rights}, Key)


def given_key(headers: Mapping[str, str]) -> str:
    """The key in a request's headers; empty: there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def read_keys(path: Path) -> dict[str, Key]:
    """The keys of a file, by name. Raises ConfigError."""
    flag = f"--keys-file {path}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}") from None
    if len(data) > _MOST_FILE_BYTES:
        raise ConfigError(f"{flag}: more than {_MOST_FILE_BYTES >> 20} MiB")
    try:
        keys = msgspec.toml.decode(data, type=dict[_Name, Key])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {error}") from None
    names: dict[str, str] = {}
    for name, key in keys.items():
        if key.id in names:
            raise ConfigError(f"{flag}: {name} and {names[key.id]} have one id; make one of them again")
        names[key.id] = name
    return keys


def now_utc() -> datetime:
    return datetime.now(UTC)
