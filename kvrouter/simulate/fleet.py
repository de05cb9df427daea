"""A fleet in virtual time: the mocker's engines behind a real router; they report their load once a second.

    arrivals ──router.route──> engine.add ──step──> outputs at now + duration ──> mark, free
                   ^                          └──> KV events ──> the pool's index
                   └── heartbeats with running, waiting, KV usage, every second

Engines name blocks by sequence hashes, so their events contain the hashes of the index.
Nothing waits: each thing that happens is an entry of the agenda, and time jumps to the next entry.
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.cost import Prompt
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.mocker.engine import Engine, EngineConfig, EngineRequest, Output, StepResult
from kvrouter.mocker.events import BlockRemoved, BlockStored
from kvrouter.simulate.percentiles import Percentiles, percentiles

BEAT_S = 1.0
_POOL = PoolId("simulated")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `hashes` are the sequence hashes of the prompt's full blocks."""

    at: float
    hashes: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    text: str = ""


@dataclass(slots=True)
class Run:
    """The results of one run."""

    targets: list[Target] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    deepest: Counter[WorkerId] = field(default_factory=Counter)
    """The largest number of requests in flight on each worker; 0 if it got none."""
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def share(self, worker: str, last: int = 0) -> float:
        """The fraction of the requests (the last `last`) that went to a worker."""
        counted = self.targets[-last:]
        return sum(target.worker_id == worker for target in counted) / len(counted)

    @property
    def ttft(self) -> Percentiles:
        return percentiles(self.ttft_s)

    @property
    def latency(self) -> Percentiles:
        return percentiles(self.latency_s)

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens


@dataclass(slots=True)
class _Flight:
    key: BookingKey
    target: Target
    sent_at: float
    began: bool = False


class Fleet:
    """Engines and one router, for one run.

    `chance()` returns a number in [0, 1). `joins` maps workers that join later to the time, `labels` maps
    workers to the labels on their cards.
    """

    def __init__(
        self,
        policy: BuiltInPolicy,
        chance: Callable[[], float],
        workers: int,
        *,
        engine: EngineConfig,
        joins: Mapping[str, float] | None = None,
        labels: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._labels = labels or {}
        self._config = engine
        self.pool = Pool(_POOL, PoolSettings())
        # unsynced: there is one replica, so nothing is unseen and the lowest cost always wins
        self.router = Router(
            self.pool,
            RouterRules(policy, chance),
            router_id=RouterId("simulated"),
            incarnation=1,
            synced=False,
        )
        self.engines: dict[Target, Engine] = {}
        self.record = Run()
        self._flights: dict[str, _Flight] = {}
        self._stepping: set[Target] = set()
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._entries = 0
        self._done = 0
        for number in range(1, workers + 1):
            self._join(f"w{number}")
        for name, at in (joins or {}).items():
            self._at(at, partial(self._join, name))

    def run(self, arrivals: Sequence[Arrival], on_done: Callable[[int], None] | None = None) -> Run:
        """Serve all arrivals. `on_done` is called with the number of requests that have ended."""
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
            before = self._done
            act(now)
            if on_done is not None and self._done > before:
                on_done(self._done)
        assert not self._flights, "every request was answered"
        return self.record

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._entries += 1
        # the number keeps entries of one time in order, and functions from being compared
        heapq.heappush(self._agenda, (when, self._entries, act))

    def _refresh(self, _now: float) -> None:
        # takes no virtual time: a frontend runs it while it serves requests
        asyncio.run(self.router.selection.policy.refresh())

    def _join(self, name: str, _now: float = 0.0) -> None:
        config = self._config
        self.engines[Target(WorkerId(name))] = Engine(config)
        self.record.deepest[WorkerId(name)] = 0
        card = Card(
            worker_id=name,
            url=f"http://{name}:9000",
            model="simulated",
            block_size=config.block_size,
            tiers={"device": config.num_blocks},
            max_model_len=config.max_model_len,
            max_batched_tokens=config.max_num_batched_tokens,
            max_sequences=config.max_num_seqs,
            labels=dict(self._labels.get(name, {})),
        )
        self.pool.update(WorkerId(name), _beat(RankBeat(0, 100, 0), card))

    def _report(self, _now: float) -> None:
        for where, engine in self.engines.items():
            load = RankBeat(
                0, 100, 0, running=engine.num_running, waiting=engine.num_waiting, kv_usage=engine.kv_usage
            )
            self.pool.update(where.worker_id, _beat(load))

    def _arrive(self, name: str, arrival: Arrival, now: float) -> None:
        tokens = arrival.prompt_tokens
        asked = RouteRequest(name, (Prompt(arrival.hashes, tokens),), text=arrival.text)
        placed = self.router.route(asked, now)
        self._flights[name] = _Flight(placed.key, placed.target, now)
        self.record.targets.append(placed.target)
        self.record.prompt_tokens += tokens
        worker = placed.target.worker_id
        depth = self.pool.active.requests(placed.target)
        self.record.deepest[worker] = max(self.record.deepest[worker], depth)
        self.engines[placed.target].add(
            EngineRequest(
                name,
                array("I", bytes(4 * tokens)),  # zeros: the engine names blocks by `hashes`, not by tokens
                max_tokens=arrival.output_tokens,
                hashes=tuple(arrival.hashes),
            )
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
            self._put_out(output, now)
        self._step(now, where)

    def _put_out(self, output: Output, now: float) -> None:
        flight, record = self._flights[output.id], self.record
        if not flight.began:
            flight.began = True
            record.ttft_s.append(now - flight.sent_at)
            record.cached_tokens += output.cached_tokens
            self.router.first_byte(flight.key, now)
        if output.finish_reason:
            record.latency_s.append(now - flight.sent_at)
            self.router.free(flight.key)
            del self._flights[output.id]
            self._done += 1


def _beat(rank: RankBeat, card: Card | None = None) -> WorkerBeat:
    return WorkerBeat(VERSION, 100, "up", _POOL, [rank], 1, card)
