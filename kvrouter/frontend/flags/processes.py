"""The flags of several processes on one port (frontend/processes.py), and of each one's admin listener."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from kvrouter.config import read_key
from kvrouter.errors import ConfigError

MOST = 256
ADMIN_OFFSET = 100
"""The admin port is this much above --port, if --admin-port does not say."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How many processes share the port, or in one of them which one it is; and where operators ask."""

    processes: int
    number: int
    """From 1; 0: the only process."""
    admin_host: str
    admin_port: int
    """Process i listens on this plus i, one alone on this; 0: on a free one."""
    admin_key: str | None = field(repr=False)
    """With it operators may ask on the clients' port, too."""
    listen_fd: int | None
    """The listening socket, as the parent has opened it; None: it opens its own."""
    waits_until_ready: bool
    """Whether it leaves connections to the other processes until it is ready."""

    @property
    def own_admin_port(self) -> int:
        """The admin port of the process with this number; 0: a free one."""
        return self.admin_port and self.admin_port + self.number


def add_admin_flags(group: argparse._ArgumentGroup) -> None:
    """Where operators ask, and with which key they may ask on the clients' port."""
    add = group.add_argument
    add(
        "--admin-port",
        type=port_number,
        default=None,
        metavar="PORT",
        help="where operators ask (/workers, /decisions, /busy_threshold, /v1/route, dry runs), beside all "
        "that clients may; process i of --processes listens on PORT+i; 0: on a free one; default: --port + "
        f"{ADMIN_OFFSET}",
    )
    add("--admin-host", default="127.0.0.1", help="address of the admin listener; it asks for no key")
    add(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="operators may ask on the clients' port, too, with the bearer key in this file; without: 404",
    )


def add_process_flags(group: argparse._ArgumentGroup) -> None:
    """How many. Those without help are the parent's to set."""
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
    """What the flags say. Raises ConfigError."""
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
    """The first one; `last` is added to it for the last process."""
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
    if asked is False:
        raise ConfigError(
            f"--processes {flags.processes} with --no-router-replica-sync: processes that share a port and "
            "not their bookings overload workers; leave one of the two out"
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
