"""The flags of several processes on one port (frontend/processes.py), and of a port of each one's own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvrouter.errors import ConfigError

MOST = 256
ADMIN_OFFSET = 100
"""Where admin ports begin, above --port, if --admin-port does not say."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How many processes share the port; or, in one of them, which one it is."""

    processes: int
    number: int
    """From 1."""
    admin_host: str
    admin_port: int | None
    """Process i listens on this plus i; 0: on a free one. None: it does not."""
    listen_fd: int | None
    """The listening socket, as the parent has opened it; None: it opens its own."""
    waits_until_ready: bool
    """Whether it leaves connections to the other processes until it is ready."""

    @property
    def own_port(self) -> int | None:
        """The admin port of the process with this number; 0: a free one."""
        return self.admin_port and self.admin_port + self.number


def add_process_flags(group: argparse._ArgumentGroup) -> None:
    """How many, and where each of them can be asked. Those without help are the parent's to set."""
    add = group.add_argument
    add(
        "--processes",
        type=_count,
        default=1,
        metavar="N",
        help="replicas on this one port, each a process; above 1 they share bookings (--router-replica-sync)",
    )
    add(
        "--admin-port",
        type=_admin_port,
        default=None,
        metavar="BASE",
        help="process i, from 1, also listens on BASE+i, for metrics and views of its own; 0: on a free one; "
        f"default: --port + {ADMIN_OFFSET} with several processes, else none",
    )
    add("--admin-host", default="127.0.0.1", help="address of the admin ports")
    add("--process-number", type=int, default=1, help=argparse.SUPPRESS)
    add("--listen-fd", type=int, default=None, help=argparse.SUPPRESS)
    add("--waits-until-ready", action="store_true", help=argparse.SUPPRESS)


def process_options(flags: argparse.Namespace) -> ProcessOptions:
    """What the flags say. Raises ConfigError."""
    base = flags.admin_port
    if base is None and flags.processes > 1:
        base = flags.port and flags.port + ADMIN_OFFSET
    if base and base + flags.processes > 65535:
        raise ConfigError(f"--admin-port {base}: {flags.processes} processes go beyond port 65535")
    return ProcessOptions(
        flags.processes,
        flags.process_number,
        flags.admin_host,
        base,
        flags.listen_fd,
        flags.waits_until_ready,
    )


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


def _admin_port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65534:
        raise argparse.ArgumentTypeError(f"{text!r}: use 0 to 65534")
    return int(text)
