"""Who chooses the engine of each request: replicas with real routers, or the oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvrouter.core.feeds.sinks import SyncSink
from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.cost import Prompt
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, Op, decode_frame
from kvrouter.simulate.agenda import Agenda
from kvrouter.simulate.engines import Arrival, SimulatedEngine
from kvrouter.simulate.reference_engine import ReferenceEngine

_POOL = PoolId("simulated")


class Placement(NamedTuple):
    """Where a request goes, and the most of its prompt that any engine held then, in tokens."""

    target: Target
    held_tokens: int


class Placer(Protocol):
    """Chooses a target for each request, and is called with everything a router would learn."""

    @property
    def refresh_s(self) -> float:
        """Seconds between two calls of `refresh`; 0: never."""
        ...

    def join(self, target: Target, engine: SimulatedEngine, card: Card) -> None: ...
    def place(self, number: int, arrival: Arrival, now: float) -> Placement: ...
    def began(self, number: int, now: float) -> None: ...
    def ended(self, number: int, now: float, output_tokens: int | None) -> None:
        """The answer is complete; None: its client has left."""

    def stored(self, target: Target, hashes: Sequence[int]) -> None: ...
    def removed(self, target: Target, hashes: Sequence[int]) -> None: ...
    def report(self, engines: Mapping[Target, SimulatedEngine]) -> None:
        """The engines report their load."""

    def refresh(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sync:
    """How replicas exchange bookings. A lost frame is repaired, and later ones wait for it, as feeds do."""

    delay_s: float = 5e-3
    loss: float = 0.0
    repair_s: float = 0.05
    """Until the reader has noticed the gap, asked, and received the frame."""


@dataclass(slots=True)
class _Replica:
    router: Router
    heard_at: dict[int, float] = field(default_factory=dict)
    """By peer, when the last frame to it arrives there."""
    _sinks: dict[RouterId, SyncSink] = field(default_factory=dict)

    def sink_of(self, peer: RouterId) -> SyncSink:
        """What writes a peer's bookings into the tables here."""
        if peer not in self._sinks:
            self._sinks[peer] = self.router.copy_sink(peer)
        return self._sinks[peer]


class Replicas:
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
        kv_delay_s: float = 0.0,
    ) -> None:
        """`kv_delay_s`: until a KV event reaches the index."""
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
        self._replicas = [
            _Replica(self._router(number, policy)) for number, policy in enumerate(policies, start=1)
        ]
        self._bookings: dict[int, tuple[_Replica, BookingKey]] = {}

    @property
    def routers(self) -> list[Router]:
        """Those of the replicas, in order."""
        return [replica.router for replica in self._replicas]

    @property
    def refresh_s(self) -> float:
        return self._replicas[0].router.selection.policy.refresh_s

    def join(self, target: Target, engine: SimulatedEngine, card: Card) -> None:
        for replica in self._replicas:
            replica.router.pool.update(target.worker_id, _beat(_load(engine), card))

    def place(self, number: int, arrival: Arrival, now: float) -> Placement:
        replicas = self._replicas
        replica = self._entrance.choice(replicas) if len(replicas) > 1 else replicas[0]
        prompt = Prompt(arrival.hashes, arrival.prompt_tokens)
        reuse = replica.router.reuse
        before = reuse.best
        placed = replica.router.route(
            RouteRequest(f"r{number}", (prompt,), text=arrival.text, session=arrival.session), now
        )
        self._bookings[number] = (replica, placed.key)
        self._publish(replica, now)
        return Placement(placed.target, arrival.prompt_tokens - (reuse.best - before))

    def began(self, number: int, now: float) -> None:
        replica, key = self._bookings[number]
        replica.router.first_byte(key, now)
        self._publish(replica, now)

    def ended(self, number: int, now: float, output_tokens: int | None) -> None:
        replica, key = self._bookings.pop(number)
        replica.router.free(key, now, output_tokens)
        self._publish(replica, now)

    def stored(self, target: Target, hashes: Sequence[int]) -> None:
        self._after_delay(lambda _now: self.index.store(target, hashes))

    def removed(self, target: Target, hashes: Sequence[int]) -> None:
        self._after_delay(lambda _now: self.index.remove(target, hashes))

    def _after_delay(self, act: Callable[[float], None]) -> None:
        if self._kv_delay_s:
            self._agenda.at(self._agenda.now + self._kv_delay_s, act)
        else:
            act(self._agenda.now)

    def report(self, engines: Mapping[Target, SimulatedEngine]) -> None:
        for target, engine in engines.items():
            beat = _beat(_load(engine))
            for replica in self._replicas:
                replica.router.pool.update(target.worker_id, beat)

    def refresh(self) -> None:
        # takes no virtual time: a frontend runs it while it serves requests
        for replica in self._replicas:
            asyncio.run(replica.router.selection.policy.refresh())

    def _router(self, number: int, policy: BuiltInPolicy) -> Router:
        index = self.index
        return Router(
            Pool(_POOL, PoolSettings(new_index=lambda _bounds, _secret: index)),
            RouterRules(policy, self._chance.random),
            router_id=RouterId(f"simulated-{number}"),
            incarnation=1,
            # unsynced: nothing is unseen and the lowest cost always wins
            synced=self._sync is not None,
        )

    def _publish(self, sender: _Replica, now: float) -> None:
        if self._sync is None:
            return
        for data in sender.router.frames():
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


class Oracle:
    """Knows every queue and every cache exactly: the least predicted time to first token, greedily."""

    refresh_s = 0.0

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._engines: dict[Target, ReferenceEngine] = {}

    def join(self, target: Target, engine: SimulatedEngine, _card: Card) -> None:
        assert isinstance(engine, ReferenceEngine), "only this engine predicts"
        self._engines[target] = engine

    def place(self, _number: int, arrival: Arrival, now: float) -> Placement:
        predicted = {name: engine.predicted_ttft_s(arrival, now) for name, engine in self._engines.items()}
        edge = min(predicted.values()) * (1 + 1e-9) + 1e-12
        best = [target for target, seconds in predicted.items() if seconds <= edge]
        held = max(engine.held_tokens(arrival) for engine in self._engines.values())
        return Placement(best[int(self._chance() * len(best))], held)

    def began(self, number: int, now: float) -> None: ...
    def ended(self, number: int, now: float, output_tokens: int | None) -> None: ...
    def stored(self, target: Target, hashes: Sequence[int]) -> None: ...
    def removed(self, target: Target, hashes: Sequence[int]) -> None: ...
    def report(self, engines: Mapping[Target, SimulatedEngine]) -> None: ...
    def refresh(self) -> None: ...


def _apply(sink: SyncSink, ops: Sequence[Op], now: float) -> None:
    for op in ops:
        sink.apply(op, now)


def card_of(worker_id: str, card: Card, labels: Mapping[str, str]) -> Card:
    """A worker's card after a pattern."""
    return replace(card, worker_id=worker_id, url=f"http://{worker_id}:9000", labels=dict(labels))


def _load(engine: SimulatedEngine) -> RankBeat:
    return RankBeat(
        0, 100, 0, running=engine.num_running, waiting=engine.num_waiting, kv_usage=engine.kv_usage
    )


def _beat(rank: RankBeat, card: Card | None = None) -> WorkerBeat:
    return WorkerBeat(VERSION, 100, "up", _POOL, [rank], 1, card)


def worker(number: int) -> WorkerId:
    """The name of the `number`th engine, from 1; ordered by name as by number."""
    return WorkerId(f"w{number}")
