"""Requests in flight: the blocks that they hold and the prefill tokens still charged, per target.

    booking (router, number) ── target ── its sequence hashes, prefill tokens, output blocks
                                   │
    active blocks of a target = distinct hashes that its bookings hold + blocks without a hash

A booking belongs to the replica that made it. The table has this replica's bookings and copies of its peers'.
Bookings on unknown targets are kept, because only their owner ends them.

A replica may end with thousands of bookings. They leave their owner at once; the blocks that they hold are
released in slices (`sweep`), deepest blocks first, so that each set stays prefix-closed.

Per target the table also knows the prefill that is left (core/routing/cost.py reads it): bookings
without a first byte, in the order in which this replica learnt of them; when the first of them began; the
tokens that decoding sequences hold. Times are dated here, never taken from a peer. No digest covers them.

    sent_at ──> unfinished: head, next, next …       first byte ──> out; the next one begins now
                            └─ began: the later of its sending and the previous first byte

The decode half of a pair is not among them: its target computes no prompt. Its first byte says nothing about
the prefills there.

Invariants: a hash's reference count on a target is the number of bookings there that name it, including
dropped ones that are not yet swept; charged tokens are the sum over bookings whose prefill is not completed.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from kvrouter.core.tables.table import CountedSet, Slots, new_table
from kvrouter.core.tables.tenants import TenantTable
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import DECODE
from kvrouter.core.wire.ids import BookingKey, RouterId, Target
from kvrouter.core.wire.ops import AddRequest, MarkPrefillCompleted, Op, Progress
from kvrouter.core.wire.values import MOST_ID_CHARACTERS

SWEEP_HASHES = 512  # about 1 ms
# At least the time from a booking until the peers know of it, 2 ms on one machine (docs/benchmarks.md, sync).
# Longer than needed costs nothing measurable, shorter costs TTFT (docs/concepts/decide.md).
UNSEEN_WINDOW_S = 0.020
# Weight of the newest sample in the moving average: a burst of a few dozen requests is enough to raise it.
UNSEEN_WEIGHT = 0.1
_MASK64 = (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode


class Booking(Struct, eq=False, gc=False):
    """One request placed on one target by one replica.

    `hashes`: distinct, parent first. `anonymous_blocks`: prompt blocks whose hashes are not known.
    `output_blocks`: blocks that the answer has filled so far. `is_text`: the hashes are of text.
    """

    key: BookingKey
    request_id: str
    target: Target
    hashes: Sequence[int]
    isl: int
    overlap_blocks: int
    prefill_tokens: int
    anonymous_blocks: int = 0
    output_blocks: int = 0
    prefill_completed: bool = False
    sent_at: float = 0.0
    """When this replica sent it, or learnt of it from its owner; in no digest."""
    is_text: bool = False
    left_out: int = 0
    """Blocks of a peer's booking whose names are not kept, as there was no room for them."""
    left_out_digest: int = 0
    """Over their names."""
    role: str = ""
    """Of AddRequest. In no digest: older replicas do not read it, and it follows from the target and its
    prefill tokens."""
    tenant: str = ""
    """Of AddRequest, as `tenant_tokens`; both in no digest."""
    tenant_tokens: int = 0

    def without_names(self) -> Booking:
        """With the same load and the same digest, in little room."""
        digest = xxh3_64_intdigest(pack_hashes(self.hashes))
        return replace(self, hashes=(), left_out=len(self.hashes), left_out_digest=digest)

    def digest(self) -> int:
        """The booking's part of the digest in a Check: a hash over all that a copy holds.

        Over the hashes and not their number: a copy with as many other blocks would show the right load, and
        share the wrong blocks with other requests.
        """
        facts = (
            self.key.number,
            self.request_id[:MOST_ID_CHARACTERS],
            self.target.worker_id,
            self.target.rank,
            self.left_out_digest or xxh3_64_intdigest(pack_hashes(self.hashes)),
            self.isl,
            self.overlap_blocks,
            self.prefill_tokens,
            self.anonymous_blocks,
            self.prefill_completed,
            self.output_blocks,
        )
        return xxh3_64_intdigest(_encode(facts))


# The role of a booking whose target reads blocks from a peer.
PULL = "pull"

# Limits of a measured prefill: longer ones are stalls, and no engine holds more tokens.
MOST_SERVICE_S = 600.0
MOST_TOKENS = 1 << 27
# The blocks whose names are kept of a peer's bookings in a pool, and of all replicas in all pools: 67 and 270
# million tokens in flight in blocks of 16. A named block takes about 40 bytes. Own names are always kept.
MOST_OF_PEER = 1 << 22
MOST_OF_ALL = 1 << 24
# Bookings in flight of a peer in a pool: more than one process can serve. Of all in all pools: 500 MB if each
# is at a target of its own. Peers with fewer than FEW do not suffer from those that have many.
MOST_BOOKINGS_OF_PEER = 1 << 16
MOST_BOOKINGS = 1 << 18
FEW = 1 << 10
# What a booking without blocks takes, in blocks.
_BOOKING_BLOCKS = 16


class Service(Struct, frozen=True):
    """A measured prefill: the target computed `tokens` in `seconds`, next to `context_tokens` of decoding."""

    target: Target
    tokens: int
    seconds: float
    context_tokens: int


@dataclass(slots=True, eq=False)
class _Load:
    """The sums over the bookings on one target.

    `prompt_tokens`, `output_blocks`: of the bookings whose prefill is completed, the context of decoding.
    """

    held: CountedSet
    nameless_blocks: int = 0
    charged_tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_blocks: int = 0
    # by identity: a dropped booking may have a successor with its key before it is swept
    unfinished: OrderedDict[int, Booking] = field(default_factory=OrderedDict)
    began: float = 0.0  # when the first of `unfinished` began
    first_byte_at: float = 0.0  # the last one that was observed
    unobserved_at: float = 0.0  # the last end of a prefill that nobody observed: a guess, or an abort
    place: int | None = None  # in the columns; None: the target is not in the roster

    @property
    def is_empty(self) -> bool:
        return not self.requests and not self.held.count


@dataclass(slots=True)
class _Owner:
    """One replica's bookings, and the digest of them all.

    Most bookings end before a Check asks for the digest, so a booking is hashed only then.

    Invariant: `total` is the sum of `parts`, the hashes of the bookings as of when each was last counted; all
    bookings that have changed since, or were never counted, are in `changed`.
    """

    bookings: dict[int, Booking] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    parts: dict[int, int] = field(default_factory=dict)
    total: int = 0
    room: int = 0
    """The blocks that they take, if they are a peer's; 0: they are this replica's own."""

    def count(self, number: int) -> None:
        """Hash the booking as it is now."""
        self.changed.discard(number)
        part = self.bookings[number].digest()
        self.total = (self.total - self.parts.get(number, 0) + part) & _MASK64
        self.parts[number] = part

    def digest(self) -> int:
        for number in list(self.changed):
            self.count(number)
        return self.total

    def end(self, number: int) -> Booking | None:
        booking = self.bookings.pop(number, None)
        if booking is not None:
            self.changed.discard(number)
            if self.parts and (part := self.parts.pop(number, None)) is not None:  # most end before a Check
                self.total = (self.total - part) & _MASK64
        return booking


def _room_of(booking: Booking) -> int:
    return _BOOKING_BLOCKS + len(booking.hashes)


@dataclass(slots=True)
class BookedBudget:
    """What the bookings of all peers take together, in all pools of a replica, and its tenants."""

    used_blocks: int = 0
    bookings: int = 0
    tenants: TenantTable = field(default_factory=TenantTable, compare=False)

    def within_bounds(self, booking: Booking, owner: _Owner) -> Booking | None:
        """A peer's booking: without its names if they are too many, or None. `owner`: all of the peer.

        Anyone who publishes as a replica can send any number of them.
        """
        known, count = owner.bookings.get(booking.key.number), len(owner.bookings)
        if known is not None and len(known.hashes) + known.left_out == len(booking.hashes):
            return booking.without_names() if known.left_out else booking  # a snapshot repeats it
        if count >= MOST_BOOKINGS_OF_PEER or (count >= FEW and self.bookings >= MOST_BOOKINGS):
            return None
        more = _room_of(booking)
        if owner.room + more > MOST_OF_PEER or self.used_blocks + more > MOST_OF_ALL:
            return booking.without_names()
        return booking

    def add(self, booking: Booking, owner: _Owner) -> None:
        owner.room += (room := _room_of(booking))
        self.used_blocks += room
        self.bookings += 1
        if booking.tenant in self.tenants.limited:
            self.tenants.booked_elsewhere[booking.tenant] += 1

    def remove(self, booking: Booking, owner: _Owner) -> None:
        owner.room -= (room := _room_of(booking))
        self.used_blocks -= room
        self.bookings -= 1
        self.forget_tenant(booking)

    def forget_tenant(self, booking: Booking) -> None:
        """It is in flight no longer."""
        counts = self.tenants.booked_elsewhere
        if booking.tenant and counts[booking.tenant] > 0:
            counts[booking.tenant] -= 1


class BookingTable:
    """The bookings of every replica, and the load they add up to. `placement_secret`: see `new_table`."""

    def __init__(self, placement_secret: int = 0, budget: BookedBudget | None = None) -> None:
        self._budget = budget or BookedBudget()
        self.tenants = self._budget.tenants
        self._table = new_table(placement_secret)
        self._slots = Slots(self._table)
        self._loads: dict[Target, _Load] = {}
        self._owners: dict[RouterId, _Owner] = {}
        self._places: dict[Target, int] = {}
        # Charged tokens, active blocks and requests of the roster's targets: candidates are made of copies of
        # these arrays. Written when they are next read, since a load changes several times between decisions.
        self._columns = (array("q"), array("q"), array("q"))
        # What `prefills_lined_up` copies. None until they are first read: most modes never do.
        self._prefills: tuple[array[int], array[int], array[int], array[float]] | None = None
        self.block_size = 0
        """The pool's, in which output blocks count."""
        self._outdated: set[_Load] = set()  # loads that have changed since
        self._dropped: deque[Booking] = deque()
        # of the first dropped booking: how many of its hashes are not released yet; None: it was not begun
        self._dropped_left: int | None = None

    def book(self, booking: Booking) -> None:
        """A request begins. A booking with the same key is replaced."""
        router_id, number = booking.key
        owner = self._owners.get(router_id)
        if owner is not None and number in owner.bookings:
            self.free(booking.key)
            owner = self._owners.get(router_id)  # None if that was its last booking
        load = self._loads.get(booking.target) or self._begin(booking.target)
        if booking.hashes:  # first, because it may raise: then nothing is booked
            load.held.add(booking.hashes)
        load.nameless_blocks += booking.anonymous_blocks + booking.output_blocks + booking.left_out
        load.requests += 1
        if booking.prefill_completed:
            load.prompt_tokens += booking.isl
            load.output_blocks += booking.output_blocks
        else:
            load.charged_tokens += booking.prefill_tokens
            if booking.role != DECODE:
                if not load.unfinished and load.began < booking.sent_at:
                    load.began = booking.sent_at
                load.unfinished[id(booking)] = booking
        self._outdated.add(load)
        if owner is None:
            owner = self._owners[router_id] = _Owner()
        owner.bookings[number] = booking
        owner.changed.add(number)

    def book_of_peer(self, booking: Booking) -> Booking | None:
        """`book` what a peer has published, as it can be kept: returns that. None: not at all."""
        router_id = booking.key.router_id
        kept = self._budget.within_bounds(booking, self._owners.get(router_id) or _Owner())
        if kept is not None:
            self.book(kept)
            self._budget.add(kept, self._owners[router_id])
        return kept

    def service(self, key: BookingKey, now: float, ttft_s: float) -> Service | None:
        """What a first byte shows of its target's speed: call before `mark_prefill_completed`.

        None if it shows nothing: since it began, another prefill has ended unobserved, or blocks were read.
        """
        booking = self.booking(key)
        if booking is None or booking.prefill_completed:
            return None
        load = self._loads[booking.target]
        # The difference travels and not the two times: replicas' clocks are not compared.
        began = max(now - ttft_s, load.first_byte_at)
        load.first_byte_at = now
        if load.unobserved_at > began or booking.role == PULL:
            return None
        # A clock that went back, or amounts that no engine has: one of them would spoil what is learnt.
        seconds, tokens = now - began, booking.prefill_tokens
        if not (0 < seconds <= MOST_SERVICE_S and 0 < tokens <= MOST_TOKENS):
            return None
        context_tokens = load.prompt_tokens + load.output_blocks * self.block_size
        return Service(booking.target, tokens, seconds, min(context_tokens, MOST_TOKENS))

    def mark_prefill_completed(self, key: BookingKey, now: float = 0.0) -> Booking | None:
        """End the booking's charge. Returns the booking if it was charged until now."""
        owner = self._owners.get(key.router_id)
        booking = owner.bookings.get(key.number) if owner is not None else None
        if owner is None or booking is None or booking.prefill_completed:
            return None
        booking.prefill_completed = True
        load = self._loads[booking.target]
        load.charged_tokens -= booking.prefill_tokens
        load.prompt_tokens += booking.isl
        load.output_blocks += booking.output_blocks
        if booking.role != DECODE:
            del load.unfinished[id(booking)]
            # Whichever it was, the engine turns to another prompt now, also if it finishes in another order.
            load.began = max(load.began, now)
            if load.first_byte_at != now:
                load.unobserved_at = now
        self._outdated.add(load)
        owner.changed.add(key.number)
        return booking

    def progress(self, key: BookingKey, output_blocks: int) -> None:
        """The answer has filled `output_blocks` blocks. A lower number than before is ignored."""
        booking = self.booking(key)
        if booking is None or output_blocks <= booking.output_blocks:
            return
        load = self._loads[booking.target]
        more = output_blocks - booking.output_blocks
        load.nameless_blocks += more
        load.output_blocks += more if booking.prefill_completed else 0
        self._outdated.add(load)
        booking.output_blocks = output_blocks
        # hashed at once: the next Check would otherwise hash all long answers in one call
        self._owners[key.router_id].count(key.number)

    def free(self, key: BookingKey, now: float = 0.0) -> Booking | None:
        """The request ends. Returns its booking; None if it has ended before."""
        booking = self._disown(key)
        if booking is not None:
            self._uncharge(booking, now)
            self._release(booking, booking.hashes)
        return booking

    def drop(self, key: BookingKey) -> None:
        """End the booking now, and let `sweep` release its blocks."""
        booking = self._disown(key)
        if booking is not None:
            self._dropped.append(booking)

    def drop_owner(self, router_id: RouterId) -> None:
        """End all bookings of a replica now, and let `sweep` release their blocks."""
        owner = self._owners.pop(router_id, None)
        if owner is not None:
            self._budget.used_blocks -= owner.room
            if owner.room:
                self._budget.bookings -= len(owner.bookings)
                for booking in owner.bookings.values():
                    self._budget.forget_tenant(booking)
            self._dropped.extend(owner.bookings.values())

    def sweep(self, hashes: int = SWEEP_HASHES) -> bool:
        """Release about this many hashes of dropped bookings; returns whether there is more to do."""
        while self._dropped and hashes > 0:
            hashes -= self._sweep_first(hashes)
        return bool(self._dropped)

    def _sweep_first(self, hashes: int) -> int:
        booking = self._dropped[0]
        if self._dropped_left is None:
            self._uncharge(booking)
            self._dropped_left = len(booking.hashes)
        rest = max(0, self._dropped_left - hashes)
        taken = booking.hashes[rest : self._dropped_left]
        self._dropped_left = rest
        if not rest:
            self._dropped.popleft()
            self._dropped_left = None
        self._release(booking, taken)
        return 8 + len(taken)  # a booking without blocks costs as much as eight hashes

    @property
    def is_empty(self) -> bool:
        """Whether no booking of any replica is left, dropped ones included."""
        return all(load.is_empty for load in self._loads.values())

    def booking(self, key: BookingKey) -> Booking | None:
        owner = self._owners.get(key.router_id)
        return owner.bookings.get(key.number) if owner else None

    def bookings(self, router_id: RouterId) -> list[Booking]:
        """One replica's bookings, oldest first."""
        owner = self._owners.get(router_id)
        return list(owner.bookings.values()) if owner else []

    def owners(self) -> dict[RouterId, int]:
        """Bookings in flight by replica; replicas with none are absent."""
        return {router_id: len(owner.bookings) for router_id, owner in self._owners.items()}

    def digest(self, router_id: RouterId) -> tuple[int, int]:
        """`(count, digest)` of one replica's bookings, as a Check carries them."""
        owner = self._owners.get(router_id)
        return (len(owner.bookings), owner.digest()) if owner else (0, 0)

    def use_block_size(self, block_size: int) -> None:
        """Count output blocks in the pool's blocks from now on."""
        if block_size != self.block_size:
            self.block_size = block_size
            self._outdated.update(self._loads.values())

    def line_up(self, targets: Sequence[Target]) -> None:
        """Keep the loads of these targets in columns, in this order."""
        self._places = {target: place for place, target in enumerate(targets)}
        self._columns = (nothing := array("q", bytes(8 * len(targets))), nothing[:], nothing[:])
        self._prefills = None
        for target, load in list(self._loads.items()):
            load.place = self._places.get(target)
            if load.place is None and load.is_empty:
                self._end(target, load)
        self._outdated = set(self._loads.values())

    def lined_up(self) -> tuple[array[int], array[int], array[int]]:
        """Charged tokens, active blocks and requests of the targets of `line_up`, as copies."""
        if self._outdated:
            self._update_columns()
        charged, blocks, requests = self._columns
        return charged[:], blocks[:], requests[:]

    def prefills_lined_up(self) -> tuple[array[int], array[int], array[int], array[float]]:
        """Copies of: unfinished prefills, tokens of the first, tokens that decode, when the first began."""
        if self._prefills is None:
            nothing = bytes(8 * len(self._places))
            zeros = array("q", nothing)
            self._prefills = zeros, zeros[:], zeros[:], array("d", nothing)
            self._outdated.update(self._loads.values())
        if self._outdated:
            self._update_columns()
        prompts, heads, context, began = self._prefills
        return prompts[:], heads[:], context[:], began[:]

    def prefills(self, target: Target) -> tuple[int, int, int, float]:
        """What `prefills_lined_up` has of one target."""
        load = self._loads.get(target)
        return self._prefills_of(load) if load else (0, 0, 0, 0.0)

    def _prefills_of(self, load: _Load) -> tuple[int, int, int, float]:
        head = next(iter(load.unfinished.values())).prefill_tokens if load.unfinished else 0
        context = load.prompt_tokens + load.output_blocks * self.block_size
        return len(load.unfinished), head, context, load.began

    def load(self, target: Target) -> tuple[int, int, int]:
        """`(charged tokens, active blocks, requests)` of the target."""
        load = self._loads.get(target)
        if load is None:
            return 0, 0, 0
        return load.charged_tokens, load.held.count + load.nameless_blocks, load.requests

    def charged_tokens(self, target: Target) -> int:
        """Prefill tokens still charged on the target."""
        load = self._loads.get(target)
        return load.charged_tokens if load else 0

    def blocks(self, target: Target) -> int:
        """Active blocks of the target: distinct hashes, and blocks without a hash."""
        load = self._loads.get(target)
        return load.held.count + load.nameless_blocks if load else 0

    def requests(self, target: Target) -> int:
        """Requests in flight on the target, of all replicas."""
        load = self._loads.get(target)
        return load.requests if load else 0

    def depths(self, hashes: Sequence[int]) -> dict[Target, int]:
        """Leading blocks of the chain that requests in flight hold, per target; absent if 0."""
        return self._table.depths(hashes)

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        self._table.check()
        dropped = list(self._dropped)
        swept = dropped.pop(0) if self._dropped_left is not None else None
        everything = [*dropped, *[one for owner in self._owners.values() for one in owner.bookings.values()]]
        extra: list[int] = list(swept.hashes[: self._dropped_left]) if swept is not None else []
        counted = {booking.target for booking in everything} | ({swept.target} if swept else set())
        has_rest = self._slots.in_use != len(self._loads) or (not counted and len(self._table) > 0)
        if has_rest or not counted <= self._loads.keys() <= counted | self._places.keys():
            raise AssertionError(f"slots, rows or loads without bookings: {set(self._loads)}")
        for target in self._loads:
            here = [booking for booking in everything if booking.target == target]
            self._check_target(target, here, extra if swept and swept.target == target else [])
        self._update_columns()
        lined_up = [self.load(target) for target in self._places]
        if lined_up != list(zip(*self._columns, strict=True)):
            raise AssertionError(f"the columns are off: {self._columns} != {lined_up}")
        prefills = [self.prefills(target) for target in self._places]
        if self._prefills is not None and prefills != list(zip(*self._prefills, strict=True)):
            raise AssertionError(f"the columns are off: {self._prefills} != {prefills}")
        for router_id, owner in self._owners.items():
            if owner.room not in {0, sum(map(_room_of, owner.bookings.values()))}:
                raise AssertionError(f"the room of {router_id} is off")
            if owner.digest() != sum(booking.digest() for booking in owner.bookings.values()) & _MASK64:
                raise AssertionError(f"the digest of {router_id} is off")

    def _check_target(self, target: Target, bookings: list[Booking], extra: list[int]) -> None:
        load = self._loads[target]
        references = Counter(hash_ for booking in bookings for hash_ in booking.hashes)
        references.update(extra)
        charged = sum(booking.prefill_tokens for booking in bookings if not booking.prefill_completed)
        nameless = sum(one.anonymous_blocks + one.output_blocks + one.left_out for one in bookings)
        expected = (dict(references), charged, nameless, len(bookings))
        held = load.held.counts()
        if expected != (held, load.charged_tokens, load.nameless_blocks, load.requests):
            raise AssertionError(f"{target} does not add up: {expected} != {held}, {load}")
        unfinished = {id(one) for one in bookings if not one.prefill_completed and one.role != DECODE}
        decoding = [one for one in bookings if one.prefill_completed]
        context = (sum(one.isl for one in decoding), sum(one.output_blocks for one in decoding))
        if unfinished != load.unfinished.keys() or context != (load.prompt_tokens, load.output_blocks):
            raise AssertionError(f"{target} does not add up: {unfinished}, {context} != {load}")
        if load.held.count != len(held) or any(not self._table.holds(load.held.slot, one) for one in held):
            raise AssertionError(f"{target}: a referenced hash is not in the table")

    def _begin(self, target: Target) -> _Load:
        slot = self._slots.take()
        self._table.label(slot, target)
        load = self._loads[target] = _Load(self._table.counted_set(slot), place=self._places.get(target))
        return load

    def _update_columns(self) -> None:
        charged, blocks, requests = self._columns
        for load in self._outdated:
            place = load.place
            if place is not None:
                charged[place] = load.charged_tokens
                blocks[place] = load.held.count + load.nameless_blocks
                requests[place] = load.requests
        if self._prefills is not None:
            prompts, heads, context, began = self._prefills
            for load in self._outdated:
                place = load.place
                if place is not None:
                    of_load = self._prefills_of(load)
                    prompts[place], heads[place], context[place], began[place] = of_load
        self._outdated.clear()

    def _disown(self, key: BookingKey) -> Booking | None:
        """Take the booking from its owner. It still counts in its target's load."""
        owner = self._owners.get(key.router_id)
        if owner is None:
            return None
        booking = owner.end(key.number)
        if owner.room and booking is not None:
            self._budget.remove(booking, owner)
        if not owner.bookings:  # replicas come and go, each with a new id
            del self._owners[key.router_id]
        return booking

    def _uncharge(self, booking: Booking, now: float = 0.0) -> None:
        """Take the booking out of its target's load, except for its hashes."""
        load = self._loads[booking.target]
        load.nameless_blocks -= booking.anonymous_blocks + booking.output_blocks + booking.left_out
        load.requests -= 1
        if booking.prefill_completed:
            load.prompt_tokens -= booking.isl
            load.output_blocks -= booking.output_blocks
        else:
            load.charged_tokens -= booking.prefill_tokens
            if booking.role != DECODE:
                if next(iter(load.unfinished)) == id(booking):  # aborted: the next one begins
                    load.began = max(load.began, now)
                del load.unfinished[id(booking)]
                load.unobserved_at = max(load.unobserved_at, now)
        self._outdated.add(load)

    def _release(self, booking: Booking, hashes: Sequence[int]) -> None:
        """Release these hashes of an uncharged booking."""
        load = self._loads[booking.target]
        if hashes:
            load.held.discard(hashes)
            self._outdated.add(load)
        if load.place is None and load.is_empty:
            self._end(booking.target, load)

    def _end(self, target: Target, load: _Load) -> None:
        """Remove an empty load that is not in the columns."""
        self._outdated.discard(load)
        del self._loads[target]
        self._slots.give_back(load.held.slot)


def add_request(booking: Booking, hashes: bytes) -> AddRequest:
    """The op from which a peer makes its copy of a booking. `hashes`: those of the booking, packed."""
    worker_id, rank = booking.target
    return AddRequest(
        number=booking.key.number,
        request_id=booking.request_id[:MOST_ID_CHARACTERS],
        worker_id=worker_id,
        rank=rank,
        hashes=hashes,
        isl=booking.isl,
        overlap_blocks=booking.overlap_blocks,
        prefill_tokens=booking.prefill_tokens,
        anonymous_blocks=booking.anonymous_blocks,
        is_text=booking.is_text,
        role=booking.role,
        tenant=booking.tenant,
        tenant_tokens=booking.tenant_tokens,
    )


def booking_ops(booking: Booking, hashes: bytes) -> list[Op]:
    """The ops that bring a peer's copy of this booking to its present state."""
    number = booking.key.number
    ops: list[Op] = [add_request(booking, hashes)]
    if booking.prefill_completed:
        ops.append(MarkPrefillCompleted(number))
    if booking.output_blocks:
        ops.append(Progress(number, booking.output_blocks))
    return ops


class UnseenBookings:
    """An estimate of the bookings of other replicas that a decision cannot know of yet.

        booking here ─W──┐   bookings of peers that arrive in this time were decided at about
             peers: │ │  │ │  the same moment, by replicas that had not seen ours either

    Replicas that decide in one instant see the same fleet and would all choose the same idle worker. The
    estimate is the number of peers' bookings that arrive within W after a booking made here, averaged over
    the bookings made here. It grows with the rate of requests, and with bursts.

    Two requests that compute the same new block (siblings) should choose the same worker: a peer's booking
    counts as -1 then.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._elsewhere = 0
        self._open: deque[tuple[float, int, int | None]] = deque()
        self._new_blocks: set[int | None] = set()

    @property
    def expected(self) -> float:
        """The bookings, without the siblings. 0 where most are siblings: then all should choose alike."""
        return max(0.0, self._mean)

    def booked_here(self, booking: Booking, now: float) -> None:
        """A booking made here: opens a sample that counts the peers' bookings from now on."""
        if self._open and now - self._open[0][0] > UNSEEN_WINDOW_S:
            self._close(now)
        block = _new_block(booking)
        self._open.append((now, self._elsewhere, block))
        self._new_blocks.add(block)

    def booked_elsewhere(self, booking: Booking, now: float) -> None:
        """A peer's booking has arrived."""
        self._close(now)
        block = _new_block(booking)
        self._elsewhere += -1 if block is not None and block in self._new_blocks else 1

    def _close(self, now: float) -> None:
        """Add the samples whose window has passed to the average."""
        while self._open and now - self._open[0][0] > UNSEEN_WINDOW_S:
            _, before, block = self._open.popleft()
            self._new_blocks.discard(block)
            self._mean += UNSEEN_WEIGHT * (self._elsewhere - before - self._mean)


def _new_block(booking: Booking) -> int | None:
    """The first block that the booking's target has to compute; None if it holds all that are known."""
    hashes, depth = booking.hashes, booking.overlap_blocks
    return hashes[depth] if depth < len(hashes) else None
