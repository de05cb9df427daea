"""The commands and their modules, which are imported only when one is needed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

from kvrouter.settings.declare import Command


class Modules(NamedTuple):
    """Where a command declares its settings as COMMAND, and where its `main` is."""

    settings: str
    program: str


# Imported when the command runs: `kvrouter nats` needs neither tokenizers nor aiohttp.
MODULES = {
    "serve": Modules("kvrouter.serve.settings", "kvrouter.serve.__main__"),
    "frontend": Modules("kvrouter.frontend.settings", "kvrouter.frontend.__main__"),
    "router": Modules("kvrouter.router.settings", "kvrouter.router.__main__"),
    "worker": Modules("kvrouter.worker.settings", "kvrouter.worker.__main__"),
    "mocker": Modules("kvrouter.lab.mocker.settings", "kvrouter.lab.mocker.__main__"),
    "analyze": Modules("kvrouter.lab.analyze.settings", "kvrouter.lab.analyze.__main__"),
    "simulate": Modules("kvrouter.lab.simulate.settings", "kvrouter.lab.simulate.__main__"),
    "tune": Modules("kvrouter.lab.tune.settings", "kvrouter.lab.tune.__main__"),
    "nats": Modules("kvrouter.bus.settings", "kvrouter.bus.__main__"),
    "nats-accounts": Modules("kvrouter.bus.accounts", "kvrouter.bus.accounts"),
    "keys": Modules("kvrouter.frontend.keys.command", "kvrouter.frontend.keys.command"),
    "verify": Modules("kvrouter.observe.verify.settings", "kvrouter.observe.verify.__main__"),
    "index": Modules("kvrouter.observe.verify.index_settings", "kvrouter.observe.verify.index_command"),
    "doctor": Modules("kvrouter.observe.doctor.settings", "kvrouter.observe.doctor.__main__"),
    "top": Modules("kvrouter.observe.top.settings", "kvrouter.observe.top.__main__"),
}


def command_named(name: str) -> Command[Any]:
    command: Command[Any] = importlib.import_module(MODULES[name].settings).COMMAND
    return command


def commands_with(flag: str) -> list[str]:
    """The commands that have this flag."""
    return [name for name in _declaring() if command_named(name).has(flag)]


def all_variables() -> set[str]:
    """The environment variables of all commands."""
    declared = (one for name in _declaring() for one in command_named(name).declared())
    return {one.variable for one in declared if not one.setting.is_hidden}


def _declaring() -> list[str]:
    return [name for name, modules in MODULES.items() if importlib.util.find_spec(modules.settings)]
