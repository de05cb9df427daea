"""Threads of the tokenizer: the shortest job first, but none starves, and no more wait than may."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from kvrouter.errors import TokenizerBusyError
from kvrouter.tokens.job_queue import AGES_PER_S, LONG, JobQueue

MOST = 10 * LONG


class Jobs:
    """Jobs that run until they are released, and the order in which they ran."""

    def __init__(self, queue: JobQueue) -> None:
        self.queue = queue
        self.ran: list[str] = []
        self.gates: list[threading.Event] = []

    def blocked(self, size: int = 1) -> tuple[asyncio.Task[bool], threading.Event]:
        """One that takes a thread until its gate opens."""
        gate = threading.Event()
        self.gates.append(gate)
        return asyncio.create_task(self.queue.run(gate.wait, size)), gate

    def named(self, name: str, size: int) -> asyncio.Task[None]:
        return asyncio.create_task(self.queue.run(partial(self.ran.append, name), size))


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Of as many threads as the test asks for; one by default."""
    found = Jobs(JobQueue(getattr(request, "param", 1), MOST, "test"))
    yield found
    for gate in found.gates:
        gate.set()
    found.queue.shutdown()


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_shortest_first(jobs: Jobs) -> None:
    """Of jobs that wait at the same time the shortest runs next."""
    _, gate = jobs.blocked()
    await turns()
    tasks = [jobs.named(name, size) for name, size in (("long", 3 * LONG), ("middle", LONG), ("short", 10))]
    await turns()
    assert 4 * LONG + 10 == jobs.queue.waiting

    gate.set()
    await asyncio.gather(*tasks)

    assert ["short", "middle", "long"] == jobs.ran
    assert 0 == jobs.queue.waiting


async def test_none_starves(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long job is overtaken only by shorter ones that come within its size / AGES_PER_S seconds."""
    _, gate = jobs.blocked()
    await turns()
    loop, later = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + later)
    tasks = [jobs.named("long", LONG)]
    await turns()
    later = LONG / AGES_PER_S + 1.0
    tasks.append(jobs.named("short", 1))
    await turns()

    gate.set()
    await asyncio.gather(*tasks)

    assert ["long", "short"] == jobs.ran


@pytest.mark.parametrize("jobs", [2], indirect=True)
async def test_a_thread_for_short_ones(jobs: Jobs) -> None:
    """Long jobs leave one thread free: a short one does not wait for any of them."""
    first, gate = jobs.blocked(2 * LONG)
    second = jobs.named("long", 2 * LONG)
    await turns()

    await jobs.named("short", LONG)

    assert ["short"] == jobs.ran
    gate.set()
    await asyncio.gather(first, second)
    assert ["short", "long"] == jobs.ran


async def test_too_much_waits(jobs: Jobs) -> None:
    """More is refused, with the time after which to come again; a job alone is never refused."""
    jobs.queue.admit(100 * MOST)
    _, gate = jobs.blocked()
    await turns()
    waiting = jobs.named("long", MOST)
    await turns()

    with pytest.raises(TokenizerBusyError, match="the tokenizer of this replica is busy") as caught:
        jobs.queue.admit(1)

    assert 1 <= caught.value.retry_after_s <= 30
    gate.set()
    await waiting
    jobs.queue.admit(1)


async def test_cancelled_while_it_waits(jobs: Jobs) -> None:
    """It never runs, and those behind it do; also if its turn came in the same moment."""
    blocked, gate = jobs.blocked()
    await turns()
    gone, next_one = jobs.named("gone", 1), jobs.named("next", 2)
    await turns()
    gone.cancel()
    await turns()
    assert 2 == jobs.queue.waiting
    gate.set()
    await blocked
    await next_one
    assert ["next"] == jobs.ran


async def test_cancelled_at_its_turn(jobs: Jobs) -> None:
    """Its thread is given to the next one."""
    blocked, gate = jobs.blocked()
    await turns()
    gone, next_one = jobs.named("gone", 1), jobs.named("next", 2)
    await turns()
    blocked.add_done_callback(lambda _: gone.cancel())
    gate.set()
    await blocked

    await next_one
    assert "next" == jobs.ran[-1]


async def test_an_error_of_a_job(jobs: Jobs) -> None:
    """The caller gets it, and the thread is free again."""

    def fail() -> None:
        raise ValueError("no such text")

    with pytest.raises(ValueError, match="no such text"):
        await jobs.queue.run(fail, 1)

    await jobs.named("next", 1)


async def test_after_the_end(jobs: Jobs) -> None:
    """RuntimeError for new jobs; a tokenizer that is replaced still encodes the texts that wait for it."""
    blocked, gate = jobs.blocked()
    await turns()
    waiting = [jobs.named("waits", 1), jobs.named("too", LONG + 1)]
    await turns()
    jobs.queue.retire()

    with pytest.raises(RuntimeError, match="takes no more texts"):
        await jobs.queue.run(list, 1)
    gate.set()
    await asyncio.gather(blocked, *waiting)
    assert ["waits", "too"] == jobs.ran


async def test_the_end_does_not_wait_for_those_that_wait(jobs: Jobs) -> None:
    """They get an error; none waits for a thread that does not come."""
    blocked, gate = jobs.blocked()
    await turns()
    waiting = jobs.named("waits", 1)
    await turns()
    gate.set()
    jobs.queue.shutdown()

    assert await blocked
    with pytest.raises(RuntimeError):
        await waiting
    assert [] == jobs.ran
