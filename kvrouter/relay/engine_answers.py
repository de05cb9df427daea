"""What an engine's answer says, found without reading all of it: a refusal, an error event, the usage.

Engines write the usage last: in the event before `[DONE]`, or near the end of the JSON body. The text that a
model generates stands in JSON strings, where a quote is escaped, so it never matches the names searched here.
"""

from __future__ import annotations

import re

import msgspec

from kvrouter.core.tables.predictions import Usage

_RETRIABLE = frozenset({408, 429})
UNKNOWN_MODEL = 404

# The usage of vLLM and SGLang ends within this much of the body's end.
TAIL_BYTES = 1024
# The usage event, `[DONE]` and the end of the body may each come in a read of its own.
TAIL_READS = 4
# As much is kept of an answer whose text is read later (/v1/responses, for `previous_response_id`).
ANSWER_BYTES = 256 * 1024
ANSWER_READS = 64
# vLLM ends a request with status 200 and this reason if its KV cache could not be loaded, for example.
_FAILED = re.compile(rb'"finish_reason": ?"error"')
# Any output: a text that is not empty, whatever the API calls it.
_OUTPUT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)": ?"[^"]')
_COMPLETION = b'"completion_tokens":'
# A whole number: the delimiter shows that no chunk boundary cuts it.
_NUMBER = re.compile(rb" ?(\d{1,12})[,} \n]")


def is_rejection(status: int, *, serves_model: bool = False) -> bool:
    """Whether another worker may accept the request. Every other 4xx is the client's fault.

    `serves_model`: the worker has announced the model. A 404 then means that it serves another model by now.
    """
    return status >= 500 or status in _RETRIABLE or (serves_model and status == UNKNOWN_MODEL)


def first_line(text: bytes) -> tuple[bytes, bool]:
    """The first line of a stream that is not an `event:` line, and whether the line is complete."""
    line, newline, rest = text.lstrip().partition(b"\n")
    if newline and line.startswith(b"event:"):
        line, newline, _ = rest.partition(b"\n")
    return line, bool(newline)


def error_status_in(event: bytes) -> int:
    """The status in an event `data: {"error": …}`; 0 if the event is not an error.

    An overloaded vLLM reports it in the first event of a stream that began with 200.
    """
    if b'"error"' not in event:  # nearly always: no need to parse the JSON
        return 0
    try:
        body = msgspec.json.decode(event.removeprefix(b"data:").strip())
    except (ValueError, RecursionError):
        return 0  # invalid JSON, invalid UTF-8, or nested too deeply
    error = body.get("error") if isinstance(body, dict) else None
    if not error:
        return 0
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def has_failed(text: bytes) -> bool:
    """Whether an answer, or the beginning of one, ends with an error before any output.

    An answer with output is the client's: another worker would say something else.
    """
    if text.find(b'"error"') < 0:  # nearly always
        return False
    return _FAILED.search(text) is not None and _OUTPUT.search(text) is None


def is_role_only(text: bytes) -> bool:
    """Whether a stream so far is the one event that names the role of a chat's answer, without output."""
    return text.count(b"data:") == 1 and text.find(b'"role"') >= 0 and _OUTPUT.search(text) is None


def find_usage(tail: bytes) -> Usage:
    """The numbers of the last usage in these bytes; None where one is missing or cut off."""
    return Usage(last_number(tail, b'"prompt_tokens":'), last_number(tail, b'"cached_tokens":'))


def find_output_tokens(tail: bytes) -> int | None:
    """The length of the answer in the last usage in these bytes; None where it is missing or cut off."""
    at = tail.rfind(_COMPLETION)  # as `last_number`, without its call: every answer comes here
    found = _NUMBER.match(tail, at + len(_COMPLETION)) if at >= 0 else None
    return int(found[1]) if found else last_number(tail, b'"output_tokens":')  # of Anthropic's API


def last_number(tail: bytes, name: bytes) -> int | None:
    """The whole number behind the last `name`, which ends in a colon; None if it is missing or cut off."""
    at = tail.rfind(name)
    found = _NUMBER.match(tail, at + len(name)) if at >= 0 else None
    return int(found[1]) if found else None
