r"""Server-sent events of an engine's stream: where each ends, and what it says.

    comment   `: keep-alive`, which servers send while nothing is generated
    field     `id`, `retry` or `event` without data
    ping      Anthropic's `ping`, or an event whose data is empty
    opening   the answer begins, without output: a chat's role, `message_start`, `response.created`
    output    what the engine has generated, its finish reason included
    error     the engine gives up: an error object, `event: error`, `response.failed`, finish_reason "error"
    end       the API's last event: `[DONE]`, `message_stop`, `response.completed`

Only output and a finish reason show that a prompt was computed. Engines send all other events also while
they hang (vLLM 0.32 with --sse-keep-alive-interval), or before they fail.

The text that a model generates stands in JSON strings, where quotes and line ends are escaped. So raw bytes
may be searched for `\ndata:` or `"type":"response.completed"` without parsing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

# A longer event is taken for output before it is complete: no opening, ping or error has this size.
MOST_EVENT_BYTES = 64 * 1024

_BOM = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"\r?\n\r?\n|\r\r")
_MOST_BLANK_BYTES = len(b"\r\n\r")  # of an empty line whose last byte is still to come
_LINE_END = re.compile(rb"\r\n?|\n")
_BLANKS = re.compile(rb"[\r\n]*+")
# In the first event of a stream, before the text that a model has generated, which is seldom empty.
_TEXT_BEGINS = (b'"content":"', b'"text":"')
_FIRST_BYTES = len(b"ffffffff\r\ndata: {")
# The line between two chunks of a body with transfer-encoding: chunked.
_CHUNK_LINE = re.compile(rb"\r\n[0-9a-fA-F]{1,16}(?:;[^\r\n]*)?\r\n")
_ERRORS = frozenset({"error", "response.failed"})
# vLLM and SGLang end a request with these reasons if it failed; its output, if any, is not complete.
_FAILED_REASONS = frozenset({"error", "abort", "ERROR"})
# The status of an error that states none, by what it does state (Anthropic, OpenAI's Responses).
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 503,
    "timeout_error": 504,
}
# Of an engine's text, in the message of an error.
_MOST_REASON_CHARACTERS = 300
# Of an event that is too long to be kept whole: its type or reason, wherever the JSON has it.
_TYPE = re.compile(rb'"type": ?"([a-z_.-]+)"\s*}?\s*\Z|\A\s*{"type": ?"([a-z_.-]+)"')
_REASON = re.compile(rb'"(?:finish_reason|stop_reason)": ?"(\w+)"')
# A longer answer has something in it.
_SHORT_BYTES = 64
# The end of `{"error": {…, "code": 500}}`.
_ERROR_END = re.compile(rb'"code": ?[45]\d\d\s*}\s*}\s*\Z')
# `"error":null`, which each Responses object has, is no error.
_SUSPICIOUS = re.compile(rb'"error"\s*:\s*[^\sn]|:\s*"(?:error|abort|ERROR)"')
_ERROR = re.compile(rb'"error"|event: *error')


class EventKind(Enum):
    COMMENT = "comment"
    FIELD = "field"
    PING = "ping"
    OPENING = "opening"
    OUTPUT = "output"
    ERROR = "error"
    END = "end"


# By the type of an event, of all APIs.
_KINDS = {
    "message_start": EventKind.OPENING,
    "message-start": EventKind.OPENING,  # Cohere
    "response.created": EventKind.OPENING,
    "response.in_progress": EventKind.OPENING,
    "response.queued": EventKind.OPENING,
    "ping": EventKind.PING,
    "keepalive": EventKind.PING,
    "message_stop": EventKind.END,
    "message-end": EventKind.END,  # Cohere
    "response.completed": EventKind.END,
    "response.incomplete": EventKind.END,
    "response.cancelled": EventKind.END,
    "speech.audio.done": EventKind.END,
    "transcript.text.done": EventKind.END,
}


class EventError(Struct, frozen=True):
    """An error that an engine reports inside an answer with status 200."""

    message: str
    status: int = 500
    """The status that it states; 500 if it states none."""
    body: bytes = b""
    """The error as the body of a whole answer; empty: a finish reason is all there is."""

    @property
    def is_clients(self) -> bool:
        """Whether the request is to blame."""
        return self.status < 500


class Event(Struct, frozen=True):
    kind: EventKind
    text: bytes = b""
    """Its bytes, the empty line at its end included."""
    data: bytes = b""
    """What its `data` lines say."""
    name: str = ""
    """Of an opening: which one it is."""
    finishes: bool = False
    """Whether it has a finish reason, or is a last event that tells how the answer ended."""
    error: EventError | None = None

    @property
    def shows_output(self) -> bool:
        """Whether the prompt was computed."""
        return self.kind is EventKind.OUTPUT or self.finishes

    @property
    def passes_early(self) -> bool:
        """Whether a client gets it at once, output or not. A chat's role comes with its first output."""
        is_opening = self.kind is EventKind.OPENING and self.name in _KINDS
        return is_opening or self.kind is EventKind.COMMENT or self.kind is EventKind.PING

    @property
    def commits(self) -> bool:
        """Whether a client should get the stream: an error among these is not the worker's fault."""
        return self.kind is EventKind.OUTPUT or self.kind is EventKind.ERROR or self.finishes


class EventReader:
    """Splits the content of a stream into events. `rest`: the beginning of one that is not complete."""

    __slots__ = ("_has_begun", "rest")

    def __init__(self) -> None:
        self.rest = b""
        self._has_begun = False

    def feed(self, content: bytes) -> list[Event]:
        """The events that are complete now. A comment needs only the end of its line."""
        searched = max(0, len(self.rest) - _MOST_BLANK_BYTES)
        data = self.rest + content
        if not self._has_begun and len(data) >= len(_BOM):
            self._has_begun = True
            data = data.removeprefix(_BOM)
        events, at = [], 0
        while at < len(data) and (end := _end_of_event(data, at, searched)) > 0:
            events.append(event_of(data[at:end]))
            at = end
        self.rest = data[at:]
        return events


def _end_of_event(data: bytes, at: int, searched: int = 0) -> int:
    """Where the event that begins at `at` ends, with the empty lines before and after it; 0: not yet.

    `searched`: no line that is looked for ends before this place: each byte is looked at once, as an engine
    may send one at a time.
    """
    start = _BLANKS.match(data, at).end()  # type: ignore[union-attr]  # it always matches
    if data[start : start + 1] != b":":  # else a comment, which needs only the end of its line
        if data.find(b"\r", start) < 0:  # nearly always, and five times as fast
            end = data.find(b"\n\n", max(start, searched))
            return end + 2 if end >= 0 else 0
        blank = _BLANK_LINE.search(data, max(start, searched))
        return blank.end() if blank is not None else 0
    line = _LINE_END.search(data, max(start, searched))
    if line is None:
        return 0
    blank = _LINE_END.match(data, line.end())
    return blank.end() if blank is not None else line.end()


def event_of(text: bytes) -> Event:
    """What a block of lines says."""
    name, data, has_comment = "", [], False
    for line in text.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.strip().decode("utf-8", "replace")
        elif line.startswith(b":"):
            has_comment = True
    if data:
        return _with_data(text, name, b"\n".join(data).strip())
    return Event(EventKind.COMMENT if has_comment and not name else EventKind.FIELD, text)


def _with_data(text: bytes, name: str, data: bytes) -> Event:
    if not data or data == b"[DONE]":
        return Event(EventKind.END if data else EventKind.PING, text, data)
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return _of_pattern(text, name, data)
    if not isinstance(value, dict):
        error = EventError(_shown(data)) if name == "error" else None
        return Event(EventKind.ERROR if error else EventKind.OUTPUT, text, data, error=error)
    of_type = value.get("type")
    name = of_type if isinstance(of_type, str) and of_type else name
    reasons = _reasons(value)
    error = _error(value, name, reasons)
    if error is not None:
        return Event(EventKind.ERROR, text, data, name, error=error)
    kind = _KINDS.get(name)
    if kind is not None:
        return Event(kind, text, data, name, finishes=kind is EventKind.END and name != "message_stop")
    opening = "" if reasons else _opening_of(value)
    kind = EventKind.OPENING if opening else EventKind.OUTPUT
    return Event(kind, text, data, opening, finishes=bool(reasons))


def _of_pattern(text: bytes, name: str, data: bytes) -> Event:
    """Of data that is not JSON, or of which the beginning or the end is missing."""
    found = _TYPE.search(data)
    name = name or ((found[1] or found[2]).decode() if found is not None else "")
    reasons = {reason.decode() for reason in _REASON.findall(data)}
    if name in _ERRORS or reasons & _FAILED_REASONS or _ERROR_END.search(data):
        return Event(EventKind.ERROR, text, data, name, error=EventError(_shown(data)))
    if _KINDS.get(name) is EventKind.END:
        return Event(EventKind.END, text, data, finishes=True)
    return Event(EventKind.OUTPUT, text, data, finishes=bool(reasons))


def _opening_of(value: dict[str, Any]) -> str:
    """Which opening a part of a chat is that has not finished; empty: none."""
    choices = value.get("choices")
    if not isinstance(choices, list):
        return ""
    if not choices:  # usage, or Azure's results of filters: nothing was generated
        return "no choices"
    return "role" if all(map(_is_opening, choices)) else ""


def _is_opening(choice: object) -> bool:
    """Whether a choice has a role at most. A delta with an empty text and no role is a token without text."""
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        return False
    is_silent = not any(value for name, value in delta.items() if name != "role")
    return is_silent and ("role" in delta or not delta)


def _reasons(value: dict[str, Any]) -> set[str]:
    """The finish reasons in a part of an answer, or in a whole one."""
    choices = value.get("choices")
    holders = choices if isinstance(choices, list) else []
    found = [each.get("finish_reason") for each in holders if isinstance(each, dict)]
    for name in ("delta", "meta_info"):  # Anthropic's and Cohere's deltas; SGLang's /generate
        holder = value.get(name)
        if isinstance(holder, dict):
            found += [holder.get("stop_reason"), holder.get("finish_reason")]
    return {_reason(each) for each in found if each}


def _reason(given: object) -> str:
    """SGLang's /generate has an object with a `type`."""
    return str(given.get("type") if isinstance(given, dict) else given)


def _error(value: dict[str, Any], name: str, reasons: set[str]) -> EventError | None:
    """The error that an event or a whole answer reports; None: it reports none. `name`: the event's type."""
    if name == "response.failed" or (value.get("object") == "response" and value.get("status") == "failed"):
        response = value.get("response")
        return _engine_error(response.get("error") if isinstance(response, dict) else value.get("error"))
    error = value.get("error")
    if error:
        return _engine_error(error, value if name == "error" else None)
    if name == "error" or value.get("object") == "error":
        return _engine_error({each: value[each] for each in value if each != "object"})
    if not reasons.isdisjoint(_FAILED_REASONS):
        is_abort = "abort" in reasons
        return EventError(f"the worker {'aborted' if is_abort else 'failed'} the request (finish_reason)")
    return None


def _engine_error(error: object, whole: object = None) -> EventError:
    details = error if isinstance(error, dict) else {"message": str(error or "no reason given")}
    status = _status(details.get("code")) or _status(details.get("status_code"))
    known = _STATUS_OF_TYPE.get(str(details.get("code"))) or _STATUS_OF_TYPE.get(str(details.get("type")))
    body = msgspec.json.encode(whole if whole is not None else {"error": details})
    return EventError(_shown(str(details.get("message", details)).encode()), status or known or 500, body)


def _status(code: object) -> int:
    """An HTTP status of an error; 0 if it is none."""
    number = int(code) if isinstance(code, str) and code.isdecimal() and len(code) == 3 else code
    return number if isinstance(number, int) and 400 <= number < 600 else 0


def _shown(data: bytes) -> str:
    return data[:_MOST_REASON_CHARACTERS].decode("utf-8", "replace")


def is_plain_output(read: bytes) -> bool:
    """Whether the first bytes of a stream are whole events of OpenAI's with text, and no error.

    So most streams begin. False: parse them.
    """
    if read.find(b"data: {", 0, _FIRST_BYTES) < 0 or not read.endswith((b"}\n\n\r\n", b"}\n\n")):
        return False
    for begin in _TEXT_BEGINS:
        if (at := read.find(begin)) >= 0:
            at += len(begin)
            return read[at : at + 1] != b'"' and not names_failure(read)
    return False


def is_plain_end(tail: bytes) -> bool:
    """Whether a body ends as OpenAI's streams do, without an error in its last bytes. False: read them."""
    content = _without_chunks(tail)
    if content.rfind(b"data: [DONE]") < 0 or content.find(b"event:") >= 0:
        return False
    return not names_failure(content)


def names_failure(content: bytes) -> bool:
    """Whether bytes may have an error in them.

    `find`, not `in`: bytes' `in` first tries its operand as a number, and the exception that this raises
    inside makes it half as slow again (CPython 3.11).
    """
    return (
        content.find(b'"abort"') >= 0
        or content.find(b'"ERROR"') >= 0
        or (content.find(b"error") >= 0 and _ERROR.search(content) is not None)
    )


def is_half(text: bytes) -> bool:
    """Whether an event without its empty line stops amid the JSON of its last line."""
    _, _, data = text.rstrip().rpartition(b"data:")
    return data.lstrip().startswith(b"{") and not data.endswith(b"}")


def _without_chunks(tail: bytes) -> bytes:
    return _CHUNK_LINE.sub(b"", b"\r\n" + tail)


def events_at_the_end(tail: bytes) -> Iterable[Event]:
    """The events in the last bytes of a body, chunk framing included; the first may lack its beginning."""
    content, at = _without_chunks(tail), 0
    while (end := _end_of_event(content, at)) > 0:
        yield _maybe_cut(content[at:end], is_first=not at, is_last=not content[end:].strip())
        at = end
    rest = content[at:]
    if rest.strip():
        event = event_of(rest)
        # of half an event its name says nothing yet
        yield _of_pattern(rest, "", event.data) if event.data and is_half(rest) else event


def _maybe_cut(text: bytes, *, is_first: bool, is_last: bool = False) -> Event:
    event = event_of(text)
    if not is_first or event.kind is not EventKind.FIELD:
        return event
    found = _of_pattern(text, "", text.strip())  # its `data:` may be missing
    # The only event, and so long that its beginning is missing: the last one of /v1/responses has all output.
    return replace(found, finishes=True) if is_last and found.error is None else found


def is_suspicious(body: bytes) -> bool:
    """Whether a whole answer may have an error in it."""
    return names_failure(body) and _SUSPICIOUS.search(body) is not None


def error_in_whole(body: bytes) -> EventError | None:
    """The error in a whole JSON answer with status 200 that `is_suspicious`; None: there is none."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    return _error(value, "", _reasons(value)) if isinstance(value, dict) else None


def is_empty_answer(body: bytes, *, is_native: bool) -> bool:
    """Whether a whole answer has nothing in it; of an API's own route also if it is cut, a page, or `{}`."""
    body = body.strip()
    if not body or not is_native:
        return not body
    if body.startswith((b"{", b"<")) and not body.endswith(b"}"):
        return True
    if len(body) >= _SHORT_BYTES:
        return False
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return False
    return value == {} or (isinstance(value, dict) and value.get("choices") == [])


def message_in(body: bytes) -> tuple[str, str]:
    """Message and type of the error in the body of an answer; of any other text its beginning."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        value = None
    error = value.get("error", value) if isinstance(value, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return _shown(body), ""
    kind = error.get("type")
    return error["message"], kind if isinstance(kind, str) else ""
