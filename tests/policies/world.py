"""A fleet in virtual time: the mocker's pure engines behind a real router, load reported once a second.

    arrivals ──router.route──> engine.add ──step──> outputs at now + duration ──> mark, free
                   ^                          └──> KV events ──> the pool's index
                   └── heartbeats with running, waiting, KV usage, every second

Blocks are named by sequence hashes throughout, so an engine's events are the index's own hashes.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrouter.core.beats import RankBeat
from kvrouter.core.cost import Prompt
from kvrouter.core.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.core.policy import Policy, PolicyState, RouteRequest
from kvrouter.core.pool import Pool, PoolSettings
from kvrouter.core.router import Router
from kvrouter.mocker.engine import Engine, EngineConfig, EngineRequest, StepResult
from kvrouter.mocker.events import BlockRemoved, BlockStored
from tests.core.worlds import POOL, card, worker_beat
from tests.policies.tables import target

BLOCK = 16
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt as the numbers of its segments: equal beginnings are shared prefixes."""

    at: float
    segments: tuple[tuple[int, int], ...]
    """`(number, blocks)` each."""
    output_tokens: int = 32

    def hashes(self) -> list[int]:
        """A chain of sequence hashes: each names everything before it."""
        chain: list[int] = []
        for number, blocks in self.segments:
            for place in range(blocks):
                chain.append(hash((chain[-1] if chain else 0, number, place)) & (1 << 64) - 1)
        return chain

    def text(self) -> str:
        """The same as text, four characters a block."""
        return "".join(chr(0x4E00 + number % 20_000) * 4 * blocks for number, blocks in self.segments)


@dataclass(slots=True)
class Run:
    """What happened."""

    targets: list[Target] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    deepest: Counter[str] = field(default_factory=Counter)
    """The most requests in flight that each worker had."""
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def share(self, worker: str, last: int = 0) -> float:
        """Which part of the (last) requests went to a worker."""
        counted = self.targets[-last:]
        return counted.count(target(worker)) / len(counted)

    def p90_ttft_s(self) -> float:
        """90th percentile."""
        return sorted(self.ttft_s)[int(0.9 * len(self.ttft_s))]

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were not computed."""
        return self.cached_tokens / self.prompt_tokens


@dataclass(slots=True)
class _Flight:
    key: BookingKey
    target: Target
    sent_at: float
    began: bool = False


class World:
    """Engines and one router. `joins` maps workers that come later to when, `zones` some to a label."""

    def __init__(
        self,
        policy: Policy,
        workers: int,
        *,
        seed: int = 1,
        joins: dict[str, float] | None = None,
        zones: dict[str, str] | None = None,
    ) -> None:
        self._zones = zones or {}
        self.pool = Pool(POOL, PoolSettings())
        self.router = Router(
            self.pool,
            policy,
            PolicyState(random.Random(seed).random),
            router_id=RouterId("me"),
            incarnation=1,
            synced=False,
        )
        self.engines: dict[Target, Engine] = {}
        self.record = Run()
        self._flights: dict[str, _Flight] = {}
        self._stepping: set[Target] = set()
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._entries = 0
        for number in range(1, workers + 1):
            self._join(f"w{number}")
        for name, at in (joins or {}).items():
            self._at(at, partial(self._join, name))

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        """Serve them all."""
        for number, arrival in enumerate(arrivals):
            self._at(arrival.at, partial(self._arrive, f"r{number}", arrival))
        end = max(arrival.at for arrival in arrivals)
        for beat in range(1, int(end / BEAT_S) + 2):
            self._at(beat * BEAT_S, self._report)
        refresh_s = self.router.selection.policy.refresh_s
        for turn in range(int(end / refresh_s) + 1 if refresh_s else 0):
            self._at(turn * refresh_s, self._refresh)
        while self._agenda:
            now, _, act = heapq.heappop(self._agenda)
            act(now)
        assert not self._flights, "every request was answered"
        return self.record

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (when, self._entries, act))

    def _refresh(self, _now: float) -> None:
        """What a frontend does beside its requests takes no time here."""
        asyncio.run(self.router.selection.policy.refresh())

    def _join(self, name: str, _now: float = 0.0) -> None:
        labels = {"zone": self._zones[name]} if name in self._zones else {}
        self.engines[target(name)] = Engine(EngineConfig(num_blocks=20_000, max_num_seqs=64))
        self.pool.update(WorkerId(name), worker_beat(card(name, tiers={"device": 20_000}, labels=labels)))

    def _report(self, _now: float) -> None:
        for where, engine in self.engines.items():
            load = RankBeat(
                0, 100, 0, running=engine.num_running, waiting=engine.num_waiting, kv_usage=engine.kv_usage
            )
            self.pool.update(where.worker_id, worker_beat(where.worker_id, ranks=[load]))

    def _arrive(self, name: str, arrival: Arrival, now: float) -> None:
        hashes = arrival.hashes()
        isl = len(hashes) * BLOCK
        asked = RouteRequest(name, (Prompt(hashes, isl),), text=arrival.text())
        placed = self.router.route(asked, now)
        self._flights[name] = _Flight(placed.key, placed.target, now)
        self.record.targets.append(placed.target)
        self.record.prompt_tokens += isl
        worker = str(placed.target.worker_id)
        depth = self.pool.active.requests(placed.target)
        self.record.deepest[worker] = max(self.record.deepest[worker], depth)
        engine = self.engines[placed.target]
        engine.add(
            EngineRequest(name, array("I", [0] * isl), max_tokens=arrival.output_tokens, hashes=tuple(hashes))
        )
        self._step(now, placed.target)

    def _step(self, now: float, where: Target) -> None:
        engine = self.engines[where]
        if where in self._stepping or not engine.has_work():
            return
        self._stepping.add(where)
        result = engine.step()
        self._at(now + result.duration_s, partial(self._finish, where, result))

    def _finish(self, where: Target, result: StepResult, now: float) -> None:
        self._stepping.discard(where)
        for event in result.events:
            if isinstance(event, BlockStored):
                self.pool.index.store(where, event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.pool.index.remove(where, event.block_hashes)
        for output in result.outputs:
            flight = self._flights[output.id]
            if not flight.began:
                flight.began = True
                self.record.ttft_s.append(now - flight.sent_at)
                self.record.cached_tokens += output.cached_tokens
                self.router.first_byte(flight.key, now)
            if output.finish_reason:
                self.router.free(flight.key)
                del self._flights[output.id]
        self._step(now, where)
