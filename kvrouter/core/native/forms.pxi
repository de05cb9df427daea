# The types in which hashes arrive: packed bytes, array('Q'), a list, or any other sequence of numbers.

cdef struct Chain:
    const uint64_t *data
    void *listed
    Py_ssize_t count


cdef inline uint64_t nth(const Chain *chain, Py_ssize_t i) except? 0:
    if chain.data != NULL:
        return chain.data[i]
    return PyLong_AsUnsignedLongLong(<object> PyList_GET_ITEM(<object> chain.listed, i))


cdef object chained(object hashes, Chain *chain):
    """Fill `chain` without a copy of a list: few of its numbers are read. The result must outlive the chain."""
    if type(hashes) is list and (not hashes or isinstance(<object> PyList_GET_ITEM(hashes, 0), int)):
        chain.data, chain.listed, chain.count = NULL, <void *> hashes, PyList_GET_SIZE(hashes)
        return hashes
    return viewed(hashes, &chain.data, &chain.count)


cdef object viewed(object hashes, const uint64_t **data, Py_ssize_t *count):
    """Point `data` to the hashes. The result must outlive the pointer."""
    cdef array.array made
    cdef Py_ssize_t i
    if type(hashes) is bytes:
        if PyBytes_GET_SIZE(hashes) & 7:
            raise ValueError("bytes length not a multiple of 8: hashes are packed u64")
        data[0], count[0] = <const uint64_t *> PyBytes_AS_STRING(hashes), PyBytes_GET_SIZE(hashes) >> 3
        return hashes
    if type(hashes) is array.array and (<array.array> hashes).typecode == "Q":  # a subclass may return a wrong length
        made = hashes
    elif type(hashes) is list:
        made = array.clone(_HASHES, PyList_GET_SIZE(hashes), zero=False)
        for i in range(PyList_GET_SIZE(hashes)):
            if not isinstance(<object> PyList_GET_ITEM(hashes, i), int):
                return viewed(array.array("Q", hashes), data, count)  # converts numpy's numbers, or raises
            made.data.as_ulonglongs[i] = PyLong_AsUnsignedLongLong(<object> PyList_GET_ITEM(hashes, i))
    elif isinstance(hashes, (bytearray, memoryview)):
        return viewed(bytes(hashes), data, count)
    else:
        made = array.array("Q", hashes)
    data[0], count[0] = <const uint64_t *> made.data.as_ulonglongs, len(made)
    return made
