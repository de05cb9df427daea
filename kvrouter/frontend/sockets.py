"""The sockets a replica listens on: the port that clients use, and the admin listener."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from kvrouter.errors import ConfigError
from kvrouter.frontend.flags.processes import ProcessOptions
from kvrouter.frontend.flags.tls import TlsOptions
from kvrouter.relay.certificate import DoorCertificate

BACKLOG = 4096
"""Connections that wait to be accepted; the kernel may allow fewer."""

_MOST = 1_048_576
"""What Linux allows at most unless it is told otherwise; a hard limit may also be `unlimited`."""
_OWN = 200
"""For the listener, NATS, logs, files, idle connections and clients that ask for /metrics."""
_PER_STREAM = 2
"""The client's connection and the worker's."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Where one replica can be reached."""

    main: socket.socket
    admin: socket.socket
    """Of this very replica, and no other."""
    is_shared: bool
    """Whether other processes accept from `main`, too."""
    certificate: DoorCertificate | None
    """What both show; None: they speak plain HTTP."""

    @property
    def url(self) -> str:
        """Where clients ask."""
        return url(self.main, is_tls=self.certificate is not None)

    @property
    def admin_url(self) -> str:
        """Where operators ask."""
        return url(self.admin, is_tls=self.certificate is not None)


@contextlib.contextmanager
def open_doors(host: str, port: int, process: ProcessOptions, tls: TlsOptions) -> Iterator[Doors]:
    """Listen; the port that processes share has been opened by their parent. Raises ConfigError."""
    certificate = DoorCertificate(tls.files) if tls.files is not None else None
    with contextlib.ExitStack() as stack:
        if process.listen_fd is None:
            main = stack.enter_context(listen(host, port))
        else:
            main = stack.enter_context(_inherited(process.listen_fd))
        admin = stack.enter_context(listen(process.admin_host, process.own_admin_port, "--admin-port"))
        yield Doors(main, admin, process.listen_fd is not None, certificate)


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket that connections queue at from now on. Raises ConfigError, naming the port's flag."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} ({flag})") from error
    return listener


def _inherited(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def url(listener: socket.socket, *, is_tls: bool) -> str:
    """Where it can be reached, as far as it knows."""
    host, port, *_ = listener.getsockname()
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def raise_limit() -> int:
    """Raise this process's soft limit as far as the hard one lets it; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else _MOST
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft  # macOS has a limit of its own below the hard one
    return wanted


def streams_within(limit: int) -> int:
    """How many can be open at once with so many descriptors."""
    return max(0, limit - _OWN) // _PER_STREAM
