# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""core/routing/candidates.py in C: overlap of the targets that hold blocks of a prompt, and costs of all targets."""

from cpython cimport array
from cpython.float cimport PyFloat_FromDouble
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from libc.math cimport fabs
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import array

cdef extern from *:
    """
    /* at += times * amount; true if that exceeds 64 bits: then `at` is unchanged */
    static inline int overflows(int64_t *at, int64_t times, int64_t amount)
    {
        int64_t product, sum;
        if (__builtin_mul_overflow(times, amount, &product) || __builtin_add_overflow(*at, product, &sum)) return 1;
        *at = sum;
        return 0;
    }
    /* a + b, rounded to a double once, as Python does it */
    static inline double sum_of(int64_t a, int64_t b)
    {
        int64_t sum;
        return __builtin_add_overflow(a, b, &sum) ? (double) ((__int128) a + b) : (double) sum;
    }
    """
    bint overflows(int64_t *, int64_t, int64_t) noexcept
    double sum_of(int64_t, int64_t) noexcept


def reckon_overlap(
    array.array held,
    array.array cached,
    int64_t most_blocks,
    int64_t block_size,
    array.array own_tokens,
    array.array overlap,
    array.array widest,
    array.array indexed,
):
    """See `_reckon_device` of core/routing/candidates.py. Returns the most blocks that any target reuses."""
    cdef int64_t deepest = 0, own
    cdef Py_ssize_t count = len(own_tokens), i
    cdef int64_t *depths = column(held, count)
    cdef int64_t *known = column(cached, count)
    cdef int64_t *tokens = column(own_tokens, count)
    cdef int64_t *columns[3]
    columns[0], columns[1], columns[2] = column(overlap, count), column(widest, count), column(indexed, count)
    for i in range(count):
        if depths[i]:
            own = min(depths[i], most_blocks)
            deepest = max(deepest, reuse(tokens, columns, i, own, min(known[i], own), block_size))
    return deepest


cdef inline int64_t reuse(
    int64_t *tokens, int64_t **columns, Py_ssize_t i, int64_t own, int64_t indexed, int64_t block_size
) except -1:
    """The target reuses `own` blocks of the prompt; returns how many it reuses of all prompts so far."""
    if (
        overflows(&tokens[i], own, -block_size)
        or overflows(&columns[0][i], own, 1)
        or overflows(&columns[1][i], own, 1)
        or overflows(&columns[2][i], indexed, 1)
    ):
        raise OverflowError("a number of tokens or blocks beyond 64 bits")
    return columns[0][i]


cdef double *seconds_column(array.array one, Py_ssize_t count) except? NULL:
    """The seconds of a column, of which there must be `count`."""
    if type(one) is not array.array or one.typecode != "d" or len(one) != count:
        raise ValueError(f"a column must be an array('d') of {count} numbers")
    return one.data.as_doubles


cdef int64_t *column(array.array one, Py_ssize_t count) except? NULL:
    """The numbers of a column, of which there must be `count`."""
    if type(one) is not array.array or one.typecode != "q" or len(one) != count:
        raise ValueError(f"a column must be an array('q') of {count} numbers")
    return <int64_t *> one.data.as_longlongs


def costs(
    double overlap_weight,
    double block_size,
    array.array charged_tokens,
    array.array own_tokens,
    array.array active_blocks,
    array.array own_blocks,
):
    """See `in_blocks` of core/routing/cost.py."""
    cdef Py_ssize_t i, count = len(charged_tokens)
    cdef list found = PyList_New(count)
    cdef int64_t *charged = column(charged_tokens, count)
    cdef int64_t *own = column(own_tokens, count)
    cdef int64_t *active = column(active_blocks, count)
    cdef int64_t *blocks = column(own_blocks, count)
    for i in range(count):
        value = PyFloat_FromDouble(
            overlap_weight * (sum_of(charged[i], own[i]) / block_size) + sum_of(active[i], blocks[i])
        )
        Py_INCREF(value)
        PyList_SET_ITEM(found, i, value)
    return found


cdef double median_low(const double *values, Py_ssize_t count) except? -1:
    """The lower median, by quickselect (Hoare): sorting 512 values costs more than all else in `cost_s`."""
    cdef Py_ssize_t low = 0, high = count - 1, wanted = (count - 1) // 2, i, j
    cdef double pivot, swap
    cdef double *rest = <double *> malloc(count * sizeof(double))
    if rest == NULL:
        raise MemoryError()
    memcpy(rest, values, count * sizeof(double))
    while low < high:
        pivot = rest[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while rest[i] < pivot:
                i += 1
            while pivot < rest[j]:
                j -= 1
            if i <= j:
                swap = rest[i]
                rest[i] = rest[j]
                rest[j] = swap
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    pivot = rest[wanted]
    free(rest)
    return pivot


def cost_s(
    double now,
    double fixed_s,
    double seconds_per_token,
    double arrivals_per_s,
    double context_slope,
    double least_left,
    double most_gamma,
    array.array charged_tokens,
    array.array unfinished,
    array.array head_tokens,
    array.array context_tokens,
    array.array began_at,
    array.array own_tokens,
):
    """See `in_seconds` of core/routing/cost.py. Returns `(cost_s, wait_s, own_s, gamma, earliest_s)`."""
    cdef Py_ssize_t i, count = len(charged_tokens)
    cdef int64_t *charged = column(charged_tokens, count)
    cdef int64_t *prompts = column(unfinished, count)
    cdef int64_t *heads = column(head_tokens, count)
    cdef int64_t *context = column(context_tokens, count)
    cdef int64_t *own = column(own_tokens, count)
    cdef double *began = seconds_column(began_at, count)
    cdef array.array wait_s = array.clone(began_at, count, zero=False)
    cdef array.array own_s = array.clone(began_at, count, zero=False)
    cdef double *waits = wait_s.data.as_doubles
    cdef double *owns = own_s.data.as_doubles
    cdef double per_token, expected, left, gamma, earliest
    cdef list found = PyList_New(count)
    if not count:
        raise ValueError("no target")
    for i in range(count):
        per_token = seconds_per_token * (1 + context_slope * context[i])
        owns[i] = fixed_s + own[i] * per_token
        if charged[i] <= 0:
            waits[i] = 0
            continue
        expected = fixed_s + heads[i] * per_token
        left = fabs(expected - (now - began[i]))
        left = max(left, least_left * expected)
        waits[i] = left + (charged[i] - heads[i]) * per_token + (prompts[i] - 1) * fixed_s
    gamma = min(most_gamma, arrivals_per_s / count * median_low(waits, count))
    earliest = waits[0] + owns[0]
    for i in range(count):
        earliest = min(earliest, waits[i] + owns[i])
        value = PyFloat_FromDouble(waits[i] + owns[i] * (1 + gamma))
        Py_INCREF(value)
        PyList_SET_ITEM(found, i, value)
    return found, wait_s, own_s, gamma, earliest


def next_copies(
    array.array overlap_blocks, array.array wait_s, array.array own_s, double most_holders, double equal_within
):
    """See core/routing/cost.py."""
    cdef Py_ssize_t i, count = len(overlap_blocks), holders = 0
    cdef int64_t *overlap = column(overlap_blocks, count)
    cdef double *waits = seconds_column(wait_s, count)
    cdef double *owns = seconds_column(own_s, count)
    cdef int64_t deepest = 0
    cdef double least = 0, seconds
    cdef bint has_any = False
    cdef list ties = []
    for i in range(count):
        deepest = max(deepest, overlap[i])
    for i in range(count):
        if overlap[i] == deepest:
            holders += 1
            continue
        seconds = waits[i] + owns[i]
        if not has_any or seconds < least:
            least = seconds
            has_any = True
    if not has_any or holders >= most_holders:
        return ties
    for i in range(count):
        seconds = waits[i] + owns[i]
        if overlap[i] < deepest and seconds - least <= equal_within * max(fabs(seconds), fabs(least)):
            ties.append(i)
    return ties
