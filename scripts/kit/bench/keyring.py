"""Keys of clients for a measurement: a file with many, and the flags of a frontend with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrouter.frontend.keys.keys_file import new_key
from scripts.kit.bench.wire.routers import OPERATORS

# Far above what any measurement uses: the limits are checked and counted, and refuse nothing.
FREE: Mapping[str, Any] = {
    "requests-per-minute": 10**9,
    "tokens-per-minute": 10**12,
    "requests-at-once": 10**6,
}


def keyring(directory: Path, tenants: int, rights: Mapping[str, Any] = FREE) -> tuple[list[str], list[str]]:
    """A key for each of so many tenants, and the flags."""
    file, admin, texts, tables = directory / "keys.toml", directory / "operators", [], []
    admin.write_text(OPERATORS)
    for number in range(tenants):
        text, key = new_key(f"tenant-{number}", rights)
        texts.append(text)
        table: dict[str, Any] = {
            "id": f'"{key.id}"',
            "sha256": f'"{key.sha256}"',
            "tenant": f'"{key.tenant}"',
        }
        lines = [f"{name} = {value}" for name, value in {**table, **rights}.items()]
        tables.append("\n".join([f"[key-{number}]", *lines, ""]))
    file.write_text("\n".join(tables))
    return texts, [f"--keys-file={file}", f"--admin-key-file={admin}"]


def header(key: str) -> str:
    return f"authorization: Bearer {key}"
