"""What asyncio's transports have no call for: a reset, and whether the kernel has sent everything."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios

_LINGER_0_S = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Reset the connection: an answer that ends with it would look whole after an orderly end."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0_S)
    transport.abort()


def is_unsent(transport: asyncio.WriteTransport | None) -> bool:
    """Whether a part of what was written is still here; it would be lost with the process."""
    if transport is None:
        return False
    if transport.get_write_buffer_size():
        return True
    sock = transport.get_extra_info("socket")
    if transport.get_extra_info("sslcontext") is None or sock is None or sock.fileno() < 0:
        return False
    # what TLS has sealed waits in a transport that tells nothing; while it does, so does the kernel's queue
    return any(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
