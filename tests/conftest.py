"""What all tests share: the event loop they run on, a NATS server, both versions of the hot tables."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import uvloop

from kvrouter.bus.embedded import server_binary
from kvrouter.core.native import versions
from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit.ports import free_ports
from tests.containers import container_url, docker_answers
from tests.frontend.fleet import FleetOf, running_fleet
from tests.long import IS_LONG

_START_TIMEOUT_S = 10.0

# A session holds millions of objects, and a full collection of them takes a second: it comes rarely.
gc.set_threshold(10_000, 20, 50)

# No test is timed: a shared machine may take any time for an example.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    max_examples=100 if IS_LONG else 25,
    derandomize=not IS_LONG,  # the short form draws the same examples in each run
)
hypothesis.settings.load_profile("untimed")


def pytest_asyncio_loop_factories(
    config: pytest.Config,  # pytest passes hook arguments by name
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests run on the loop that the processes run on."""
    marker = item.get_closest_marker("timeout")
    asked = config.getoption("timeout")  # 0: none, as for a debugger
    timeout_s = float(marker.args[0] if marker else config.getini("timeout") if asked is None else asked)
    return {"uvloop": partial(_watched_loop, 0.8 * timeout_s) if timeout_s else uvloop.new_event_loop}


def _watched_loop(seconds: float) -> asyncio.AbstractEventLoop:
    """A loop that ends a test that hangs and prints what it waits for; `timeout` would do so in silence."""
    loop = uvloop.new_event_loop()
    loop.call_later(seconds, _end_hanging_test, loop)
    return loop


def _end_hanging_test(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.print_stack()
        task.cancel()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """The order of the tests is random: a failed run reports how to repeat its order."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        seed = config.getoption("randomly_seed", None)
        terminalreporter.write_line(f"the same order again: --randomly-seed={seed}")


class NatsServer:
    """A nats-server process on its own port, which a test may stop and start again."""

    def __init__(self, port: int, config: Path | None = None) -> None:
        self.port = port
        self._flags = ["--config", str(config)] if config is not None else []
        self.url = f"nats://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return when it answers."""
        self._process = subprocess.Popen(
            [str(server_binary()), "--addr", "127.0.0.1", "--port", str(self.port), *self._flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _answers(self.port):
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"nats-server did not come up on port {self.port}")

    def pause(self) -> None:
        """Let it hang, with its connections open, until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _answers(port: int) -> bool:
    """Whether a NATS server answers: it sends its INFO line first. A refused connection takes no time."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.2) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def _free_port() -> int:
    (port,) = free_ports(1)
    return port


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Returns a port without a listener."""
    return _free_port


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where embedded NATS servers keep their users: never in the state directory of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def no_public_authorities() -> Iterator[None]:
    """One authority instead of the machine's, which take each process 0.1 s of CPU time to read.

    An empty file is not enough: httpx, in the clients' packages, wants a certificate.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(Path(__file__).with_name("data") / "tls" / "cert.pem"))
        yield


@pytest.fixture
def new_nats_server() -> Iterator[Callable[..., NatsServer]]:
    """Makes servers that are not started yet, with or without a configuration file, and ends them."""
    servers: list[NatsServer] = []

    def make(config: Path | None = None) -> NatsServer:
        servers.append(NatsServer(_free_port(), config))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """A NATS server for the whole session: a container where Docker answers, else the bundled binary.

    Tests that share it keep apart by namespace.
    """
    with contextlib.ExitStack() as stack:
        yield container_url(stack) if docker_answers() else _bundled_url(stack)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model directory, which tests only read: it takes a second to build."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_model(path)
    return path


@pytest.fixture
def fleet_of(nats_url: str) -> FleetOf:
    """Opens fleets on the session's NATS, each in its own namespace."""
    return partial(running_fleet, nats_url)


def _bundled_url(stack: contextlib.ExitStack) -> str:
    server = NatsServer(_free_port())
    stack.callback(server.stop)
    server.start()
    return server.url


@pytest.fixture(params=versions.CORES, scope="module")
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """The version in use while a module's tests run; `pytestmark = usefixtures("core")` runs them on each."""
    before = versions.in_use()
    if request.param == versions.NATIVE and versions.why_not_built:
        pytest.skip(f"not built here: {versions.why_not_built}")
    yield versions.choose(request.param)
    versions.choose(before)


@pytest.fixture
def remote_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 stands for the address of another machine."""
    monkeypatch.setattr("kvrouter.frontend.operators.rights.is_loopback", lambda host: host == "127.0.0.1")
