"""The requests being served: whether there are any, and how those are ended that outlive the draining.

begun ──> waiting: body, tokens, a worker, its first byte ──> answering ──> over
             │ refuse_waiting                                    │ Attempt.cut_off
             └──> 503                                            └──> error event
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

from kvrouter.errors import ShuttingDownError
from kvrouter.relay.request import Request


class InFlight:
    """Counts requests, and knows the tasks of those whose clients have seen nothing yet."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while no request is being served."""
        self.idle.set()
        self.count = 0
        """Requests being served."""
        self._waiting: dict[Request, asyncio.Task[Any]] = {}
        self._refused: dict[Request, asyncio.Task[Any]] = {}
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    def begin(self, request: Request) -> None:
        """One more, served by the current task. Raises ShuttingDownError after the last one."""
        task = asyncio.current_task(self._loop)  # told the loop it asks nobody, not even the system
        assert task is not None
        self.count += 1
        self.idle.clear()
        self._waiting[request] = task
        if self._is_closed:
            raise cut_off_error()

    def answered(self, request: Request) -> None:
        """Its client has the answer; what follows may wait for the client only."""
        self._waiting.pop(request, None)

    def take_refusal(self, request: Request) -> ShuttingDownError | None:
        """What its client is told if we cancelled it, which is taken back; None: the client has left."""
        task = self._refused.get(request)
        if task is None:
            return None
        task.uncancel()
        return cut_off_error()

    def end(self, request: Request) -> None:
        """One less."""
        self.count -= 1
        self._waiting.pop(request, None)
        self._refused.pop(request, None)
        if not self.count:
            self.idle.set()

    def refuse_waiting(self, answering: Container[Request]) -> None:
        """Refuse, with 503, every request but those being answered, and every one that is still to come."""
        self._is_closed = True
        for request, task in self._waiting.items():
            if request not in answering:
                self._refused[request] = task
                task.cancel()


def cut_off_error() -> ShuttingDownError:
    """What a client is told whose request outlives the draining."""
    return ShuttingDownError("this replica is shutting down and can wait no longer; send the request again")
