"""What a large JSON body is made of: long strings, long lists of token ids, large fields.

    {"model": "m", "prompt": [15, 22, …], "messages": [{"content": "long …"}, {…}, …]}
                  │           └ ids ──┘ │            │               └ string ┘   ^ cut
                  └────── member ───────┘            └────────── member ──────────────┘

It is found in slices. In a body that is no valid JSON it is of no use, and the parser of the rest raises an
error. core/native/bodies.pyx is the same in C: a nanosecond a byte, and nearly nothing for text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from typing import Protocol, TypeAlias, cast

import msgspec

from kvrouter.core.native import versions
from kvrouter.core.wire.values import TokenId
from kvrouter.errors import BadRequestError

# Strings and fields of fewer bytes stay where they are: filling a hole takes as long as decoding this much.
LONG_BYTES = 32 * 1024
LEAST_IDS_BYTES = 200
# A field's items are decoded in groups of about this much.
GROUP_BYTES = 32 * 1024
GROUP_VALUES = 2048
LIMITS = (LONG_BYTES, LEAST_IDS_BYTES, GROUP_BYTES, GROUP_VALUES)

_MARK = re.compile(rb'["\[\]{},]')
_IDS = re.compile(rb"[\d \t\r\n,]*+")
_SPACE = re.compile(rb"[ \t\r\n]*+")
_DIGIT = re.compile(rb"\d")
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode
_decode_hashes = msgspec.json.Decoder(list[int]).decode
_MOST_HASH = (1 << 64) - 1

Place: TypeAlias = tuple[int, int, int]


class Scan(Protocol):
    values: int
    """Strings, lists, objects and commas outside of strings and of `ids`: at least as many as JSON values."""
    ids: list[Place]
    """Start, end and number of ids of the long lists of ids, without their brackets."""
    strings: list[tuple[int, int]]
    """Start and end of the long strings that are no names of fields, without their quotes."""
    members: list[Place]
    """Start, end and values of the large fields of the body, from name to value."""
    cuts: list[tuple[int, int]]
    """Commas between the items of a field, some GROUP_BYTES or GROUP_VALUES apart, and the values between."""

    def step(self, most: int) -> bool:
        """Read `most` more bytes; returns whether there are more."""
        ...


class PythonScan:
    """See Scan."""

    def __init__(self, body: bytes, limits: tuple[int, int, int, int]) -> None:
        self.values = 0
        self.ids: list[Place] = []
        self.strings: list[tuple[int, int]] = []
        self.members: list[Place] = []
        self.cuts: list[tuple[int, int]] = []
        self._long_bytes, self._least_ids, self._group_bytes, self._group_values = limits
        self._body = body
        self._at = self._begin = self._end = self._depth = 0
        self._member_at = self._member_values = self._cut_at = self._cut_values = 0
        self._read: Callable[[int], None] = self._outside

    def step(self, most: int) -> bool:
        stop = min(self._at + most, len(self._body))
        while self._at < stop:
            self._read(stop)
        if self._at < len(self._body):
            return True
        if self._read == self._after_string:
            self.strings.append((self._begin, self._end))
            self._read = self._outside
        return False

    def _in_string(self, stop: int) -> None:
        at = back = self._body.find(b'"', self._at, stop)
        if at < 0:
            self._at = stop
            return
        while back > self._begin and self._body[back - 1] == ord("\\"):
            back -= 1
        self._at = at + 1
        if (at - back) % 2:
            return  # an escaped quote
        is_long = at - self._begin >= self._long_bytes
        self._end, self._read = at, self._after_string if is_long else self._outside

    def _after_string(self, stop: int) -> None:
        found = _SPACE.match(self._body, self._at, stop)
        self._at = found.end() if found is not None else self._at
        if self._at < stop:
            if self._body[self._at] != ord(":"):  # else it is the name of a field
                self.strings.append((self._begin, self._end))
            self._read = self._outside

    def _in_ids(self, stop: int) -> None:
        found = _IDS.match(self._body, self._at, stop)
        self._at = at = found.end() if found is not None else self._at
        if at == stop and stop < len(self._body):
            return
        self._read = self._outside
        commas = self._body.count(b",", self._begin, at)
        is_long = self._body[at : at + 1] == b"]" and at - self._begin >= self._least_ids
        if is_long and _DIGIT.search(self._body, self._begin, at):
            self.ids.append((self._begin, at, commas + 1))
        else:
            self.values += commas

    def _outside(self, stop: int) -> None:
        found = _MARK.search(self._body, self._at, stop)
        self._at = at = found.end() if found is not None else stop
        match found[0] if found is not None else b"":
            case b'"':
                self.values += 1
                self._begin, self._read = at, self._in_string
            case b",":
                self.values += 1
                if self._depth == 1:
                    self._member(at - 1, at)
                elif self._depth == 2:
                    self._cut(at - 1)
            case b"[" | b"{" as mark:
                self.values += 1
                self._depth += 1
                if self._depth == 1:
                    self._member_at, self._member_values = at, self.values
                elif self._depth == 2:
                    self._cut_at, self._cut_values = at, self.values
                if mark == b"[":
                    self._begin, self._read = at, self._in_ids
            case b"]" | b"}":
                if self._depth == 1:
                    self._member(at - 1, at)
                self._depth -= 1

    def _member(self, end: int, after: int) -> None:
        if end - self._member_at >= self._long_bytes:
            self.members.append((self._member_at, end, self.values - self._member_values))
        self._member_at, self._member_values = after, self.values

    def _cut(self, at: int) -> None:
        values = self.values - self._cut_values
        if at - self._cut_at >= self._group_bytes or values >= self._group_values:
            self.cuts.append((at, values))
            self._cut_at, self._cut_values = at + 1, self.values


def new_scan(body: bytes) -> Scan:
    native = versions.chosen.bodies
    return PythonScan(body, LIMITS) if native is None else cast("Scan", native.Scan(body, LIMITS))


def read_hashes(body: bytes, start: int, end: int) -> array[int]:
    """Numbers of 64 bits, signed or not, of a part of a list. Raises ValueError, of msgspec, too."""
    native = versions.chosen.bodies
    found = None if native is None else native.read_hashes(body, start, end)
    if found is not None:
        return cast("array[int]", found)
    hashes = _decode_hashes(b"[%b]" % body[start:end])
    if not all(-(1 << 63) <= one <= _MOST_HASH for one in hashes):
        raise ValueError("a hash is a number of 64 bits")
    return array("Q", [one & _MOST_HASH for one in hashes])


def read_ids(body: bytes, start: int, end: int) -> array[int]:
    """The token ids of a part of a list, between two commas. Raises BadRequestError."""
    native = versions.chosen.bodies
    found = None if native is None else native.read_ids(body, start, end)
    if found is not None:
        return cast("array[int]", found)
    try:
        return array("I", _decode_ids(b"[%b]" % body[start:end]))
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error), param="prompt") from error
    except msgspec.DecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
