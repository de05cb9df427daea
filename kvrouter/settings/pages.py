"""The text of --help, --help-all and --show-config."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from kvrouter.settings.declare import Command, Declared

WIDTH = 100
_NAMES_WIDTH = 34
_MORE = (
    "--help lists the settings that matter first, --help-all all of them, "
    "--show-config prints each value and where it came from."
)
_WAYS = (
    "{flag} can also be given as the environment variable {variable}, or as the key {name} in table "
    "[{command}] or [shared] of a TOML file, named by --config FILE or KVROUTER_CONFIG; "
    "so can every setting. "
    "A flag has precedence over the environment, the environment over the file."
)


def help_page(command: Command[Any], *, is_whole: bool) -> str:
    """The settings in groups, in the order of declaration; those that matter first, or all."""
    groups: dict[str, list[Declared]] = {}
    for one in command.declared():
        if not one.setting.is_hidden and (is_whole or one.setting.is_top):
            groups.setdefault(one.heading, []).append(one)
    positional = "".join(f" [{one.metavar}]" for one in command.declared() if one.setting.is_positional)
    lines = [
        f"usage: kvrouter {command.name}{positional} [--setting value …]",
        "",
        *_wrapped(command.summary),
    ]
    for heading, members in groups.items():
        lines += ["", f"{heading}:", *(line for one in members for line in _lines(one, is_whole=is_whole))]
    example = next(iter(groups.values()))[0]
    ways = _WAYS.format(flag=example.flag, variable=example.variable, name=example.name, command=command.name)
    return "\n".join([*lines, "", *_wrapped(f"{ways} {_MORE}")])


def config_page(command: Command[Any], values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Each value and where it came from."""
    rows = [
        (
            one.name,
            _text(one, values[one.name], is_default=one.name not in sources),
            sources.get(one.name, "default"),
        )
        for one in command.declared()
        if not one.setting.is_hidden
    ]
    names, texts = max(len(row[0]) for row in rows), min(40, max(len(row[1]) for row in rows))
    return "\n".join(f"{name:<{names}}  {text:<{texts}}  {source}" for name, text, source in rows)


def _text(one: Declared, value: Any, *, is_default: bool) -> str:
    described = one.setting.default_text
    return (described if is_default else "") or one.shown(value) or described or "-"


def usage(one: Declared) -> str:
    """How a setting is given."""
    if one.setting.is_positional:
        return one.metavar
    if one.is_switch:
        return f"--[no-]{one.name}"
    return f"{one.flag} {one.metavar}"


def description(one: Declared) -> str:
    """The help of a setting with its default."""
    default = one.setting.default_text or one.shown(one.default)
    repeated = "; may be repeated" if one.is_list else ""
    return f"{one.setting.help}{repeated}" + (f" (default: {default})" if default else "")


def _lines(one: Declared, *, is_whole: bool) -> Iterator[str]:
    name = f"  {usage(one)}"
    variables = " or ".join(filter(None, (one.variable, one.setting.variable)))
    told = f"{description(one)} [{variables}]" if is_whole else description(one)
    text = textwrap.wrap(told, WIDTH - _NAMES_WIDTH, break_on_hyphens=False)
    if len(name) > _NAMES_WIDTH - 2:
        yield name
        name = ""
    for line in text:
        yield f"{name:<{_NAMES_WIDTH}}{line}"
        name = ""


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)
