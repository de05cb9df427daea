"""The usage at the end of an answer, found without reading the answer.

Engines write it last: in the event before `[DONE]`, or near the end of the JSON body. What a model says
stands in JSON strings, where a quote is escaped; so it cannot be mistaken for the names looked for here.
"""

from __future__ import annotations

import re

from kvrouter.core.tables.predictions import Usage

TAIL_BYTES = 1024
TAIL_READS = 4
"""The usage event, `[DONE]` and the end of the body may come in reads of their own."""

_NUMBER = re.compile(rb" ?(\d{1,12})[,} \n]")
"""A number that is whole: no chunk ends within it."""


def find_usage(tail: bytes) -> Usage:
    """What the last usage in these bytes says; None where there is none, or only a part of it."""
    return Usage(_last_number(tail, b'"prompt_tokens":'), _last_number(tail, b'"cached_tokens":'))


def _last_number(tail: bytes, name: bytes) -> int | None:
    at = tail.rfind(name)
    found = _NUMBER.match(tail, at + len(name)) if at >= 0 else None
    return int(found[1]) if found else None
