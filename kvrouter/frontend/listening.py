"""The sockets a replica listens on: the port that clients use, and maybe a port of its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from kvrouter.errors import ConfigError
from kvrouter.frontend.certificate import DoorCertificate
from kvrouter.frontend.process_flags import ProcessOptions
from kvrouter.frontend.tls_flags import TlsOptions

BACKLOG = 4096
"""Connections that wait to be accepted; the kernel may allow fewer."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Where one replica can be reached."""

    main: socket.socket
    admin: socket.socket | None
    is_shared: bool
    """Whether other processes accept from `main`, too."""
    certificate: DoorCertificate | None
    """What both show; None: they speak plain HTTP."""

    @property
    def url(self) -> str:
        """Where this very replica answers, and no other."""
        listener = self.main if self.admin is None or not self.is_shared else self.admin
        return url(listener, is_tls=self.certificate is not None)

    def is_main(self, address: object) -> bool:
        """Whether a connection with this address on our side came through the port that clients use."""
        port = address[1] if isinstance(address, tuple) else None
        return bool(port == self.main.getsockname()[1])


@contextlib.contextmanager
def open_doors(host: str, port: int, process: ProcessOptions, tls: TlsOptions) -> Iterator[Doors]:
    """Listen; the port that processes share has been opened by their parent. Raises ConfigError."""
    certificate = DoorCertificate(tls.files) if tls.files is not None else None
    with contextlib.ExitStack() as stack:
        if process.listen_fd is None:
            main = stack.enter_context(listen(host, port))
        else:
            main = stack.enter_context(_inherited(process.listen_fd))
        admin = None
        if process.own_port is not None:
            admin = stack.enter_context(listen(process.admin_host, process.own_port))
        yield Doors(main, admin, process.listen_fd is not None, certificate)


def listen(host: str, port: int) -> socket.socket:
    """A socket that connections queue at from now on. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(BACKLOG)
    return listener


def _inherited(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def url(listener: socket.socket, *, is_tls: bool) -> str:
    """Where it can be reached, as far as it knows."""
    host, port, *_ = listener.getsockname()
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
