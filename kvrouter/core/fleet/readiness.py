"""Whether a replica knows enough to get traffic. Once ready, it stays ready.

hello ──> answers of workers and replicas ──> first recoveries ──> ready
                 │
                 └─ a replica's answer names the workers it knows; each is awaited too,
                    until its heartbeat arrives or for a lease

A feed whose owner answers no question, or badly, is awaited no longer: a forged heartbeat names such feeds.
Those of a peer that has answered nothing, neither a question nor at its address, are awaited for CLAIMED_S in
all, however many there are.

A ready replica gets no traffic only while it serves nothing and its peers do (`unserved`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.block_size import NAMED_MOST
from kvrouter.core.fleet.peers import Peers
from kvrouter.core.fleet.pools import Pools
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.senders import Feed, KvSource, name
from kvrouter.errors import counted

# Replicas and agents answer a hello within 50 ms. A slower agent is awaited if a replica names its worker.
HELLO_S = 0.2
# The most workers that a replica awaits, and names in one heartbeat (270 KB).
AWAITED_MOST = 4096
# So many questions in a row without an answer, 2 s each, until a feed is awaited no longer.
UNANSWERED_MOST = 4

# After the hello. Replicas answer a question within 10 ms, so this is time for a hundred, one after another.
CLAIMED_S = 2.0


class Readiness:
    """What a joining replica still lacks; and what a ready one says of itself."""

    def __init__(self, pools: Pools, peers: Peers, readers: Mapping[Feed, FeedReader]) -> None:
        self.is_ready = False
        self.has_met_worker = False
        """Whether a worker's card has ever arrived: without one nothing could be served."""
        self._pools = pools
        self._peers = peers
        self._readers = readers
        self._hello_at: float | None = None
        self._awaited: dict[WorkerId, RouterId] = {}

    def hello_sent(self, now: float) -> None:
        """A hello was published, maybe once more after a reconnect."""
        if self._hello_at is None:
            self._hello_at = now

    @property
    def has_greeted(self) -> bool:
        """Whether a hello was published: NATS was reached."""
        return self._hello_at is not None

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

    def give_up_waiting(self) -> None:
        """Be ready with what is known: `--ready-timeout-s` has passed."""
        self.is_ready = True

    def not_ready(self, now: float) -> list[str]:
        """Why this replica should not get traffic yet; always empty after it was ready once.

        Called many times a second: a moment of readiness counts even if no probe came then.
        """
        if self.is_ready:
            return []
        are_claims_over = self._hello_at is not None and now >= self._hello_at + CLAIMED_S
        answering = {
            source: reader
            for source, reader in self._readers.items()
            if is_awaited(reader)
            and (
                not are_claims_over
                or reader.has_answered
                or isinstance(source, KvSource)
                or self._peers.has_answered(source.router_id)
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

    # What a ready replica says

    def awaited(self, now: float) -> list[str]:
        """What requests of some model wait for; empty while each known model has a live target."""
        if missing := self.not_ready(now):
            return missing
        pools = self._pools.with_workers()
        idle = [
            f"pool {pool.id}: no live target: {self._pools.why_no_target(pool.id)}"
            for pool in pools
            if not pool.has_live_target
        ]
        return idle or ([] if pools else ["no worker is known"])

    def degraded(self) -> list[str]:
        """Problems that exist although requests are served."""
        reasons = [f"{name(source)}: {one.flag}" for source, one in self._readers.items() if one.flag]
        reasons += behind(self._readers)
        pools = self._pools.with_workers()
        idle = [pool for pool in pools if not pool.has_live_target]
        reasons += [f"pool {pool.id}: no live worker" for pool in idle]
        compared = [router.pool for router in self._pools.routers.values() if router.needs_tokens]
        reasons += [f"pool {pool.id}: {note}" for pool in compared if (note := pool.sizes_note())]
        return reasons or ([] if pools else ["no worker is known"])

    def unserved(self) -> list[str]:
        """Why traffic should go to peers instead: the pools that they serve and this replica cannot.

            this one  {}     peer {a}     after a lease this one is not ready: clients of a are served there
            this one  {a}    peer {a, b}  stays ready, and names the pool: a claim takes no served pool away

        A replica that serves anything stays ready, whatever others claim, so they are never all unready at
        once while one of them serves. A peer counts only while it takes clients' requests, up and with an
        address, if that address has answered as the peer, and for pools of which a card has arrived here.
        """
        return [] if self._pools.serves() else self._claimed()

    def doubts(self) -> list[str]:
        """What peers claim to serve and this replica does not, while it stays ready: each in a sentence."""
        serves, peers = self._pools.serves(), self._peers
        lasting = peers.lasting_claims(serves.keys())
        unknown = {one.pool_id for one in lasting if not self._pools.has_met(one.pool_id)}
        unreached = {one.router_id for one in lasting if peers.has_failed(one.router_id)}
        reasons = self._claimed() if serves else []
        reasons += [
            f"replica {router_id} says that it serves pools which are not served here, and its address "
            f"{peers[router_id].address} does not answer as that replica: it does not count"
            for router_id in sorted(unreached)[:NAMED_MOST]
        ]
        reasons += [
            f"pool {pool_id}: a replica says that it serves it, and no worker's card of it has arrived here"
            for pool_id in sorted(unknown)[:NAMED_MOST]
        ]
        return reasons

    def _claimed(self) -> list[str]:
        """The pools that peers serve, if their addresses have answered, and of which a card is here."""
        served: dict[PoolId, list[RouterId]] = {}
        for pool_id, router_id in self._peers.lasting_claims(self._pools.serves().keys()):
            if self._pools.has_met(pool_id) and self._peers.has_answered(router_id):
                served.setdefault(pool_id, []).append(router_id)
        return [
            f"pool {pool_id}: peers serve it ({', '.join(router_ids[:NAMED_MOST])}), "
            f"no target here: {self._pools.why_no_target(pool_id)}"
            for pool_id, router_ids in list(served.items())[:NAMED_MOST]
        ]


def is_awaited(reader: FeedReader) -> bool:
    """Whether a joining replica waits for this feed."""
    return reader.state is not FeedState.BROKEN and reader.unanswered < UNANSWERED_MOST


def behind(readers: Mapping[Feed, FeedReader]) -> Iterator[str]:
    """Sentences about the feeds that are not live: the first NAMED_MOST, and how many more there are."""
    found = [(source, reader) for source, reader in readers.items() if reader.state is not FeedState.LIVE]
    for source, reader in found[:NAMED_MOST]:
        yield f"{name(source)}: {reader.state.value}, {counted(reader.lag, 'frame')} behind"
    if len(found) > NAMED_MOST:
        yield f"{len(found) - NAMED_MOST} other feeds are not live"
