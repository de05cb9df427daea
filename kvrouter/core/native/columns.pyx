# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Twin of what core/candidates.py does for each target: overlap where somebody holds something, and costs."""

from cpython cimport array
from cpython.dict cimport PyDict_GetItem
from cpython.float cimport PyFloat_FromDouble
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t

import array

cdef extern from "Python.h":
    int PyDict_Next(object dictionary, Py_ssize_t *at, PyObject **key, PyObject **value)


def reckon_overlap(
    dict places,
    dict cached,
    dict in_flight,
    int64_t most_blocks,
    int64_t block_size,
    array.array own_tokens,
    array.array overlap,
    array.array widest,
    array.array indexed,
):
    """See `_reckon_device` of core/candidates.py."""
    cdef PyObject *target
    cdef PyObject *depth
    cdef PyObject *place
    cdef PyObject *known
    cdef Py_ssize_t at = 0, i, count = len(own_tokens)
    cdef int64_t blocks, held, own
    while PyDict_Next(cached, &at, &target, &depth):
        place = PyDict_GetItem(places, <object> target)
        if place == NULL:
            continue
        i = <object> place
        if not 0 <= i < count:
            raise IndexError("a place that no column has")
        blocks = held = <object> depth
        if in_flight:
            known = PyDict_GetItem(in_flight, <object> target)
            if known != NULL:
                held = max(held, <int64_t> <object> known)
        own = min(held, most_blocks)
        blocks = min(blocks, own)
        own_tokens.data.as_longlongs[i] -= own * block_size
        overlap.data.as_longlongs[i] += own
        widest.data.as_longlongs[i] += own
        indexed.data.as_longlongs[i] += blocks
    at = 0
    while PyDict_Next(in_flight, &at, &target, &depth):
        if PyDict_GetItem(cached, <object> target) != NULL:
            continue
        place = PyDict_GetItem(places, <object> target)
        if place == NULL:
            continue
        i = <object> place
        if not 0 <= i < count:
            raise IndexError("a place that no column has")
        own = min(<int64_t> <object> depth, most_blocks)
        own_tokens.data.as_longlongs[i] -= own * block_size
        overlap.data.as_longlongs[i] += own
        widest.data.as_longlongs[i] += own


def costs(
    double overlap_weight,
    double block_size,
    array.array charged_tokens,
    array.array own_tokens,
    array.array active_blocks,
    array.array own_blocks,
):
    """See `Candidates.costs` of core/candidates.py."""
    cdef Py_ssize_t i, count = len(charged_tokens)
    cdef list found = PyList_New(count)
    cdef double prefill_blocks, decode_blocks
    if not count == len(own_tokens) == len(active_blocks) == len(own_blocks):
        raise ValueError("columns of different lengths")
    for i in range(count):
        prefill_blocks = <double> (charged_tokens.data.as_longlongs[i] + own_tokens.data.as_longlongs[i]) / block_size
        decode_blocks = <double> (active_blocks.data.as_longlongs[i] + own_blocks.data.as_longlongs[i])
        value = PyFloat_FromDouble(overlap_weight * prefill_blocks + decode_blocks)
        Py_INCREF(value)
        PyList_SET_ITEM(found, i, value)
    return found
