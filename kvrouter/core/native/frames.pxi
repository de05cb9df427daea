# Frames of KV feeds (core/wire/ops.py), read where they lie. Only frames of which nothing is odd: Stored on the
# device and Removed, or one Check of the device; no more fields than this version has. All others are left to
# core/feeds/reader.py, which says what a frame means.

cdef enum:
    FRAME_VERSION = 1
    STORED = 1
    REMOVED = 2
    CHECK = 4
    LAST_TIER = 2
    MOST_OPS = 16
    RUN_BYTES = 32 * 1024  # of frames that are applied in one call: up to 1 ms
    PART = 512  # hashes that are copied at a time, since they are not aligned in a frame

cdef int64_t MOST_NUMBER = <int64_t> 1 << 62  # core/wire/values.py

cdef struct Step:
    bint stores
    bint checks
    bint has_parent
    uint64_t parent  # or the digest
    const unsigned char *hashes
    Py_ssize_t count

cdef struct Cursor:
    const unsigned char *at
    Py_ssize_t left


cdef inline const unsigned char *passed(Cursor *cursor, Py_ssize_t size) noexcept:
    """The next bytes; NULL: there are not so many."""
    cdef const unsigned char *at = cursor.at
    if size > cursor.left:
        return NULL
    cursor.at += size
    cursor.left -= size
    return at


cdef inline bint sized(Cursor *cursor, int size, uint64_t *value) noexcept:
    """A big-endian number of `size` bytes."""
    cdef const unsigned char *at = passed(cursor, size)
    cdef int i
    if at == NULL:
        return False
    value[0] = 0
    for i in range(size):
        value[0] = value[0] << 8 | at[i]
    return True


cdef inline bint number_at(Cursor *cursor, uint64_t *value) noexcept:
    """An unsigned number of msgpack."""
    cdef const unsigned char *at = passed(cursor, 1)
    if at == NULL:
        return False
    if at[0] < 0x80:
        value[0] = at[0]
        return True
    return 0xCC <= at[0] <= 0xCF and sized(cursor, 1 << (at[0] - 0xCC), value)


cdef inline bint array_at(Cursor *cursor, uint64_t *count) noexcept:
    """The length of an array of msgpack."""
    cdef const unsigned char *at = passed(cursor, 1)
    if at == NULL:
        return False
    if 0x90 <= at[0] <= 0x9F:
        count[0] = at[0] & 0x0F
        return True
    return 0xDC <= at[0] <= 0xDD and sized(cursor, 2 << (at[0] - 0xDC), count)


cdef inline bint hashes_at(Cursor *cursor, Step *step) noexcept:
    """Whole hashes as bytes of msgpack."""
    cdef const unsigned char *at = passed(cursor, 1)
    cdef uint64_t size
    if at == NULL or not 0xC4 <= at[0] <= 0xC6 or not sized(cursor, 1 << (at[0] - 0xC4), &size) or size & 7:
        return False
    step.hashes, step.count = passed(cursor, size), size >> 3
    return step.hashes != NULL


cdef inline bint op_at(Cursor *cursor, Step *step) noexcept:
    """One op, if it is Stored on the device, Removed, or a Check of the device."""
    cdef uint64_t fields, code, tier
    if not (array_at(cursor, &fields) and fields and number_at(cursor, &code) and number_at(cursor, &tier)):
        return False
    step.stores, step.checks, step.has_parent = code == STORED, code == CHECK, False
    if step.checks:
        step.count = <Py_ssize_t> tier  # where the other ops have their tier
        return fields == 4 and number_at(cursor, &step.parent) and number_at(cursor, &tier) and not tier
    if code == REMOVED:
        return fields == 3 and tier <= LAST_TIER and hashes_at(cursor, step)
    if code != STORED or fields != 4 or tier or not cursor.left:
        return False
    if cursor.at[0] == 0xC0:
        passed(cursor, 1)
    elif number_at(cursor, &step.parent):
        step.has_parent = True
    else:
        return False
    return hashes_at(cursor, step)


cdef int steps_of(bytes frame, int64_t incarnation, int64_t seq, Step *steps) noexcept:
    """The ops of this frame, at most MOST_OPS; -1: it is another one, or one to be read in Python."""
    cdef Cursor cursor
    cdef uint64_t fields, version, found, number, ops, i
    cursor.at, cursor.left = <const unsigned char *> PyBytes_AS_STRING(frame), PyBytes_GET_SIZE(frame)
    if not (array_at(&cursor, &fields) and fields == 4 and number_at(&cursor, &version)):
        return -1
    if version != FRAME_VERSION or not number_at(&cursor, &found) or found != <uint64_t> incarnation:
        return -1
    if seq > MOST_NUMBER or not (number_at(&cursor, &number) and number == <uint64_t> seq and array_at(&cursor, &ops) and ops <= MOST_OPS):
        return -1
    for i in range(ops):
        if not op_at(&cursor, &steps[i]):
            return -1
    return -1 if cursor.left else <int> ops


cdef inline bint names(const Step *step, uint64_t hash_) noexcept:
    """Whether it is one of the op's hashes."""
    cdef uint64_t one
    cdef Py_ssize_t i
    for i in range(step.count):
        memcpy(&one, &step.hashes[8 * i], 8)
        if one == hash_:
            return True
    return False
