# cython: language_level=3, boundscheck=False, wraparound=False
"""Streams that have committed, passed on from a worker's socket to its client's.

    Python ──add──> recv → look → send, again and again
       ^               │
       └─ returned ────┴── the end of the body, an error in it, a ping, framing that is not plain;
                           a client that is slow or gone; the worker's end

Each read is one write, as in Python. Nothing is kept but the last bytes: a read that is not plain, or that
could not be sent as a whole, goes back with the stream. The sockets stay those of the transports in Python.
That of the worker must be paused there, and nothing may be written to that of the client. Both must stay open
until the stream has returned or was stopped.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcmp, memcpy, memmove

cdef extern from "<time.h>" nogil:
    cdef struct timespec:
        long tv_sec, tv_nsec
    int clock_gettime(int, timespec *)
    int CLOCK_MONOTONIC

cdef extern from "<unistd.h>" nogil:
    int c_close "close"(int)

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int, void *, size_t, int)
    ssize_t send(int, const void *, size_t, int)
    int MSG_NOSIGNAL

cdef extern from "<sys/epoll.h>" nogil:
    cdef union epoll_data:
        void *ptr
    cdef struct epoll_event:
        unsigned int events
        epoll_data data
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event *)
    int epoll_wait(int, epoll_event *, int, int)
    int EPOLLIN, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CLOEXEC

cdef enum:
    # Bytes of a read, as many as asyncio reads at once.
    BUFFER = 65536
    # Kept of what was passed on: the usage and the finish reason are there (TAIL_BYTES in engine_answers.py).
    TAIL = 2048
    # Streams of a turn of the loop: with full buffers 4 MB.
    READY = 64
    # A longer chunk is not an event.
    MOST_CHUNK = 1 << 24
    # Of the records of all streams (RECORDS_BYTES in seam.py).
    RECORDS = 256 * 1024 * 1024
    # Bytes of `"abort"`, `"error"` and `"ERROR"`.
    WORD = 7
    # Bytes of a chunk that are looked at with those of the next one: `event: error` may be cut in two.
    NEAR = 12

    # The first block of a record; each further one is twice as long as the one before, up to the last.
    FIRST_BLOCK = 4096
    LAST_BLOCK = 65536

# Of a record: it grows without being copied.
cdef struct Block:
    Block *before
    Py_ssize_t used, room

# What the records of all streams take.
cdef Py_ssize_t _recorded = 0
# One for the process: a step reads and sends without anything in between.
cdef char _buffer[BUFFER]


cdef class Stream:
    """One answer on its way. What stands here is read once it has returned or was stopped."""

    cdef int worker, client
    cdef StreamLoop loop
    cdef object returned
    cdef readonly long events
    """Events with data that were passed on."""
    cdef readonly Py_ssize_t left
    """Bytes of the current chunk still to come, its line end included; 0: the next byte begins one."""
    cdef readonly double active_at
    """When an event was passed on last, in seconds of the monotonic clock, as the loop's."""
    cdef readonly bytes received, unsent
    """What has arrived and was not passed on, and what was passed on and the client did not take."""
    cdef bytes held
    """Of a stream that may move: the beginning of an event, until its end has arrived."""
    cdef readonly int error
    """The errno of the worker's socket; 0: none."""
    cdef int tail_bytes
    cdef char _tail[2 * TAIL]
    # Of a stream that may move to another worker (seam.py): all that was passed on.
    cdef Block *_last
    cdef Py_ssize_t most
    cdef readonly Py_ssize_t recorded
    cdef readonly bint is_over
    """Whether it was more than `most` bytes, or than there is room for: then no record is kept."""

    def tail(self):
        """The last bytes that were passed on: of the record, if there is one."""
        return self.end(TAIL) if self._last != NULL else self._tail[:self.tail_bytes]

    def record(self):
        """All that was passed on, if that was asked for."""
        return self.end(self.recorded)

    cdef bytes end(self, Py_ssize_t size):
        """The last bytes of the record."""
        cdef Block *block = self._last
        cdef list parts = []
        while block != NULL and size > 0:
            parts.append((<char *>(block + 1))[max(0, block.used - size):block.used])
            size -= block.used
            block = block.before
        parts.reverse()
        return b"".join(parts)

    cdef void note(self, const char *data, Py_ssize_t size) noexcept nogil:
        """Add to the record."""
        cdef Block *block = self._last
        if block == NULL or block.used + size > block.room:
            block = self.grow(size)
            if block == NULL:
                self.keep(data, size)
                return
        memcpy(<char *>(block + 1) + block.used, data, size)
        block.used += size
        self.recorded += size

    cdef Block *grow(self, Py_ssize_t size) noexcept nogil:
        """A new block for the record; NULL: it is over."""
        global _recorded
        cdef Block *block = NULL
        cdef Py_ssize_t room = FIRST_BLOCK
        if self._last != NULL:
            room = min(2 * self._last.room, LAST_BLOCK)
        room = max(room, size)
        if self.recorded + size <= self.most and _recorded + room <= RECORDS:
            block = <Block *>malloc(sizeof(Block) + room)
        if block == NULL:
            if self._last != NULL:
                self.keep(<char *>(self._last + 1), self._last.used)
            self.forget()
            self.is_over = True
            return NULL
        _recorded += room
        block.before, block.used, block.room = self._last, 0, room
        self._last = block
        return block

    cdef void forget(self) noexcept nogil:
        """Drop the record."""
        global _recorded
        cdef Block *block
        while self._last != NULL:
            block = self._last
            self._last = block.before
            _recorded -= block.room
            free(block)
        self.recorded = 0

    def __dealloc__(self):
        self.forget()

    def stop(self):
        """Pass on nothing more. Does nothing if it has returned."""
        if self.loop is not None:
            self.loop.drop(self)

    cdef void keep(self, const char *data, Py_ssize_t size) noexcept nogil:
        if size >= TAIL:
            memcpy(self._tail, data + size - TAIL, TAIL)
            self.tail_bytes = TAIL
            return
        if self.tail_bytes + size > 2 * TAIL:
            memmove(self._tail, self._tail + self.tail_bytes - TAIL, TAIL)
            self.tail_bytes = TAIL
        memcpy(self._tail + self.tail_bytes, data, size)
        self.tail_bytes += <int>size


cdef bint _is_ping(const char *content, Py_ssize_t size) noexcept nogil:
    """Whether a chunk shows only that the connection is open (_PINGS in exchange.py)."""
    return (size >= 11 and memcmp(content, b"event: ping", 11) == 0) or (
        size >= 16 and memcmp(content, b"event: keepalive", 16) == 0
    )


cdef bint _ends_event(const char *last, Py_ssize_t size) noexcept nogil:
    """Whether an event ends with these bytes of its content (_ENDS in seam.py)."""
    return (
        (size > 1 and memcmp(last + size - 2, b"\n\n", 2) == 0)
        or (size > 2 and memcmp(last + size - 3, b"\n\r\n", 3) == 0)
        or (size > 1 and memcmp(last + size - 2, b"\r\r", 2) == 0)
    )


cdef bint _has_end(const char *data, Py_ssize_t size) noexcept nogil:
    """Whether an event ends within these bytes."""
    cdef Py_ssize_t at
    for at in range(1, size):
        if data[at] == data[at - 1] and (data[at] == 10 or data[at] == 13):
            return True
        if data[at] == 10 and data[at - 1] == 13 and at > 1 and data[at - 2] == 10:
            return True
    return False


cdef Py_ssize_t _last_word(char *near, Py_ssize_t kept, const char *data, Py_ssize_t size) noexcept nogil:
    """Keep the last bytes, up to NEAR, of the `kept` ones and these; how many."""
    cdef Py_ssize_t old = max(0, min(kept, NEAR - size)), new = min(size, NEAR)
    memmove(near, near + kept - old, old)
    memcpy(near + old, data + size - new, new)
    return old + new


cdef Py_ssize_t _past_chunks(
    const char *data, Py_ssize_t size, Py_ssize_t left, Py_ssize_t *whole
) noexcept nogil:
    """How much is left of the last chunk behind these bytes, which begin with `left` of one; -1: not plain.

    `whole`, if it is not NULL: where the last chunk ends that ends an event. Then the bytes may end anywhere.
    """
    cdef Py_ssize_t at = left, chunk, got, kept = 0
    cdef int digit
    cdef char near[2 * NEAR]
    while at < size:
        chunk = 0
        while True:
            if at >= size and whole != NULL:
                return 1
            if at >= size or chunk > MOST_CHUNK:
                return -1
            digit = data[at]
            at += 1
            if 48 <= digit <= 57:
                chunk = chunk * 16 + digit - 48
            elif 97 <= digit <= 102:
                chunk = chunk * 16 + digit - 87
            elif 65 <= digit <= 70:
                chunk = chunk * 16 + digit - 55
            else:
                break
        if chunk and digit == 13 and at == size and whole != NULL:
            return 1
        if chunk == 0 or digit != 13 or at >= size or data[at] != 10:
            return -1
        at += 1
        if _is_ping(data + at, size - at):
            return -1
        if whole != NULL and not kept and at + chunk + 2 <= size and _ends_event(data + at, chunk):
            whole[0] = at + chunk + 2  # nearly always
        elif whole != NULL:
            got = min(chunk, size - at)
            if kept:  # amid an event: the word of a failure may be in several chunks
                memcpy(near + kept, data + at, min(got, NEAR))
                if _names_failure(near, kept + min(got, NEAR)):
                    return -1
                if _has_end(near, kept + (NEAR if got > NEAR else got - 1)):
                    return -1
            kept = _last_word(near, kept, data + at, got)
            if at + chunk + 2 <= size and _ends_event(near, kept):
                whole[0], kept = at + chunk + 2, 0
            elif _has_end(data + at, got - 1):  # an event has ended amid the chunk, and must not wait
                return -1
        at += chunk + 2
    return at - size


cdef long _data_lines(const char *data, Py_ssize_t size) noexcept nogil:
    cdef const char *end = data + size
    cdef const char *at = data
    cdef long found = 0
    while True:
        at = <const char *>memchr(at, 10, end - at)
        if at == NULL or end - at < 6:
            return found
        at += 1
        if memcmp(at, b"data:", 5) == 0:
            found += 1


cdef bint _has(const char *data, Py_ssize_t size, const char *word, int letter) noexcept nogil:
    """Whether this word of WORD bytes is there: where its rarest letter is, the others are compared."""
    cdef const char *last = data + size - WORD
    cdef const char *at = data + letter
    while True:
        at = <const char *>memchr(at, word[letter], data + size - at) if at < data + size else NULL
        if at == NULL or at - letter > last:
            return False
        if memcmp(at - letter, word, WORD) == 0:
            return True
        at += 1


cdef bint _names_failure(const char *data, Py_ssize_t size) noexcept nogil:
    """As names_failure in events.py. (memmem takes eight times as long.)"""
    return (
        _has(data, size, b'"abort"', 2)
        or _has(data, size, b'"error"', 2)
        or _has(data, size, b'"ERROR"', 1)
        or _has_error_line(data, size)
    )


cdef bint _has_error_line(const char *data, Py_ssize_t size) noexcept nogil:
    """Whether `event: error` is there, with any number of spaces."""
    cdef const char *end = data + size
    cdef const char *at = data + 1
    while True:
        at = <const char *>memchr(at, 118, end - at) if at < end else NULL  # `v`
        if at == NULL or end - at < 10:
            return False
        if memcmp(at - 1, b"event:", 6) == 0:
            at += 5
            while at < end and at[0] == 32:
                at += 1
            if end - at >= 5 and memcmp(at, b"error", 5) == 0:
                return True
        at += 1


cdef bint _pass(Stream stream, double now):
    """One read of a stream. False: it goes back."""
    cdef Py_ssize_t sent, whole = 0, left = -1, size = len(stream.held)
    cdef Py_ssize_t got = recv(stream.worker, _buffer + size, BUFFER - size, 0)
    cdef long lines
    if got < 0 and (errno == EAGAIN or errno == EINTR):
        return True
    stream.error = errno if got < 0 else 0
    memcpy(_buffer, <const char *>stream.held, size)
    size += max(got, 0)
    if got > 0 and not _names_failure(_buffer, size):
        left = _past_chunks(_buffer, size, stream.left, &whole if stream.most else NULL)
    if left < 0 or (stream.most and whole == 0 and size > BUFFER // 2):
        stream.received = _buffer[:size]
        return False
    if stream.most:  # a part of an event must not reach the client: its worker may not send the rest
        if whole < size or stream.held:
            stream.held = _buffer[whole:size]
        if whole < size and _data_lines(_buffer + whole, size - whole):
            stream.active_at = now
        size, left = whole, 0
        if size == 0:
            return True
    lines = _data_lines(_buffer, size) + (size > 4 and memcmp(_buffer, b"data:", 5) == 0)
    if lines or stream.left:  # else a comment, which is no output
        stream.events += lines
        stream.active_at = now
    stream.left = left
    if stream.most and not stream.is_over:
        stream.note(_buffer, size)
    else:
        stream.keep(_buffer, size)
    sent = send(stream.client, _buffer, size, MSG_NOSIGNAL)
    if sent < size:
        stream.unsent, stream.received = _buffer[max(sent, 0):size], stream.held
    return sent == size


cdef class StreamLoop:
    """The streams of one event loop, which calls `run` when `fileno()` is readable."""

    cdef int epoll
    cdef set streams
    cdef object failed

    def __cinit__(self, failed):
        """`failed` is called with an exception of a `returned`, which stops no other stream."""
        self.streams, self.failed = set(), failed
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
            raise OSError(errno, "epoll_create1")

    def fileno(self):
        return self.epoll

    def add(self, int worker, int client, returned, Py_ssize_t most=0):
        """Pass on from one descriptor to the other, until `returned` is called.

        `most`: bytes of which a record is kept, if not 0. Then only whole events are passed on.
        """
        cdef epoll_event event
        cdef Stream stream = Stream.__new__(Stream)
        stream.worker, stream.client, stream.returned, stream.loop = worker, client, returned, self
        stream.most = most
        stream.held = stream.received = stream.unsent = b""
        event.events = EPOLLIN
        event.data.ptr = <void *>stream
        if epoll_ctl(self.epoll, EPOLL_CTL_ADD, worker, &event):
            raise OSError(errno, "epoll_ctl")
        self.streams.add(stream)
        return stream

    cdef drop(self, Stream stream):
        self.streams.discard(stream)
        if self.epoll >= 0:
            epoll_ctl(self.epoll, EPOLL_CTL_DEL, stream.worker, NULL)
        returned, stream.returned, stream.loop = stream.returned, None, None
        return returned

    def run(self):
        """Pass on what has arrived."""
        cdef epoll_event ready[READY]
        cdef timespec clock
        cdef double now
        cdef int at, count = epoll_wait(self.epoll, ready, READY, 0)
        cdef list back = None
        clock_gettime(CLOCK_MONOTONIC, &clock)
        now = clock.tv_sec + 1e-9 * clock.tv_nsec
        for at in range(count):
            if not _pass(<Stream>ready[at].data.ptr, now):
                if back is None:
                    back = []
                back.append(<Stream>ready[at].data.ptr)
        if back is not None:  # only now: what they call may stop other streams
            self._return([self.drop(stream) for stream in back])

    cdef _return(self, list calls):
        for returned in calls:
            try:
                returned()
            except Exception as error:
                self.failed(error)
    def close(self):
        """Stop all streams."""
        for stream in list(self.streams):
            self.drop(stream)
        if self.epoll >= 0:
            c_close(self.epoll)
            self.epoll = -1

    def __dealloc__(self):
        if self.epoll >= 0:
            c_close(self.epoll)
