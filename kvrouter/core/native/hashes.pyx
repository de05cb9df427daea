# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""core/wire/hashes.py in C: XXH3-64 over tokens, and the chain over its values.

Tokens may be any sequence of numbers. A list is read item by item; an array('I') is used without a copy.
"""

from cpython cimport array
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsUnsignedLongLong
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

import array

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "written for little-endian machines; others use the Python version"
    #endif
    #define XXH_INLINE_ALL
    #include "xxhash.h"
    """
    uint64_t XXH3_64bits_withSeed(const void *data, size_t length, uint64_t seed) noexcept

cdef extern from "Python.h":
    object PyLong_FromUnsignedLongLong(unsigned long long value)

cdef uint64_t CHAIN_SEED = 1337
cdef array.array _TOKENS = array.array("I")
cdef array.array _HASHES = array.array("Q")


def block_hashes(tokens, Py_ssize_t block_size, uint64_t seed):
    """The hash of each full block, as a list."""
    cdef array.array held = _tokens(tokens, block_size)
    cdef Py_ssize_t count = len(held) // block_size
    cdef list hashes = PyList_New(count)
    cdef const uint32_t *at = held.data.as_uints
    cdef Py_ssize_t i
    for i in range(count):
        value = PyLong_FromUnsignedLongLong(XXH3_64bits_withSeed(at, block_size * 4, seed))
        Py_INCREF(value)
        PyList_SET_ITEM(hashes, i, value)
        at += block_size
    return hashes


def sequence_hashes(hashes, parent):
    """Chain block hashes below `parent` (None: at a root), as a list."""
    cdef list blocks = hashes if type(hashes) is list else list(hashes)
    cdef Py_ssize_t count = PyList_GET_SIZE(blocks), i
    cdef list chain = PyList_New(count)
    cdef uint64_t[2] pair = [0, 0]
    cdef bint is_root = parent is None
    if not is_root:
        pair[0] = parent
    for i in range(count):
        pair[1] = PyLong_AsUnsignedLongLong(<object> PyList_GET_ITEM(blocks, i))
        pair[0] = pair[1] if is_root else XXH3_64bits_withSeed(pair, 16, CHAIN_SEED)
        is_root = False
        value = PyLong_FromUnsignedLongLong(pair[0])
        Py_INCREF(value)
        PyList_SET_ITEM(chain, i, value)
    return chain


def chain_of(array.array blocks not None):
    """`sequence_hashes` at a root, of an array('Q') in another one."""
    if type(blocks) is not array.array or blocks.typecode != "Q":
        raise ValueError("blocks must be an array('Q')")
    cdef Py_ssize_t count = len(blocks), i
    cdef array.array chain = blocks[:]
    cdef uint64_t *at = <uint64_t *> chain.data.as_ulonglongs
    cdef uint64_t[2] pair
    for i in range(1, count):
        pair[0], pair[1] = at[i - 1], at[i]
        at[i] = XXH3_64bits_withSeed(pair, 16, CHAIN_SEED)
    return chain


def prompt_hashes(tokens, Py_ssize_t block_size, uint64_t seed, array.array known not None):
    """The sequence hashes of a prompt, as an array('Q'). `known`: those of its first blocks."""
    cdef array.array held = _tokens(tokens, block_size)
    cdef Py_ssize_t count = len(held) // block_size, done = len(known)
    if type(known) is not array.array or known.typecode != "Q" or done > count:
        raise ValueError("known must be an array('Q'): the hashes of the prompt's first blocks")
    cdef array.array chain = array.clone(_HASHES, count, zero=False)
    cdef const uint32_t *at = held.data.as_uints + done * block_size
    cdef uint64_t *out = <uint64_t *> chain.data.as_ulonglongs
    cdef uint64_t[2] pair = [0, 0]
    cdef Py_ssize_t i
    if done:
        memcpy(out, known.data.as_ulonglongs, done * 8)
        pair[0] = out[done - 1]
    for i in range(done, count):
        pair[1] = XXH3_64bits_withSeed(at, block_size * 4, seed)
        pair[0] = XXH3_64bits_withSeed(pair, 16, CHAIN_SEED) if i else pair[1]
        out[i] = pair[0]
        at += block_size
    return chain


def sampled_hashes(hashes, uint64_t mask):
    """The hashes that are 0 in all bits of `mask`, as a list."""
    cdef array.array held
    if type(hashes) is array.array and (<array.array> hashes).typecode == "Q":  # a subclass may return a wrong length
        held = hashes
    else:
        held = array.array("Q", hashes)
    cdef const uint64_t *at = <const uint64_t *> held.data.as_ulonglongs
    cdef list found = []
    cdef Py_ssize_t i
    for i in range(len(held)):
        if not at[i] & mask:
            found.append(PyLong_FromUnsignedLongLong(at[i]))
    return found


cdef array.array _tokens(object tokens, Py_ssize_t block_size):
    """The tokens as an array('I'). Raises what array('I', …) raises for a value that is not a token id."""
    if block_size < 1:
        raise ValueError(f"block size {block_size}: use 1 or more")  # C division by 0 ends the process
    if type(tokens) is array.array and (<array.array> tokens).typecode == "I":
        return tokens
    if type(tokens) is not list:
        return array.array("I", tokens)
    cdef list listed = tokens
    cdef Py_ssize_t count = PyList_GET_SIZE(listed), i
    cdef array.array held = array.clone(_TOKENS, count, zero=False)
    cdef uint32_t *out = <uint32_t *> held.data.as_uints
    try:
        for i in range(count):
            one = <object> PyList_GET_ITEM(listed, i)
            if not isinstance(one, int):
                return array.array("I", tokens)  # converts by __index__, or raises an error with the reason
            out[i] = one  # reads a small number's digit without a call
    except OverflowError:
        return array.array("I", tokens)
    return held
