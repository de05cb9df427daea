"""What an engine's answer says, found without reading all of it: a refusal and its advice, the usage.

Engines write the usage last: in the event before `[DONE]`, or near the end of the JSON body. The text that a
model generates stands in JSON strings, where a quote is escaped, so it never matches the names searched here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from kvrouter.core.tables.predictions import Usage
from kvrouter.errors import LoopError

_RETRIABLE = frozenset({408, 429})
UNKNOWN_MODEL = 404

# The usage of vLLM and SGLang ends within this much of the body's end.
TAIL_BYTES = 1024
# The usage event, `[DONE]` and the end of the body may each come in a read of its own.
TAIL_READS = 4
# As much is kept of an answer whose text is read later (/v1/responses, for `previous_response_id`).
ANSWER_BYTES = 256 * 1024
ANSWER_READS = 64
# The longest time that a worker may ask to be left alone for.
MOST_REST_S = 300.0
_ADVICE = frozenset({b"retry-after", b"retry-after-ms", b"x-should-retry"})
_RATE_LIMITS = (b"x-ratelimit-", b"anthropic-ratelimit-")
_DECIMAL = re.compile(rb"\d{1,12}(?:\.\d{1,6})?")
_COMPLETION = b'"completion_tokens":'
# A whole number: the delimiter shows that no chunk boundary cuts it.
_NUMBER = re.compile(rb" ?(\d{1,12})[,} \n]")


def is_rejection(status: int, *, serves_model: bool = False) -> bool:
    """Whether another worker may accept the request. Every other 4xx is the client's fault.

    `serves_model`: the worker has announced the model. A 404 then means that it serves another model by now.
    A loop (508) ends here: trying on would send the request round through every other way back.
    """
    if status == LoopError.status:
        return False
    return status >= 500 or status in _RETRIABLE or (serves_model and status == UNKNOWN_MODEL)


def advice_in(headers: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of a refusal that tell when to ask again, for the client. The SDKs read them."""
    return tuple(
        [field for field in headers.items() if field[0] in _ADVICE or field[0].startswith(_RATE_LIMITS)]
    )


def rest_s(advice: Mapping[bytes, bytes], now: float) -> float:
    """How long the worker asks to be left alone, in seconds; 0 if it does not ask for it.

    `now`: seconds since 1970. At most MOST_REST_S: a wrong number or clock must not take a worker away.
    """
    given = advice.get(b"retry-after-ms")
    seconds = _number(given) / 1000 if given is not None else 0.0
    if not seconds and (given := advice.get(b"retry-after")) is not None:
        seconds = _number(given) or seconds_until(given, now)
    return min(max(seconds, 0.0), MOST_REST_S)


def _number(text: bytes) -> float:
    return float(text) if _DECIMAL.fullmatch(text) else 0.0


def seconds_until(date: bytes, now: float) -> float:
    """Until a date of HTTP; 0 if it is none."""
    try:
        return parsedate_to_datetime(date.decode("ascii")).timestamp() - now
    except (ValueError, OverflowError):
        return 0.0


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
