"""Requests in flight: which blocks they hold and what prefill is still charged, per target.

    booking (router, number) ── target ── its sequence hashes, prefill tokens, output blocks
                                   │
    active blocks of a target = distinct hashes its bookings hold + blocks without a name

A booking belongs to the replica that made it; here own bookings and copies of the peers' stand
side by side. Bookings on targets unknown here are kept: only their owner ends them.

A replica may end with thousands of bookings. They are its own no longer at once; what they hold is
taken off in slices (`sweep`), deepest blocks first, so that sets stay prefix-closed.

Invariants: a hash's reference count on a target is the number of its bookings there that name it,
dropped ones not yet swept included; charged tokens are the sum over bookings whose prefill is not
completed.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from xxhash import xxh3_64_intdigest

from kvrouter.core.tables.table import CountedSet, Slots, new_table
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import BookingKey, RouterId, Target
from kvrouter.core.wire.values import MOST_ID_CHARACTERS

SWEEP_HASHES = 512
"""Taking off this many takes about 1 ms."""
_MASK64 = (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Booking:
    """One request placed on one target by one replica.

    `hashes` are distinct, parent first; `anonymous_blocks` are prompt blocks whose hashes are not
    known; `output_blocks` are those the answer has filled.
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

    def digest(self) -> int:
        """What a Check of the owner's feed adds up: all that a copy holds.

        The hashes too: a copy with as many others would charge the right load, and share the wrong blocks.
        """
        facts = (
            self.key.number,
            self.request_id[:MOST_ID_CHARACTERS],
            self.target.worker_id,
            self.target.rank,
            xxh3_64_intdigest(pack_hashes(self.hashes)),
            self.isl,
            self.overlap_blocks,
            self.prefill_tokens,
            self.anonymous_blocks,
            self.prefill_completed,
            self.output_blocks,
        )
        return xxh3_64_intdigest(_encode(facts))


@dataclass(slots=True, eq=False)
class _Load:
    """What the bookings on one target add up to."""

    held: CountedSet
    nameless_blocks: int = 0
    charged_tokens: int = 0
    requests: int = 0
    place: int | None = None
    """In the columns; None if it is not lined up."""

    @property
    def is_empty(self) -> bool:
        """Whether no booking is left here."""
        return not self.requests and not self.held.count


@dataclass(slots=True)
class _Owner:
    """One replica's bookings, and the digest of them all: made when asked for, as most have ended by then.

    Invariant: the digest is that of the bookings, but for those in `changed` as they were in `parts`.
    """

    bookings: dict[int, Booking] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    parts: dict[int, int] = field(default_factory=dict)
    """What each booking adds to the digest, as of when it was counted."""
    total: int = 0

    def count(self, number: int) -> None:
        """The booking counts as it is now."""
        self.changed.discard(number)
        part = self.bookings[number].digest()
        self.total = (self.total - self.parts.get(number, 0) + part) & _MASK64
        self.parts[number] = part

    def digest(self) -> int:
        """Of all bookings as they are now."""
        for number in list(self.changed):
            self.count(number)
        return self.total

    def end(self, number: int) -> Booking | None:
        """The booking is no longer one of these."""
        booking = self.bookings.pop(number, None)
        if booking is not None:
            self.changed.discard(number)
            self.total = (self.total - self.parts.pop(number, 0)) & _MASK64
        return booking


class ActiveTable:
    """The bookings of every replica, and the load they add up to. `placement_secret`: see `new_table`."""

    def __init__(self, placement_secret: int = 0) -> None:
        self._table = new_table(placement_secret)
        self._slots = Slots(self._table)
        self._loads: dict[Target, _Load] = {}
        self._owners: dict[RouterId, _Owner] = {}
        self._places: dict[Target, int] = {}
        self._columns = (array("q"), array("q"), array("q"))
        self._unshown: set[_Load] = set()
        """Loads that have changed since the columns were last looked at."""
        self._dropped: deque[Booking] = deque()
        self._dropped_left: int | None = None
        """Of the first dropped: how many of its hashes still count; None if it counts whole."""

    def book(self, booking: Booking) -> None:
        """A request begins. One booked before under the same key is replaced."""
        router_id, number = booking.key
        owner = self._owners.get(router_id)
        if owner is not None and number in owner.bookings:
            self.free(booking.key)
            owner = self._owners.get(router_id)
        load = self._loads.get(booking.target) or self._begin(booking.target)
        if booking.hashes:
            load.held.add(booking.hashes)
        load.nameless_blocks += booking.anonymous_blocks + booking.output_blocks
        load.charged_tokens += 0 if booking.prefill_completed else booking.prefill_tokens
        load.requests += 1
        self._unshown.add(load)
        if owner is None:
            owner = self._owners[router_id] = _Owner()
        owner.bookings[number] = booking
        owner.changed.add(number)

    def mark_prefill_completed(self, key: BookingKey) -> Booking | None:
        """Its tokens are no longer charged. Returns the booking if this was news."""
        booking = self.booking(key)
        if booking is None or booking.prefill_completed:
            return None
        booking.prefill_completed = True
        load = self._loads[booking.target]
        load.charged_tokens -= booking.prefill_tokens
        self._unshown.add(load)
        self._owners[key.router_id].changed.add(key.number)
        return booking

    def progress(self, key: BookingKey, output_blocks: int) -> None:
        """Its answer now fills `output_blocks` blocks; fewer than before is passed over."""
        booking = self.booking(key)
        if booking is None or output_blocks <= booking.output_blocks:
            return
        load = self._loads[booking.target]
        load.nameless_blocks += output_blocks - booking.output_blocks
        self._unshown.add(load)
        booking.output_blocks = output_blocks
        self._owners[key.router_id].count(key.number)  # long answers have their share of the work now

    def free(self, key: BookingKey) -> Booking | None:
        """The request ends; a second time changes nothing. Returns the booking that ended."""
        booking = self._disown(key)
        if booking is not None:
            self._uncharge(booking)
            self._release(booking, booking.hashes)
        return booking

    def drop(self, key: BookingKey) -> None:
        """The request has ended, as it turns out; what it holds is taken off by `sweep`."""
        booking = self._disown(key)
        if booking is not None:
            self._dropped.append(booking)

    def drop_owner(self, router_id: RouterId) -> None:
        """All bookings of a replica have ended; what they hold is taken off by `sweep`."""
        owner = self._owners.pop(router_id, None)
        if owner is not None:
            self._dropped.extend(owner.bookings.values())

    def sweep(self, hashes: int = SWEEP_HASHES) -> bool:
        """Take about this many hashes of dropped bookings off; returns whether there is more to do."""
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
        return 8 + len(taken)  # a booking without blocks costs something, too

    @property
    def is_empty(self) -> bool:
        """Whether nobody's bookings are left, dropped ones included."""
        return all(load.is_empty for load in self._loads.values())

    def booking(self, key: BookingKey) -> Booking | None:
        """The booking under this key, if it is in flight."""
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

    def line_up(self, targets: Sequence[Target]) -> None:
        """Keep the loads of these in columns, in this order."""
        self._places = {target: place for place, target in enumerate(targets)}
        self._columns = (nothing := array("q", bytes(8 * len(targets))), nothing[:], nothing[:])
        for target, load in list(self._loads.items()):
            load.place = self._places.get(target)
            if load.place is None and load.is_empty:
                self._end(target, load)
        self._unshown = set(self._loads.values())

    def lined_up(self) -> tuple[array[int], array[int], array[int]]:
        """Charged tokens, active blocks and requests of the targets that are lined up; copies."""
        self._show_all()
        charged, blocks, requests = self._columns
        return charged[:], blocks[:], requests[:]

    def load(self, target: Target) -> tuple[int, int, int]:
        """`(charged tokens, active blocks, requests)` of the target, in one look-up."""
        load = self._loads.get(target)
        if load is None:
            return 0, 0, 0
        return load.charged_tokens, load.held.count + load.nameless_blocks, load.requests

    def charged_tokens(self, target: Target) -> int:
        """Prefill tokens still charged on the target."""
        load = self._loads.get(target)
        return load.charged_tokens if load else 0

    def blocks(self, target: Target) -> int:
        """Active blocks of the target: distinct named ones, and those without a name."""
        load = self._loads.get(target)
        return load.held.count + load.nameless_blocks if load else 0

    def requests(self, target: Target) -> int:
        """Requests in flight on the target, booked by any replica."""
        load = self._loads.get(target)
        return load.requests if load else 0

    def depths(self, hashes: Sequence[int]) -> dict[Target, int]:
        """Leading blocks of the chain that requests in flight hold, per target; 0 is left out."""
        return self._table.depths(hashes)

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        self._table.check()
        live = [booking for owner in self._owners.values() for booking in owner.bookings.values()]
        dropped = list(self._dropped)
        swept = dropped.pop(0) if self._dropped_left is not None else None
        everything = [*live, *dropped]
        extra: list[int] = list(swept.hashes[: self._dropped_left]) if swept is not None else []
        counted = {booking.target for booking in everything} | ({swept.target} if swept else set())
        if not counted <= self._loads.keys() <= counted | self._places.keys():
            raise AssertionError(f"loads kept for targets without bookings: {set(self._loads)}")
        for target in self._loads:
            here = [booking for booking in everything if booking.target == target]
            self._check_target(target, here, extra if swept and swept.target == target else [])
        self._show_all()
        lined_up = [self.load(target) for target in self._places]
        if lined_up != list(zip(*self._columns, strict=True)):
            raise AssertionError(f"the columns are off: {self._columns} != {lined_up}")
        for router_id, owner in self._owners.items():
            if owner.digest() != sum(booking.digest() for booking in owner.bookings.values()) & _MASK64:
                raise AssertionError(f"the digest of {router_id} is off")

    def _check_target(self, target: Target, bookings: list[Booking], extra: list[int]) -> None:
        load = self._loads[target]
        references = Counter(hash_ for booking in bookings for hash_ in booking.hashes)
        references.update(extra)
        charged = sum(booking.prefill_tokens for booking in bookings if not booking.prefill_completed)
        nameless = sum(booking.anonymous_blocks + booking.output_blocks for booking in bookings)
        expected = (dict(references), charged, nameless, len(bookings))
        held = load.held.counts()
        if expected != (held, load.charged_tokens, load.nameless_blocks, load.requests):
            raise AssertionError(f"{target} does not add up: {expected} != {held}, {load}")
        if load.held.count != len(held) or any(not self._table.holds(load.held.slot, one) for one in held):
            raise AssertionError(f"{target}: a referenced hash is not in the table")

    def _begin(self, target: Target) -> _Load:
        slot = self._slots.take()
        self._table.label(slot, target)
        load = self._loads[target] = _Load(self._table.counted_set(slot), place=self._places.get(target))
        return load

    def _show_all(self) -> None:
        """Bring the columns up to date."""
        for load in self._unshown:
            self._show(load)
        self._unshown.clear()

    def _show(self, load: _Load) -> None:
        if load.place is not None:
            charged, blocks, requests = self._columns
            charged[load.place] = load.charged_tokens
            blocks[load.place] = load.held.count + load.nameless_blocks
            requests[load.place] = load.requests

    def _disown(self, key: BookingKey) -> Booking | None:
        """Take the booking from its owner; it still counts on its target."""
        owner = self._owners.get(key.router_id)
        if owner is None:
            return None
        booking = owner.end(key.number)
        if not owner.bookings:
            del self._owners[key.router_id]
        return booking

    def _uncharge(self, booking: Booking) -> None:
        """Take all but its hashes off its target."""
        load = self._loads[booking.target]
        load.nameless_blocks -= booking.anonymous_blocks + booking.output_blocks
        load.charged_tokens -= 0 if booking.prefill_completed else booking.prefill_tokens
        load.requests -= 1
        self._unshown.add(load)

    def _release(self, booking: Booking, hashes: Sequence[int]) -> None:
        """Take these hashes of an uncharged booking off its target."""
        load = self._loads[booking.target]
        if hashes:
            load.held.discard(hashes)
            self._unshown.add(load)
        if load.place is None and load.is_empty:
            self._end(booking.target, load)

    def _end(self, target: Target, load: _Load) -> None:
        """Nothing is left of this load, and nobody looks at it."""
        self._unshown.discard(load)
        del self._loads[target]
        self._slots.give_back(load.held.slot)
