"""Settings of a running process, read again: which of them can change, and which need a restart.

flags, environment, file ──read again──> differences ──reloadable──> the settings to use from now on
                                                    └──others──> named, and as they were
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from kvrouter.settings.declare import Declared, Settings, built
from kvrouter.settings.read import Loaded

log = structlog.get_logger()

S = TypeVar("S", bound=Settings)

CHANGED = "changed"
"""Stands for values that are not printed."""


@dataclass(frozen=True, slots=True)
class Changes:
    """By setting: `old → new`, or CHANGED for a secret or the contents of its file."""

    applied: dict[str, str] = field(default_factory=dict)
    needs_restart: dict[str, str] = field(default_factory=dict)

    def log(self) -> None:
        log.info("settings.reloaded", changed=_texts(self.applied))
        if self.needs_restart:
            effect = "these settings stay as they were until a restart"
            log.warning("settings.needs_restart", settings=_texts(self.needs_restart), effect=effect)


def read_again(current: Loaded[S], switches: Container[str] = ()) -> tuple[Loaded[S], Changes]:
    """The settings to use from now on, and how they differ. Changes nothing. Raises ConfigError.

    `switches`: settings that may change, but not from or to nothing.
    """
    later, changes, values = current.reread(), Changes(), {**current.values}
    for one in current.changes(later):
        old, new = current.values[one.name], later.values[one.name]
        if one.setting.reloadable and (one.name not in switches or bool(old) == bool(new)):
            values[one.name] = new
            changes.applied[one.name] = _difference(one, old, new)
        else:
            changes.needs_restart[one.name] = _difference(one, old, new)
    # checked again: what changes must also fit what stays
    settings = built(current.command.kind, current.command.declared(), values)
    return replace(current, settings=settings, values=values, sources=later.sources), changes


def log_failure(error: Exception) -> None:
    log.warning("settings.not_reloaded", error=str(error), effect="all settings stay as they were")


def _texts(changes: Mapping[str, str]) -> list[str]:
    return [f"{name}: {text}" for name, text in changes.items()]


def _difference(one: Declared, old: object, new: object) -> str:
    if one.setting.is_secret:
        return CHANGED
    none = one.setting.default_text or "none"
    before, after = one.shown(old) or none, one.shown(new) or none
    return f"{before} → {after}" if before != after else CHANGED  # they differ in a password
