"""The requests being served: how many there are, and how they end if they outlive the drain.

begun ──> waiting: body, tokens, a worker, its first byte ──> answering ──> ended
             │ reject_waiting                                    │ Attempt.cut_off
             └──> 503                                            └──> error event
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

from kvrouter.errors import ShuttingDownError
from kvrouter.relay.request import Request


class InFlight:
    """Counts the requests being served, and cancels those whose answers have not begun."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()  # set while no request is being served
        self.idle.set()
        self.count = 0
        self._waiting: dict[Request, asyncio.Task[Any]] = {}
        self._rejected: dict[Request, asyncio.Task[Any]] = {}
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    def begin(self, request: Request) -> None:
        """Count a request that the current task serves. Raises ShuttingDownError after `reject_waiting`."""
        task = asyncio.current_task(self._loop)  # without the loop it calls os.getpid to find it
        assert task is not None
        self.count += 1
        self.idle.clear()
        self._waiting[request] = task
        if self._is_closed:
            raise cut_off_error()

    def answered(self, request: Request) -> None:
        """The answer is written. The task may still wait for its client, and is no longer cancelled."""
        self._waiting.pop(request, None)

    def take_rejection(self, request: Request) -> ShuttingDownError | None:
        """The error for a request that `reject_waiting` cancelled, whose task goes on to answer with it.

        None if the task was cancelled because the client has left.
        """
        task = self._rejected.get(request)
        if task is None:
            return None
        task.uncancel()  # the cancellation ends here: the task answers its client
        return cut_off_error()

    def end(self, request: Request) -> None:
        self.count -= 1
        self._waiting.pop(request, None)
        self._rejected.pop(request, None)
        if not self.count:
            self.idle.set()

    def reject_waiting(self, answering: Container[Request]) -> None:
        """Answer all requests with 503, later ones too, except those in `answering`."""
        self._is_closed = True
        for request, task in self._waiting.items():
            if request not in answering:
                self._rejected[request] = task
                task.cancel()


def cut_off_error() -> ShuttingDownError:
    """The error for requests that outlive the drain."""
    return ShuttingDownError("this replica is shutting down and can wait no longer; send the request again")
