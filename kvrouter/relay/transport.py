"""What asyncio's transports have no call for: resets, bytes not sent yet, ends that are not read yet."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios

_LINGER_0_S = struct.pack("ii", 1, 0)
# The first byte of Linux's tcp_info.
_ESTABLISHED = 1


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


def has_ended(transport: asyncio.Transport) -> bool:
    """Whether the other side has ended or reset the connection; on Linux also while nothing is read."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0 or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        state: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:  # not TCP
        return False
    return state[0] != _ESTABLISHED
