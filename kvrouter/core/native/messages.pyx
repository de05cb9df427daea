# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""kvrouter/bus/messages.py's `run_at` in C."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memchr, memcmp

cdef enum:
    MOST_LINE = 4096  # nats-py's MAX_CONTROL_LINE_SIZE
    MOST_DIGITS = 18
    MOST_WORDS = 4

cdef struct Word:
    const char *at
    Py_ssize_t size


cdef inline Py_ssize_t number_of(const Word *word) noexcept:
    """A decimal number; -1: it is none."""
    cdef Py_ssize_t value = 0, i
    if not 0 < word.size <= MOST_DIGITS:
        return -1
    for i in range(word.size):
        if not c'0' <= word.at[i] <= c'9':
            return -1
        value = 10 * value + (word.at[i] - c'0')
    return value


cdef int words_of(const char *at, const char *end, Word *words) noexcept:
    """The words between single spaces, at most MOST_WORDS; 0: an empty one, or more."""
    cdef const char *space
    cdef int count = 0
    while count < MOST_WORDS:
        space = <const char *> memchr(at, c' ', end - at)
        words[count].at, words[count].size = at, (end if space == NULL else space) - at
        if not words[count].size:
            return 0
        count += 1
        if space == NULL:
            return count
        at = space + 1
    return 0


cdef inline const char *line_end(const char *at, const char *end) noexcept:
    """Where the line ends; NULL: not within MOST_LINE."""
    if end - at > MOST_LINE:
        end = at + MOST_LINE
    while at < end:
        at = <const char *> memchr(at, c'\r', end - at)
        if at == NULL or at + 1 >= end:
            return NULL
        if at[1] == c'\n':
            return at
        at += 1
    return NULL


def run_at(bytes data not None, Py_ssize_t start):
    cdef const char *begin = PyBytes_AS_STRING(data)
    cdef const char *end = begin + PyBytes_GET_SIZE(data)
    cdef const char *at = begin + start
    cdef const char *line
    cdef Word words[MOST_WORDS]
    cdef Py_ssize_t sid = -1, found, size, cut_bytes = -1
    cdef int count
    cdef list messages = []
    cdef str last = ""  # mostly the next subject is another one, but a worker's frames come together
    cdef Word last_word
    last_word.at, last_word.size = NULL, 0
    while end - at > 4 and memcmp(at, b"MSG ", 4) == 0:
        line = line_end(at, end)
        count = 0 if line == NULL else words_of(at + 4, line, words)
        if count < 3:
            break
        found, size = number_of(&words[1]), number_of(&words[count - 1])
        if found < 0 or size < 0 or (sid >= 0 and found != sid):
            break
        sid = found
        if size + 2 > end - (line + 2):
            cut_bytes = size
            break
        if words[0].size != last_word.size or memcmp(words[0].at, last_word.at, last_word.size):
            last, last_word = PyUnicode_DecodeUTF8(words[0].at, words[0].size, b"replace"), words[0]
        messages.append((
            last,
            PyBytes_FromStringAndSize(line + 2, size),
            "" if count == 3 else PyUnicode_DecodeUTF8(words[2].at, words[2].size, b"replace"),
        ))
        at = line + 2 + size + 2
    return sid, messages, at - begin, cut_bytes
