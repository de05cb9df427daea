"""Kinds of engines are known in kvrouter/worker/engines and engine_versions.py: others ask adapters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvrouter.engine_versions import SINCE
from kvrouter.worker.engines.discovery import KINDS

PACKAGE = Path(__file__).parents[1] / "kvrouter"
ENGINES = PACKAGE / "worker" / "engines"
# Here a name is that of a command or of a connector, not of a kind of engine.
COMMANDS = {
    PACKAGE / "cli.py",
    PACKAGE / "settings" / "commands.py",
    PACKAGE / "lab" / "simulate" / "settings.py",
    # the name of a connector, that of SGLang's pairs
    PACKAGE / "connectors" / "__init__.py",
    PACKAGE / "core" / "wire" / "heartbeats.py",
}


def names_in(module: Path) -> Iterator[str]:
    """The kinds of engines that stand as texts in a module, each with its line."""
    source = module.read_text(encoding="utf-8")
    if not any(f"{quote}{kind}{quote}" in source for kind in KINDS for quote in "\"'"):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in KINDS:
            yield f"{module.relative_to(PACKAGE.parent)}:{node.lineno}: {node.value!r}"


def test_kinds_are_named_in_one_place() -> None:
    """No module outside the adapters compares an engine's kind with a name."""
    modules = [
        module
        for module in sorted(PACKAGE.rglob("*.py"))
        if ENGINES not in module.parents
        and module.name != "engine_versions.py"
        and PACKAGE / "lab" / "mocker" not in module.parents
    ]

    found = [name for module in modules if module not in COMMANDS for name in names_in(module)]

    assert not found, (
        "ask worker/engines (Kind, kvrouter/engine_versions.py) or a field of the card:\n" + "\n".join(found)
    )
    assert list(names_in(ENGINES / "discovery.py"))


def test_versions_of_known_kinds() -> None:
    """Versions are known of kinds with an adapter only."""
    assert set(SINCE) <= set(KINDS)
