"""A load that continues until it is stopped: requests at a fixed rate, to replicas in turn."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from scripts.kit.http_client import Client
from scripts.kit.load import LoadRequest, Outcome, send


class SteadyLoad:
    """An open-loop load. A replica that refuses the connection is skipped, as by a load balancer.

    `outcomes` grows while it runs. Leaving the block, or `stop`, waits for requests in flight.
    """

    def __init__(
        self, requests: Sequence[LoadRequest], urls: Sequence[str], *, rate: float, timeout_s: float = 60.0
    ) -> None:
        self.outcomes: list[Outcome] = []
        # Replicas that receive no requests, as a load balancer skips replicas whose /ready is not 200.
        self.left_out: set[str] = set()
        self._requests = itertools.cycle(requests)
        self._numbers = itertools.count()
        self._urls = urls
        self._rate = rate
        self._timeout_s = timeout_s
        self._client = Client()
        self._sending: set[asyncio.Task[None]] = set()
        self._pacer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._pacer = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for task in self._sending:
                task.cancel()
        await self.stop()
        self._client.close()

    @property
    def in_flight(self) -> list[Outcome]:
        """Requests that were sent and have not ended."""
        return [outcome for outcome in self.outcomes if outcome.ended_at_s is None]

    def is_streaming(self, url: str) -> bool:
        """Whether this replica is in the middle of an answer."""
        return any(outcome.url == url and outcome.ttft_s is not None for outcome in self.in_flight)

    def send(self, request: LoadRequest, url: str, *others: str) -> Outcome:
        """Send one more request now; its answer counts like the others."""
        outcome = Outcome(next(self._numbers), url)
        self.outcomes.append(outcome)
        sending = send(self._client, request, outcome, timeout_s=self._timeout_s, other_urls=others)
        task = asyncio.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return outcome

    async def stop(self) -> None:
        """Send no more requests; returns when all are answered or timed out."""
        if self._pacer is not None:
            self._pacer.cancel()
            await asyncio.gather(self._pacer, return_exceptions=True)
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _run(self) -> None:
        start = time.perf_counter()
        for number, request in enumerate(self._requests):
            await asyncio.sleep(start + number / self._rate - time.perf_counter())
            turn = number % len(self._urls)
            in_turn = (*self._urls[turn:], *self._urls[:turn])
            self.send(request, *(url for url in in_turn if url not in self.left_out))
