"""A file with keys of clients."""

from __future__ import annotations

from pathlib import Path

from kvrouter.frontend.keys import command
from kvrouter.settings.read import load


def add_key(file: Path, name: str, *flags: str) -> str:
    """Add a key; returns its text."""
    (text,) = command.change(load(command.COMMAND, ("add", name, "--file", str(file), *flags), {}).settings)
    return text


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}"
