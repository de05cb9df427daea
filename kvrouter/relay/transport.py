"""What asyncio's transports have no call for: a reset, and whether the kernel has sent everything."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios

_LINGER_0_S = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Reset the connection, so that the client sees an error.

    After an orderly end an incomplete answer whose body ends with the connection would look complete.
    """
    # With SO_LINGER 0 the kernel sends RST; `abort` alone sends FIN once the buffers are empty.
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0_S)
    transport.abort()


def is_unsent(transport: asyncio.WriteTransport | None) -> bool:
    """Whether a part of what was written is still in this process, and would be lost with it."""
    if transport is None:
        return False
    if transport.get_write_buffer_size():
        return True
    sock = transport.get_extra_info("socket")
    if transport.get_extra_info("sslcontext") is None or sock is None or sock.fileno() < 0:
        return False
    # uvloop 0.23 counts only plain bytes: what TLS has encrypted waits in an inner transport without a public
    # size. While something waits there, the kernel's queue (TIOCOUTQ) is not empty either.
    return any(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
