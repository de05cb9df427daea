"""Threads for jobs of known size, the shortest first: a short prompt does not wait for a long one.

    run(job, size) ──a thread is free──> runs ──> result
                 └── waits, in the order of  arrival + size / AGES_PER_S  ──> runs

So a job is overtaken only by shorter ones that come within size / AGES_PER_S seconds after it: none starves.
One thread, if there are several, takes no job above LONG. Not thread-safe: for one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvrouter.errors import TokenizerBusyError

# Characters; a prompt of 100,000 tokens waits for others for half a second.
AGES_PER_S = 1_000_000
# Characters; about 16,000 tokens.
LONG = 64_000
# What a thread encodes, in characters per second, before any job was measured: the reference library.
_FIRST_PER_S = 1_000_000.0
_MOST_RETRY_S = 30
# Of the speed's mean, the weight of a new job.
_NEWEST = 0.1

_Result = TypeVar("_Result")


class JobQueue:
    def __init__(self, threads: int, most_waiting: int, name: str) -> None:
        """`most_waiting`: the size of all waiting jobs above which `admit` refuses more."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._free_for_long = max(1, threads - 1)
        self._most_waiting = most_waiting
        self._numbers = itertools.count()
        self._short: list[tuple[float, int, asyncio.Future[None]]] = []
        self._long: list[tuple[float, int, asyncio.Future[None]]] = []
        self._per_s = _FIRST_PER_S
        self._count = threads
        self._is_retired = False
        self._callers = 0
        self.waiting = 0
        """The size of all jobs that wait."""

    def admit(self, size: int) -> None:
        """Raise TokenizerBusyError if a job of this size would wait behind too many."""
        if self.waiting and self.waiting + size > self._most_waiting:
            error = TokenizerBusyError(
                "the tokenizer of this replica is busy; send the request again later, or to another replica"
            )
            seconds = self.waiting / (self._per_s * self._count)
            error.retry_after_s = max(1, min(_MOST_RETRY_S, math.ceil(seconds)))
            raise error

    async def run(self, job: Callable[[], _Result], size: int = 0) -> _Result:
        """The result of `job`, run in a thread. If cancelled while it waits, it never runs.

        Raises RuntimeError after `retire` or `shutdown`.
        """
        if self._is_retired:
            raise RuntimeError("the tokenizer takes no more texts")
        self._callers += 1
        try:
            return await self._run(job, size, is_long=size > LONG)
        finally:
            self._callers -= 1
            self._end_if_retired()

    def retire(self) -> None:
        """Take no more jobs; those that wait still run."""
        self._is_retired = True
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        if self._is_retired and not self._callers:
            self._threads.shutdown(wait=False)

    def shutdown(self) -> None:
        """Wait for the jobs that run. Those that wait get RuntimeError at their turn."""
        self._is_retired = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, job: Callable[[], _Result], size: int, *, is_long: bool) -> _Result:
        loop = asyncio.get_running_loop()
        if self._may_start(is_long):
            self._take(is_long)
        else:
            await self._turn(loop, size, is_long)
        began = loop.time()

        def ended(_: Future[_Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._ended, is_long, size, began, loop)

        try:
            running = self._threads.submit(job)
        except RuntimeError:  # shut down
            self._give_back(is_long)
            raise
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    async def _turn(self, loop: asyncio.AbstractEventLoop, size: int, is_long: bool) -> None:
        """Wait for a thread; it is taken then."""
        turn = loop.create_future()
        key = loop.time() + size / AGES_PER_S
        heapq.heappush(self._long if is_long else self._short, (key, next(self._numbers), turn))
        self.waiting += size
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its turn just now
                self._give_back(is_long)
            raise
        finally:
            self.waiting -= size

    def _may_start(self, is_long: bool) -> bool:
        return self._free > 0 and (not is_long or self._free_for_long > 0)

    def _take(self, is_long: bool) -> None:
        self._free -= 1
        self._free_for_long -= is_long

    def _give_back(self, is_long: bool) -> None:
        self._free += 1
        self._free_for_long += is_long
        while (line := self._next_line()) is not None:
            _, _, turn = heapq.heappop(line)
            if not turn.done():  # else cancelled
                self._take(line is self._long)
                turn.set_result(None)

    def _next_line(self) -> list[tuple[float, int, asyncio.Future[None]]] | None:
        """The line whose first job is next, if a thread is free for it."""
        lines = [line for line in (self._short, self._long) if line and self._may_start(line is self._long)]
        return min(lines, key=lambda line: line[0][:2], default=None)

    def _ended(self, is_long: bool, size: int, began: float, loop: asyncio.AbstractEventLoop) -> None:
        took_s = loop.time() - began
        if size and took_s > 0:
            self._per_s += _NEWEST * (size / took_s - self._per_s)
        self._give_back(is_long)
