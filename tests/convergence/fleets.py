"""Small fleets without faults, for tests that cause one thing at a time."""

from __future__ import annotations

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.tables.bookings import BookingTable
from kvrouter.core.wire.ids import PoolId, Target
from kvrouter.core.wire.senders import KvSource, SyncSource
from tests.convergence.engines import LIBRARY, SimAgent
from tests.convergence.replicas import SimReplica
from tests.convergence.world import Setup, World

LEASE_BEATS = 7
"""Five rounds of silence are passed, plus one for the phase."""


class Fleet(World):
    """A world whose members all know each other; places 0, 1, … are replicas, then agents."""

    def __init__(self, setup: Setup | None = None) -> None:
        super().__init__(setup or Setup())
        self.agenda.run(3.0)

    def pass_beats(self, count: float) -> None:
        """Let time pass, in heartbeats."""
        self.agenda.run(count)
        self.check()

    def replica_at(self, place: int) -> SimReplica:
        """The process in this place."""
        process = self._places[place]
        assert isinstance(process, SimReplica)
        return process

    def agent_at(self, number: int) -> SimAgent:
        """The agent of this engine."""
        process = self._places[self.setup.replicas + number]
        assert isinstance(process, SimAgent)
        return process

    def crash(self, place: int) -> None:
        """SIGKILL."""
        self._bury(place)

    def book(self, sim: SimReplica, count: int) -> None:
        """Requests arrive at a replica, which publishes its bookings."""
        for _ in range(count):
            sim.place(self.rng)
        self.agenda.run(0.05)

    def fill_caches(self, events: int = 40) -> None:
        """Engines store and remove."""
        for _ in range(events):
            self._engine_acts()
        self.agenda.run(0.05)

    def fill_cache(self, nodes: range) -> None:
        """Agent 0's engine stores these blocks, each after its parents."""
        for node in nodes:
            hashes, chain = [1000 + n for n in LIBRARY.chain(node)], LIBRARY.chain(node)
            self.agent_at(0).hear(0, lambda p, h=hashes, c=chain: p.stored(h, LIBRARY.tokens(c)))  # type: ignore[misc]
        self.agenda.run(0.05)


def pool(sim: SimReplica) -> Pool:
    """The first pool of a replica."""
    return sim.replica.routers[min(sim.replica.routers)].pool


def active(sim: SimReplica) -> BookingTable:
    """Its table of bookings."""
    return pool(sim).active


def index(sim: SimReplica) -> BlockIndex:
    """Its index."""
    return pool(sim).index


def load_seen(sim: SimReplica) -> dict[Target, tuple[int, int, int]]:
    """Requests, blocks and charged tokens on each target, in a replica's table."""
    table = active(sim)
    return {
        target: (table.requests(target), table.blocks(target), table.charged_tokens(target))
        for target in pool(sim).targets
    }


def requests_seen(sim: SimReplica) -> int:
    """Requests in flight on all targets."""
    return sum(requests for requests, _, _ in load_seen(sim).values())


def sync_reader(sim: SimReplica, peer: SimReplica) -> FeedReader:
    """The replica's reader of the peer's bookings in their first pool."""
    return sim.replica.readers[SyncSource(PoolId(min(sim.replica.routers)), peer.replica.router_id)]


def kv_reader(sim: SimReplica, agent: SimAgent) -> FeedReader:
    """The replica's reader of the agent's rank 0."""
    source = agent.publishers[0].source
    assert isinstance(source, KvSource)
    return sim.replica.readers[source]
