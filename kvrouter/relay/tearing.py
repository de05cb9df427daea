"""How a client learns that its answer is not whole, where it cannot be told: its connection is torn."""

from __future__ import annotations

import asyncio
import socket
import struct

_LINGER_0_S = struct.pack("ii", 1, 0)


def tear(transport: asyncio.Transport) -> None:
    """Reset the connection: an answer that ends with it would look whole after an orderly end."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0_S)
    transport.abort()
