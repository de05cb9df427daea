# Rows: hash → id of an interned set, in 2,048 shards, each of which grows and is swept alone.
#
#     shard ── bucket, bucket, …     a bucket is one cache line: five hashes, their ids, and `state`:
#                                     rows here (three bits), rows that passed by (all other bits)
#
# A row is in its home bucket or, if that was full, in the next one with room (the first follows the last);
# every bucket that it passed counts it. A search ends at the first bucket that no row has passed, or when it
# is back home: rows may have passed every bucket of a small shard, and still count after full buckets have
# lost rows.
# No place is marked as deleted. A shard holds at most three rows per bucket (21 bytes a row), and grows by
# half: 32 bytes a row just after. A shard of 10,000,000 / 2,048 rows grows in less than 0.1 ms.
#
# Invariants: a row's id is not 0; rows are at the front of their bucket; `state` is right; a shard holds at
# most three rows per bucket. So there is always a bucket with room, a new row finds it before it is back home,
# and a search of one round has seen every place where its row can be.

cdef enum:
    ROWS = 5
    SHARD_BITS = 11
    SHARD_COUNT = 2048
    MOST = 3  # rows per bucket, on average: with four, every third bucket would be full
    SMALL = 4
    PAST = 8  # one in the upper part of `state`
    RETURNED = 16384  # buckets, 1 MB: the least that is returned to the system

cdef struct Bucket:
    uint64_t hashes[ROWS]
    uint32_t sets[ROWS]
    uint32_t state

cdef struct Shard:
    Bucket *buckets
    uint32_t size
    uint32_t rows

cdef struct Place:
    Shard *shard
    uint64_t mix
    uint32_t home
    uint32_t bucket
    uint32_t row


cdef struct Keys:
    # Made of the table's secret; they decide where hashes are placed.
    uint64_t added[2]
    uint64_t times[2]


cdef inline Keys keys_of(uint64_t secret) noexcept:
    cdef Keys keys
    cdef int i
    for i in range(2):
        keys.added[i] = scattered(secret + <uint64_t> (2 * i))
        keys.times[i] = scattered(secret + <uint64_t> (2 * i + 1)) | 1
    return keys


cdef inline uint64_t mixed(const Keys *keys, uint64_t hash_) noexcept:
    """The top bits choose the shard, the next bits the bucket.

    Sequence hashes are public, so a client that knew where rows are placed could choose prompts whose rows
    crowd into one bucket. It cannot know: no answer, digest or message depends on the place, and both factors
    of both products are secret. Two rounds, because after one multiplication evenly spaced hashes still have
    evenly spaced places, which coincide for some factors.
    """
    return folded(folded(hash_ ^ keys.added[0], keys.times[0]) ^ keys.added[1], keys.times[1])


cdef inline uint32_t home_of(const Shard *shard, uint64_t mix) noexcept:
    return <uint32_t> ((<uint64_t> <uint32_t> (mix >> (32 - SHARD_BITS)) * shard.size) >> 32)


@cython.final
cdef class Rows:
    cdef Shard shards[SHARD_COUNT]
    cdef Keys keys
    cdef Py_ssize_t count
    cdef size_t buckets, most  # `most`: since memory was returned last

    def __cinit__(self, uint64_t secret):
        self.keys = keys_of(secret)

    def __dealloc__(self):
        cdef int i
        for i in range(SHARD_COUNT):
            free(self.shards[i].buckets)
        if self.buckets > RETURNED:
            return_memory()

    cdef inline uint64_t fetch(self, uint64_t hash_) noexcept:
        """Prefetch the hash's bucket and the next one, where up to one search in ten ends.

        Returns the mix that `seek` needs.
        """
        cdef uint64_t mix = mixed(&self.keys, hash_)
        cdef Shard *shard = &self.shards[mix >> (64 - SHARD_BITS)]
        cdef Bucket *home
        if shard.size:
            home = &shard.buckets[home_of(shard, mix)]
            prefetch(home)
            prefetch(home + 1)
        return mix

    cdef inline bint seek(self, uint64_t hash_, uint64_t mix, Place *place) noexcept:
        """Find the hash's row. False: it has none; `place` then has its shard and home. `mix`: see `mixed`."""
        cdef Shard *shard = &self.shards[mix >> (64 - SHARD_BITS)]
        cdef uint32_t at, same, step
        cdef Bucket *bucket
        place.shard, place.mix = shard, mix
        place.home = at = home_of(shard, mix)
        for step in range(shard.size):
            bucket = &shard.buckets[at]
            same = same_hashes(bucket, hash_) & ((<uint32_t> 1 << (bucket.state & (PAST - 1))) - 1)
            if same:
                place.bucket, place.row = at, ctz(same)
                return True
            if bucket.state < PAST:
                return False
            at = at + 1 if at + 1 < shard.size else 0
        return False

    cdef inline uint32_t find(self, uint64_t hash_) noexcept:
        """The id of the hash's set; 0 without a row."""
        return self.found(hash_, mixed(&self.keys, hash_))

    cdef inline uint32_t found(self, uint64_t hash_, uint64_t mix) noexcept:
        """The same, with the mix from `fetch`."""
        cdef Place place
        return self.set_at(&place)[0] if self.seek(hash_, mix, &place) else 0

    cdef inline uint32_t *set_at(self, Place *place) noexcept:
        return &place.shard.buckets[place.bucket].sets[place.row]

    cdef inline int insert(self, uint64_t hash_, uint32_t number, Place *place) except -1:
        """Add a row that `seek` did not find."""
        cdef Shard *shard = place.shard
        cdef uint32_t more = max(2, (shard.size >> 1) + 1)  # one bucket alone would grow after three rows
        if shard.rows >= shard.size * MOST and not self.resized(shard, shard.size + more):
            taken(NULL)
        put(shard, place.mix, hash_, number)
        shard.rows += 1
        self.count += 1
        return 0

    cdef void erase(self, Place *place) noexcept:
        """Remove a row. The last row of its bucket takes its place."""
        cdef Bucket *bucket = &place.shard.buckets[place.bucket]
        cdef uint32_t last = (bucket.state & (PAST - 1)) - 1, at = place.home
        bucket.hashes[place.row], bucket.sets[place.row] = bucket.hashes[last], bucket.sets[last]
        bucket.sets[last] = 0
        bucket.state -= 1
        while at != place.bucket:
            place.shard.buckets[at].state -= PAST
            at = at + 1 if at + 1 < place.shard.size else 0
        place.shard.rows -= 1
        self.count -= 1

    cdef inline void thin(self, Shard *shard) noexcept:
        """Shrink below one row per bucket. Without memory for the smaller copy, a later call does it."""
        if shard.rows < shard.size and shard.size > SMALL:
            self.resized(shard, shard.rows // 2 + 1)
            if self.most - self.buckets > max(RETURNED, self.most >> 3):
                self.most = self.buckets
                return_memory()

    cdef bint resized(self, Shard *shard, uint32_t size) noexcept:
        """Move all rows to `size` new buckets; False: not enough memory for them."""
        cdef Shard old = shard[0]
        cdef uint32_t i, row
        cdef Bucket *bucket
        if posix_memalign(<void **> &shard.buckets, sizeof(Bucket), size * sizeof(Bucket)):
            shard.buckets = old.buckets
            return False
        memset(shard.buckets, 0, size * sizeof(Bucket))
        shard.size = size
        for i in range(old.size):
            bucket = &old.buckets[i]
            for row in range(bucket.state & (PAST - 1)):
                put(shard, mixed(&self.keys, bucket.hashes[row]), bucket.hashes[row], bucket.sets[row])
        free(old.buckets)
        self.buckets += size - <size_t> old.size
        self.most = max(self.most, self.buckets)
        return True

    cdef dict check(self):
        """Raise if an invariant is broken; returns how many rows there are of each set."""
        cdef Shard *shard
        cdef Place place
        cdef uint32_t at
        cdef int row
        cdef Py_ssize_t total = 0
        cdef dict rows = {}
        for number in range(SHARD_COUNT):
            shard = &self.shards[number]
            states, count = [0] * shard.size, 0
            for at in range(shard.size):
                for row in range(ROWS):
                    if not shard.buckets[at].sets[row]:
                        continue
                    hash_, set_ = shard.buckets[at].hashes[row], shard.buckets[at].sets[row]
                    if row and not shard.buckets[at].sets[row - 1]:
                        raise AssertionError(f"a gap before row {hash_}")
                    if not self.seek(hash_, mixed(&self.keys, hash_), &place) \
                            or (place.bucket, place.row) != (at, row):
                        raise AssertionError(f"row {hash_} is not found where it is")
                    for step in range((at + shard.size - place.home) % shard.size):
                        states[(place.home + step) % shard.size] += PAST
                    states[at] += 1
                    rows[set_] = rows.get(set_, 0) + 1
                    count += 1
            if count > shard.size * MOST:
                raise AssertionError(f"{count} rows in the {shard.size} buckets of shard {number}")
            if [shard.buckets[at].state for at in range(shard.size)] != states or count != shard.rows:
                raise AssertionError(f"shard {number} counts wrongly: {count} rows, {shard.rows} noted")
            total += count
        if total != self.count:
            raise AssertionError(f"{total} rows, counted {self.count}")
        return rows


cdef inline uint32_t same_hashes(const Bucket *bucket, uint64_t hash_) noexcept:
    """A bit for each place with this hash. Without branches, because no CPU could predict which place it is."""
    cdef const uint64_t *hashes = <const uint64_t *> &bucket.hashes[0]
    return (
        <uint32_t> (hashes[0] == hash_)
        | <uint32_t> (hashes[1] == hash_) << 1
        | <uint32_t> (hashes[2] == hash_) << 2
        | <uint32_t> (hashes[3] == hash_) << 3
        | <uint32_t> (hashes[4] == hash_) << 4
    )


cdef inline void put(Shard *shard, uint64_t mix, uint64_t hash_, uint32_t number) noexcept:
    """Put a row into the first bucket with room from its home on. The invariants guarantee one."""
    cdef uint32_t at = home_of(shard, mix)
    cdef uint32_t row
    cdef Bucket *bucket
    while True:
        bucket = &shard.buckets[at]
        row = bucket.state & (PAST - 1)
        if row < ROWS:
            bucket.hashes[row], bucket.sets[row] = hash_, number
            bucket.state += 1
            return
        bucket.state += PAST
        at = at + 1 if at + 1 < shard.size else 0
