"""What callers have reserved: bookings whose owner is outside this process, and selections kept for them.

    select (with an id) ──> kept, for 120 s ──┐
                                              ├──> reserved ──any call for it──> its lease begins again
    select_and_reserve ───────────────────────┘        ├── free
                                                       └── no call for a lease ──> expired: the caller is gone

Everything is bounded, in number and in bytes: a caller that never frees must not fill the memory of this
process, nor of its peers, which keep a copy of each booking.

Invariant: each reservation in the table has one entry in the heap, dated at or before its expiry.
"""

from __future__ import annotations

import heapq
from collections import Counter

from msgspec import Struct

from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.bookings import MOST_BOOKINGS_OF_PEER
from kvrouter.core.wire.ids import BookingKey, Target
from kvrouter.errors import ReservationsFullError, TakenIdError, UnknownReservationError, counted
from kvrouter.settings.declare import MIB

MOST_LEASE_S = 86_400.0
# Of all callers: peers count no more bookings of one replica. And the bytes of all, of one half of that.
MOST, MOST_BYTES = MOST_BOOKINGS_OF_PEER, 512 * MIB
PER_CALLER = 16_384
# Kept selections, as Dynamo's: each can be reserved once.
KEPT_S = 120.0
MOST_KEPT = 4096
MOST_KEPT_BYTES = 64 * MIB
# What a reservation takes without its blocks, and with each of them: a name is in the request, in the
# booking, and as an entry with a count in the table of active blocks.
_BYTES, _BYTES_OF_BLOCK = 1024, 56
# A heap with fewer entries is not tidied.
_FEW = 64


class Reservation(Struct, eq=False):
    """A booking of a caller. `output_tokens`: of its answer, as far as the caller has reported it."""

    id: str
    caller: str
    router: Router
    key: BookingKey
    target: Target
    block_size: int
    lease_s: float
    expires_at: float
    size_bytes: int
    output_tokens: int = 0


class Kept(Struct, frozen=True):
    """A selection that may be reserved later, as it was."""

    router: Router
    request: RouteRequest
    target: Target
    expires_at: float
    size_bytes: int


class Reservations:
    def __init__(self, per_caller: int = PER_CALLER) -> None:
        self._per_caller = per_caller
        self._by_id: dict[str, Reservation] = {}
        self._heap: list[tuple[float, int, Reservation]] = []
        self._pushed = 0  # equal times must not compare reservations
        self._of_caller: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._bytes = 0
        self._kept: dict[str, Kept] = {}  # oldest first
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._by_id

    def check_room(self, reservation_id: str, caller: str, request: RouteRequest) -> int:
        """The bytes of one more reservation. Raises TakenIdError or ReservationsFullError."""
        if reservation_id in self._by_id:
            raise TakenIdError(f"{reservation_id!r} is reserved already: free it first, or give another id")
        size = size_of(request)
        if self._of_caller[caller] >= self._per_caller:
            raise ReservationsFullError(
                f"caller {caller!r} holds {counted(self._per_caller, 'reservation')}: free them when their "
                "requests end, or raise --reservations-per-caller"
            )
        if 2 * (self._bytes_of[caller] + size) > MOST_BYTES:
            raise ReservationsFullError(f"what caller {caller!r} holds takes too much memory: free some")
        if len(self._by_id) >= MOST or self._bytes + size > MOST_BYTES:
            what = f"{counted(len(self._by_id), 'reservation')} are held here, as many as there is room for"
            raise ReservationsFullError(f"{what}: free some, or ask another router of the fleet")
        return size

    def add(self, reservation: Reservation) -> None:
        """After `check_room`, in the same turn of the event loop."""
        self._by_id[reservation.id] = reservation
        self._of_caller[reservation.caller] += 1
        self._count_bytes(reservation, reservation.size_bytes)
        self._push(reservation)

    def renew(self, reservation_id: str, now: float) -> Reservation:
        """The reservation, whose lease begins again. Raises UnknownReservationError."""
        found = self._by_id.get(reservation_id)
        if found is None or found.expires_at <= now:
            raise UnknownReservationError(
                f"no reservation {reservation_id[:100]!r} here: it was freed, its lease has ended, or "
                "another router made it; every call for it goes to the router that reserved it"
            )
        found.expires_at = now + found.lease_s
        return found

    def remove(self, reservation: Reservation) -> None:
        """It is over. Its entry in the heap, if it has one, is skipped when its time comes."""
        del self._by_id[reservation.id]
        self._count_bytes(reservation, -reservation.size_bytes)
        self._of_caller[reservation.caller] -= 1
        if not self._of_caller[reservation.caller]:  # callers are not bounded, what they hold is
            del self._of_caller[reservation.caller], self._bytes_of[reservation.caller]

    def expired(self, now: float) -> list[Reservation]:
        """Those whose lease has ended, to be removed now. Forgets selections that were kept too long."""
        for name in [name for name, one in self._kept.items() if one.expires_at <= now]:
            self.forget(name)
        over = []
        while self._heap and self._heap[0][0] <= now:
            reservation = heapq.heappop(self._heap)[2]
            if self._by_id.get(reservation.id) is not reservation:
                continue
            if reservation.expires_at > now:  # renewed since
                self._push(reservation)
            else:
                over.append(reservation)
        return over

    def of_worker(self, worker_id: str) -> list[Reservation]:
        return [one for one in self._by_id.values() if one.target.worker_id == worker_id]

    # Selections

    def keep(self, name: str, router: Router, request: RouteRequest, target: Target, now: float) -> None:
        """Keep a selection for KEPT_S; the oldest ones give way."""
        self.forget(name)
        size = size_of(request)
        self._kept[name] = Kept(router, request, target, now + KEPT_S, size)
        self._kept_bytes += size
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
            self.forget(next(iter(self._kept)))

    def kept(self, name: str, now: float) -> Kept:
        """A kept selection, to be forgotten once it is reserved. Raises UnknownReservationError."""
        found = self._kept.get(name)
        if found is None or found.expires_at <= now:
            raise UnknownReservationError(
                f"no selection {name[:100]!r} is kept: it can be reserved once, within {KEPT_S:g} s after "
                "/select with this selection_id at the same router; or name `worker_id`"
            )
        return found

    def forget(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        self._kept_bytes -= kept.size_bytes if kept is not None else 0

    def _count_bytes(self, reservation: Reservation, size: int) -> None:
        self._bytes_of[reservation.caller] += size
        self._bytes += size

    def _push(self, reservation: Reservation) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (reservation.expires_at, self._pushed, reservation))
        if len(self._heap) > _FEW + 2 * len(self._by_id):  # most are freed long before their time
            self._heap = [one for one in self._heap if self._by_id.get(one[2].id) is one[2]]
            heapq.heapify(self._heap)


def size_of(request: RouteRequest) -> int:
    """About what a reservation of this request takes, in bytes."""
    blocks = sum(len(prompt.hashes) for prompt in request.prompts)
    return _BYTES + _BYTES_OF_BLOCK * blocks + 4 * len(request.text)
