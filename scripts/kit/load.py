"""An open-loop load generator: requests are sent at given times, however slow the answers are.

A closed loop would wait for a slow server, and so hide its queues (coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.kit.http_client import Client, Head, HttpError, RefusedError, request_bytes

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
    client = Client()
    try:
        async with asyncio.timeout(time_limit_s), asyncio.TaskGroup() as tasks:
            start = _now()
            for request, outcome in zip(requests, outcomes, strict=True):
                await asyncio.sleep(start + request.at_s - _now())
                # never negative: a timer, which counts milliseconds, may fire up to 1 ms early
                outcome.late_s = max(0.0, _now() - start - request.at_s)
                sending = send(client, request, outcome, timeout_s=request_timeout_s, on_done=on_done)
                tasks.create_task(sending)
    except TimeoutError:
        pass  # the outcomes of unfinished requests are errors already
    finally:
        client.close()
    return outcomes


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
    raw = request_bytes("POST", outcome.url + request.path, request.body, request.headers)
    for next_url in (*other_urls, None):
        try:
            head = await client.send(outcome.url, raw, stream.feed)
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
