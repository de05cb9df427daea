"""Run the histories of the tests with native modules built for AddressSanitizer and UBSan.

    .venv/bin/python -m scripts.kit.sanitize [TEST …]

It works on a copy in a temporary folder. It needs gcc with libasan and libubsan, and everything that
`scripts/setup` needs to build. Exit code 0: no test failed, and no access out of bounds, use after free,
overflow or misalignment was found. Leaks are not checked: CPython does not free all memory at exit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("kvrouter", "scripts", "tests", "pyproject.toml", "README.md", "LICENSE")
TABLES, RELAY = Path("kvrouter/core/native"), Path("kvrouter/relay/native")
FLAGS = "-fsanitize=address,undefined"
COMPILED = f"{FLAGS} -fno-sanitize-recover=undefined -fno-wrapv -fno-omit-frame-pointer -g"
TESTS = [
    "tests/bodies/test_reader.py",
    "tests/bus/test_nats_client.py",
    "tests/core/feeds/test_taken.py",
    "tests/core/native",
    "tests/core/wire/test_hashes.py",
    "tests/core/tables/test_approx.py",
    "tests/core/tables/test_block_index.py",
    "tests/core/tables/test_bookings.py",
    "tests/core/tables/test_churn.py",
    "tests/core/tables/test_index_bounds.py",
    "tests/core/tables/test_index_histories.py",
    "tests/core/tables/test_table.py",
    "tests/core/routing/test_candidates.py",
    "tests/relay/test_streams.py",
]
# The sanitizers write to the real stderr, and reserve terabytes of address space: so do not limit that.
PYTEST = ["-p", "no:cacheprovider", "--timeout=1800", "--capture=sys", "-k", "not no_memory"]


def main(arguments: Sequence[str] | None = None) -> int:
    tests = list(sys.argv[1:] if arguments is None else arguments) or TESTS
    with tempfile.TemporaryDirectory(prefix="kvrouter-sanitize-") as folder:
        copy = Path(folder)
        build(copy)
        command = [sys.executable, "-m", "pytest", *PYTEST, *tests]
        return subprocess.run(command, cwd=copy, env=sanitized(copy), check=False).returncode


def build(copy: Path) -> None:
    """A copy of the checkout whose native modules are instrumented."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
        else:
            shutil.copy(source, copy / name)
    environment = {**os.environ, "CFLAGS": COMPILED, "LDFLAGS": FLAGS}
    install = ["-m", "pip", "install", "--quiet", "--quiet", "--no-deps", "--target", str(copy / "built")]
    subprocess.run([sys.executable, *install, str(copy)], env=environment, check=True)
    for folder in (TABLES, RELAY):
        modules = list((copy / "built" / folder).glob("*.so"))
        if len(modules) != len(list((copy / folder).glob("*.pyx"))):
            raise SystemExit(f"sanitize: of the native modules only {modules} could be built")
        for module in modules:
            shutil.copy(module, copy / folder)


def sanitized(copy: Path) -> dict[str, str]:
    """The environment for instrumented modules in a Python that is not instrumented."""
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {
        **os.environ,
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(copy),
    }


if __name__ == "__main__":
    sys.exit(main())
