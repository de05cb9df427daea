"""docs/reference/settings.md, from the declared settings; reference_pages.py writes it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from kvrouter.settings.commands import MODULES, command_named
from kvrouter.settings.declare import Command, Declared, declared
from kvrouter.settings.pages import usage

MADE = "<!-- Written by `python -m scripts.kit.reference_pages`; a test compares it with the code. -->"
_INTRODUCTION = """\
Every setting can be given in three ways. A flag has precedence over the environment, the environment over the
file:

| way | example |
|---|---|
| flag | `kvrouter frontend --port 9000` |
| environment variable | `KVROUTER_PORT=9000` |
| TOML file, named by `--config FILE` or `KVROUTER_CONFIG` | `port = 9000` in `[frontend]`, or in `[shared]` |

[An example of a file](../examples/kvrouter.toml). `--show-config` prints the value of each setting and where
it came from, without passwords. `--help` of a command prints the settings that matter first, `--help-all`
all of them.

The key of the file is the flag without its dashes; the variable is `KVROUTER_` and the key in capitals, with
`_` for `-`. A name that ends with `-s`, `-ms` or `-mib` is in seconds, milliseconds or MiB.

`--[no-]name` is a switch: `--name` switches it on, `--no-name` off; in the environment and in files it is
`true` or `false`. *Reloadable*: it can change at run time, by SIGHUP or `POST /config/reload`
([operations.md](../operations.md)). Earlier spellings still work. Settings exist since version 0.1 unless
another is named."""
_FIRST = "frontend"  # most settings of the other commands are among its own
_SINCE = "0.1"
_WIDTH = 140


def settings_page() -> str:
    """Return all settings of all commands: each as a row of the first command that has it."""
    parts = ["# Settings", MADE, _INTRODUCTION]
    seen: dict[str, str] = {}  # row: the command that has it first
    for name in sorted(MODULES, key=lambda one: one != _FIRST):
        parts += [f"## kvrouter {name}", *_tables(command_named(name), seen)]
    return "\n\n".join(parts) + "\n"


def _tables(command: Command[Any], seen: dict[str, str]) -> Iterator[str]:
    yield command.summary.replace("\n", " ")
    shared: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    for one in command.declared():
        if one.setting.is_hidden:
            continue
        row = _row(one)
        if row in seen:
            shared.setdefault(seen[row], []).append(f"`{one.flag}`")
        else:
            groups.setdefault(one.heading, []).append(row)
    for heading, rows in groups.items():
        head = "| setting | default | meaning |\n|---|---|---|"
        yield "\n".join([f"### {heading} ({command.name})\n", head, *rows])
        seen |= dict.fromkeys(rows, command.name)
    for owner, flags in shared.items():
        text = f"{_which(command, owner, flags)} of [`kvrouter {owner}`](#kvrouter-{owner})."
        yield textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    hidden = {one.name for one in declared(command.kind) if one.setting.is_hidden}
    left_out: dict[str, list[str]] = {}
    for name, use in command.left_out.items():
        if name not in hidden:
            left_out.setdefault(use, []).append(f"`--{name}`")
    for use, names in left_out.items():
        text = f"Not of this command: {', '.join(names)} ({use})."
        yield textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _which(command: Command[Any], owner: str, flags: list[str]) -> str:
    """Which settings of `owner` the command has, too: it names them, unless it has all."""
    own = {one.name for one in command.declared()} | {*command.left_out}
    others = [
        one for one in command_named(owner).declared() if not one.setting.is_hidden and one.name not in own
    ]
    return f"{', '.join(flags)}: as" if others else "All other settings"


def _row(one: Declared) -> str:
    setting = one.setting
    default = setting.default_text or (one.shown(one.default) if not one.is_required else "required")
    earlier = [f"`{name}`" for name in setting.old if name not in setting.help]
    notes = [
        f"{setting.help.rstrip('.')}.",
        "Repeatable." if one.is_list else "",
        f"Earlier: {', '.join(earlier)}." if earlier else "",
        f"Also `{setting.variable}`." if setting.variable else "",
        "*Reloadable.*" if setting.reloadable else "",
        f"Since {setting.since}." if setting.since != _SINCE else "",
    ]
    key = f", in a file `{one.name}`" if setting.is_positional else ""
    cells = (f"`{usage(one)}`{key}", default or "–", " ".join(filter(None, notes)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
