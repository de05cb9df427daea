"""Snippets of other systems' documents, run with nothing but their imports changed."""

from __future__ import annotations

import ast
import types
from pathlib import Path
from typing import Any

SNIPPETS = Path(__file__).parent / "snippets"


def run(name: str, module: str, *others: str) -> dict[str, Any]:
    """The names that a snippet defines; imports from `others` come from `module` instead."""
    text = (SNIPPETS / name).read_text()
    for other in others:
        assert f"from {other} import" in text
        text = text.replace(f"from {other} import", f"from {module} import")
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), names)
    return names


async def run_awaiting(text: str, names: dict[str, Any]) -> None:
    """Run code with `await` outside of any function. It uses and defines `names`."""
    code = compile(text, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    awaited = types.FunctionType(code, names)()
    if awaited is not None:
        await awaited
