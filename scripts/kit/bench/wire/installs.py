"""Other routers from PyPI, each in its own virtual environment in the user's cache directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.kit.fleet import FleetError


@dataclass(frozen=True, slots=True)
class Peer:
    """What pip installs. `without_deps` come after the rest, without their dependencies."""

    name: str
    packages: Sequence[str]
    without_deps: Sequence[str] = ()
    program: str = "python"

    @property
    def version(self) -> str:
        return (self.without_deps or self.packages)[0].partition("==")[2]

    def directory(self, cache: Path | None = None) -> Path:
        """The path of its environment, which may not exist."""
        return (cache or cache_directory()) / self.name

    def find(self, cache: Path | None = None) -> Path | None:
        """Its program if the installation is complete, else None."""
        directory = self.directory(cache)
        return directory / "bin" / self.program if _stamp(directory, self).exists() else None


VLLM_ROUTER = Peer("vllm-router", ["vllm-router==0.1.17"], program="vllm-router")
SGLANG_ROUTER = Peer("sglang-router", ["sglang-router==0.3.2"], program="sglang-router")
DYNAMO = Peer(
    "ai-dynamo",
    [
        "ai-dynamo-runtime==1.6.1", "aiohttp", "certifi", "kubernetes>=32.0.1,<33", "msgspec", "packaging",
        "prometheus-client", "pyyaml", "pyzmq", "redis", "tqdm", "transformers", "zstandard",
    ],
    ["ai-dynamo==1.6.1"],  # alone: its requirement `aisimulate` has no wheel, and is not needed here
)  # fmt: skip
PEERS = (VLLM_ROUTER, SGLANG_ROUTER, DYNAMO)


def cache_directory() -> Path:
    """The directory of all peers, in $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvrouter" / "peers"


def install(peer: Peer, cache: Path | None = None) -> None:
    """Make a new environment. Raises FleetError with the end of pip's output."""
    directory = peer.directory(cache)
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    _pip(peer, directory, peer.packages)
    if peer.without_deps:
        _pip(peer, directory, ["--no-deps", *peer.without_deps])
    _stamp(directory, peer).touch()


def _stamp(directory: Path, peer: Peer) -> Path:
    return directory / "-".join(["installed", *(peer.without_deps or peer.packages[:1])])


def _pip(peer: Peer, directory: Path, words: Sequence[str]) -> None:
    command = [
        str(directory / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    result = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if result.returncode:
        last = "\n".join(result.stderr.strip().splitlines()[-5:])
        raise FleetError(f"pip could not install {peer.name} for Python {sys.version.split()[0]}:\n{last}")
