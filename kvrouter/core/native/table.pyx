# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""core/tables/table.py in C: the flat table, a slot's hashes, and reference counts.

A call is atomic: it keeps the GIL, and no Python code runs in it while the table is half changed.
"""

cimport cython
from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsUnsignedLongLong
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import array

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef extern from *:
    """
    #include <stdlib.h>
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "written for little-endian machines; others use the Python version"
    #endif
    #define ctz(x) ((unsigned int) __builtin_ctzll(x))
    #define popcount(x) ((unsigned int) __builtin_popcountll(x))
    static inline void prefetch(const void *at)
    {
        __builtin_prefetch(at);
        __asm__ volatile (""); /* else gcc takes this function for pure and drops its calls */
    }
    #ifdef __GLIBC__
    #include <malloc.h>
    #define return_memory() malloc_trim(0) /* it keeps what lies below memory in use */
    #else
    #define return_memory() ((void) 0)
    #endif
    static inline uint64_t folded(uint64_t a, uint64_t b)
    {
        unsigned __int128 product = (unsigned __int128) a * b;
        return (uint64_t) product ^ (uint64_t) (product >> 64);
    }
    """
    unsigned int ctz(uint64_t) noexcept
    unsigned int popcount(uint64_t) noexcept
    void prefetch(const void *) noexcept
    uint64_t folded(uint64_t, uint64_t) noexcept
    int posix_memalign(void **, size_t, size_t) noexcept
    void return_memory() noexcept

cdef struct Turn:
    # The last step from a set to the one with one slot more or less: neighbours on a chain mostly repeat it.
    uint32_t slot, old, to
    uint64_t old_born, to_born
    bint is_known

cdef struct Ended:
    Py_ssize_t depth
    uint32_t slot
    uint32_t row  # the set of the chain's last hash there

include "forms.pxi"
include "sets.pxi"
include "rows.pxi"
include "counts.pxi"
include "frames.pxi"

cdef enum:
    AHEAD = 16  # rows fetched from memory at the same time, so that their latencies overlap; a power of two
    AHEAD_BUCKETS = 4

cdef array.array _HASHES = array.array("Q")
cdef array.array _DEPTHS = array.array("q")


@cython.final
cdef class FlatTable:
    """Sets of slots by hash; see core/tables/table.py."""

    cdef HolderSets sets
    cdef Rows rows
    cdef list labels
    cdef uint64_t *visible
    cdef uint64_t *alive
    cdef uint64_t *waiting
    cdef uint32_t *limits  # slot → its limit plus 1, and the reverse; 0 for none
    cdef uint32_t *limited
    cdef uint32_t limit_count
    cdef uint32_t width
    cdef Turn adding, discarding
    cdef public Py_ssize_t stored, removed

    shards = SHARD_COUNT

    def __cinit__(self, uint64_t placement_secret=0):
        self.sets, self.rows, self.labels = HolderSets(placement_secret), Rows(placement_secret), []
        self.widen(0)

    def __dealloc__(self):
        free(self.visible)
        free(self.alive)
        free(self.waiting)
        free(self.limits)
        free(self.limited)

    def __len__(self):
        return self.rows.count

    def slot_set(self, uint32_t slot):
        return SlotSet(self, slot)

    def counted_set(self, uint32_t slot):
        return CountedSet(self, slot)

    def label(self, uint32_t slot, owner):
        """Look-ups return `owner` for the slot. None: they ignore the slot."""
        cdef uint64_t bit = <uint64_t> 1 << (slot & 63)
        self.widen(slot)
        while len(self.labels) <= slot:
            self.labels.append(None)
        self.labels[slot] = owner
        if owner is None:
            self.visible[slot >> 6] &= ~bit
        else:
            self.visible[slot >> 6] |= bit

    def limit(self, uint32_t slot, limit):
        """Look-ups go up from the end of `slot` to a hash that the slot `limit` holds; None: no limit."""
        cdef uint32_t number
        self.widen(slot)
        if self.limits[slot]:
            self.limited[self.limits[slot] - 1] = 0
            self.limits[slot] = 0
            self.limit_count -= 1
        if limit is not None:
            number = limit
            self.widen(number)
            self.limits[slot], self.limited[number] = number + 1, slot + 1
            self.limit_count += 1

    def add(self, uint32_t slot, hashes):
        cdef const uint64_t *data
        cdef Py_ssize_t count
        cdef uint64_t total = 0
        held = viewed(hashes, &data, &count)
        return self.add_all(slot, &self.adding, data, count, &total), total

    def discard(self, uint32_t slot, hashes):
        cdef const uint64_t *data
        cdef Py_ssize_t count
        cdef uint64_t total = 0
        held = viewed(hashes, &data, &count)
        return self.discard_all(slot, &self.discarding, data, count, &total), total

    def accepted(self, uint32_t slot, hashes, Py_ssize_t room, others, uint32_t max_holders):
        cdef const uint64_t *data
        cdef Py_ssize_t count, i, ahead = 0
        cdef uint64_t mixes[AHEAD]
        cdef Place place
        cdef uint32_t number
        cdef object all_slots = 1  # a Python number, as it has more than 64 bits
        cdef bytes mask
        if type(others) is not int:
            raise TypeError("a mask of slots is an int")
        held = viewed(hashes, &data, &count)  # the last step that may run Python code, which may call `widen`
        self.widen(slot)
        all_slots = (all_slots << 64 * self.width) - 1
        mask = (others & all_slots).to_bytes(8 * self.width, "little")
        for i in range(count):
            if i == ahead:
                ahead = self.fetch(data, i, count, mixes)
            number = self.rows.set_at(&place)[0] if self.rows.seek(data[i], mixes[i & (AHEAD - 1)], &place) else 0
            if not number:
                if room <= 0:
                    return i
                room -= 1
            elif self.sets.has(number, slot):
                continue
            elif max_holders and self.sets.shared(number, <const uint64_t *> PyBytes_AS_STRING(mask)) >= max_holders:
                return i
        return count

    def size_bytes(self):
        return sizeof(Shard) * SHARD_COUNT + self.rows.buckets * sizeof(Bucket) + self.sets.bytes

    def holds(self, uint32_t slot, uint64_t hash_):
        cdef uint32_t number = self.rows.find(hash_)
        return number != 0 and self.sets.has(number, slot)

    def depths(self, hashes, Py_ssize_t most=PY_SSIZE_T_MAX):
        """How deep each owner's slot holds the chain."""
        cdef Ended *ended = NULL
        cdef Py_ssize_t ends, i
        cdef dict found = {}
        cdef object depth = None
        try:
            ends = self.find_ends(hashes, most, &ended)
            for i in range(ends):  # only now: an owner's __hash__ may run any code and change the table
                if not ended[i].depth:
                    continue
                if not i or ended[i].depth != ended[i - 1].depth:
                    depth = ended[i].depth
                found[<object> PyList_GET_ITEM(self.labels, ended[i].slot)] = depth
        finally:
            free(ended)
        return found

    def depths_of(self, hashes, array.array slots not None, Py_ssize_t most=PY_SSIZE_T_MAX):
        """The depth of each of these slots, in their order; 0 where there is no owner."""
        cdef Ended *ended = NULL
        cdef Py_ssize_t ends, i, count
        cdef array.array found
        cdef int64_t *depths
        cdef uint64_t slot
        if type(slots) is not array.array or slots.typecode != "q":
            raise ValueError("slots must be an array('q')")
        try:
            ends = self.find_ends(hashes, most, &ended)
            count = len(slots)  # only now: `hashes` may have run any code
            found = array.clone(_DEPTHS, count, zero=True)
            if not ends:
                return found
            depths = <int64_t *> taken(calloc(64 * self.width, sizeof(int64_t)))
            for i in range(ends):
                depths[ended[i].slot] = ended[i].depth
            for i in range(count):
                slot = <uint64_t> slots.data.as_longlongs[i]  # none, -1, is beyond all
                found.data.as_longlongs[i] = depths[slot] if slot < 64 * <uint64_t> self.width else 0
            free(depths)
        finally:
            free(ended)
        return found

    cdef Py_ssize_t find_ends(self, hashes, Py_ssize_t most, Ended **ends_of) except -1:
        """Find each depth at which a slot's set ends: gallop, then bisect. Then limited slots go up from there."""
        cdef Chain chain
        cdef uint32_t low_set, high_set, last_set, number, alive, i
        cdef Py_ssize_t low = 0, high, middle, step, first = 0, ahead = 0
        cdef uint64_t mixes[AHEAD]  # of the hashes from `first` to `ahead`
        cdef Ended *ended
        cdef Py_ssize_t ends = 0
        held = chained(hashes, &chain)
        if not chain.count:
            return 0
        low_set = self.rows.find(nth(&chain, 0))
        if not low_set:
            return 0
        memset(self.alive, 0, self.width * 8)
        self.sets.spread(low_set, self.alive)
        for i in range(self.width):
            self.alive[i] &= self.visible[i]
        alive = self.sets.shared(low_set, self.alive)
        if not alive:
            return 0
        ends_of[0] = ended = <Ended *> taken(malloc(alive * sizeof(Ended)))
        last_set = self.rows.find(nth(&chain, chain.count - 1))
        while alive:  # the slots that hold the chain down to `low`
            if last_set and self.sets.covers(last_set, self.alive, alive):
                ends += self.end(&ended[ends], chain.count, 0, last_set)
                break
            high, high_set, step = chain.count - 1, last_set, 1
            if high - low > 4 * <Py_ssize_t> alive:
                step = (high - low) // (4 * <Py_ssize_t> alive)
            while low + step < high:
                if step == 1 and not first <= low + 1 < ahead:  # many end near each other: their rows together
                    first, ahead = low + 1, min(low + 1 + AHEAD, chain.count)
                    for middle in range(first, ahead):
                        mixes[middle - first] = self.rows.fetch(nth(&chain, middle))
                if first <= low + step < ahead:
                    number = self.rows.found(nth(&chain, low + step), mixes[low + step - first])
                else:
                    number = self.rows.find(nth(&chain, low + step))
                if number != low_set and not (number and self.sets.covers(number, self.alive, alive)):
                    high, high_set = low + step, number
                    break
                low, low_set, step = low + step, number, step * 2
            while high - low > 1:
                middle = (low + high) >> 1
                number = self.rows.find(nth(&chain, middle))
                if number != low_set and not (number and self.sets.covers(number, self.alive, alive)):
                    high, high_set = middle, number
                else:
                    low, low_set = middle, number
            i = self.end(&ended[ends], high, high_set, low_set)  # at least one of them does not hold the hash at `high`
            alive, ends = alive - i, ends + i
            low, low_set = high, high_set
        if self.limit_count:
            self.go_up(&chain, ended, ends, most)
        return ends

    cdef int go_up(self, Chain *chain, Ended *ended, Py_ssize_t ends, Py_ssize_t most) except -1:
        """Set the depth of each limited slot to where its limit holds the hash; 0: nowhere.

        All go up together, so that a row is looked at once, and where slots end it is known. `ended` is in the
        order of the depths.
        """
        cdef Py_ssize_t left = ends - 1, depth = 0
        cdef uint32_t count = 0, number, limit = 0
        cdef bint is_alone = False  # one waits, and it is `limit`: mostly, where each slot ends elsewhere
        cdef uint32_t *places = <uint32_t *> taken(malloc(64 * self.width * sizeof(uint32_t)))
        memset(self.waiting, 0, self.width * 8)
        try:
            while count or left >= 0:
                if not count:
                    depth = min(ended[left].depth, most)
                number = 0
                while left >= 0 and min(ended[left].depth, most) >= depth:
                    if ended[left].depth == depth:
                        number = ended[left].row
                    if self.limits[ended[left].slot]:
                        limit = self.limits[ended[left].slot]
                        self.waiting[limit - 1 >> 6] |= <uint64_t> 1 << (limit - 1 & 63)
                        places[limit - 1] = <uint32_t> left
                        ended[left].depth = 0
                        count += 1
                        is_alone = count == 1
                    left -= 1
                if not count:
                    continue
                if depth <= 0:
                    break
                if depth > 4:  # the next rows' latencies overlap
                    self.rows.fetch(nth(chain, depth - 5))
                if not number:
                    number = self.rows.find(nth(chain, depth - 1))
                if number and is_alone and count:
                    if self.sets.has(number, limit - 1):
                        self.waiting[limit - 1 >> 6] = 0
                        ended[places[limit - 1]].depth = depth
                        count = 0
                elif number:
                    count -= self.settle(ended, places, number, depth)
                depth -= 1
        finally:
            free(places)
        return 0

    cdef uint32_t settle(self, Ended *ended, const uint32_t *places, uint32_t number, Py_ssize_t depth) noexcept:
        """Record `depth` for the waiting limits that are in this set; returns how many."""
        cdef HolderSet *one = self.sets.at(number)
        cdef uint64_t held
        cdef uint32_t i, limit, count = 0
        for i in range(one.words):
            held = self.waiting[i] & (<uint64_t *> one.members)[i]
            self.waiting[i] ^= held
            while held:
                ended[places[(i << 6) + ctz(held)]].depth = depth
                held &= held - 1
                count += 1
        for i in range(0 if one.words else one.count):
            limit = (<uint32_t *> one.members)[i]
            if self.waiting[limit >> 6] >> (limit & 63) & 1:
                self.waiting[limit >> 6] ^= <uint64_t> 1 << (limit & 63)
                ended[places[limit]].depth = depth
                count += 1
        return count

    def copy_slot(self, uint32_t source, uint32_t copy):
        self.widen(source)
        self.widen(copy)
        self.sets.copy_slot(source, copy)

    def sweep(self, slots, uint32_t shard_number):
        cdef array.array listed = array.array("I", slots)
        cdef uint32_t slot
        cdef uint64_t *doomed
        if shard_number >= SHARD_COUNT:
            raise IndexError(f"no shard {shard_number}")
        for slot in listed.data.as_uints[:len(listed)]:
            self.widen(slot)
        doomed = <uint64_t *> taken(calloc(self.width, 8))
        try:
            for slot in listed.data.as_uints[:len(listed)]:
                doomed[slot >> 6] |= <uint64_t> 1 << (slot & 63)
            self.sweep_shard(&self.rows.shards[shard_number], doomed)
            self.rows.thin(&self.rows.shards[shard_number])
        finally:
            free(doomed)

    def held(self, uint32_t slot, uint32_t shard_number):
        cdef Shard *shard
        cdef uint32_t at, row, number, last = 0
        cdef bint is_held = False
        cdef list found = []
        if shard_number >= SHARD_COUNT:
            raise IndexError(f"no shard {shard_number}")
        shard = &self.rows.shards[shard_number]
        for at in range(shard.size):
            for row in range(ROWS):
                number = shard.buckets[at].sets[row]
                if not number:
                    break
                if number != last:  # neighbours mostly share a set
                    last, is_held = number, self.sets.has(number, slot)
                if is_held:
                    found.append(shard.buckets[at].hashes[row])
        return found

    def homes(self, hashes):
        """Each hash's shard, and its home there as a share of 2^32. For tests."""
        cdef const uint64_t *data
        cdef Py_ssize_t count, i
        held = viewed(hashes, &data, &count)
        mixes = [mixed(&self.rows.keys, data[i]) for i in range(count)]
        return [(mix >> 64 - SHARD_BITS, mix >> 32 - SHARD_BITS & 0xFFFFFFFF) for mix in mixes]

    def check(self):
        """Raise if an invariant is broken. Tests call this after every step."""
        limits = {slot: self.limits[slot] - 1 for slot in range(64 * self.width) if self.limits[slot]}
        limited = {slot: self.limited[slot] - 1 for slot in range(64 * self.width) if self.limited[slot]}
        if {limit: slot for slot, limit in limits.items()} != limited or len(limits) != self.limit_count:
            raise AssertionError(f"two slots have the same limit: {limits}")
        self.sets.check(self.rows.check())

    cdef int widen(self, uint32_t slot) except -1:
        """Make every bitset wide enough for the slot."""
        cdef uint32_t words = max((slot >> 6) + 1, self.width)
        if words > self.width:
            words += words >> 2
            self.visible = longer(self.visible, self.width, words)
            self.alive = longer(self.alive, self.width, words)
            self.waiting = longer(self.waiting, self.width, words)
            self.limits = <uint32_t *> longer(<uint64_t *> self.limits, 32 * self.width, 32 * words)
            self.limited = <uint32_t *> longer(<uint64_t *> self.limited, 32 * self.width, 32 * words)
            self.sets.grow_width(words)
            self.width = words
        return 0

    cdef Py_ssize_t add_all(
        self, uint32_t slot, Turn *turn, const uint64_t *data, Py_ssize_t count, uint64_t *total
    ) except -1:
        cdef Py_ssize_t i, ahead = 0, added = 0
        cdef uint64_t mixes[AHEAD]
        cdef Place place
        cdef uint32_t old
        cdef bint found
        self.widen(slot)
        for i in range(count):
            if i == ahead:
                ahead = self.fetch(data, i, count, mixes)
            found = self.rows.seek(data[i], mixes[i & (AHEAD - 1)], &place)
            old = self.rows.set_at(&place)[0] if found else 0
            if not self.is_known(turn, slot, old):
                if old and self.sets.has(old, slot):
                    continue
                self.learn(turn, slot, old, 1)
            if found:
                self.rows.set_at(&place)[0] = turn.to
            else:
                self.rows.insert(data[i], turn.to, &place)
            self.sets.at(turn.to).rows += 1
            if old:
                self.sets.release(old)
            added += 1
            total[0] += data[i]
        return added

    cdef Py_ssize_t discard_all(
        self, uint32_t slot, Turn *turn, const uint64_t *data, Py_ssize_t count, uint64_t *total
    ) except -1:
        cdef Py_ssize_t i, ahead = 0, removed = 0
        cdef uint64_t mixes[AHEAD]
        cdef Place place
        cdef uint32_t old
        self.widen(slot)
        for i in range(count):
            if i == ahead:
                ahead = self.fetch(data, i, count, mixes)
            if not self.rows.seek(data[i], mixes[i & (AHEAD - 1)], &place):
                continue
            old = self.rows.set_at(&place)[0]
            if not self.is_known(turn, slot, old):
                if not self.sets.has(old, slot):
                    continue
                self.learn(turn, slot, old, -1)
            self.replace(&place, turn.to)
            removed += 1
            total[0] += data[i]
        return removed

    cdef inline Py_ssize_t fetch(
        self, const uint64_t *data, Py_ssize_t start, Py_ssize_t count, uint64_t *mixes
    ) noexcept:
        """Prefetch the next AHEAD rows together; returns the index after them.

        `start` is a multiple of AHEAD: the mix that `seek` needs for the hash at i is `mixes[i & (AHEAD - 1)]`.
        """
        cdef Py_ssize_t stop = start + AHEAD if start + AHEAD < count else count, i
        for i in range(start, stop):
            mixes[i - start] = self.rows.fetch(data[i])
        return stop

    cdef inline int replace(self, Place *place, uint32_t number) except -1:
        """Point a row to another set; 0 erases the row."""
        cdef uint32_t old = self.rows.set_at(place)[0]
        if number:
            self.sets.at(number).rows += 1
            self.rows.set_at(place)[0] = number
        else:
            self.rows.erase(place)
            self.rows.thin(place.shard)
        self.sets.release(old)
        return 0

    cdef inline bint is_known(self, const Turn *turn, uint32_t slot, uint32_t old) noexcept:
        """Whether the last turn was from this set by this slot, and both its sets are still the same."""
        if not turn.is_known or turn.old != old or turn.slot != slot:
            return False
        return turn.to_born == self.sets.birth(turn.to) and turn.old_born == self.sets.birth(old)

    cdef int learn(self, Turn *turn, uint32_t slot, uint32_t old, int change) except -1:
        turn.is_known = False
        turn.to = <uint32_t> self.sets.toggled(old, slot, change)
        turn.to_born, turn.old, turn.old_born = self.sets.birth(turn.to), old, self.sets.birth(old)
        turn.slot, turn.is_known = slot, True
        return 0

    cdef int sweep_shard(self, Shard *shard, const uint64_t *doomed) except -1:
        cdef uint32_t at = 0, row, number
        cdef Bucket *bucket
        cdef Place place
        place.shard = shard
        while at < shard.size:
            bucket = &shard.buckets[at]
            if at + 2 * AHEAD_BUCKETS < shard.size:
                self.fetch_sets(&bucket[AHEAD_BUCKETS], &bucket[2 * AHEAD_BUCKETS])
            row = 0
            while row < ROWS and bucket.sets[row]:
                number = bucket.sets[row]
                if not self.sets.shared(number, doomed):
                    row += 1
                    continue
                place.home, place.bucket, place.row = home_of(shard, mixed(&self.rows.keys, bucket.hashes[row])), at, row
                number = <uint32_t> self.sets.without(number, doomed)
                if number:
                    self.sets.at(number).rows += 1
                    self.sets.release(bucket.sets[row])
                    bucket.sets[row] = number
                    row += 1
                else:
                    self.sets.release(bucket.sets[row])
                    self.rows.erase(&place)  # moves another row here, so `row` stays
            at += 1
        return 0

    cdef inline void fetch_sets(self, const Bucket *near, const Bucket *far) noexcept:
        """Prefetch the far rows' sets, and the members of the nearer rows' sets."""
        cdef uint32_t i
        for i in range(near.state & (PAST - 1)):
            prefetch(self.sets.at(near.sets[i]).members)
        for i in range(far.state & (PAST - 1)):
            prefetch(self.sets.at(far.sets[i]))

    cdef uint32_t end(self, Ended *ended, Py_ssize_t depth, uint32_t number, uint32_t row) noexcept:
        """Record `depth` and `row` for the alive slots that are not in this set; returns how many. The others stay."""
        cdef HolderSet *one = self.sets.at(number)
        cdef uint64_t *kept = self.sets.scratch
        cdef uint64_t lost
        cdef uint32_t i, words = self.width, count = 0
        if one.words:
            kept, words = <uint64_t *> one.members, one.words
        elif number:
            self.sets.spread(number, kept)
        for i in range(self.width):
            lost = self.alive[i] & ~(kept[i] if i < words else 0)
            self.alive[i] ^= lost
            while lost:
                ended[count].depth, ended[count].slot, ended[count].row = depth, (i << 6) + ctz(lost), row
                lost &= lost - 1
                count += 1
        if not one.words:
            memset(kept, 0, self.width * 8)
        return count


cdef uint64_t *longer(uint64_t *words, uint32_t count, uint32_t wanted) except NULL:
    """The words, extended with zeros. Without memory it raises and the old ones stay valid."""
    words = <uint64_t *> taken(realloc(words, wanted * sizeof(uint64_t)))
    memset(&words[count], 0, (wanted - count) * sizeof(uint64_t))
    return words


@cython.final
cdef class SlotSet:
    """See core/tables/table.py."""

    cdef FlatTable table
    cdef Turn adding, discarding
    cdef readonly uint32_t slot
    cdef public Py_ssize_t count
    cdef public uint64_t digest
    cdef public bint is_plain

    def __cinit__(self, FlatTable table not None, uint32_t slot):
        self.table, self.slot = table, slot

    def add(self, hashes):
        cdef const uint64_t *data
        cdef Py_ssize_t count, added
        held = viewed(hashes, &data, &count)
        added = self.table.add_all(self.slot, &self.adding, data, count, &self.digest)
        self.count += added
        return added

    def discard(self, hashes):
        cdef const uint64_t *data
        cdef Py_ssize_t count, removed
        cdef uint64_t total = 0
        held = viewed(hashes, &data, &count)
        removed = self.table.discard_all(self.slot, &self.discarding, data, count, &total)
        self.count -= removed
        self.digest -= total
        return removed

    cdef bint take_frame(self, bytes frame, int64_t incarnation, int64_t seq, Py_ssize_t most) except -1:
        cdef Step steps[MOST_OPS]
        cdef Py_ssize_t stored = 0
        cdef int count = steps_of(frame, incarnation, seq, steps), i
        if count == 1 and steps[0].checks:
            return steps[0].count == self.count and steps[0].parent == self.digest
        for i in range(count):
            if steps[i].checks:
                return False
            if steps[i].stores:
                stored += steps[i].count
                if steps[i].has_parent and not self.will_hold(steps, i, steps[i].parent):
                    return False
        if count < 0 or (most and self.count + stored > most):
            return False
        for i in range(count):
            if steps[i].stores:
                self.table.stored += self.change(&steps[i])
            else:
                self.table.removed += self.change(&steps[i])
        return True

    cdef bint will_hold(self, const Step *steps, int before, uint64_t hash_) noexcept:
        """Whether the slot holds the hash once the steps before this one are done."""
        cdef uint32_t number
        while before:
            before -= 1
            if names(&steps[before], hash_):
                return steps[before].stores
        number = self.table.rows.find(hash_)
        return number != 0 and self.table.sets.has(number, self.slot)

    cdef Py_ssize_t change(self, const Step *step) except -1:
        """Do it; returns how many hashes were new, or were held."""
        cdef uint64_t part[PART]
        cdef uint64_t total
        cdef Py_ssize_t at = 0, size, changed = 0, found
        while at < step.count:
            size, total = min(PART, step.count - at), 0
            memcpy(part, &step.hashes[8 * at], 8 * size)
            if step.stores:
                found = self.table.add_all(self.slot, &self.adding, part, size, &total)
                self.count += found
                self.digest += total
            else:
                found = self.table.discard_all(self.slot, &self.discarding, part, size, &total)
                self.count -= found
                self.digest -= total
            changed += found
            at += size
        return changed


@cython.final
cdef class Position:
    """See core/feeds/position.py."""

    cdef public int64_t incarnation, seq, source_seq, live_seq
    cdef public Py_ssize_t most, taken
    cdef public object received_at
    cdef public SlotSet into

    def take(self, bytes frame not None, now):
        return self.take_frame(frame, now)

    def is_told(self, int64_t incarnation, int64_t seq, now):
        if self.into is None or incarnation != self.incarnation or seq != self.seq:
            return False
        self.received_at = now
        self.source_seq, self.live_seq = seq, max(self.live_seq, seq)
        return True

    cdef bint take_frame(self, bytes frame, now) except -1:
        if self.into is None or not self.into.is_plain:
            return False
        if not self.into.take_frame(frame, self.incarnation, self.seq + 1, self.most):
            return False
        self.seq += 1
        self.source_seq, self.live_seq = max(self.source_seq, self.seq), max(self.live_seq, self.seq)
        self.received_at = now
        self.taken += 1
        return True


def take_run(list messages not None, Py_ssize_t at, Py_ssize_t stop, dict positions not None, now):
    cdef tuple message
    cdef object position
    cdef Py_ssize_t left = RUN_BYTES
    while at < stop and left > 0:
        message = messages[at]
        position = positions.get(message[0])
        if position is None:
            break
        try:
            if not (<Position?> position).take_frame(message[1], now):
                break
        except MemoryError:
            (<Position> position).into = None  # its reader takes the frame, and breaks down if it cannot, either
            break
        left -= len(message[1])
        at += 1
    return at
