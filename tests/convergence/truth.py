"""The state of owners after each frame, and whether copies equal it.

While faults run, one thing must be true at every moment: a reader that is live at frame n of an
incarnation holds exactly what the owner held after frame n. Afterwards: everything everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.bookings import Booking
from kvrouter.core.wire.ids import PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import TIERS
from kvrouter.core.wire.senders import Feed, SyncSource
from kvrouter.worker.blocks.engine_blocks import EngineBlocks
from tests.worker.closed_sets import ClosedSets

if TYPE_CHECKING:
    from tests.convergence.engines import SimAgent
    from tests.convergence.replicas import SimReplica
    from tests.convergence.world import World

Facts = tuple[tuple[int, int], ...]
"""Counts and digests: of each tier set, or of the bookings."""

_MASK64 = (1 << 64) - 1


class Histories:
    """The state of each feed's owner after each frame."""

    def __init__(self) -> None:
        self._facts: dict[tuple[Feed, int], dict[int, Facts]] = {}

    def note(self, source: Feed, incarnation: int, seq: int, facts: Facts) -> None:
        """The owner's state after this frame."""
        self._facts.setdefault((source, incarnation), {})[seq] = facts

    def facts(self, source: Feed, incarnation: int, seq: int) -> Facts | None:
        """The recorded state; None for a frame that was published together with the next."""
        return self._facts.get((source, incarnation), {}).get(seq)


def published_facts(blocks: EngineBlocks) -> Facts:
    """Of the three tier sets; a set without further blocks equals the narrower one."""
    return _tier_facts(published_sets(blocks))


def published_sets(blocks: EngineBlocks) -> list[set[int]]:
    """The three tier sets an agent has published."""
    return ClosedSets().apply(blocks.state_ops()).tiers


def _tier_facts(sets: list[set[int]]) -> Facts:
    return tuple((len(held), sum(held) & _MASK64) for held in sets)


def booking_facts(replica: Replica, pool_id: PoolId, router_id: RouterId) -> Facts:
    """Of one replica's bookings in this replica's table."""
    router = replica.routers.get(pool_id)
    return (router.pool.active.digest(router_id) if router else (0, 0),)


def copied_facts(replica: Replica, source: Feed) -> Facts:
    """Of this replica's copy of a feed."""
    if isinstance(source, SyncSource):
        return booking_facts(replica, source.pool, source.router_id)
    index = replica.router(source.pool).pool.index
    facts: list[tuple[int, int]] = []
    for tier in TIERS:
        digest = index.digest(source.target, tier)
        facts.append(facts[-1] if facts and not digest[0] else digest)  # no such set: the narrower one
    return tuple(facts)


def check_live_copies(replica: Replica, histories: Histories) -> None:
    """Raise if a live reader's copy differs from its owner's state after that frame, or has no owner."""
    for source, reader in replica.readers.items():
        if reader.state is FeedState.LIVE:
            expected = histories.facts(source, reader.incarnation, reader.seq)
            held = copied_facts(replica, source)
            assert expected in (None, held), f"{source} at {reader.seq}: {held} is not {expected}"
        counters = reader.counters
        assert not counters.digest_mismatches, f"{source}: a Check differed"
        assert not counters.contradictions, f"{source}: contradicts what is held"
        assert not counters.malformed, f"{source}: malformed"
    for pool_id, router in replica.routers.items():
        for owner in router.pool.active.owners():
            is_followed = SyncSource(pool_id, owner) in replica.readers
            assert is_followed or owner == replica.router_id, (
                f"bookings of {owner}, whose feed is not followed"
            )


def check_tables(replica: Replica) -> None:
    """Raise if an invariant of a table is broken."""
    for router in replica.routers.values():
        pool = router.pool
        pool.index.check()
        pool.active.check()
        for target in pool.targets:
            assert pool.active.requests(target) >= 0, f"{target}: a negative number of requests"
            assert pool.active.charged_tokens(target) >= 0, f"{target}: negative prefill tokens"


def differences(world: World) -> list[str]:
    """Copies that differ from their owner's state; empty when all agree."""
    return [difference for sim in world.replicas() for difference in _differences_at(sim.replica, world)]


def _differences_at(replica: Replica, world: World) -> Iterator[str]:
    me = replica.router_id
    expected = dict(_expected_feeds(replica, world))
    followed = {source for source, reader in replica.readers.items() if _matters(source, reader.source_seq)}
    if followed != expected.keys():
        yield f"{me} follows {followed - expected.keys()} too much, lacks {expected.keys() - followed}"
        return
    if set(replica.peers) != {sim.replica.router_id for sim in world.replicas()} - {me}:
        yield f"{me} has the peers {set(replica.peers)}"
    yield from _differences_of_workers(replica, world)
    for source, incarnation in expected.items():
        yield from _differences_of_reader(replica, source, incarnation)
    for sim in world.replicas():
        yield from _differences_of_bookings(replica, sim)
    for agent in world.agents():
        yield from _differences_of_index(replica, agent, world)
    yield from _leaks(replica, world)


def _expected_feeds(replica: Replica, world: World) -> Iterator[tuple[Feed, int]]:
    """Every feed of others, with its incarnation."""
    for agent in world.agents():
        yield from ((publisher.source, publisher.incarnation) for publisher in agent.publishers)
    for peer in (sim.replica for sim in world.replicas() if sim.replica is not replica):
        for pool_id, seq in peer.heartbeat("up", "").feeds.items():
            source = SyncSource(PoolId(pool_id), peer.router_id)
            if _matters(source, seq):
                yield source, peer.incarnation


def _matters(source: Feed, seq: int) -> bool:
    """A peer's empty feed may be followed or not, as its pool ends sooner or later."""
    return seq > 0 or not isinstance(source, SyncSource)


def _differences_of_workers(replica: Replica, world: World) -> Iterator[str]:
    """Known workers are the live ones; the last of a pool are kept as silent if none is up."""
    for pool_id, router in replica.routers.items():
        live = {WorkerId(agent.card.worker_id): agent for agent in world.agents() if agent.pool_id == pool_id}
        has_any_up = any(agent.state == "up" for agent in live.values())
        for worker_id, worker in router.pool.workers.items():
            agent, seen = live.get(worker_id), (worker.incarnation, worker.state, worker.silent)
            if agent is not None and seen != (agent.incarnation, agent.state, False):
                yield f"{replica.router_id}: {worker_id} is known as {seen}"
            if worker_id not in live and (has_any_up or not worker.silent):
                yield f"{replica.router_id}: dead {worker_id} is kept"
        if has_any_up:
            yield from _differences_of_block_size(replica, pool_id, list(live.values()), world)
        if set(live) - set(router.pool.workers):
            yield f"{replica.router_id}: lacks {set(live) - set(router.pool.workers)}"


def _differences_of_block_size(
    replica: Replica, pool_id: PoolId, agents: list[SimAgent], world: World
) -> Iterator[str]:
    """No other size has more targets, all replicas have the same, every worker that is up is a target."""
    pool = replica.routers[pool_id].pool
    cards = [agent.card for agent in agents if agent.state == "up"]
    targets = Counter(card.block_size for card in cards)
    if targets[pool.block_size] != max(targets.values()):
        yield f"{replica.router_id}: {pool_id} has block size {pool.block_size}, engines {targets}"
    everywhere = [sim.replica.routers.get(pool_id) for sim in world.replicas()]
    sizes = {router.pool.block_size for router in everywhere if router is not None and router.pool.targets}
    if len(sizes) > 1:
        yield f"{pool_id} has the block sizes {sizes}"
    if {target.worker_id for target in pool.targets} != {card.worker_id for card in cards}:
        yield f"{replica.router_id}: {pool_id} has the targets {list(pool.targets)}"


def _differences_of_reader(replica: Replica, source: Feed, incarnation: int) -> Iterator[str]:
    reader, me = replica.readers[source], replica.router_id
    if reader.incarnation != incarnation:
        yield f"{me}: {source} is of incarnation {reader.incarnation}, not {incarnation}"
    if reader.state is not FeedState.LIVE or reader.lag or reader.flag:
        yield f"{me}: {source} is {reader.state.value}, {reader.lag} behind, {reader.flag!r}"


def _differences_of_bookings(replica: Replica, owner: SimReplica) -> Iterator[str]:
    """The owner's table has the requests of the ledger, and the copies equal it."""
    name = owner.replica.router_id
    for pool_id in set(replica.routers) | set(owner.replica.routers):
        sides = [side.routers.get(pool_id) for side in (replica, owner.replica)]
        copies, own = (side.pool.active.bookings(name) if side else [] for side in sides)
        if sorted(map(_told, copies)) != sorted(map(_told, own)):
            yield f"{replica.router_id} has {len(copies)} of {name}'s {len(own)} bookings"
        if {(pool_id, booking.key) for booking in own} != {key for key in owner.running if key[0] == pool_id}:
            yield f"{name} lost bookings of its own"


def _differences_of_index(replica: Replica, agent: SimAgent, world: World) -> Iterator[str]:
    index = replica.router(agent.pool_id).pool.index
    for publisher in agent.publishers:
        target, sets = publisher.source.target, published_sets(publisher.blocks)
        if copied_facts(replica, publisher.source) != _tier_facts(sets):
            yield f"{replica.router_id}: the digest of {target} is off"
        for tier, held in zip(TIERS, sets, strict=True):
            if {hash_ for hash_ in world.universe if index.holds(target, hash_, tier)} != held:
                yield f"{replica.router_id}: {target} holds other blocks in {tier}"
        yield from _differences_of_overlap(replica, target, sets[0], world)


def _differences_of_overlap(
    replica: Replica, target: Target, device: set[int], world: World
) -> Iterator[str]:
    index = replica.router(world.pool_of(target)).pool.index
    for chain in world.chains:
        depth = next((n for n, hash_ in enumerate(chain) if hash_ not in device), len(chain))
        if index.overlap(chain).get(target, 0) != depth:
            yield f"{replica.router_id}: overlap with {target} is not {depth}"


def _told(booking: Booking) -> str:
    """All fields; packed hashes equal hashes in a list."""
    return repr(replace(booking, hashes=list(booking.hashes), sent_at=0.0))


def _leaks(replica: Replica, world: World) -> Iterator[str]:
    """Bookings, targets, slots and rows without an owner."""
    alive = {sim.replica.router_id for sim in world.replicas()}
    targets = {publisher.source.target for agent in world.agents() for publisher in agent.publishers}
    for pool_id, router in replica.routers.items():
        pool = router.pool
        if not pool.active.owners().keys() <= alive:
            yield f"{replica.router_id}: phantoms of {pool.active.owners().keys() - alive}"
        if not set(pool.index.targets()) <= targets:
            yield f"{replica.router_id}: blocks of {set(pool.index.targets()) - targets}"
        sets = [tier_set for holding in pool.index._holdings.values() for tier_set in holding.sets]
        slots = pool.index._slots
        if slots.in_use != len(sets):
            yield f"{replica.router_id}: slots without an owner in {pool_id}"
        is_swept = not slots._dying and not slots._waiting  # otherwise rows of dropped targets may remain
        if is_swept and len(pool.index) != len(
            {h for agent in world.agents() for h in agent.blocks(pool_id)}
        ):
            yield f"{replica.router_id}: rows without a holder in {pool_id}"
