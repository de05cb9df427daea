"""When a replica asks all agents and replicas for a heartbeat, and what it tells the agents with it.

    a live worker's card is missing        a hello, at most one per lease: all members answer it
    several pools serve a name             a hello with the name: agents look whether they can join one pool

The second kind is repeated less and less often: engines of one name whose token ids differ stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrouter.core.wire.heartbeats import MOST_SHARED_NAMES, Hello, encode

# In rounds, which are about one second long.
_MOST_ROUNDS = 600


class Hellos:
    """The hellos of one replica, after the one with which it joins."""

    def __init__(self, lease_rounds: int) -> None:
        self.lacks_card = False
        self._lease_rounds = lease_rounds
        self._next_round = 0
        self._shared: Mapping[str, int] = {}
        self._names_round = self._names_wait = 0

    def due(self, round_: int, shared: Mapping[str, int]) -> bytes | None:
        """The hello of this round. `shared`: names that several pools serve, and the workers of each."""
        if shared != self._shared:
            self._shared, self._names_round, self._names_wait = shared, round_, self._lease_rounds
        tells = bool(shared) and round_ >= self._names_round
        if not (tells or self.lacks_card) or round_ < self._next_round:
            return None
        self.lacks_card = False
        self._next_round = round_ + self._lease_rounds
        if not tells:
            return b""
        self._names_round = round_ + self._names_wait
        self._names_wait = min(2 * self._names_wait, _MOST_ROUNDS)
        return encode(Hello(tuple(sorted(shared)[:MOST_SHARED_NAMES])))
