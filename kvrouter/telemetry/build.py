"""What every process of kvrouter says of itself: its version, its settings, and what the kernel counts."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from kvrouter.core.native import versions
from kvrouter.settings.declare import Declared
from kvrouter.telemetry.metrics import Sample, StateCollector
from kvrouter.version import __version__

# Settings in which replicas of one deployment may differ: where each listens, and how it is reached.
_OF_ONE_PROCESS = frozenset({"host", "port", "admin-host", "admin-port", "advertise", "processes", "nats"})
_HASH_DIGITS = 12


def register_build(registry: CollectorRegistry) -> None:
    """Add `process_*`, and which version runs."""
    ProcessCollector(registry=registry)
    labels = {"version": __version__, "core": versions.in_use(), "python": platform.python_version()}
    registry.register(StateCollector(lambda: [("kvrouter_build_info", labels, 1)]))


def config_collector(declared: Iterable[Declared], settings: Callable[[], Any]) -> StateCollector:
    """The hash of the settings that hold now."""
    shown = [one for one in declared if not one.setting.is_hidden and one.name not in _OF_ONE_PROCESS]

    def samples() -> Iterator[Sample]:
        labels = {"hash": config_hash(shown, settings())}
        yield "kvrouter_config_info", labels, 1

    return StateCollector(samples)


def config_hash(declared: Iterable[Declared], settings: Any) -> str:
    """Equal for equal settings. Secrets are left out: a hash of a short one could be guessed."""
    lines = [f"{one.name}={one.shown(one.value_in(settings))}" for one in declared]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_HASH_DIGITS]
