"""What a program still publishes if it ends without leaving what it has opened on NATS.

Library objects live in programs of others, which end in ways that run no `finally`:

    the loop stops, or is closed, and the interpreter ends   ──> atexit ──┐
    SIGTERM, for which the program has no handler            ──> ours   ──┴─> publish_all ──> its own effect

The loop of the bus does not run then, so the last messages go over a new connection, on a loop of their own.
A handler of the program for SIGTERM stays, also one that it sets later. A process that was forked is another
program: it says nothing in this one's name.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvloop

# How long the end of a program waits for NATS at most.
MOST_S = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """`leave` queues the last messages, `send` sends them on the running loop."""

    leave: Callable[[], None]
    send: Callable[[], Awaitable[None]]


_pid = 0
_open: list[Ending] = []


@contextlib.contextmanager
def open_until(ending: Ending) -> Iterator[None]:
    """If the program ends within the block, do what `ending` says."""
    global _pid  # noqa: PLW0603  # one for each process, as atexit and signals are
    if _pid != os.getpid():
        _pid = os.getpid()
        _open.clear()  # of the process that was forked
        atexit.register(publish_all)
    _open.append(ending)
    _handle_sigterm()
    try:
        yield
    finally:
        if ending in _open:
            _open.remove(ending)
        if not _open:
            _give_sigterm_back()


def publish_all() -> None:
    """End in order what is open in this process. Never raises."""
    endings, _open[:] = _open[:] if _pid == os.getpid() else [], []
    for ending in endings:
        with contextlib.suppress(Exception):  # the state may be half changed: a signal can come at any time
            ending.leave()
    if endings:
        with contextlib.suppress(Exception):
            _run(_send(endings))


async def _send(endings: list[Ending]) -> None:
    async with asyncio.timeout(MOST_S):
        await asyncio.gather(*(ending.send() for ending in endings), return_exceptions=True)


def _run(sending: Awaitable[None]) -> None:
    # not asyncio's loop: it looks names up in a thread, and at the interpreter's end none can be started
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(sending)
    finally:
        loop.close()


def _handle_sigterm() -> None:
    if threading.current_thread() is threading.main_thread() and _handler() is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _give_sigterm_back() -> None:
    if threading.current_thread() is threading.main_thread() and _handler() is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _handler() -> object:
    return signal.getsignal(signal.SIGTERM)


def _terminated(number: int, _frame: FrameType | None) -> None:
    """Publish, then end by the signal, as without a handler."""
    signal.signal(number, signal.SIG_DFL)
    # a thread of its own: a loop may be running in this one
    publishing = threading.Thread(target=publish_all, name="kvrouter last messages", daemon=True)
    publishing.start()
    publishing.join(2 * MOST_S)  # it may find a lock held by this thread
    os.kill(os.getpid(), number)
