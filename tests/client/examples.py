"""The Python examples in docs/*.md."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d ")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str) -> list[str]:
    """All Python in a document."""
    return _BLOCK.findall((DOCS / document).read_text())


def block(document: str, part: str) -> str:
    """The example that contains `part`."""
    (found,) = [text for text in blocks(document) if part in text]
    return found


async def output_of(program: str, nats: str = "", namespace: str = "") -> list[str]:
    """Run the code with this NATS and namespace; returns what it prints, without the log.

    In a thread with a loop of its own, as starting Python and importing kvrouter take a second.
    """
    program = program.replace('"nats://127.0.0.1:4222"', repr(nats)).replace('"default"', repr(namespace))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        await asyncio.to_thread(exec, compile(program, "example", "exec"), {"__name__": "__main__"})
    return [line for line in said.getvalue().splitlines() if not _LOGGED.match(line)]
