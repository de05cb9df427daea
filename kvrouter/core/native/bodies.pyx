# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""bodies/scan.py in C: what a large JSON body is made of, and its token ids."""

from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memchr

import array

cdef array.array _TOKENS = array.array("I")
cdef array.array _HASHES = array.array("Q")
cdef uint64_t _LEAST = <uint64_t> 1 << 63  # of a signed number, without its sign

cdef enum:
    OUTSIDE, STRING, AFTER_STRING, IDS


cdef inline bint is_space(unsigned char c) noexcept:
    return c == 32 or (9 <= c <= 13 and c != 11 and c != 12)


cdef class Scan:
    """See bodies/scan.py."""

    cdef readonly Py_ssize_t values
    cdef readonly list ids, strings, members, cuts
    cdef bytes _body
    cdef const unsigned char *_text
    cdef Py_ssize_t _size, _at, _begin, _end, _depth
    cdef Py_ssize_t _commas, _member_at, _member_values, _cut_at, _cut_values
    cdef Py_ssize_t _long_bytes, _group_bytes, _group_values, _least_ids
    cdef int _state
    cdef bint _has_digits

    def __init__(self, bytes body not None, limits):
        self._body = body
        self._text = <const unsigned char *> PyBytes_AS_STRING(body)
        self._size = PyBytes_GET_SIZE(body)
        self._long_bytes, self._least_ids, self._group_bytes, self._group_values = limits
        self._state = OUTSIDE
        self.ids, self.strings, self.members, self.cuts = [], [], [], []

    def step(self, Py_ssize_t most):
        """Read `most` more bytes; returns whether there are more."""
        cdef Py_ssize_t stop = min(self._at + most, self._size)
        while self._at < stop:
            if self._state == STRING:
                self._in_string(stop)
            elif self._state == IDS:
                self._in_ids(stop)
            elif self._state == AFTER_STRING:
                self._after_string()
            else:
                self._outside(stop)
        if self._at < self._size:
            return True
        if self._state == AFTER_STRING:
            self.strings.append((self._begin, self._end))
            self._state = OUTSIDE
        return False

    cdef void _in_string(self, Py_ssize_t stop) except *:
        cdef const unsigned char *found
        cdef Py_ssize_t at, back
        found = <const unsigned char *> memchr(self._text + self._at, 34, stop - self._at)
        if found == NULL:
            self._at = stop
            return
        at = back = found - self._text
        while back > self._begin and self._text[back - 1] == 92:
            back -= 1
        self._at = at + 1
        if (at - back) & 1:
            return  # an escaped quote
        self._state = OUTSIDE
        if at - self._begin >= self._long_bytes:
            self._end, self._state = at, AFTER_STRING

    cdef void _after_string(self) except *:
        cdef unsigned char c = self._text[self._at]
        if is_space(c):
            self._at += 1
            return
        if c != 58:  # else it is the name of a field
            self.strings.append((self._begin, self._end))
        self._state = OUTSIDE

    cdef void _in_ids(self, Py_ssize_t stop) except *:
        cdef const unsigned char *text = self._text
        cdef Py_ssize_t at = self._at, commas = self._commas
        cdef bint has_digits = self._has_digits
        cdef unsigned char c
        while at < stop:
            c = text[at]
            if 48 <= c <= 57:
                has_digits = True
            elif c == 44:
                commas += 1
            elif not is_space(c):
                break
            at += 1
        self._at, self._commas, self._has_digits = at, commas, has_digits
        if at == stop and stop < self._size:
            return
        self._state = OUTSIDE
        if at < self._size and text[at] == 93 and has_digits and at - self._begin >= self._least_ids:
            self.ids.append((self._begin, at, commas + 1))
        else:
            self.values += commas

    cdef void _outside(self, Py_ssize_t stop) except *:
        cdef const unsigned char *text = self._text
        cdef Py_ssize_t at = self._at
        cdef unsigned char c
        while at < stop:
            c = text[at]
            at += 1
            if c == 34:
                self.values += 1
                self._begin, self._state = at, STRING
                break
            if c == 44:
                self.values += 1
                if self._depth == 1:
                    self._member(at - 1, at)
                elif self._depth == 2:
                    self._cut(at - 1)
            elif c == 91 or c == 123:
                self.values += 1
                self._depth += 1
                if self._depth == 1:
                    self._member_at, self._member_values = at, self.values
                elif self._depth == 2:
                    self._cut_at, self._cut_values = at, self.values
                if c == 91:
                    self._begin, self._commas, self._has_digits, self._state = at, 0, False, IDS
                    break
            elif c == 93 or c == 125:
                if self._depth == 1:
                    self._member(at - 1, at)
                self._depth -= 1
        self._at = at

    cdef void _member(self, Py_ssize_t end, Py_ssize_t after) except *:
        if end - self._member_at >= self._long_bytes:
            self.members.append((self._member_at, end, self.values - self._member_values))
        self._member_at, self._member_values = after, self.values

    cdef void _cut(self, Py_ssize_t at) except *:
        cdef Py_ssize_t values = self.values - self._cut_values
        if at - self._cut_at >= self._group_bytes or values >= self._group_values:
            self.cuts.append((at, values))
            self._cut_at, self._cut_values = at + 1, self.values


def read_ids(bytes body not None, Py_ssize_t start, Py_ssize_t end):
    """The token ids of a part of a list of ids, as an array('I'); None if it is no such part."""
    return numbers(body, start, end, _TOKENS, 0xFFFFFFFF, False)


def read_hashes(bytes body not None, Py_ssize_t start, Py_ssize_t end):
    """The hashes of a part of a list, as an array('Q'): those below 0 are signed. None if it is no such part."""
    return numbers(body, start, end, _HASHES, 0xFFFFFFFFFFFFFFFF, True)


cdef array.array numbers(
    bytes body, Py_ssize_t start, Py_ssize_t end, array.array kind, uint64_t most, bint may_be_signed
):
    cdef const unsigned char *text = <const unsigned char *> PyBytes_AS_STRING(body)
    cdef Py_ssize_t at = start, count = 0, first
    cdef uint64_t value, digit
    cdef bint is_below, is_short = kind.itemsize == 4
    if not 0 <= start < end <= PyBytes_GET_SIZE(body):
        return None
    cdef array.array found = array.clone(kind, (end - start + 1) // 2, zero=False)
    while True:
        while at < end and is_space(text[at]):
            at += 1
        is_below = may_be_signed and at < end and text[at] == 45
        at += is_below
        first, value = at, 0
        while at < end and 48 <= text[at] <= 57:
            digit = text[at] - 48
            if value > (most - digit) // 10:
                return None
            value = value * 10 + digit
            at += 1
        if at == first or (text[first] == 48 and at - first > 1) or (is_below and value > _LEAST):
            return None
        if is_short:
            found.data.as_uints[count] = <unsigned int> value
        else:
            found.data.as_ulonglongs[count] = 0 - value if is_below else value
        count += 1
        while at < end and is_space(text[at]):
            at += 1
        if at == end:
            break
        if text[at] != 44:
            return None
        at += 1
    array.resize(found, count)
    return found
