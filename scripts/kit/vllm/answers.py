"""An engine's answers, read as by a client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.kit.http_client import Client, Head, HttpError, request_bytes
from scripts.kit.vllm.workload import Request


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request: what the router predicted and what the engine reported."""

    number: int
    phase: str
    kind: str
    group: int
    worker: str
    predicted_tokens: int
    cached_tokens: int
    prompt_tokens: int

    @property
    def is_exact(self) -> bool:
        """Whether the prediction equals the cached tokens that the engine reported."""
        return self.predicted_tokens == self.cached_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers, text and usage of one answer."""

    status: int
    headers: Mapping[str, str]
    text: str
    usage: Mapping[str, Any]

    def sample(self, number: int, phase: str, request: Request, block_size: int) -> Sample:
        """The sample. Raises HttpError for an error, or if the engine reported no cached tokens."""
        details = self.usage.get("prompt_tokens_details") or {}
        if self.status != 200 or "prompt_tokens" not in self.usage:
            raise HttpError(f"request {number} ({request.kind}): {self.status} {self.text[:300]}")
        return Sample(
            number,
            phase,
            request.kind,
            request.group,
            self.headers["x-kvrouter-worker"],
            int(self.headers["x-kvrouter-overlap-blocks"]) * block_size,
            int(details.get("cached_tokens") or 0),
            int(self.usage["prompt_tokens"]),
        )


async def ask(client: Client, base_url: str, request: Request) -> Answer:
    """Send one request and wait for the whole answer. Raises HttpError without one."""
    url = base_url + request.path
    body = bytearray()
    head = await client.send(url, request_bytes("POST", url, request.encoded()), body.extend)
    if head.status != 200:
        return Answer(head.status, head.headers, body.decode(errors="replace"), {})
    return _stream(head, bytes(body)) if request.is_stream else _whole(head, bytes(body))


def _whole(head: Head, body: bytes) -> Answer:
    answer = json.loads(body)
    return Answer(head.status, head.headers, _said(answer["choices"][0]), answer["usage"])


def _stream(head: Head, body: bytes) -> Answer:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    if events[-1] != b"[DONE]":
        raise HttpError(f"the stream ends with {events[-1][:200]!r}")
    parsed = [json.loads(event) for event in events[:-1]]
    errors = [event["error"] for event in parsed if "error" in event]
    if errors:
        raise HttpError(f"the stream holds an error: {errors[0]}")
    usage: Mapping[str, Any] = next((event["usage"] for event in reversed(parsed) if event.get("usage")), {})
    text = "".join(_said(choice) for event in parsed for choice in event["choices"])
    return Answer(head.status, head.headers, text, usage)


def _said(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")
