"""Load generators: at given times (`run_load`), and at a rate until stopped (`SteadyLoad`).

Both are open loops: requests are sent however slow the answers are. A closed loop would wait for a slow
server, and so hide its queues (coordinated omission).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from scripts.kit.http_client import Client, Head, HttpError, RefusedError
from scripts.kit.script import ScriptError

# not loop.time(): uvloop's clock has a resolution of 1 ms and stands still within one iteration
_now = time.perf_counter

# Bytes kept from the end of a stream: the last events contain usage, errors and [DONE].
_TAIL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A streaming request and the time at which to send it."""

    # Seconds since the start of the run.
    at_s: float
    # It should ask for `stream` and `stream_options.include_usage`.
    body: bytes
    # An answer of another length counts as an error.
    output_tokens: int | None = None
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """The result of a request. `error` is None if a complete and valid answer was received."""

    number: int
    url: str
    error: str | None = "not sent before the end of the run"
    status: int | None = None
    # In seconds of the monotonic clock, like `ended_at_s`.
    sent_at_s: float = 0.0
    ended_at_s: float | None = None
    # Seconds between the request's time and its sending: the delay of this generator.
    late_s: float = 0.0
    # Seconds from sending to the first byte of the first `data:` line.
    ttft_s: float | None = None
    latency_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    worker: str | None = None
    retry_after: str | None = None


async def run_load(
    requests: Sequence[LoadRequest],
    base_urls: Sequence[str],
    *,
    request_timeout_s: float = 60.0,
    time_limit_s: float = 600.0,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send each request at its time, to the base URLs in turn; returns when all are answered.

    After `time_limit_s` it ends by itself, and unfinished requests are errors.
    """
    outcomes = [Outcome(n, base_urls[n % len(base_urls)]) for n in range(len(requests))]
    try:
        async with (
            Client() as client,
            asyncio.timeout(time_limit_s),
            asyncio.TaskGroup() as tasks,
        ):
            start = _now()
            for request, outcome in zip(requests, outcomes, strict=True):
                await asyncio.sleep(start + request.at_s - _now())
                # never negative: a timer, which counts milliseconds, may fire up to 1 ms early
                outcome.late_s = max(0.0, _now() - start - request.at_s)
                sending = send(client, request, outcome, timeout_s=request_timeout_s, on_done=on_done)
                tasks.create_task(sending)
    except TimeoutError:
        pass  # the outcomes of unfinished requests are errors already
    return outcomes


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
        await self._client.close()

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


def check(outcomes: Sequence[Outcome]) -> None:
    """Raise ScriptError if a request failed."""
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise ScriptError(f"{len(failed)} requests failed; the first: {failed[0]}")


async def send(
    client: Client,
    request: LoadRequest,
    outcome: Outcome,
    *,
    timeout_s: float,
    on_done: Callable[[Outcome], None] = lambda _outcome: None,
    other_urls: Sequence[str] = (),
) -> None:
    """Send one request to `outcome.url`, or to the next of `other_urls` while a connection is refused."""
    outcome.error = "not finished when the run ended"
    outcome.sent_at_s = _now()
    try:
        async with asyncio.timeout(timeout_s):
            await _send(client, request, outcome, other_urls)
    except TimeoutError:
        outcome.error = f"no complete answer within {timeout_s:g} s"
    except HttpError as error:
        outcome.error = str(error)
    outcome.ended_at_s = _now()
    on_done(outcome)


async def _send(client: Client, request: LoadRequest, outcome: Outcome, other_urls: Sequence[str]) -> None:
    stream = _Stream(_now, outcome)
    for next_url in (*other_urls, None):
        try:
            url = outcome.url + request.path
            head = await client.send("POST", url, stream.feed, request.body, request.headers)
        except RefusedError:
            if next_url is None:
                raise
            outcome.url = next_url
        else:
            stream.conclude(head, request)
            return


class _Stream:
    """An SSE body in pieces. Only its first and last bytes are parsed."""

    def __init__(self, now: Callable[[], float], outcome: Outcome) -> None:
        self._now = now
        self._sent_at = now()
        self._outcome = outcome
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        """Receive bytes of the body."""
        self._tail += data
        is_first = self._outcome.ttft_s is None
        if is_first and (self._tail.startswith(b"data:") or b"\ndata:" in self._tail):
            self._outcome.ttft_s = self._now() - self._sent_at
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]

    def conclude(self, head: Head, request: LoadRequest) -> None:
        """Set the outcome at the end of the body."""
        outcome = self._outcome
        outcome.status = head.status
        outcome.worker = head.headers.get("x-kvrouter-worker")
        outcome.retry_after = head.headers.get("retry-after")
        outcome.latency_s = self._now() - self._sent_at
        events = list(_events(self._tail))
        for event in events:
            _take_usage(event, outcome)
        outcome.error = self._error(head, events, request, outcome)

    def _error(
        self, head: Head, events: list[dict[str, Any]], request: LoadRequest, outcome: Outcome
    ) -> str | None:
        if head.status != 200:
            return f"status {head.status}: {self._tail[:200].decode(errors='replace')}"
        for event in events:
            if "error" in event:
                return f"error event: {json.dumps(event['error'])[:200]}"
        if not self._tail.rstrip().endswith(b"data: [DONE]"):
            return "the stream ended without data: [DONE]"
        if request.output_tokens not in {None, outcome.output_tokens}:
            return f"{outcome.output_tokens} output tokens instead of {request.output_tokens}"
        return None


def _events(tail: bytearray) -> Iterator[dict[str, Any]]:
    """The JSON objects in the last events; the first event may be cut, and is then ignored."""
    for line in tail.split(b"\n"):
        if line.startswith(b"data: {"):
            try:
                yield json.loads(line[6:])
            except ValueError:
                continue


def _take_usage(event: dict[str, Any], outcome: Outcome) -> None:
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
