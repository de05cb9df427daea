"""`kvrouter keys add|list|revoke|expire`: changes the file of clients' keys, and keeps the rest of it."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvrouter.errors import ConfigError
from kvrouter.frontend.keys.keys_file import NAME, OVERRIDES, Key, new_key, now_utc, read_keys
from kvrouter.settings.declare import Command, Settings, setting
from kvrouter.settings.read import Loaded, run

Action = Literal["add", "list", "revoke", "expire"]
_DAYS = re.compile(r"([0-9]{1,5})d")
_NAME_RULE = "must be a name of letters, digits, . _ and -, at most 64"
# A name with a dot needs quotes: [a.b] is a table in another one.
_HEADER = re.compile(rf"\[\s*(\"?)({NAME})\1\s*\]\s*(?:#.*)?")


def _read_name(text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise ValueError(_NAME_RULE)
    return text


def _read_expiry(text: str) -> datetime:
    if days := _DAYS.fullmatch(text):
        return now_utc().replace(microsecond=0) + timedelta(days=int(days[1]))
    try:
        given = datetime.fromisoformat(text)
        return (given if given.tzinfo is not None else given.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(
            "must be a date as in 2027-01-31 or 2027-01-31T12:00Z, or days from now as in 90d"
        ) from None


@dataclass(frozen=True, slots=True)
class KeysSettings(Settings):
    heading = "Keys"

    action: Action = setting(MISSING, "what to do", is_positional=True, is_top=True)
    name: str = setting(
        "", "the key's name, its table in the file", metavar="NAME", is_positional=True, is_top=True
    )
    file: Path = setting(Path("keys.toml"), "the file, as for --keys-file", is_top=True)
    tenant: str | None = setting(
        None, "whose the key is", metavar="NAME", read=_read_name, default_text="the key's name", is_top=True
    )
    model: tuple[str, ...] = setting((), "a model that it may use; none: all", metavar="NAME", is_top=True)
    expires: datetime | None = setting(
        None,
        "when it ends; expire: now, if this is not given",
        metavar="DATE|Nd",
        read=_read_expiry,
        text=datetime.isoformat,
        is_top=True,
    )
    requests_per_minute: int = setting(0, "of its tenant; 0: no limit", least=0, is_top=True)
    tokens_per_minute: int = setting(
        0, "of its tenant, prompts and answers; 0: no limit", least=0, is_top=True
    )
    requests_at_once: int = setting(0, "of its tenant; 0: no limit", least=0, is_top=True)
    max_body_bytes: int = setting(0, "of a request; 0: --max-body-mib", least=0)
    max_header_bytes: int = setting(0, "of a request, all headers; 0: 65,536", least=0)
    priority: int = setting(0, "of requests that name none; lower goes first")
    weight: float = setting(1.0, "its tenant's share while requests wait", least=0.01, most=1000)
    cache_salt: str = setting(
        "", "keys with one salt share prefixes under --tenant-cache-salt", metavar="TEXT"
    )
    override: tuple[str, ...] = setting(
        (),
        "what its requests may choose: target, mode, weights, priority or dry-run",
        choices=tuple(OVERRIDES),
        is_repeated=True,
        is_top=True,
    )

    def rights(self) -> dict[str, Any]:
        """What the table has besides id, hash and tenant: all that is not the default."""
        found = {
            "models": list(self.model),
            "expires": self.expires,
            "requests-per-minute": self.requests_per_minute,
            "tokens-per-minute": self.tokens_per_minute,
            "requests-at-once": self.requests_at_once,
            "max-body-bytes": self.max_body_bytes,
            "max-header-bytes": self.max_header_bytes,
            "priority": self.priority,
            "weight": self.weight if self.weight != 1.0 else None,
            "cache-salt": self.cache_salt,
            "overrides": list(self.override),
        }
        return {name: value for name, value in found.items() if value}


COMMAND = Command(
    "keys",
    KeysSettings,
    "Change the file of clients' keys (--keys-file): add, list, revoke or expire one.\n"
    "add prints the key, once: the file has its hash only. Running frontends read the file again on SIGHUP.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Change or list; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[KeysSettings]) -> int:
    try:
        for line in change(loaded.settings):
            print(line)  # noqa: T201
    except (ConfigError, OSError) as error:
        print(f"kvrouter keys: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def change(given: KeysSettings) -> list[str]:
    """Change the file; returns what to print. Raises ConfigError or OSError."""
    if given.action != "list" and not re.fullmatch(NAME, given.name):
        raise ConfigError(f"{given.action} NAME: {_NAME_RULE}")
    return _ACTIONS[given.action](given, read_keys(given.file) if given.file.exists() else {})


def _add(given: KeysSettings, keys: dict[str, Key]) -> list[str]:
    if given.name in keys:
        raise ConfigError(f"{given.file} has a key {given.name!r}: revoke it first, or give another name")
    try:
        text, key = new_key(given.tenant or given.name, given.rights())
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    table = {"id": key.id, "sha256": key.sha256, "tenant": key.tenant, **given.rights()}
    lines = [
        f'["{given.name}"]' if "." in given.name else f"[{given.name}]",
        *(f"{name} = {_toml(value)}" for name, value in table.items()),
    ]
    old = given.file.read_text().rstrip() if given.file.exists() else ""
    _write(given.file, "\n".join([*([old, ""] if old else []), *lines, ""]))
    return [text]


def _list(_given: KeysSettings, keys: dict[str, Key]) -> list[str]:
    now, lines = now_utc(), []
    for name, key in keys.items():
        fields = msgspec.to_builtins(key, builtin_types=(datetime,))
        rights = [
            f"{field}={','.join(value) if isinstance(value, tuple) else value}"
            for field, value in fields.items()
            if value and (field, value) != ("weight", 1.0) and field not in {"sha256", "id"}
        ]
        lines.append(" ".join([name, f"kvr_{key.id}_…", *rights, *["(expired)"] * key.has_expired(now)]))
    return lines


def _revoke(given: KeysSettings, keys: dict[str, Key]) -> list[str]:
    _write(given.file, "".join(_without(given, keys, lambda _line: False)))
    return []


def _expire(given: KeysSettings, keys: dict[str, Key]) -> list[str]:
    ends = given.expires or now_utc().replace(microsecond=0)
    lines = list(_without(given, keys, lambda line: not line.lstrip().startswith("expires")))
    at = next(at for at, line in enumerate(lines) if _name_in(line) == given.name)
    _write(given.file, "".join([*lines[: at + 1], f"expires = {_toml(ends)}\n", *lines[at + 1 :]]))
    return []


_ACTIONS = {"add": _add, "list": _list, "revoke": _revoke, "expire": _expire}


def _without(given: KeysSettings, keys: dict[str, Key], is_kept: Callable[[str], bool]) -> Iterator[str]:
    """The lines of the file, without those of the key's table that are not kept. Raises ConfigError."""
    if given.name not in keys:
        raise ConfigError(f"{given.file} has no key {given.name!r}; it has: {', '.join(keys) or 'none'}")
    lines, inside = given.file.read_text().splitlines(keepends=True), False
    if not any(_name_in(line) == given.name for line in lines):
        raise ConfigError(f"{given.file} has no line [{given.name}]: change this key by hand")
    for line in lines:
        if line.lstrip().startswith("["):
            inside = _name_in(line) == given.name
        if not inside or is_kept(line):
            yield line


def _name_in(line: str) -> str:
    """The key whose table begins with this line; empty: none."""
    found = _HEADER.fullmatch(line.strip())
    return found[2] if found else ""


def _toml(value: Any) -> str:
    """JSON has the same strings, numbers and arrays."""
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else json.dumps(value)


def _write(path: Path, text: str) -> None:
    """Replace the file in one step: a frontend that reads it meanwhile gets the old one or the new one."""
    path = path.resolve()  # a link stays one
    old = path.stat() if path.exists() else None
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as new:
        new.write(text)
    try:
        read_keys(Path(new.name))
        os.chmod(new.name, old.st_mode & 0o777 if old is not None else 0o600)
        if old is not None and old.st_uid != os.geteuid():
            os.chown(new.name, old.st_uid, old.st_gid)  # its frontends must go on reading it
        os.replace(new.name, path)
    except BaseException:
        os.unlink(new.name)
        raise


if __name__ == "__main__":
    sys.exit(main())
