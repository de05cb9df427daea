"""The sockets a replica listens on, and the limit of descriptors for its connections."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvrouter.errors import ConfigError
from kvrouter.frontend.server.siblings import Siblings
from kvrouter.frontend.settings import ProcessOptions, TlsOptions
from kvrouter.relay.certificate import ServerCertificate

# Connections that wait to be accepted. The kernel lowers it to net.core.somaxconn.
BACKLOG = 4096
# Descriptors kept free for listeners, NATS, logs, files, idle connections and clients of /metrics.
_OTHER_DESCRIPTORS = 200
# A stream needs two: the client's connection and the worker's.
_DESCRIPTORS_PER_STREAM = 2


@dataclass(frozen=True, slots=True)
class Listeners:
    """The two sockets of one replica: the clients' port and the admin listener.

    `siblings`: the other processes that accept from `main` as well; `admin` is never shared. `certificate` is
    for both; without one they serve plain HTTP.
    """

    main: socket.socket
    admin: socket.socket
    certificate: ServerCertificate | None
    siblings: Siblings | None = None

    @property
    def url(self) -> str:
        return url(self.main, is_tls=self.certificate is not None)

    @property
    def admin_url(self) -> str:
        return url(self.admin, is_tls=self.certificate is not None)


@contextlib.contextmanager
def open_listeners(host: str, port: int, process: ProcessOptions, tls: TlsOptions) -> Iterator[Listeners]:
    """Open both sockets, or take a shared port from the parent process. Raises ConfigError."""
    certificate = ServerCertificate(tls.files, tls.client_ca) if tls.files is not None else None
    with contextlib.ExitStack() as stack:
        if process.listen_fd is None:
            main = stack.enter_context(listen(host, port))
        else:
            main = stack.enter_context(_inherited(process.listen_fd))
        admin = stack.enter_context(listen(process.admin_host, process.own_admin_port, "--admin-port"))
        listeners = Listeners(main, admin, certificate)
        if process.siblings_fd is not None:
            os.set_inheritable(process.siblings_fd, False)
            siblings = Siblings(process.siblings_fd, process.number, listeners.admin_url)
            listeners = replace(listeners, siblings=siblings)
        yield listeners


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Open a listening socket. Raises ConfigError, which names the port's `flag`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            flag = flag.replace("port", "host")
        taken = f"; give another {flag}, or end the program that has it" if _is_taken(error) else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} ({flag}){taken}") from error
    return listener


def _is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE


def _inherited(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)  # no child process may inherit this socket
    return socket.socket(fileno=fd)


def url(listener: socket.socket, *, is_tls: bool) -> str:
    """The URL of a listening socket, with the address it is bound to."""
    host, port, *_ = listener.getsockname()
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def streams_within(limit: int) -> int:
    """How many streams can be open at once under this limit of descriptors."""
    return max(0, limit - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_STREAM
