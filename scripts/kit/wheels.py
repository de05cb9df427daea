"""Builds the sdist, the pure wheel and a wheel with C tables, and tries each in an empty environment.

    checkout ──build──> sdist ──> tree without extension modules ──> kvrouter-X-py3-none-any.whl
                          └─────> kvrouter-X-cp3NN-cp3NN-PLATFORM.whl, one for each Python

For a release: people install by `pip install .`, which compiles in the same way. A trial is outside the
checkout: a mocker, an agent, NATS and a frontend with a completion through it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.kit.fleet import Fleet, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.script import ScriptError

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
# Of pyproject.toml: the last tables before the tools' tables.
_EXTENSIONS = re.compile(
    r"^(#[^\n]*\n)*\[\[tool\.setuptools\.ext-modules\]\]\n(?:[^\[\n][^\n]*\n)*\n?", re.MULTILINE
)
_READY_S = 60.0
# What `kvrouter serve` starts by -m would import the checkout: by PYTHONPATH, or from the working directory.
_OWN_CODE = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
_LARGEST_MB = 200
_NEWER = ("3.11", "3.12", "3.13", "3.14")
NATIVE, PURE = "native", "python"


class WheelError(ScriptError):
    """A build failed, or what was built does not work."""


@dataclass(frozen=True, slots=True)
class Trial:
    """An installed file, and what was seen of it."""

    file: str
    python: str
    core: str
    """The version of the hot tables in use."""
    megabytes: float
    """Of the whole environment."""
    seconds: float


def without_extensions(pyproject: str) -> str:
    """The text without its extension modules, and without Cython, which only they need."""
    return _EXTENSIONS.sub("", pyproject).replace(', "Cython>=3.1"', "")


def pythons(named: Sequence[str]) -> list[str]:
    """Interpreters by path: the named ones, or every supported one on the PATH or known to pyenv."""
    if named:
        return [path for name in named if (path := shutil.which(name))]
    found: list[str] = []
    for version in _NEWER:
        kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        newest = str(kept[-1]) if kept else shutil.which(f"python{version}")
        if newest and _has_venv(newest):
            found.append(newest)
    return found


def _has_venv(python: str) -> bool:
    return (
        subprocess.run(
            [python, "-c", "import venv, ensurepip, ssl"], capture_output=True, check=False
        ).returncode
        == 0
    )


def run(*words: str | Path, cwd: Path | None = None) -> str:
    """The output of a command. Raises WheelError with its last lines."""
    command = [*map(str, words)]
    ended = subprocess.run(command, cwd=cwd, env=_clean(), capture_output=True, text=True, check=False)
    if ended.returncode:
        last = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-15:])
        raise WheelError(f"{' '.join(map(str, words))}: exit code {ended.returncode}\n{last}")
    return ended.stdout


def _clean() -> dict[str, str]:
    """Without PYTHONPATH, which would make pip find the checkout, and without settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVROUTER"))}


def environment(python: str, directory: Path) -> Path:
    """An empty environment; returns its Python."""
    run(python, "-m", "venv", directory)
    return directory / "bin" / "python"


def build(output: Path, interpreters: Sequence[str]) -> list[Path]:
    """The sdist, the pure wheel, and a wheel with C tables for each interpreter, in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvrouter-wheels-") as name:
        work = Path(name)
        builder = environment(interpreters[0], work / "builder")
        run(builder, "-m", "pip", "install", "--quiet", "build")
        run(builder, "-m", "build", "--sdist", "--outdir", work / "sdist", ROOT)
        (sdist,) = (work / "sdist").glob("*.tar.gz")
        made = [Path(shutil.copy(sdist, output))]
        for number, python in enumerate(interpreters):
            made += _wheel(python, sdist, work / f"native-{number}", output)
        (work / "tree").mkdir()
        # not tarfile: its filters are in Python 3.11.4 and newer only
        subprocess.run(["tar", "-xzf", sdist, "-C", work / "tree"], check=True)
        (tree,) = (work / "tree").iterdir()
        pyproject = tree / "pyproject.toml"
        pyproject.write_text(without_extensions(pyproject.read_text()))
        return made + _wheel(interpreters[0], tree, work / "pure", output)


def _wheel(python: str, source: Path, work: Path, output: Path) -> list[Path]:
    """A wheel of an sdist or a tree."""
    own = environment(python, work / "venv")
    run(own, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work / "out", source)
    return [Path(shutil.copy(wheel, output)) for wheel in (work / "out").glob("*.whl")]


def try_file(file: Path, python: str, *, core: str) -> Trial:
    """Install the file into an empty environment, and send a completion through what it starts."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrouter-trial-") as name:
        work = Path(name)
        own = environment(python, work / "venv")
        run(own, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, file, cwd=work)
        version = run(own.parent / "kvrouter", "--version", cwd=work).strip()
        if f"kvrouter-{version}-" not in file.name.replace(".tar.gz", "-"):
            raise WheelError(f"{file.name} is version {version}")
        in_use = asyncio.run(_serve(own.parent / "kvrouter", work))
        if in_use != core:
            raise WheelError(f"{file.name} uses the tables in {in_use}, not {core}")
        size = sum(each.lstat().st_size for each in (work / "venv").rglob("*") if each.is_file())
        if size > _LARGEST_MB * 1e6:
            raise WheelError(f"{file.name}: the environment has {size / 1e6:.0f} MB, more than {_LARGEST_MB}")
        tag = run(own, "-c", "import sys; print(*sys.version_info[:2], sep='.')").strip()
    return Trial(file.name, tag, in_use, size / 1e6, time.monotonic() - began)


async def _serve(kvrouter: Path, work: Path) -> str:
    """Run NATS, a mocker and `kvrouter serve`; returns which hot tables serve. Raises FleetError."""
    engine, port, admin, nats = free_ports(4)
    commands = {
        "nats": ["nats", f"nats://127.0.0.1:{nats}"],
        "mocker": ["mocker", f"--port={engine}", "--served-model-name=m"],
        "serve": [
            "serve", f"--engine=http://127.0.0.1:{engine}", f"--port={port}", f"--admin-port={admin}",
            f"--nats=nats://127.0.0.1:{nats}", "--host=127.0.0.1",
        ],
    }  # fmt: skip
    async with Client() as client, Fleet(work) as fleet:
        for name, words in commands.items():
            last = await fleet.start(name, [str(kvrouter), *words], _OWN_CODE)
        await wait_until_ok(client, last, f"http://127.0.0.1:{port}/ready", _READY_S)
        body = json.dumps({"model": "m", "prompt": list(range(1, 65)), "max_tokens": 3}).encode()
        await client.post_json(f"http://127.0.0.1:{port}/v1/completions", body)
        in_use: str = (await client.get_json(f"http://127.0.0.1:{admin}/workers"))["core"]["in_use"]
        return in_use


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/wheels", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "directory", type=Path, nargs="?", default=ROOT / "dist", help="where files go (dist)"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="an interpreter; repeatable"
    )
    flags = parser.parse_args(arguments)
    interpreters = pythons(flags.python)
    if not interpreters:
        print("wheels: no Python 3.11 or newer with venv; name one: --python PATH", file=sys.stderr)
        return 1
    try:
        made = build(flags.directory.resolve(), interpreters)
        for trial in map(_tried, _pairs(made, interpreters)):
            print(
                f"{trial.file}: Python {trial.python}, tables in {trial.core},"
                f" environment of {trial.megabytes:.0f} MB, {trial.seconds:.0f} s"
            )
    except ScriptError as error:
        print(f"wheels: failed: {error}", file=sys.stderr)
        return 1
    return 0


def _pairs(made: Sequence[Path], interpreters: Sequence[str]) -> list[tuple[Path, str, str]]:
    """What is tried with what: each wheel with C tables, which is the sdist compiled, and the pure one."""
    (pure,) = (file for file in made if file.name.endswith("-none-any.whl"))
    native = [file for file in made if file.suffix == ".whl" and file != pure]
    return [
        *((file, python, NATIVE) for file, python in zip(native, interpreters, strict=True)),
        *((pure, python, PURE) for python in interpreters),
    ]


def _tried(pair: tuple[Path, str, str]) -> Trial:
    file, python, core = pair
    return try_file(file, python, core=core)


if __name__ == "__main__":
    sys.exit(main())
