"""The requests being served: whether there are any, and how those are ended that outlive the draining.

begun ──> waiting: body, tokens, a worker, its first byte ──> answering ──> over
             │ refuse_waiting                                    │ Attempt.cut_off
             └──> 503                                            └──> error event
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from types import TracebackType
from typing import Any, TypeAlias

from kvrouter.errors import ShuttingDownError

RequestTask: TypeAlias = asyncio.Task[Any]


class _One:
    """A request, from beginning to end. A class, for a generator would cost every request twice as much."""

    __slots__ = ("_in_flight", "_task")

    def __init__(self, in_flight: InFlight, task: RequestTask) -> None:
        self._in_flight = in_flight
        self._task = task

    def __enter__(self) -> None:
        self._in_flight.begin(self._task)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_flight.end(self._task) and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise cut_off_error() from None  # any other cancelled request is one whose client has left


class InFlight:
    """Counts requests, and knows the tasks of those whose clients have seen nothing yet."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while no request is being served."""
        self.idle.set()
        self.count = 0
        """Requests being served."""
        self._waiting: set[RequestTask] = set()
        self._refused: set[RequestTask] = set()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def one(self) -> _One:
        """The request of the current task, while inside. Raises ShuttingDownError if it is refused."""
        return _One(self, self.task())

    def task(self) -> RequestTask:
        """The one that serves the present request."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)  # told the loop it asks nobody, not even the system
        assert task is not None
        return task

    def begin(self, task: RequestTask) -> None:
        """One more. Raises ShuttingDownError after the last one."""
        if self._is_closed:
            raise cut_off_error()
        self.count += 1
        self._waiting.add(task)
        self.idle.clear()

    def end(self, task: RequestTask) -> bool:
        """One less; returns whether it was refused."""
        was_refused = task in self._refused
        self.count -= 1
        self._waiting.discard(task)
        self._refused.discard(task)
        if not self.count:
            self.idle.set()
        return was_refused

    def answered(self) -> None:
        """The current task's client has its answer; what follows may wait for the client only."""
        self._waiting.discard(self.task())

    def refuse_waiting(self, answering: Container[RequestTask]) -> None:
        """Refuse, with 503, every request but those being answered, and every one that is still to come."""
        self._is_closed = True
        for task in self._waiting:
            if task not in answering:
                self._refused.add(task)
                task.cancel()


def cut_off_error() -> ShuttingDownError:
    """What a client is told whose request outlives the draining."""
    return ShuttingDownError("this replica is shutting down and can wait no longer; send the request again")
