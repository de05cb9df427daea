"""The commands, and where each declares its settings as COMMAND: imported only when one is needed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from kvrouter.settings.declare import Command

MODULES = {
    "serve": "kvrouter.serve.settings",
    "frontend": "kvrouter.frontend.settings",
    "worker": "kvrouter.worker.settings",
    "mocker": "kvrouter.mocker.settings",
    "analyze": "kvrouter.analyze.settings",
    "simulate": "kvrouter.simulate.settings",
    "tune": "kvrouter.simulate.tune_settings",
    "nats": "kvrouter.bus.settings",
    "nats-accounts": "kvrouter.bus.accounts",
    "verify": "kvrouter.verify.settings",
    "index": "kvrouter.verify.index_settings",
    "doctor": "kvrouter.doctor.settings",
    "top": "kvrouter.top.settings",
}


def command_named(name: str) -> Command[Any]:
    command: Command[Any] = importlib.import_module(MODULES[name]).COMMAND
    return command


def commands_with(flag: str) -> list[str]:
    """The commands that have this flag."""
    return [name for name in _declaring() if command_named(name).has(flag)]


def all_variables() -> set[str]:
    """The environment variables of all commands."""
    declared = (one for name in _declaring() for one in command_named(name).declared())
    return {one.variable for one in declared if not one.setting.is_hidden}


def _declaring() -> list[str]:
    return [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
