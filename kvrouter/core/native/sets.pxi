# Distinct sets of slots, each kept once however many rows point to it.
#
#     id ──> HolderSet(name, rows, members)        name = xor over the members of a secret number for each slot
#     name ──> bucket ──> chain of ids             so the name of "one slot more" is known without a look
#
# A set is a list of slots or, where that is shorter, a bitset. Id 0 is the empty set, which no row has.
# Pages and linear hashing: memory grows by one page or one bucket, and is never copied as a whole.
#
# Invariants: no two live sets have the same members; a live set has rows (except while it is being made);
# a freed id is in the free list, and its count is 0.

cdef enum:
    PAGE_BITS = 12
    PAGE = 4096

cdef struct HolderSet:
    uint64_t name
    uint32_t rows
    uint32_t count
    uint32_t words  # of the bitset; 0: a list
    uint32_t next  # in its bucket's chain, or in the free list
    uint64_t born  # ids are used again: an equal `born` proves that an id still means the same set
    void *members


@cython.final
cdef class HolderSets:
    cdef HolderSet **pages
    cdef uint32_t **heads
    cdef uint32_t page_count, head_page_count
    cdef uint32_t used, live, first_free
    cdef uint32_t level, split
    cdef uint32_t width  # words of a bitset that has room for every slot
    cdef uint64_t *scratch  # all zero between calls
    cdef uint64_t births
    cdef uint64_t secret
    cdef size_t bytes

    def __cinit__(self, uint64_t secret):
        self.secret = secret
        self.used = 1
        self.grow_width(1)
        self.add_page()
        self.add_head_page()

    def __dealloc__(self):
        cdef uint32_t i
        if self.pages != NULL:
            for i in range(1, self.used):
                if self.at(i).count:
                    free(self.at(i).members)
        for i in range(self.page_count):
            free(self.pages[i])
        for i in range(self.head_page_count):
            free(self.heads[i])
        free(self.pages)
        free(self.heads)
        free(self.scratch)

    cdef inline HolderSet *at(self, uint32_t number) noexcept:
        return &self.pages[number >> PAGE_BITS][number & (PAGE - 1)]

    cdef inline uint64_t birth(self, uint32_t number) noexcept:
        """Differs from an earlier value if the set has ended since. Always 0 for the empty set."""
        return self.at(number).born

    cdef inline uint32_t *head(self, uint64_t name) noexcept:
        cdef uint64_t bucket = name & ((<uint64_t> 1 << self.level) - 1)
        if bucket < self.split:
            bucket = name & ((<uint64_t> 2 << self.level) - 1)
        return &self.heads[bucket >> PAGE_BITS][bucket & (PAGE - 1)]

    cdef inline uint64_t part(self, uint32_t slot) noexcept:
        """The slot's part of a set's name. The secret keeps clients from choosing sets of equal names."""
        return scattered(self.secret ^ slot)

    cdef int grow_width(self, uint32_t words) except -1:
        """Make room for slots below 64 * words."""
        cdef uint64_t *wider
        if words > self.width:
            wider = <uint64_t *> taken(calloc(words, 8))
            free(self.scratch)
            self.scratch = wider
            self.width = words
        return 0

    cdef int add_page(self) except -1:
        cdef void *pages = taken(realloc(self.pages, (self.page_count + 1) * sizeof(void *)))
        self.pages = <HolderSet **> pages
        self.pages[self.page_count] = <HolderSet *> taken(calloc(PAGE, sizeof(HolderSet)))
        self.page_count += 1
        self.bytes += PAGE * sizeof(HolderSet)
        return 0

    cdef int add_head_page(self) except -1:
        cdef void *heads = taken(realloc(self.heads, (self.head_page_count + 1) * sizeof(void *)))
        self.heads = <uint32_t **> heads
        self.heads[self.head_page_count] = <uint32_t *> taken(calloc(PAGE, sizeof(uint32_t)))
        self.head_page_count += 1
        self.bytes += PAGE * sizeof(uint32_t)
        return 0

    # Members of a set

    cdef inline bint has(self, uint32_t number, uint32_t slot) noexcept:
        cdef HolderSet *one = self.at(number)
        cdef uint32_t i
        if one.words:
            return slot >> 6 < one.words and (<uint64_t *> one.members)[slot >> 6] >> (slot & 63) & 1
        for i in range(one.count):
            if (<uint32_t *> one.members)[i] == slot:
                return True
        return False

    cdef uint32_t shared(self, uint32_t number, const uint64_t *mask) noexcept:
        """How many of its members are in `mask`, which is `width` words."""
        cdef HolderSet *one = self.at(number)
        cdef uint32_t i, slot, count = 0
        if one.words:
            for i in range(one.words):
                count += popcount((<uint64_t *> one.members)[i] & mask[i])
            return count
        for i in range(one.count):
            slot = (<uint32_t *> one.members)[i]
            count += mask[slot >> 6] >> (slot & 63) & 1
        return count

    cdef bint covers(self, uint32_t number, const uint64_t *mask, uint32_t in_mask) noexcept:
        """Whether it has all slots in `mask`, of which there are `in_mask`."""
        cdef HolderSet *one = self.at(number)
        cdef uint32_t i
        cdef uint64_t missing = 0
        if one.count < in_mask:
            return False
        if not one.words:
            return self.shared(number, mask) == in_mask
        for i in range(self.width):
            missing |= mask[i] & ~((<uint64_t *> one.members)[i] if i < one.words else 0)
        return missing == 0

    cdef void spread(self, uint32_t number, uint64_t *words) noexcept:
        """Add its members to a bitset of `width` words."""
        cdef HolderSet *one = self.at(number)
        cdef uint32_t i, slot
        if one.words:
            for i in range(one.words):
                words[i] |= (<uint64_t *> one.members)[i]
        else:
            for i in range(one.count):
                slot = (<uint32_t *> one.members)[i]
                words[slot >> 6] |= <uint64_t> 1 << (slot & 63)

    # From one set to another

    cdef int64_t toggled(self, uint32_t number, uint32_t slot, int change) except -1:
        """The id of the set plus (change 1) or minus (-1) this slot. The slot must be absent, or present."""
        cdef uint64_t name = self.part(slot)
        cdef uint32_t count = 1
        if number:
            name ^= self.at(number).name
            count = self.at(number).count + change
        if not count:
            return 0
        if number:
            self.spread(number, self.scratch)
        self.scratch[slot >> 6] ^= <uint64_t> 1 << (slot & 63)
        return self.interned(name, count)

    cdef int64_t without(self, uint32_t number, const uint64_t *mask) except -1:
        """The id of the set without the slots in `mask`."""
        cdef uint64_t name = self.at(number).name, gone
        cdef uint32_t count = self.at(number).count, i
        self.spread(number, self.scratch)
        for i in range(self.width):
            gone = self.scratch[i] & mask[i]
            self.scratch[i] ^= gone
            while gone:
                name ^= self.part((i << 6) + ctz(gone))
                count -= 1
                gone &= gone - 1
        return self.interned(name, count) if count else 0

    cdef int64_t interned(self, uint64_t name, uint32_t count) except -1:
        """The id of the set in the scratch words, which are zero afterwards."""
        cdef uint32_t number = self.head(name)[0]
        cdef HolderSet *one
        try:
            while number:
                one = self.at(number)
                if one.name == name and one.count == count and self.is_scratch(one):
                    return number
                number = one.next
            return self.made(name, count)
        finally:
            memset(self.scratch, 0, self.width * 8)

    cdef bint is_scratch(self, HolderSet *one) noexcept:
        """Whether a set equals the scratch words. Their numbers of members must be equal."""
        cdef uint32_t i, slot
        if one.words:
            return memcmp(one.members, self.scratch, one.words * 8) == 0
        for i in range(one.count):
            slot = (<uint32_t *> one.members)[i]
            if not self.scratch[slot >> 6] >> (slot & 63) & 1:
                return False
        return True

    cdef int64_t made(self, uint64_t name, uint32_t count) except -1:
        """A new set of the members in the scratch words, without rows yet."""
        cdef uint32_t words = self.width, number = self.first_free, i, place = 0
        cdef uint64_t left
        cdef HolderSet *one
        cdef void *members
        while not self.scratch[words - 1]:
            words -= 1
        if not number and self.used == self.page_count << PAGE_BITS:
            self.add_page()
        if count > 2 * words:
            members = taken(malloc(words * 8))
            memcpy(members, self.scratch, words * 8)
        else:
            members = taken(malloc(count * 4))
            for i in range(words):
                left = self.scratch[i]
                while left:
                    (<uint32_t *> members)[place] = (i << 6) + ctz(left)
                    place += 1
                    left &= left - 1
            words = 0
        if number:
            self.first_free = self.at(number).next
        else:
            number = self.used
            self.used += 1
        one = self.at(number)
        self.births += 1
        one.name, one.rows, one.count, one.words, one.members = name, 0, count, words, members
        one.born = self.births
        self.bytes += members_bytes(one)
        self.link(number)
        self.live += 1
        self.split_bucket()
        return number

    cdef inline void link(self, uint32_t number) noexcept:
        cdef uint32_t *head = self.head(self.at(number).name)
        self.at(number).next = head[0]
        head[0] = number

    cdef void unlink(self, uint32_t number) noexcept:
        cdef uint32_t *at = self.head(self.at(number).name)
        while at[0] != number:
            at = &self.at(at[0]).next
        at[0] = self.at(number).next

    cdef int split_bucket(self) except -1:
        """Linear hashing: if there are more sets than buckets, split one bucket's chain with a new bucket."""
        cdef uint32_t buckets = (<uint32_t> 1 << self.level) + self.split
        cdef uint32_t number, following
        cdef uint32_t *old
        if self.live <= buckets:
            return 0
        if buckets == self.head_page_count << PAGE_BITS:
            self.add_head_page()
        old = &self.heads[self.split >> PAGE_BITS][self.split & (PAGE - 1)]
        number, old[0] = old[0], 0
        self.split += 1
        while number:
            following = self.at(number).next
            self.link(number)
            number = following
        if self.split == <uint32_t> 1 << self.level:
            self.level, self.split = self.level + 1, 0
        return 0

    cdef inline void release(self, uint32_t number) noexcept:
        """One row fewer has this set."""
        cdef HolderSet *one = self.at(number)
        one.rows -= 1
        if not one.rows:
            self.end(number)

    cdef void end(self, uint32_t number) noexcept:
        cdef HolderSet *one = self.at(number)
        self.unlink(number)
        self.bytes -= members_bytes(one)
        free(one.members)
        one.members, one.count, one.born, one.next = NULL, 0, 0, self.first_free
        self.first_free = number
        self.live -= 1

    cdef int copy_slot(self, uint32_t source, uint32_t copy) except -1:
        """Add `copy`, which no set has, to every set that has `source`. The sets keep their ids."""
        cdef uint32_t number, fresh
        cdef HolderSet *one
        cdef HolderSet *other
        for number in range(1, self.used):
            one = self.at(number)
            if not one.count or not self.has(number, source) or self.has(number, copy):
                continue
            self.unlink(number)
            self.spread(number, self.scratch)
            self.scratch[copy >> 6] |= <uint64_t> 1 << (copy & 63)
            try:
                fresh = self.made(one.name ^ self.part(copy), one.count + 1)
            except MemoryError:
                self.link(number)
                raise
            finally:
                memset(self.scratch, 0, self.width * 8)
            other = self.at(fresh)  # its contents move to the old id, which all rows point to
            self.unlink(fresh)
            self.bytes -= members_bytes(one)
            free(one.members)
            one.name, one.count, one.words, one.members = other.name, other.count, other.words, other.members
            one.born = other.born
            self.link(number)
            other.members, other.count, other.born, other.next = NULL, 0, 0, self.first_free
            self.first_free = fresh
            self.live -= 1
        return 0

    cdef list slots(self, uint32_t number):
        """Its members, lowest first."""
        cdef uint32_t i
        cdef list found = []
        for i in range(self.width * 64):
            if self.has(number, i):
                found.append(i)
        return found

    cdef list chain(self, uint64_t name):
        """The sets in the name's bucket. Ends even if a broken chain is a circle."""
        cdef uint32_t number = self.head(name)[0]
        cdef list found = []
        while number and <uint32_t> len(found) < self.live:
            found.append(number)
            number = self.at(number).next
        return found

    cdef check(self, dict rows):
        """Raise if an invariant is broken; `rows`: how many there are of each id."""
        seen = set()
        for number in range(1, self.used):
            if not self.at(number).count:
                continue
            members = tuple(self.slots(number))
            if members in seen or len(members) != self.at(number).count:
                raise AssertionError(f"set {number} exists twice or has a wrong count: {members}")
            seen.add(members)
            if self.at(number).rows != rows.get(number, 0) or not self.at(number).rows:
                raise AssertionError(f"set {number} counts {self.at(number).rows} rows, not {rows.get(number)}")
            if number not in self.chain(self.at(number).name):
                raise AssertionError(f"set {number} is not in its bucket's chain")
        if len(seen) != self.live or rows.keys() - set(range(1, self.used)):
            raise AssertionError(f"{len(seen)} sets, counted {self.live}")


cdef inline size_t members_bytes(HolderSet *one) noexcept:
    """The members' memory, with malloc's header."""
    return 16 + (one.words * 8 if one.words else one.count * 4)


cdef inline uint64_t scattered(uint64_t x) noexcept:
    """A number that looks random (splitmix64)."""
    x = (x + 1) * <uint64_t> 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t> 0x94D049BB133111EB
    return x ^ (x >> 31)


cdef void *taken(void *memory) except NULL:
    if memory == NULL:
        raise MemoryError("no memory for the block index")
    return memory
