"""How a person or a supervisor ends a process, or makes it read its settings again.

SIGTERM: end, after a grace in which new requests are accepted until load balancers look elsewhere.
SIGINT: end without that grace, as Ctrl-C in a terminal. A second one of either: end now.
SIGHUP: read the settings again; if the terminal of the process was closed, the same as SIGINT.
SIGUSR1, SIGUSR2, SIGALRM: nothing, where a process has no use for them; they would end it at once otherwise.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial

import structlog

log = structlog.get_logger()


def outlive(*numbers: signal.Signals) -> None:
    """Log these signals from now on, and go on. Call it where the event loop runs."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, partial(log.info, "signal.ignored", signal=number.name))


class Reloads:
    """The SIGHUPs of this process. `on_closed` is called instead if its terminal was closed."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        # nohup has set SIG_IGN: the closed terminal must not end what it protects
        self._has_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
        self._on_closed = on_closed
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hung_up)

    async def next(self) -> None:
        """Return after the next SIGHUP; at once if one came since the last call."""
        await self._came.wait()
        self._came.clear()

    def _hung_up(self) -> None:
        if self._has_terminal and not _has_terminal():
            self._on_closed()
        else:
            self._came.set()


class Signals:
    """The signals of this process, as events. Create it where the event loop runs."""

    def __init__(self) -> None:
        self.stopped, self.hurried = asyncio.Event(), asyncio.Event()
        self.is_interrupt = False
        """Whether it was asked to end by Ctrl-C, so that nobody waits for a load balancer."""
        self.reloads = Reloads(self.interrupt)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        outlive(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)

    def stop(self) -> None:
        (self.hurried if self.stopped.is_set() else self.stopped).set()

    def interrupt(self) -> None:
        self.is_interrupt = self.is_interrupt or not self.stopped.is_set()
        self.stop()

    def grace_s(self, configured_s: float) -> float:
        """Seconds in which new requests are still accepted."""
        return 0.0 if self.is_interrupt else configured_s


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
