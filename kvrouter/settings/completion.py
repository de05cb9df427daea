"""`kvrouter completion SHELL`: a script that completes commands, flags and their choices."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Literal, cast

import cyclopts

from kvrouter.settings.commands import MODULES, command_named
from kvrouter.settings.declare import Declared
from kvrouter.settings.read import WRONG_SETTINGS, collecting

SHELLS = ("bash", "zsh", "fish")
_USAGE = """\
usage: kvrouter completion bash|zsh|fish

  kvrouter completion bash >~/.local/share/bash-completion/completions/kvrouter
  kvrouter completion zsh >DIR/_kvrouter         DIR: one of $fpath, before compinit
  kvrouter completion fish >~/.config/fish/completions/kvrouter.fish
"""


def main(arguments: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    shell = arguments[0] if len(arguments) == 1 else ""
    if shell in SHELLS:
        sys.stdout.write(_app().generate_completion(shell=cast(Any, shell)))
        return 0
    print(_USAGE, end="", file=sys.stdout if shell == "--help" else sys.stderr)
    return 0 if shell == "--help" else WRONG_SETTINGS


def _app() -> cyclopts.App:
    """All commands, to describe and not to run; without hidden settings and former spellings."""
    app = _command("kvrouter")
    for name in MODULES:
        own = _command(name, " ".join(command_named(name).summary.split()))
        shown = [one for one in command_named(name).declared() if not one.setting.is_hidden]
        own.default(collecting(map(_with_choices, shown)))
        app.command(own)
    for name, words in (("help", MODULES), ("completion", SHELLS)):
        own = _command(name)
        for word in words:
            own.command(_command(word))
        app.command(own)
    return app


def _command(name: str, summary: str = "") -> cyclopts.App:
    return cyclopts.App(name=name, help=summary, help_flags=["--help", "--help-all"], version_flags=[])


def _with_choices(one: Declared) -> Declared:
    """Choices that are known only at run time become a type, from which cyclopts takes them."""
    is_plain = not one.setting.choices or one.is_list
    return one if is_plain else dataclasses.replace(one, type=Literal[one.setting.choices])
