"""A program that ends without `shutdown`: its worker and its router leave, in whatever way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvrouter.bus import Bus, NatsOptions, Subjects, endings
from kvrouter.core.wire.heartbeats import decode_router_beat, decode_worker_beat
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.senders import RouterSource, WorkerSource
from tests.long import needs_long

PROGRAM = Path(__file__).with_name("ending_program.py")
PATIENCE_S = 40.0
ON_UVLOOP = needs_long("another program")


@dataclass
class Ears:
    """The states of workers and routers, in order, by kind."""

    subjects: Subjects
    worker: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, subject: str, data: bytes, _reply: str) -> None:
        match self.subjects.parse_live(subject):
            case WorkerSource(worker_id):
                self.worker.append(decode_worker_beat(data, WorkerId(worker_id)).state)
            case RouterSource():
                self.router.append(decode_router_beat(data).state)
            case _:
                pass
        self.changed.set()

    async def until_left(self) -> None:
        """Wait until both have left."""
        async with asyncio.timeout(PATIENCE_S):
            while "leave" not in self.worker or "leave" not in self.router:
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def running(
    nats_url: str, end: str, ready: bytes = b"ready\n"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Ears]]:
    """The program once it is ready, and what is heard of it."""
    namespace = uuid.uuid4().hex
    ears = Ears(Subjects(namespace))
    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus:
        await bus.subscribe(ears.subjects.live, ears.take)
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), namespace, end,
            env={**os.environ, "NATS_SERVER": nats_url, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert program.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (line := await program.stdout.readline()) != ready:
                    assert line, "the program ended before it was ready"
            yield program, ears
        finally:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.communicate()


@pytest.mark.parametrize(
    "end",
    ["run to its end", "left open", "closed", pytest.param("closed, on uvloop", marks=ON_UVLOOP)],
    ids=lambda end: end.replace(" ", "-"),
)
async def test_program_that_ends(nats_url: str, end: str) -> None:
    """`asyncio.run`, a loop that is never closed, or one that is: both leave, and say nothing later."""
    async with running(nats_url, end) as (program, ears):
        await ears.until_left()
        async with asyncio.timeout(PATIENCE_S):
            assert 0 == await program.wait()

    assert ["leave", "leave"] == [ears.worker[-1], ears.router[-1]]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("signalled", -signal.SIGTERM),
        pytest.param("signalled, on uvloop", -signal.SIGTERM, marks=ON_UVLOOP),
        ("signalled, with a handler", 3),
    ],
    ids=["asyncio", "uvloop", "own-handler"],
)
async def test_program_that_is_ended(nats_url: str, end: str, code: int) -> None:
    """SIGTERM ends a program without a handler as before, once it has left; its own handler is called."""
    async with running(nats_url, end) as (program, ears):
        program.terminate()
        await ears.until_left()
        async with asyncio.timeout(PATIENCE_S):
            assert code == await program.wait()

    assert ["leave", "leave"] == [ears.worker[-1], ears.router[-1]]


async def test_forked_child(nats_url: str) -> None:
    """A child that the program forks says nothing in its name, however it ends."""
    async with running(nats_url, "forked", b"forked\n") as (program, ears):
        assert "leave" not in ears.worker + ears.router
        assert program.stdin is not None
        program.stdin.write(b"\n")
        await ears.until_left()

    assert 1 == ears.worker.count("leave") == ears.router.count("leave")


@pytest.fixture
def no_handler() -> Iterator[None]:
    """SIGTERM as in a program without a handler: other tests in this process may have left one."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@pytest.mark.usefixtures("no_handler")
def test_sigterm_is_given_back() -> None:
    """The handler is there while something is open, and only if the program has no handler."""
    ending = endings.Ending(lambda: None, _nothing)
    with endings.open_until(ending):
        with endings.open_until(endings.Ending(lambda: None, _nothing)):
            inside = signal.getsignal(signal.SIGTERM)
        after_one = signal.getsignal(signal.SIGTERM)
    assert signal.SIG_DFL != inside == after_one
    assert signal.SIG_DFL == signal.getsignal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with endings.open_until(ending):
        assert signal.SIG_IGN == signal.getsignal(signal.SIGTERM)
    assert signal.SIG_IGN == signal.getsignal(signal.SIGTERM)


async def _nothing() -> None:
    pass
