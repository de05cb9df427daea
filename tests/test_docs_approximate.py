"""The example of docs/approximate.md runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "approximate.md"


def test_example_runs() -> None:
    """It runs as a program, with its assertions."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (0, "") == (ended.returncode, ended.stderr)
