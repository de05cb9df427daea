"""Free TCP ports of 127.0.0.1 for processes that will start later. No port is given out twice on a machine.

A port that was tested and released could be drawn again before its process listens on it. So a drawn port
stays marked until the process that drew it ends, by a UDP socket bound to the same number. That does not
disturb TCP listeners, also when they restart, and the kernel closes it even if the process is killed.
"""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral ports, which the kernel uses for outgoing connections.
_PORTS = range(20_000, 32_000)
_ATTEMPTS = 10_000


def free_ports(count: int) -> list[int]:
    """Consecutive ports that no process has drawn or listens on."""
    for _ in range(_ATTEMPTS):
        first = random.randrange(_PORTS.start, _PORTS.stop - count + 1)
        marks: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                marks.append(_mark(port))  # if a later port is in use, all these are closed
        except OSError:
            for mark in marks:
                mark.close()
            continue
        for mark in marks:
            mark.detach()  # keeps the descriptor open until this process ends
        return list(range(first, first + count))
    raise RuntimeError(f"no {count} free ports in a row in {_PORTS}")


def _mark(port: int) -> socket.socket:
    """Raises OSError if the port has been drawn or has a listener."""
    mark = socket.socket(type=socket.SOCK_DGRAM)
    try:
        mark.bind(("127.0.0.1", port))
        with socket.socket() as listener:
            # without it, a program that binds the port at this moment would fail
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
    except OSError:
        mark.close()
        raise
    return mark
