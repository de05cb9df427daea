"""`kvrouter top` in a pseudo-terminal, in front of a replica."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import socket
import struct
import sys
import termios

from tests.frontend.fleet import FleetOf
from tests.frontend.workers import OK

WITHIN_S = 20.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][0B]?")


class Terminal:
    """The program's terminal, and what it has written since it was last looked at."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.raw = b""

    async def until(self, *texts: str) -> str:
        """Read until one drawing has all of these texts."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WITHIN_S):
            while True:
                frame = _CONTROL.sub("", self.raw.rpartition(b"\x1b[H")[2].decode(errors="replace"))
                if all(text in frame for text in texts):
                    return frame
                self.raw += await loop.run_in_executor(None, os.read, self._master, 65536)

    def press(self, keys: bytes) -> None:
        self.raw = b""
        os.write(self._master, keys)


async def test_in_a_terminal(fleet_of: FleetOf) -> None:
    """Rows beside a replica that hangs, help, a filter, details; after a signal the terminal is as before."""
    hung = socket.create_server(("127.0.0.1", 0))  # the kernel accepts, nobody answers
    async with fleet_of("--router-mode", "kv", scripts=(OK, OK)) as fleet:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))
        before, terminal = termios.tcgetattr(slave), Terminal(master)
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvrouter.observe.top",
            fleet.frontend.admin_url,
            "http://127.0.0.1:1",
            f"http://127.0.0.1:{hung.getsockname()[1]}",
            "--interval-s=0.2",
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color"} | dict.fromkeys(("COLUMNS", "LINES"), ""),
        )
        await terminal.until("w0/0", "w1/0", "2 of 2", "//127.0.0.1:1: cannot be reached", "not asked yet")
        assert b"\0" == termios.tcgetattr(slave)[6][termios.VSUSP]  # Ctrl-Z is a key without meaning
        terminal.press(b"?")
        await terminal.until("this help")
        terminal.press("?/wé".encode())
        await terminal.until("filter: wé")
        terminal.press(b"\x1b/w1\r\r")
        shown = await terminal.until("1 of 2 targets with 'w1'", "active blocks", "w1/0")
        assert "w0/0" not in shown
        program.send_signal(signal.SIGTERM)

        assert 0 == await program.wait()
        assert before == termios.tcgetattr(slave)
        assert b"Traceback" not in terminal.raw
        for descriptor in (master, slave):
            os.close(descriptor)
        hung.close()
