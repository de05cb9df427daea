"""An engine's answers, read as by a client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from scripts.kit.engine_tests.workload import Request
from scripts.kit.http_client import Client, Head, HttpError

Json: TypeAlias = dict[str, Any]


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
    """Status, headers and text of one answer; the tokens that the engine reports, None if it does not."""

    status: int
    headers: Mapping[str, str]
    text: str
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    response_id: str = ""

    def sample(self, number: int, phase: str, request: Request, block_size: int) -> Sample:
        """The sample. Raises HttpError for an error, or if the engine reported no prompt tokens."""
        if self.status != 200 or self.prompt_tokens is None:
            raise HttpError(f"request {number} ({request.kind}): {self.status} {self.text[:300]}")
        return Sample(
            number,
            phase,
            request.kind,
            request.group,
            self.headers["x-kvrouter-worker"],
            int(self.headers["x-kvrouter-overlap-blocks"]) * block_size,
            self.cached_tokens,
            self.prompt_tokens,
        )


async def ask(client: Client, base_url: str, request: Request) -> Answer:
    """Send one request and wait for the whole answer. Raises HttpError without one."""
    url = base_url + request.path
    body = bytearray()
    head = await client.send("POST", url, body.extend, request.encoded())
    if head.status != 200:
        return Answer(head.status, head.headers, body.decode(errors="replace"))
    return read(request.path, head, events_of(bytes(body)) if request.is_stream else [json.loads(body)])


def read(path: str, head: Head, events: list[Json]) -> Answer:
    """The answer of a path, from the events of its stream or from the whole body alone."""
    readers = {"/v1/messages": read_message, "/v1/responses": read_response}
    return readers.get(path, read_completion)(head, events)


def events_of(body: bytes) -> list[Json]:
    """The data of a stream's events, without `[DONE]`. Raises HttpError if one is an error."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    events: list[Json] = [json.loads(line) for line in lines if line != b"[DONE]"]
    errors = [event for event in events if event.get("error") or event.get("type") == "error"]
    if errors:
        raise HttpError(f"the stream holds an error: {errors[0]}")
    return events


def read_completion(head: Head, events: list[Json]) -> Answer:
    """A chat or a completion."""
    usage: Json = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    details = usage.get("prompt_tokens_details") or {}
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    parts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    text = "".join(part.get("content") or part.get("text") or "" for part in parts)
    return Answer(
        head.status, head.headers, text, usage.get("prompt_tokens"), details.get("cached_tokens") or 0
    )


def read_message(head: Head, events: list[Json]) -> Answer:
    """An answer of /v1/messages; `input_tokens` is what was neither cached before nor stored now."""
    blocks = [block for event in events for block in event.get("content") or ()]
    deltas = [event["delta"] for event in events if event.get("type") == "content_block_delta"]
    text = "".join(part.get("text") or "" for part in [*blocks, *deltas])
    usages = [event.get("usage") or event.get("message", {}).get("usage") for event in events]
    usage: Json = next((usage for usage in reversed(usages) if usage), {})
    cached = usage.get("cache_read_input_tokens") or 0
    created = usage.get("cache_creation_input_tokens") or 0
    total = usage["input_tokens"] + cached + created if "input_tokens" in usage else None
    return Answer(head.status, head.headers, text, total, cached)


def read_response(head: Head, events: list[Json]) -> Answer:
    """An answer of /v1/responses; the last event of a stream has the whole of it."""
    response: Json = events[-1].get("response") or events[-1]
    usage = response.get("usage") or {}
    parts = [part for item in response["output"] for part in item.get("content") or ()]
    text = "".join(part.get("text") or "" for part in parts if part["type"] == "output_text")
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(head.status, head.headers, text, usage.get("input_tokens"), cached, response["id"])
