# Reference counts of one slot's hashes: open addressing, linear probing, no marks for deleted entries.
#
# Invariants: at most half of the places are taken; no place between a hash's home and its place is free.

cdef struct Counted:
    uint64_t hash
    uint64_t count  # 0: a free place


@cython.final
cdef class CountedSet:
    """One slot's hashes with reference counts; see core/tables/table.py."""

    cdef FlatTable table
    cdef Keys keys
    cdef Turn adding, discarding
    cdef readonly uint32_t slot
    cdef readonly Py_ssize_t count
    cdef Counted *places
    cdef Py_ssize_t size

    def __cinit__(self, FlatTable table not None, uint32_t slot):
        self.table, self.keys, self.slot, self.size = table, table.rows.keys, slot, 16
        self.places = <Counted *> taken(calloc(self.size, sizeof(Counted)))

    def __dealloc__(self):
        free(self.places)

    def add(self, hashes):
        cdef const uint64_t *data
        cdef Py_ssize_t count, i, ahead = 0, first = 0
        cdef uint64_t mixes[AHEAD]
        cdef Counted *place
        cdef uint64_t total = 0
        held = viewed(hashes, &data, &count)
        cdef array.array fresh = array.clone(_HASHES, count, zero=False)
        cdef Py_ssize_t size = self.size
        while 2 * (self.count + count) > size:
            size *= 2
        if size > self.size:
            self.resize(size)  # once, as if all were new
        for i in range(count):
            if i == ahead:
                ahead = self.fetch(data, i, count, mixes)
            place = self.place(data[i], mixes[i & (AHEAD - 1)])
            if not place.count:
                place.hash = data[i]
                self.count += 1
                fresh.data.as_ulonglongs[first] = data[i]
                first += 1
            place.count += 1
        self.table.add_all(self.slot, &self.adding, <const uint64_t *> fresh.data.as_ulonglongs, first, &total)

    def discard(self, hashes):
        cdef const uint64_t *data
        cdef Py_ssize_t count, i, ahead = 0, gone = 0
        cdef uint64_t mixes[AHEAD]
        cdef Counted *place
        cdef uint64_t total = 0
        held = viewed(hashes, &data, &count)
        cdef array.array last = array.clone(_HASHES, count, zero=False)
        for i in range(count):
            if i == ahead:
                ahead = self.fetch(data, i, count, mixes)
            place = self.place(data[i], mixes[i & (AHEAD - 1)])
            if not place.count:
                raise KeyError(data[i])
            place.count -= 1
            if not place.count:
                self.close(place)
                self.count -= 1
                last.data.as_ulonglongs[gone] = data[i]
                gone += 1
        self.table.discard_all(self.slot, &self.discarding, <const uint64_t *> last.data.as_ulonglongs, gone, &total)
        if self.size > 1024 and 16 * self.count < self.size:
            self.resize(self.size // 4)

    def counts(self):
        """The references of each hash. For tests."""
        cdef Py_ssize_t i
        return {self.places[i].hash: self.places[i].count for i in range(self.size) if self.places[i].count}

    cdef inline Py_ssize_t home(self, uint64_t mix) noexcept:
        return <Py_ssize_t> (mix >> 24) & (self.size - 1)

    cdef inline Py_ssize_t fetch(
        self, const uint64_t *data, Py_ssize_t start, Py_ssize_t count, uint64_t *mixes
    ) noexcept:
        """Prefetch the next hashes' places together; see FlatTable.fetch."""
        cdef Py_ssize_t stop = start + AHEAD if start + AHEAD < count else count, i
        for i in range(start, stop):
            mixes[i - start] = mixed(&self.keys, data[i])
            prefetch(&self.places[self.home(mixes[i - start])])
        return stop

    cdef inline Counted *place(self, uint64_t hash_, uint64_t mix) noexcept:
        cdef Py_ssize_t at = self.home(mix)
        while self.places[at].count and self.places[at].hash != hash_:
            at = (at + 1) & (self.size - 1)
        return &self.places[at]

    cdef void close(self, Counted *place) noexcept:
        """Move entries that probed past a freed place up, so that searches still find them."""
        cdef Py_ssize_t hole = place - self.places, at = hole, mask = self.size - 1
        while True:
            at = (at + 1) & mask
            if not self.places[at].count:
                return
            if ((at - self.home(mixed(&self.keys, self.places[at].hash))) & mask) >= ((at - hole) & mask):
                self.places[hole] = self.places[at]
                self.places[at].count = 0
                hole = at

    cdef int resize(self, Py_ssize_t size) except -1:
        cdef Counted *old = self.places
        cdef Py_ssize_t old_size = self.size, i
        self.places = <Counted *> taken(calloc(size, sizeof(Counted)))
        self.size = size
        for i in range(old_size):
            if old[i].count:
                self.place(old[i].hash, mixed(&self.keys, old[i].hash))[0] = old[i]
        free(old)
        return 0
