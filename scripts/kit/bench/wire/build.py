"""Compiles the two C programs at first use. A binary is used again until its source changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from scripts.kit.fleet import FleetError

HERE = Path(__file__).parent
CACHE = HERE.parents[3] / ".venv" / "bench"
_FLAGS = ("-O2", "-Wall", "-Wextra", "-std=gnu11")


def binary(name: str, cache: Path = CACHE) -> Path:
    """The program `worker` or `load`, compiled if necessary. Raises FleetError if the compiler is missing."""
    source = HERE / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    target = cache / f"{name}-{digest}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(source, target)
    return target


def _compile(source: Path, target: Path) -> None:
    half_done = target.with_suffix(f".{os.getpid()}")
    result = subprocess.run(
        [_compiler(), *_FLAGS, "-o", str(half_done), str(source)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise FleetError(f"{source.name} does not compile:\n{result.stderr}")
    half_done.rename(target)  # atomic: another bench may compile the same source


def _compiler() -> str:
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    found = next(filter(None, map(shutil.which, wanted)), None)
    if found is None:
        raise FleetError(
            f"no C compiler ({', '.join(wanted)}): the load generator and the fake worker are in C;"
            " on Debian and Ubuntu: apt-get install gcc libc6-dev; or set CC=/path/to/cc"
        )
    return found
