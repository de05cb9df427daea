"""The Python examples in docs/*.md."""

from __future__ import annotations

import os
import re
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
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
    """Run the code as a program with this NATS and namespace; returns what it prints, without the log."""
    program = program.replace('"nats://127.0.0.1:4222"', repr(nats)).replace('"default"', repr(namespace))
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    process = await create_subprocess_exec(
        sys.executable, "-c", program, stdout=PIPE, stderr=PIPE, env=environment
    )
    said, errors = await process.communicate()
    assert 0 == process.returncode, errors.decode()
    return [line for line in said.decode().splitlines() if not _LOGGED.match(line)]
