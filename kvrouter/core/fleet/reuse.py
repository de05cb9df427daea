"""What was cached of the prompts that were routed here, and what other caches would have had of them.

own request ──count──> counts: chosen, best, pooled, endless
└──> Ghosts <──booked_elsewhere── peers' bookings, which their owners count
"""

from __future__ import annotations

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.tables.bookings import Booking
from kvrouter.core.tables.ghosts import Ghosts, Reuse


class ReuseMeter:
    """Of one pool."""

    def __init__(self, pool: Pool) -> None:
        self.counts = Reuse()
        self._pool = pool
        self._ghosts = Ghosts()
        # the blocks that all targets have room for, as of a number of changes of the pool
        self._room: tuple[int, int] = (-1, 0)

    def count(self, request: RouteRequest, choice: Candidate, candidates: Candidates) -> None:
        """Count what was cached of the prompt, and what could have been."""
        reuse, size, isl = self.counts, self._pool.block_size, request.isl
        reuse.prompt_tokens += isl
        reuse.chosen += choice.own_prefill_tokens
        # the chosen one may hold more with the wider view of several prompts
        reuse.best += isl - max(candidates.deepest_blocks(), choice.overlap_blocks) * size
        ghosts, room, named = self._ghosts, self._room_blocks(), 0
        endless, pooled = ghosts.endless_misses, ghosts.pooled_misses
        for prompt in request.prompts:
            if prompt.hashes:
                most = min(len(prompt.hashes), max(0, prompt.isl - 1) // size)
                ghosts.use(prompt.hashes, most, room)
                named += most
        never = isl - named * size
        reuse.endless += never + (ghosts.endless_misses - endless) * size
        reuse.pooled += never + (ghosts.pooled_misses - pooled) * size

    def booked_elsewhere(self, booking: Booking) -> None:
        """A peer has routed a request: the caches that all replicas' requests share hold it, too."""
        self._ghosts.insert(booking.hashes, self._room_blocks())

    def _room_blocks(self) -> int:
        """The blocks that the pool's targets have room for, together."""
        if self._room[0] != self._pool.changes:
            blocks = sum(self._pool.capacity_blocks(target) for target in self._pool.targets)
            self._room = (self._pool.changes, blocks)
        return self._room[1]
