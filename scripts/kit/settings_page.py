"""Writes docs/reference/settings.md and help.md from the declared settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrouter.settings.commands import MODULES, command_named
from kvrouter.settings.declare import Command, Declared
from kvrouter.settings.pages import help_page

FOLDER = Path(__file__).resolve().parents[2] / "docs/reference"
_MADE = "<!-- Written by `python -m scripts.kit.settings_page`; a test compares it with the code. -->"
_INTRODUCTION = """\
Every setting can be given in three ways. A flag has precedence over the environment, the environment over the
file:

| way | example |
|---|---|
| flag | `kvrouter frontend --port 9000` |
| environment variable | `KVROUTER_PORT=9000` |
| TOML file, named by `--config FILE` or `KVROUTER_CONFIG` | `port = 9000` in `[frontend]`, or in `[shared]` |

[An example of a file](../examples/kvrouter.toml). `--show-config` prints the value of each setting and where
it came from. Passwords are not printed.

The key of the file is the flag without its dashes. A name that ends with `-s`, `-ms` or `-mib` is in seconds,
milliseconds or MiB.

In the tables, *on/off* is a switch: `--name` switches it on, `--no-name` off; in the environment and in files
it is `true` or `false`. A setting that can change *at run time* does so on SIGHUP or `POST /config/reload`
([operations.md](../operations.md)). *Since* is the version that
had it first. Earlier spellings still work."""


def settings_page() -> str:
    """Return all settings of all commands, as tables."""
    parts = ["# Settings", _MADE, _INTRODUCTION]
    for name in MODULES:
        parts += [f"## kvrouter {name}", *_tables(command_named(name))]
    return "\n\n".join(parts) + "\n"


def _tables(command: Command[Any]) -> Iterator[str]:
    yield command.summary.replace("\n", " ")
    groups: dict[str, list[Declared]] = {}
    for one in command.declared():
        if not one.setting.is_hidden:
            groups.setdefault(one.heading, []).append(one)
    for heading, members in groups.items():
        head = "| setting | variable | type | default | meaning | at run time | since |\n" + "|---" * 7 + "|"
        yield "\n".join([f"### {heading} ({command.name})\n", head, *map(_row, members)])
    if command.left_out:
        yield "\n".join(
            f"`--{name}` is not a setting of this command: {use}." for name, use in command.left_out.items()
        )


def _row(one: Declared) -> str:
    setting = one.setting
    kind = "on/off" if one.is_switch else one.metavar
    default = setting.default_text or (one.shown(one.default) if not one.is_required else "required")
    earlier = [f"`{name}`" for name in setting.old if name not in setting.help]
    old = f" Earlier: {', '.join(earlier)}." if earlier else ""
    also = f" Also `{setting.variable}`." if setting.variable else ""
    repeated = " May be repeated." if one.is_list else ""
    cells = (
        f"`{one.flag}`",
        f"`{one.variable}`",
        f"`{kind}`" if not one.is_switch else kind,
        default or "–",
        f"{setting.help.rstrip('.')}.{repeated}{old}{also}",
        "yes" if setting.reloadable else "",
        setting.since,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def help_pages() -> str:
    """Return the --help of each command, as a terminal shows it."""
    parts = [
        "# Help of each command",
        _MADE,
        "What `--help` of each command prints; `--help-all` prints the rest.",
    ]
    for name in MODULES:
        parts.append(
            f"## kvrouter {name} --help\n\n```text\n{help_page(command_named(name), is_whole=False)}\n```"
        )
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Return the pages by path."""
    return {FOLDER / "settings.md": settings_page(), FOLDER / "help.md": help_pages()}


def main() -> int:
    """Write them; returns the exit status."""
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
