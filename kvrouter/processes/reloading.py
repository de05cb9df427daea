"""SIGHUP for processes whose log level is all that they change themselves: parents, and agents."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvrouter.errors import ConfigError
from kvrouter.processes.children import Child
from kvrouter.processes.signals import Reloads
from kvrouter.settings.declare import Settings
from kvrouter.settings.read import Loaded
from kvrouter.settings.reload import Changes, log_failure, read_again
from kvrouter.telemetry.logs import LEVELS, set_log_level

S = TypeVar("S", bound=Settings)


def log_changes(changes: Changes, old_level: str, new_level: str) -> None:
    """Log the changes at the more verbose of both levels, then use the new one."""
    set_log_level(min(old_level, new_level, key=LEVELS.index))
    changes.log()
    set_log_level(new_level)


def _no_children() -> Iterable[Child]:
    return ()


async def reload_forever(
    reloads: Reloads,
    loaded: Loaded[S],
    children: Callable[[], Iterable[Child]] = _no_children,
    fixed: str = "",
) -> None:
    """At each SIGHUP read the settings again; if they are right, send SIGHUP to the children.

    `fixed`: a table of the file that the children got as flags, so that its values need a restart.
    """
    while True:
        await reloads.next()
        try:
            later, changes = await asyncio.to_thread(read_again, loaded)
        except ConfigError as error:
            log_failure(error)
            continue
        sources = {
            name: {loaded.sources.get(name, ""), later.sources.get(name, "")} for name in changes.applied
        }
        for name, of_value in sources.items():
            if fixed and any(source.endswith(f"[{fixed}]") for source in of_value):
                changes.needs_restart[name] = changes.applied.pop(name)
        level = "log-level"
        is_fixed = level in changes.needs_restart
        log_changes(changes, loaded.values[level], (loaded if is_fixed else later).values[level])
        loaded = later
        for child in children():
            child.send_signal(signal.SIGHUP)
