"""The requests being served: whether there are any, and how those are ended that outlive the draining.

begun ──> waiting: body, tokens, a worker, its first byte ──> answering ──> over
             │ refuse_waiting                                    │ Attempt.cut_off
             └──> 503                                            └──> error event
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container, Iterator
from typing import Any, TypeAlias

from kvrouter.errors import ShuttingDownError

RequestTask: TypeAlias = asyncio.Task[Any]


class InFlight:
    """Counts requests, and knows the tasks of those whose clients have seen nothing yet."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while no request is being served."""
        self.idle.set()
        self._count = 0
        self._waiting: set[RequestTask] = set()
        self._refused: set[RequestTask] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """The request of the current task, from beginning to end. Raises ShuttingDownError if refused."""
        if self._is_closed:
            raise cut_off_error()
        task = current_task()
        self._count += 1
        self._waiting.add(task)
        self.idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._refused:
                raise  # the client has left
            task.uncancel()
            raise cut_off_error() from None
        finally:
            self._count -= 1
            self._waiting.discard(task)
            self._refused.discard(task)
            if not self._count:
                self.idle.set()

    def answered(self) -> None:
        """The current task's client has its answer; what follows may wait for the client only."""
        self._waiting.discard(current_task())

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


def current_task() -> RequestTask:
    """The task that serves the request."""
    task = asyncio.current_task()
    assert task is not None
    return task
