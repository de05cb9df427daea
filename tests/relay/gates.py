"""A worker that answers when the test lets it, and requests that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.frontend.clients import Response, ask
from tests.frontend.fleet import BODY, Fleet
from tests.frontend.workers import LAST_CHUNK, SSE_HEAD, Received, Wire, answer, chunk, event, until


@dataclass
class Gate:
    """A worker that answers each request when `answer` is called."""

    arrived: list[int] = field(default_factory=list)
    """The `seed` of each request, in the order of arrival."""
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    streams: bool = False

    async def script(self, received: Received, wire: Wire) -> None:
        """Answer one request."""
        self.arrived.append(received.json["seed"])
        if self.streams:
            await wire.send(SSE_HEAD + chunk(event("a")))
        await self.permits.acquire()
        await wire.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK if self.streams else answer())

    async def until_sent(self, requests: int) -> None:
        """Return when this many requests have arrived. More are an error."""
        await until(lambda: len(self.arrived) >= requests, f"{requests} are sent")
        assert requests == len(self.arrived), "one at a time"

    def open(self) -> None:
        """Answer at once from now on."""
        for _ in range(1000):
            self.permits.release()


def numbered(number: int, **more: Any) -> dict[str, Any]:  # fields of a body
    """A request that the worker can identify by its seed; no two share a prompt."""
    return {**BODY, "prompt": [number * 100 + place for place in range(64)], "seed": number, **more}


def waiting(fleet: Fleet, frontend: int = 0) -> int:
    """How many requests wait at one frontend."""
    return fleet.frontends[frontend].waiting_room.waiting()


@dataclass
class Crowd:
    """Requests that have been sent."""

    fleet: Fleet
    tasks: list[asyncio.Task[Response]] = field(default_factory=list)

    async def add(self, number: int, *headers: str, frontend: int = 0, **more: Any) -> None:  # body fields
        """Send another request, and return when it waits in the queue."""
        before = waiting(self.fleet, frontend)
        url = self.fleet.frontends[frontend].url
        self.tasks.append(asyncio.create_task(ask(url, numbered(number, **more), *headers)))
        await until(lambda: waiting(self.fleet, frontend) == before + 1, f"request {number} waits")

    async def statuses(self) -> list[int]:
        """The status of each answer."""
        return [response.status for response in await asyncio.gather(*self.tasks)]


@contextlib.asynccontextmanager
async def one_at_work(fleet: Fleet, gate: Gate, frontend: int = 0) -> AsyncIterator[Crowd]:
    """Request 0 occupies the worker, which is full with it. On exit all requests are answered."""
    crowd = Crowd(fleet)
    url = fleet.frontends[frontend].url
    first = asyncio.create_task(ask(url, numbered(0, stream=gate.streams)))
    await until(lambda: gate.arrived == [0], "the first request is at the worker")
    yield crowd
    gate.open()
    assert 200 == (await first).status
