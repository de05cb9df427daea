"""The pages of help and of the docs that are made from the declarations."""

from __future__ import annotations

import re

import pytest

from kvrouter.settings.commands import MODULES, command_named
from kvrouter.settings.pages import WIDTH, help_page
from kvrouter.settings.read import load
from scripts.kit.reference_pages import FOLDER
from scripts.kit.settings_page import settings_page

NOTHING = re.compile(r"default: (None|\[\]|\(\))?\)")


@pytest.mark.parametrize("name", MODULES)
def test_help_fits_one_screen(name: str) -> None:
    """--help has at most 60 lines of 100 characters, and begins with what matters first."""
    lines = help_page(command_named(name), is_whole=False).splitlines()

    assert 60 >= len(lines)
    assert [] == [line for line in lines if len(line) > WIDTH and " " in line.strip()]


@pytest.mark.parametrize("name", MODULES)
def test_each_default_is_shown_once(name: str) -> None:
    """Each setting shows one default at most, and never an empty one; none is left out of --help-all."""
    page = help_page(command_named(name), is_whole=True)
    entries = re.split(r"\n  (?=--)", page)

    assert [] == [entry for entry in entries if entry.count("(default:") > 1 or NOTHING.search(entry)]
    for one in command_named(name).declared():
        assert one.setting.is_hidden != (one.name in page)
        assert one.setting.is_hidden or one.variable in page


def flags_on_the_page(name: str) -> set[str]:
    """The flags in the part of a command, and of the commands of which it has all other settings."""
    _, _, rest = settings_page().partition(f"\n## kvrouter {name}\n")
    part, _, _ = rest.partition("\n## ")
    named = {text.replace("[no-]", "").split(" ")[0] for text in re.findall(r"`([^`]+)`", part)}
    others = re.findall(r"All other settings of \[`kvrouter (\w+)`\]", part)
    return named.union(*map(flags_on_the_page, others))


@pytest.mark.parametrize("name", MODULES)
def test_the_page_names_each_setting(name: str) -> None:
    """The part of a command names all of its settings, also settings with their row at another command."""
    named = flags_on_the_page(name)

    assert set() == {one.flag for one in command_named(name).declared() if not one.setting.is_hidden} - named


@pytest.mark.parametrize("name", ["serve", "router"])
def test_all_other_settings(name: str) -> None:
    """A part that refers to all settings of frontends names the ones that the command lacks."""
    _, _, rest = settings_page().partition(f"\n## kvrouter {name}\n")
    part, _, _ = rest.partition("\n## ")
    others = {one.flag for one in command_named("frontend").declared() if not one.setting.is_hidden}
    lacking = others - {one.flag for one in command_named(name).declared()}

    assert "All other settings of [`kvrouter frontend`]" in part
    assert lacking
    assert lacking == set(re.findall(r"`(--[\w-]+)`", part.partition("Not of this command: ")[2]))


@pytest.mark.parametrize("name", ["frontend", "serve"])
def test_the_example_file(name: str) -> None:
    """docs/examples/kvrouter.toml can be used as it is."""
    file = FOLDER.parent / "examples/kvrouter.toml"
    loaded = load(command_named(name), ["--config", str(file)], {})

    assert ("production", 8000) == (loaded.values["namespace"], loaded.values["port"])
    assert f"{file} [shared]" == loaded.sources["namespace"]
