"""Who chooses the engine of each request: replicas with real routers, or the oracle."""

from __future__ import annotations

import asyncio
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from kvrouter.core.feeds.sinks import SyncSink
from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.router import Placement, Router, RouterRules
from kvrouter.core.routing.admission import AdmissionQueue, AdmissionSettings, Ticket
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import PoolId, RouterId, Target
from kvrouter.core.wire.ops import VERSION, Op, decode_frame
from kvrouter.lab.simulate.agenda import Agenda
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.reference_engine import ReferenceEngine
from kvrouter.lab.simulate.split import AUTO_RULE, PEERS, PUBLISHED, route_by

_POOL = PoolId("simulated")


class SimulatedPlacement(NamedTuple):
    """Where a request goes, and the most of its prompt that any engine held then, in tokens."""

    target: Target
    held_tokens: int
    computes: Target | None = None
    """Where the prompt is computed, if elsewhere."""
    source: Target | None = None
    """The peer from which blocks are read."""


class Placer(ABC):
    """Chooses a target for each request, and is called with everything a router would learn."""

    @property
    def refresh_s(self) -> float:
        """Seconds between two calls of `refresh`; 0: never."""
        return 0.0

    @abstractmethod
    def join(self, target: Target, engine: ReferenceEngine, card: Card) -> None:
        """An engine has joined."""

    @abstractmethod
    def left(self, target: Target) -> None:
        """An engine has failed. Its requests have ended before."""

    @abstractmethod
    def place(self, number: int, arrival: Arrival, now: float) -> SimulatedPlacement | None:
        """Choose; None: the request waits, and is placed again when `next_waiting` names it."""

    def next_waiting(self) -> Sequence[int]:
        """The waiting requests that may be next."""
        return ()

    def computed(self, number: int, now: float) -> None:  # noqa: B027  an oracle need not be told
        """The prompt was computed by the first engine of a pair."""

    def began(self, number: int, now: float) -> None:  # noqa: B027
        """The first token of a request."""

    def ended(self, number: int, now: float, output_tokens: int | None) -> None:  # noqa: B027
        """The answer is complete; None: its client has left."""

    def stored(self, target: Target, hashes: Sequence[int]) -> None:  # noqa: B027
        """Blocks of an engine became reusable."""

    def removed(self, target: Target, hashes: Sequence[int]) -> None:  # noqa: B027
        """Blocks of an engine were evicted."""

    def report(self, engines: Mapping[Target, ReferenceEngine]) -> None:  # noqa: B027
        """The engines report their load."""

    def refresh(self) -> None:  # noqa: B027
        """Let policies read what they follow."""


@dataclass(frozen=True, slots=True)
class Sync:
    """How replicas exchange bookings. A lost frame is repaired, and later ones wait for it, as feeds do."""

    delay_s: float = 5e-3
    loss: float = 0.0
    repair_s: float = 0.05
    """Until the reader has noticed the gap, asked, and received the frame."""


@dataclass(frozen=True, slots=True)
class Frontend:
    """How the frontend around the router is set: queue (which has no end here), sessions, index."""

    queue_threshold: float = 0.0
    session_affinity: Literal["off", "soft", "hard"] = "off"
    use_kv_events: bool = True
    """Else prompts are taken for cached where they were sent, for `router-ttl-s`."""

    @property
    def queue(self) -> AdmissionSettings:
        return AdmissionSettings(threshold=self.queue_threshold, max_waiting=sys.maxsize)

    @property
    def filters(self) -> FilterSettings:
        return FilterSettings(session_affinity=self.session_affinity, agent_sessions=False)


@dataclass(slots=True)
class _Replica:
    router: Router
    queue: AdmissionQueue
    heard_at: dict[int, float] = field(default_factory=dict)
    """By peer, when the last frame to it arrives there."""
    _sinks: dict[RouterId, SyncSink] = field(default_factory=dict)

    def sink_of(self, peer: RouterId) -> SyncSink:
        """What writes a peer's bookings into the tables here."""
        if peer not in self._sinks:
            self._sinks[peer] = self.router.feed.copy_sink(peer)
        return self._sinks[peer]


class SimulatedReplicas(Placer):
    """Routers that share one index, since all follow the same KV feeds, and each have their own bookings.

    A request comes through one at random; its bookings reach the others as frames, after a delay. `sync`
    None: they do not exchange bookings.
    """

    def __init__(
        self,
        agenda: Agenda,
        policies: Sequence[BuiltInPolicy],
        chance: random.Random,
        sync: Sync | None = None,
        *,
        kv_delay_s: float = 0.0,
        frontend: Frontend = Frontend(),
        in_turn: bool = False,
        rule: str = AUTO_RULE,
    ) -> None:
        """`kv_delay_s`: until a KV event reaches the index. `in_turn`: requests do not enter at random.

        `rule`: which prompts are handed over, in a fleet with roles.
        """
        self._agenda = agenda
        self._kv_delay_s = kv_delay_s
        self._chance = chance
        # of their own, so that a policy's draws do not change where requests come in, or what is lost
        self._entrance, self._losses = random.Random("entrance"), random.Random("losses")
        if len(policies) > 1:
            self._entrance.seed(chance.random())
            self._losses.seed(chance.random())
        self._sync = sync if len(policies) > 1 else None
        self.index = BlockIndex()
        self._frontend = frontend
        self._in_turn = in_turn
        self._stays = PUBLISHED.get(rule)
        self._pulls = rule == PEERS
        self._replicas = [
            _Replica(self._router(number, policy), AdmissionQueue(frontend.queue))
            for number, policy in enumerate(policies, start=1)
        ]
        self._bookings: dict[int, tuple[_Replica, Placement]] = {}
        self._computed_at: dict[int, float] = {}
        self._tickets: dict[int, tuple[_Replica, Ticket]] = {}

    @property
    def routers(self) -> list[Router]:
        """Those of the replicas, in order."""
        return [replica.router for replica in self._replicas]

    @property
    def refresh_s(self) -> float:
        return self._replicas[0].router.selection.policy.refresh_s

    def join(self, target: Target, engine: ReferenceEngine, card: Card) -> None:
        for replica in self._replicas:
            replica.router.pool.update(target.worker_id, _beat(_load(engine), card))

    def place(self, number: int, arrival: Arrival, now: float) -> SimulatedPlacement | None:
        prompt = Prompt(arrival.hashes, arrival.prompt_tokens)
        replica = self._replica_of(number)
        request = RouteRequest(
            f"r{number}",
            (prompt,),
            text=arrival.text,
            session=arrival.session,
            may_split=replica.router.pool.split.may_share,
        )
        if replica.queue.is_on and not self._may_pass(number, request, replica, now):
            return None
        router, reuse = replica.router, replica.router.reuse
        before = reuse.best
        if request.may_split and self._stays is not None:
            placed = route_by(self._stays, router, request, now)
        else:
            placed = router.route(request, now)
        self._bookings[number] = (replica, placed)
        self._publish(replica, now)
        computes = None if placed.prefill is None else placed.prefill.target
        source = None if placed.pull is None else placed.pull.source
        held_tokens = arrival.prompt_tokens - (reuse.best - before)
        return SimulatedPlacement(placed.target, held_tokens, computes, source)

    def next_waiting(self) -> Sequence[int]:
        firsts = {(id(replica), one) for replica in self._replicas for one in replica.queue.firsts()}
        return [n for n, (replica, ticket) in self._tickets.items() if (id(replica), ticket) in firsts]

    def computed(self, number: int, now: float) -> None:
        replica, placed = self._bookings[number]
        assert placed.prefill is not None
        self._computed_at[number] = now
        replica.router.bookings.first_byte(placed.prefill.key, now)
        replica.router.bookings.free(placed.prefill.key, now)
        self._publish(replica, now)

    def began(self, number: int, now: float) -> None:
        replica, placed = self._bookings[number]
        if placed.prefill is not None:
            seconds = now - self._computed_at.pop(number)
            replica.router.tables.transfers.observe(seconds, placed.choice.own_prefill_tokens, now)
        replica.router.bookings.first_byte(placed.key, now)
        self._publish(replica, now)

    def ended(self, number: int, now: float, output_tokens: int | None) -> None:
        replica, placed = self._bookings.pop(number)
        replica.router.bookings.free(placed.key, now, output_tokens)
        self._publish(replica, now)

    def stored(self, target: Target, hashes: Sequence[int]) -> None:
        self._after_delay(lambda _now: self.index.store(target, hashes))

    def removed(self, target: Target, hashes: Sequence[int]) -> None:
        self._after_delay(lambda _now: self.index.remove(target, hashes))

    def left(self, target: Target) -> None:
        for replica in self._replicas:
            replica.router.forget(replica.router.pool.remove(target.worker_id))
            replica.router.report_workers()

    def _after_delay(self, act: Callable[[float], None]) -> None:
        if not self._frontend.use_kv_events:
            return
        if self._kv_delay_s:
            self._agenda.at(self._agenda.now + self._kv_delay_s, act)
        else:
            act(self._agenda.now)

    def report(self, engines: Mapping[Target, ReferenceEngine]) -> None:
        for target, engine in engines.items():
            beat = _beat(_load(engine))
            for replica in self._replicas:
                replica.router.pool.update(target.worker_id, beat)

    def _replica_of(self, number: int) -> _Replica:
        if number in self._tickets:
            return self._tickets[number][0]
        if self._in_turn:
            return self._replicas[number % len(self._replicas)]
        return self._entrance.choice(self._replicas) if len(self._replicas) > 1 else self._replicas[0]

    def _may_pass(self, number: int, request: RouteRequest, replica: _Replica, now: float) -> bool:
        """Whether a request need not wait, or no longer; as the frontend's queue asks."""
        router, queue = replica.router, replica.queue
        if number in self._tickets:
            if not queue.admit(self._tickets[number][1], has_room=not router.must_wait(request, now, queue)):
                return False
            del self._tickets[number]
            return True
        lane = router.lane(request, now)
        if not queue.is_waited_in(lane) and not router.must_wait(request, now, queue):
            return True
        self._tickets[number] = replica, queue.join(now, 0, lane)
        return False

    def refresh(self) -> None:
        # takes no virtual time: a frontend runs it while it serves requests
        for replica in self._replicas:
            asyncio.run(replica.router.selection.policy.refresh())

    def _router(self, number: int, policy: BuiltInPolicy) -> Router:
        index, uses = self.index, self._frontend.use_kv_events
        least_tokens = None if self._stays is None else 0
        settings = (
            PoolSettings(
                new_index=lambda _bounds, _secret: index,
                pd_min_uncached_tokens=least_tokens,
                kv_from_peers=self._pulls,
            )
            if uses
            else PoolSettings(use_kv_events=False, pd_min_uncached_tokens=least_tokens)
        )
        return Router(
            Pool(_POOL, settings),
            RouterRules(policy, self._chance.random, filters=new_filters(self._frontend.filters)),
            router_id=RouterId(f"simulated-{number}"),
            incarnation=1,
            # unsynced: nothing is unseen and the lowest cost always wins
            synced=self._sync is not None,
        )

    def _publish(self, sender: _Replica, now: float) -> None:
        if self._sync is None:
            return
        for data in sender.router.feed.frames():
            ops = decode_frame(data).ops or ()
            for number, peer in enumerate(self._replicas):
                if peer is sender:
                    continue
                lost = self._sync.loss and self._losses.random() < self._sync.loss
                late = self._sync.repair_s if lost else 0.0
                # in order: a reader holds the frames after a gap
                at = max(now + self._sync.delay_s + late, sender.heard_at.get(number, 0.0))
                sender.heard_at[number] = at
                self._agenda.at(at, partial(_apply, peer.sink_of(sender.router.router_id), ops))


class Oracle(Placer):
    """Knows every queue and every cache exactly: the least predicted time to first token, greedily."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._engines: dict[Target, ReferenceEngine] = {}

    def join(self, target: Target, engine: ReferenceEngine, _card: Card) -> None:
        self._engines[target] = engine

    def place(self, _number: int, arrival: Arrival, now: float) -> SimulatedPlacement:
        predicted = {name: engine.predicted_ttft_s(arrival, now) for name, engine in self._engines.items()}
        edge = min(predicted.values()) * (1 + 1e-9) + 1e-12
        best = [target for target, seconds in predicted.items() if seconds <= edge]
        held = max(engine.held_tokens(arrival) for engine in self._engines.values())
        return SimulatedPlacement(best[int(self._chance() * len(best))], held)

    def left(self, target: Target) -> None:
        del self._engines[target]


def _apply(sink: SyncSink, ops: Sequence[Op], now: float) -> None:
    for op in ops:
        sink.apply(op, now)


def _load(engine: ReferenceEngine) -> RankBeat:
    return RankBeat(
        0, 100, 0, running=engine.num_running, waiting=engine.num_waiting, kv_usage=engine.kv_usage
    )


def _beat(rank: RankBeat, card: Card | None = None) -> WorkerBeat:
    return WorkerBeat(VERSION, 100, "up", _POOL, [rank], 1, card)
