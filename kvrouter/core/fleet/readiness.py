"""Whether a replica knows enough to get traffic. Once ready, it stays ready.

hello ──> answers of workers and replicas ──> first recoveries ──> ready
                 │
                 └─ a replica's answer names the workers it knows; each is awaited too,
                    until its heartbeat arrives or for a lease

A feed whose owner answers no question, or badly, is awaited no longer: a forged heartbeat names such feeds.
Those of a peer that has answered nothing, neither a question nor at its address, are awaited for CLAIMED_S in
all, however many there are.

`ServedElsewhere`: whether a replica should get no traffic because only its peers serve anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.block_size import NAMED_MOST
from kvrouter.core.wire.heartbeats import RouterBeat
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.senders import Feed, KvSource, name

# Replicas and agents answer a hello within 50 ms. A slower agent is awaited if a replica names its worker.
HELLO_S = 0.2
# The most workers that a replica awaits, and names in one heartbeat (270 KB).
AWAITED_MOST = 4096
# So many questions in a row without an answer, 2 s each, until a feed is awaited no longer.
UNANSWERED_MOST = 4

# After the hello. Replicas answer a question within 10 ms, so this is time for a hundred, one after another.
CLAIMED_S = 2.0


class Readiness:
    """What a joining replica still lacks."""

    def __init__(self) -> None:
        self.is_ready = False
        self.has_met_worker = False
        """Whether a worker's card has ever arrived."""
        self._hello_at: float | None = None
        self._awaited: dict[WorkerId, RouterId] = {}

    def hello_sent(self, now: float) -> None:
        """A hello was published, maybe once more after a reconnect."""
        if self._hello_at is None:
            self._hello_at = now

    def wait_for(self, workers: Iterable[WorkerId], known_to: RouterId) -> list[WorkerId]:
        """A replica knows these workers, and no heartbeat of them has arrived here; returns the new ones."""
        room = AWAITED_MOST - len(self._awaited)
        new = [worker_id for worker_id in dict.fromkeys(workers) if worker_id not in self._awaited][:room]
        self._awaited.update(dict.fromkeys(new, known_to))
        return new

    def is_waiting_for(self, worker_id: WorkerId) -> bool:
        """Whether the worker is awaited: its card is missing."""
        return worker_id in self._awaited

    def met(self, worker_id: WorkerId) -> None:
        """The worker is known now, or gone."""
        self._awaited.pop(worker_id, None)

    @property
    def is_connected(self) -> bool:
        """Whether a hello was published."""
        return self._hello_at is not None

    def missing(
        self, readers: Mapping[Feed, FeedReader], now: float, has_answered: Callable[[RouterId], bool]
    ) -> list[str]:
        """Why this replica should not get traffic yet; always empty after it was ready once.

        `has_answered`: whether a peer has answered at its address.
        """
        if self.is_ready:
            return []
        are_claims_over = self._hello_at is not None and now >= self._hello_at + CLAIMED_S
        answering = {
            source: reader
            for source, reader in readers.items()
            if is_awaited(reader)
            and (
                not are_claims_over
                or reader.has_answered
                or isinstance(source, KvSource)
                or has_answered(source.router_id)
            )
        }
        reasons = [*self._greetings(now), *self._absent(), *behind(answering)]
        self.is_ready = not reasons
        return reasons

    def _greetings(self, now: float) -> Iterator[str]:
        if self._hello_at is None:
            yield "not connected to NATS yet"
        elif now < self._hello_at + HELLO_S:
            yield "waiting for the answers to hello"
        if not self.has_met_worker:
            yield "no worker has been seen"

    def _absent(self) -> Iterator[str]:
        for worker_id, router_id in list(self._awaited.items())[:NAMED_MOST]:
            yield f"no heartbeat of worker {worker_id} yet, which replica {router_id} knows"
        if len(self._awaited) > NAMED_MOST:
            yield f"no heartbeat of {len(self._awaited) - NAMED_MOST} other workers yet"


class ServedElsewhere:
    """Whether this replica has served nothing for at least a lease, and other replicas serve something.

        this one  {}     peer {a}     after a lease this one is not ready: clients of a are served there
        this one  {a}    peer {a, b}  stays ready, and names the pool: a claim takes no served pool away

    A replica that serves anything stays ready, whatever others claim, so they are never all unready at once
    while one of them serves. A peer counts only while it takes clients' requests, up and with an address, if
    that address has answered as the peer (reached.py), and for pools of which a card has arrived here. Rounds
    are those of the leases: a replica that is cut off has none, so stale heartbeats cannot make it unready.
    """

    def __init__(self) -> None:
        self._rounds: dict[Claim, int] = {}

    def next_round(self, claims: Iterable[Claim]) -> None:
        """A round of the leases has passed, and these pools are claimed that are not served here."""
        self._rounds = {one: self._rounds.get(one, 0) + 1 for one in claims}

    def lasting(self, lease_rounds: int) -> list[Claim]:
        """The claims that have lasted for a lease."""
        return sorted(one for one, rounds in self._rounds.items() if rounds >= lease_rounds)


class Claim(NamedTuple):
    """A replica names a pool that it serves and this one does not."""

    pool_id: PoolId
    router_id: RouterId


# Of one peer: a heartbeat may name a thousand pools, and nothing of any of them need be true.
CLAIMS_MOST = 16


def claims(own: Set[str], peers: Mapping[RouterId, RouterBeat]) -> Iterator[Claim]:
    """The pools that peers which take clients' requests serve, and this replica does not."""
    for router_id, beat in peers.items():
        if beat.state == "up" and beat.address:
            for pool_id in sorted(beat.serves.keys() - own)[:CLAIMS_MOST]:
                yield Claim(PoolId(pool_id), router_id)


def sizes_of_elders(
    peers: Mapping[RouterId, RouterBeat], incarnation: int, router_id: RouterId
) -> dict[str, int]:
    """The block size of each pool at the eldest peer that serves it and is older than this replica."""
    older = [
        (beat.incarnation, peer_id, beat.serves)
        for peer_id, beat in peers.items()
        if (beat.incarnation, peer_id) < (incarnation, router_id)
    ]
    sizes: dict[str, int] = {}
    for _, _, serves in sorted(older, key=lambda peer: peer[:2], reverse=True):
        sizes |= serves
    return sizes


def is_awaited(reader: FeedReader) -> bool:
    """Whether a joining replica waits for this feed."""
    return reader.state is not FeedState.BROKEN and reader.unanswered < UNANSWERED_MOST


def behind(readers: Mapping[Feed, FeedReader]) -> Iterator[str]:
    """Sentences about the feeds that are not live: the first NAMED_MOST, and how many more there are."""
    found = [(source, reader) for source, reader in readers.items() if reader.state is not FeedState.LIVE]
    for source, reader in found[:NAMED_MOST]:
        yield f"{name(source)}: {reader.state.value}, {reader.lag} frames behind"
    if len(found) > NAMED_MOST:
        yield f"{len(found) - NAMED_MOST} other feeds are not live"
