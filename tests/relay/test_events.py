"""Server-sent events: where they end, and what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.relay.engine_answers import TAIL_BYTES
from kvrouter.relay.events import (
    MOST_EVENT_BYTES,
    Event,
    EventKind,
    EventReader,
    error_in_whole,
    event_of,
    events_at_the_end,
    is_half,
    is_plain_end,
    is_plain_output,
    is_suspicious,
    message_in,
)
from tests.frontend.workers import LAST_CHUNK, chunk
from tests.relay.answers import APIS, DONE, QUIET, USAGE, ApiStream, delta, part, sse, typed

KINDS: list[tuple[bytes, EventKind]] = [
    *[(event, EventKind.OPENING) for api in APIS for event in api.opening if event.count(b"data:") == 1],
    *[(event, EventKind.OUTPUT) for api in APIS for event in api.outputs],
    *[(event, EventKind.ERROR) for api in APIS for event in api.errors],
    (delta(role="assistant"), EventKind.OPENING),
    (delta(role="assistant", content="a"), EventKind.OUTPUT),
    (delta(content=""), EventKind.OUTPUT),
    (delta(finish="stop"), EventKind.OUTPUT),
    (delta(), EventKind.OPENING),
    (USAGE, EventKind.OPENING),
    (DONE, EventKind.END),
    (b"data:[DONE]\r\n\r\n", EventKind.END),
    (typed("message_stop"), EventKind.END),
    (typed("response.incomplete", response={}), EventKind.END),
    (typed("ping"), EventKind.PING),
    (b"data:\n\n", EventKind.PING),
    (b": keep-alive\n\n", EventKind.COMMENT),
    (b"id: 7\nretry: 3000\n\n", EventKind.FIELD),
    (b"event: message\n\n", EventKind.FIELD),
    (b"event: error\ndata: not JSON\n\n", EventKind.ERROR),
    (b"data: not JSON\n\n", EventKind.OUTPUT),
    (b"data: [1, 2]\n\n", EventKind.OUTPUT),
    (b'data: {"error":' + b"[" * 9_999 + b"\n\n", EventKind.OUTPUT),
    (sse({"text": "a", "meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}), EventKind.ERROR),
    (sse({"text": "a", "meta_info": {"finish_reason": {"type": "stop"}}}), EventKind.OUTPUT),
    (sse({"error": None, "choices": [{"delta": {"content": "a"}}]}), EventKind.OUTPUT),
    (delta('{"error": "x", "finish_reason": "abort", "type": "message_stop"}'), EventKind.OUTPUT),
]


@pytest.mark.parametrize(("text", "kind"), KINDS, ids=range(len(KINDS)))
def test_kinds(text: bytes, kind: EventKind) -> None:
    """Each event is what its API means by it, whatever text the model generates."""
    assert kind is event_of(text).kind


@pytest.mark.parametrize(
    ("error", "status", "is_clients"),
    [
        ({"message": "m", "code": 503}, 503, False),
        ({"message": "m", "code": "429"}, 429, True),
        ({"message": "m", "code": 200}, 500, False),
        ({"message": "m", "code": True}, 500, False),
        ({"message": "m", "type": "overloaded_error"}, 503, False),
        ({"message": "m", "type": "invalid_request_error"}, 400, True),
        ({"message": "m", "code": "rate_limit_exceeded"}, 429, True),
        ({}, 500, False),
        ("m", 500, False),
    ],
)
def test_status_of_errors(error: Any, status: int, is_clients: bool) -> None:
    """An error has the status that it states, or that its type stands for, or 500."""
    found = event_of(sse({"type": "error", "error": error})).error

    assert found is not None
    assert (status, is_clients) == (found.status, found.is_clients)


BLANKS = ("\n", "\r\n", "\r")


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[EventKind]]:
    """A stream of any API in any form that SSE allows, and the kinds of its events."""
    parts = draw(st.lists(st.sampled_from([*KINDS, *[(quiet, None) for quiet in QUIET]]), max_size=8))
    blank = draw(st.sampled_from(BLANKS)).encode()
    text, kinds = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])), []
    for event, kind in parts:
        text += event.replace(b"\r\n", b"\n").replace(b"\n", blank)
        kinds += [kind] if kind is not None else [one.kind for one in EventReader().feed(event)]
    return text, kinds


@given(st.data(), streams())
def test_reads_of_any_size(data: st.DataObject, stream: tuple[bytes, list[EventKind]]) -> None:
    """In pieces of any size, with any line ends, the same events are found, and no byte of them is lost."""
    text, kinds = stream
    reader, events = EventReader(), list[Event]()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += reader.feed(text[start:end])

    assert kinds == [event.kind for event in events]
    assert text.removeprefix(b"\xef\xbb\xbf") == b"".join(event.text for event in events) + reader.rest


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\n\n", b"data: ", b"data: {", b"\r", b":"])))
def test_any_bytes(pieces: list[bytes]) -> None:
    """No bytes make the reader fail."""
    reader = EventReader()
    found = [event for piece in pieces for event in reader.feed(piece)]
    found += events_at_the_end(b"".join(pieces))

    assert all(isinstance(event.kind, EventKind) for event in found)


@pytest.mark.parametrize("byte", [b"\n", b"\r", b":", b"d"])
def test_one_byte_at_a_time(byte: bytes) -> None:
    """However an engine cuts what says nothing, each byte is looked at once: else this takes minutes."""
    reader, count = EventReader(), MOST_EVENT_BYTES // 2
    events = [event for _ in range(count) for event in reader.feed(byte)]

    assert count == len(reader.rest) + sum(len(event.text) for event in events)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
@given(st.data())
def test_ends(api: ApiStream, data: st.DataObject) -> None:
    """The last bytes of a body show a good end, an error, or neither, wherever they were cut."""
    chunks = [chunk(event) for event in (*api.opening, *api.outputs * 20)]
    error = data.draw(st.sampled_from(api.errors))
    ends = {
        "good": [*map(chunk, api.end), LAST_CHUNK],
        "none": [LAST_CHUNK],
        "error": [chunk(error), *([chunk(DONE)] if data.draw(st.booleans()) else []), LAST_CHUNK],
    }
    how = data.draw(st.sampled_from(sorted(ends)))
    body = b"".join([*chunks, *ends[how]])
    tail = body[-data.draw(st.integers(TAIL_BYTES, len(body))) :]

    events = list(events_at_the_end(tail))

    assert ("error" == how) is any(event.error is not None for event in events)
    if how != "error":
        assert ("good" == how) is any(event.finishes or event.kind is EventKind.END for event in events)


def test_end_longer_than_the_tail() -> None:
    """The last event of /v1/responses has the whole answer: its type is found behind it."""
    text = "a" * 9_000
    for kind, is_error in (("completed", False), ("failed", True)):
        value = {"response": {"output": text, "error": {"code": "x"} if is_error else None}}
        event = sse({**value, "sequence_number": 9, "type": f"response.{kind}"})
        for tail in (event[-1024:], chunk(event)[-1024:] + LAST_CHUNK):
            (found,) = events_at_the_end(tail)
            assert (is_error, not is_error) == (found.error is not None, found.finishes)


def test_long_error() -> None:
    """A message of any length: the status at its end is enough."""
    event = sse({"error": {"message": "m" * 9_000, "type": "InternalServerError", "code": 500}})
    found = list(events_at_the_end((chunk(event) + chunk(DONE) + LAST_CHUNK)[-1024:]))

    assert [EventKind.ERROR, EventKind.END] == [each.kind for each in found]


WHOLE: dict[str, tuple[Any, int]] = {
    "good": ({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}, 0),
    "no error": ({"object": "response", "status": "completed", "error": None}, 0),
    "error": ({"error": {"message": "m", "code": 503}}, 503),
    "SGLang's": ({"object": "error", "message": "m", "code": 400}, 400),
    "reason": ({"choices": [{"text": "a", "finish_reason": "error"}]}, 500),
    "aborted": ({"choices": [{"text": "", "finish_reason": "abort"}]}, 500),
    "failed": ({"object": "response", "status": "failed", "error": {"code": "server_error"}}, 500),
    "text of the model": ({"choices": [{"text": '"error": {"code": 500}', "finish_reason": "stop"}]}, 0),
    "a token": ({"choices": [{"text": "", "logprobs": {"tokens": ["error"]}, "finish_reason": "stop"}]}, 0),
    "metadata": ({"object": "response", "error": None, "metadata": {"error": "x"}}, 0),
    "a list": ([{"error": 1}], 0),
}


@pytest.mark.parametrize("case", WHOLE)
def test_whole_answers(case: str) -> None:
    """An error in a whole answer with status 200 is found by its meaning, not by its bytes."""
    value, status = WHOLE[case]
    for body in (json.dumps(value), json.dumps(value, indent=1), json.dumps(value, separators=(",", ":"))):
        error = error_in_whole(body.encode()) if is_suspicious(body.encode()) else None
        assert status == (error.status if error is not None else 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m","type":"t"}}', ("m", "t")),
        (b'{"object":"error","message":"m","type":"t"}', ("m", "t")),
        (b'{"detail":"m"}', ('{"detail":"m"}', "")),
        (b"<html>" + b"x" * 900, ("<html>" + "x" * 294, "")),
        (b"", ("", "")),
    ],
)
def test_message_in(body: bytes, message: tuple[str, str]) -> None:
    """An engine's refusal in any form has a message."""
    assert message == message_in(body)


def test_a_part_of_a_completion_is_output() -> None:
    """Even an empty text is a token that was generated."""
    assert event_of(part("")).shows_output


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
@given(st.data())
def test_without_parsing(api: ApiStream, data: st.DataObject) -> None:
    """What is taken for output, or for a good end, without a look at its JSON is that to the parser, too."""
    everything = [*api.opening, *api.outputs, *api.end, *api.errors, DONE, *QUIET]
    events = data.draw(st.lists(st.sampled_from(everything), min_size=1, max_size=5))
    read = b"".join(map(chunk, events))
    found = list(events_at_the_end(read))

    if is_plain_output(read):
        assert any(event.kind is EventKind.OUTPUT for event in found)
    if is_plain_output(read) or is_plain_end(read):
        assert all(event.kind is not EventKind.ERROR for event in found)
    if is_plain_end(read):
        assert any(event.kind is EventKind.END for event in found)


def test_plain_streams() -> None:
    """Nearly all streams begin and end without being parsed: else an event costs 1 % more."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        (api,) = [api for api in APIS if api.path == path]
        assert any(is_plain_output(chunk(event)) for event in api.outputs)
        assert is_plain_end(b"".join(map(chunk, [*api.outputs, *api.end])) + LAST_CHUNK)


@pytest.mark.parametrize(
    ("text", "is_cut"),
    [
        (b'data: {"choices":[{"text":"a', True),
        (b'event: error\ndata: {"mess', True),
        (b'data: {"text":"a"}\ndata: {"text":"b"}\ndata: [DONE]\n', False),
        (b'data: {"text":"a"}\ndata: {"te', True),
        (b'data: {"text":"\\ud83d","x":NaN}', False),
        (b"data: [DO", False),
        (b"event: mess", False),
    ],
)
def test_half_an_event(text: bytes, *, is_cut: bool) -> None:
    """What an engine writes oddly is not cut; half an event is no error, whatever its name."""
    assert is_cut == is_half(text)
    (event,) = events_at_the_end(text)
    assert event.error is None
