"""The flags of several processes on one port (frontend/processes.py), and of each one's admin listener."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from kvrouter.config import read_key
from kvrouter.errors import ConfigError

MOST = 256
# The default of --admin-port is --port plus this.
ADMIN_OFFSET = 100


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """The processes on one port, and the admin listener of each."""

    processes: int
    number: int
    """Of this process, from 1; 0: the only process."""
    admin_host: str
    admin_port: int
    """Process i listens on this plus i; 0: on a free port."""
    admin_key: str | None = field(repr=False)
    """Opens the operators' routes on the clients' port."""
    listen_fd: int | None
    """The listening socket that the parent opened; None: this process opens its own."""
    waits_until_ready: bool
    """Whether other processes accept all connections until this one is ready."""

    @property
    def own_admin_port(self) -> int:
        """The admin port of the process with this number; 0: a free one."""
        return self.admin_port and self.admin_port + self.number


def add_admin_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--admin-port",
        type=port_number,
        default=None,
        metavar="PORT",
        help="port of the admin listener, with all routes and those for operators (/workers, /decisions, "
        "/busy_threshold, /v1/route, dry runs); process i of --processes listens on PORT+i; 0: a free port; "
        f"default: --port + {ADMIN_OFFSET}",
    )
    add("--admin-host", default="127.0.0.1", help="address of the admin listener; it requires no key")
    add(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="serve the operators' routes on the clients' port to requests with the bearer key in this file",
    )


def add_process_flags(group: argparse._ArgumentGroup) -> None:
    """Flags without help are set by the parent process."""
    add = group.add_argument
    add(
        "--processes",
        type=_count,
        default=1,
        metavar="N",
        help="replicas on this one port, each a process; above 1 they share bookings (--router-replica-sync)",
    )
    add("--process-number", type=int, default=0, help=argparse.SUPPRESS)
    add("--listen-fd", type=int, default=None, help=argparse.SUPPRESS)
    add("--waits-until-ready", action="store_true", help=argparse.SUPPRESS)


def process_options(flags: argparse.Namespace) -> ProcessOptions:
    """Raises ConfigError."""
    last = flags.processes if flags.processes > 1 else flags.process_number
    return ProcessOptions(
        flags.processes,
        flags.process_number,
        flags.admin_host,
        _admin_port(flags, last),
        _admin_key(flags.admin_key_file),
        flags.listen_fd,
        flags.waits_until_ready,
    )


def _admin_port(flags: argparse.Namespace, last: int) -> int:
    """The admin port of process 0. The port of process `last` must exist, too."""
    port: int = flags.port and flags.port + ADMIN_OFFSET if flags.admin_port is None else flags.admin_port
    if port and port + last > 65535:
        given = f"{port}" if flags.admin_port is not None else f"is --port + {ADMIN_OFFSET} by default"
        raise ConfigError(f"--admin-port {given}: there is no port {port + last}; give a lower one, or 0")
    return port


def _admin_key(path: Path | None) -> str | None:
    key = read_key("--admin-key-file", path)
    if path is not None and key is None:
        raise ConfigError(f"--admin-key-file {path}: it is empty; write the operators' key into it")
    return key


def syncs(flags: argparse.Namespace) -> bool:
    """Whether bookings are shared with other replicas. Raises ConfigError."""
    asked: bool | None = getattr(flags, "router_replica_sync", None)
    if flags.processes == 1:
        return bool(asked)
    # Each process would count its own bookings only, and all of them would choose the same idle worker.
    if asked is False:
        raise ConfigError(
            f"--processes {flags.processes} with --no-router-replica-sync: processes on one port "
            "must share their bookings, else they overload workers; drop one of the two flags"
        )
    return True


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: use 1 to {MOST}")
    return int(text)


def port_number(text: str) -> int:
    """An argparse type: a port, or 0 for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: a port is a number from 0 to 65535")
    return int(text)
