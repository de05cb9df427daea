"""A fleet in virtual time: simulated engines behind real routers; they report their load once a second.

    arrivals ──placer──> engine.add ──due──> first token, last token ──> mark, free
                  ^                     └──> KV events ──> the pools' index
                  └── heartbeats with running, waiting, KV usage, every second

Engines name blocks by sequence hashes, so their events contain the hashes of the index.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from kvrouter.core.wire.heartbeats import BOTH, DECODE, PEER, PREFILL, Card
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.lab.simulate.agenda import Agenda
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.percentiles import Percentiles, percentiles
from kvrouter.lab.simulate.placement import Placer
from kvrouter.lab.simulate.reference_engine import ReferenceEngine
from kvrouter.lab.simulate.split import PREFILL_STEP_TOKENS, Links, Roles
from kvrouter.lab.simulate.step_model import StepModel

BEAT_S = 1.0


@dataclass(slots=True)
class Run:
    """The results of one run. The lists have an item per arrival; NaN where its client has left."""

    arrivals: Sequence[Arrival]
    targets: list[Target] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """When the first token came, in virtual time."""
    sent_s: list[float] = field(default_factory=list)
    """When the request came."""
    end_s: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    handed: list[bool] = field(default_factory=list)
    """Whether one engine computed the prompt and another one generated the answer; or read blocks from it."""
    held: list[int] = field(default_factory=list)
    """Of each prompt, the most tokens that any engine held when it was placed."""
    deepest: Counter[WorkerId] = field(default_factory=Counter)
    """The largest number of requests in flight on each worker; 0 if it got none."""

    def after(self, first: int) -> Run:
        """The same without the first arrivals."""
        return Run(
            arrivals=self.arrivals[first:],
            targets=self.targets[first:],
            first_s=self.first_s[first:],
            sent_s=self.sent_s[first:],
            end_s=self.end_s[first:],
            cached=self.cached[first:],
            handed=self.handed[first:],
            held=self.held[first:],
            deepest=self.deepest,
        )

    def share(self, worker: str, last: int = 0) -> float:
        """The fraction of the requests (the last `last`) that went to a worker."""
        counted = self.targets[-last:]
        return sum(target.worker_id == worker for target in counted) / len(counted)

    @property
    def ttft_s(self) -> list[float]:
        """The times to first token of the completed requests."""
        return [self.first_s[number] - self.sent_s[number] for number in self.completed]

    @property
    def latency_s(self) -> list[float]:
        """The times to the last token of the completed requests."""
        return [self.end_s[number] - self.sent_s[number] for number in self.completed]

    @property
    def itl_s(self) -> list[float]:
        """The mean time between two tokens of each completed request; 0 for an answer of one token."""
        return [
            (self.end_s[number] - self.first_s[number]) / max(1, self.arrivals[number].output_tokens - 1)
            for number in self.completed
        ]

    @property
    def completed(self) -> list[int]:
        """The arrivals whose answers are complete."""
        return [number for number, end in enumerate(self.end_s) if not math.isnan(end)]

    @property
    def ttft(self) -> Percentiles:
        return percentiles(self.ttft_s)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached)

    @property
    def prompt_tokens(self) -> int:
        return sum(arrival.prompt_tokens for arrival in self.arrivals)

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def held_rate(self) -> float:
        """The fraction of prompt tokens that would have been cached, had each gone where most of it was."""
        return sum(self.held) / self.prompt_tokens


def card_of(
    worker_id: str,
    model: StepModel,
    capacity_blocks: int,
    labels: Mapping[str, str],
    *,
    role: str = BOTH,
    connector: str = "",
) -> Card:
    """What a worker states about its engine."""
    return Card(
        worker_id=worker_id,
        url=f"http://{worker_id}:9000",
        model="simulated",
        block_size=model.block_size,
        tiers={"device": capacity_blocks},
        max_model_len=capacity_blocks * model.block_size,
        max_batched_tokens=model.step_tokens,
        max_sequences=model.max_num_seqs,
        labels=dict(labels),
        role=role,
        kv_connector=connector if role == BOTH else "nixl",
        kv_address=f"{worker_id}:5710" if connector else "",
    )


NewPlacer: TypeAlias = Callable[[Agenda], Placer]


class _Sounding:
    """One engine's listener: records its requests, and passes everything on to the fleet's placer."""

    def __init__(self, fleet: SimulatedFleet, target: Target) -> None:
        self._fleet, self._target = fleet, target

    def began(self, number: int, cached_tokens: int, now: float) -> None:
        self._fleet.began(number, cached_tokens, now)

    def ended(self, number: int, now: float) -> None:
        self._fleet.ended(number, now)

    def stored(self, hashes: Sequence[int]) -> None:
        self._fleet.placer.stored(self._target, hashes)

    def removed(self, hashes: Sequence[int]) -> None:
        self._fleet.placer.removed(self._target, hashes)

    def reads(self, number: int, tokens: int) -> None:
        self._fleet.reads(number, tokens)

    def pulls(self, number: int, cached_tokens: int) -> int:
        return self._fleet.pulls(number, cached_tokens)


class SimulatedFleet:
    """Engines and one placer, for one run.

    Every engine has `capacity_blocks`; `speeds` are the relative speeds of the engines, one each. `joins`
    maps workers that join later to the time, `fails` those that fail, `labels` maps workers to the labels on
    their cards. `roles` None: every engine serves whole requests.
    """

    def __init__(
        self,
        new_placer: NewPlacer,
        model: StepModel,
        capacity_blocks: int,
        speeds: Sequence[float],
        *,
        joins: Mapping[str, float] | None = None,
        fails: Mapping[str, float] | None = None,
        labels: Mapping[str, Mapping[str, str]] | None = None,
        roles: Roles | None = None,
    ) -> None:
        self._labels = labels or {}
        self._roles = roles or Roles(0, 0)
        self._are_peers = roles is not None and not roles.prefill
        self._links = Links(self._roles.token_s)
        self._model, self._capacity_blocks = model, capacity_blocks
        self._agenda = Agenda()
        self.placer = new_placer(self._agenda)
        self.engines: dict[Target, ReferenceEngine] = {}
        self.record = Run(())
        self._flights: dict[int, Target] = {}
        # Of requests that two engines serve: where the prompt is computed; where it is kept until it is read.
        self._computing: dict[int, Target] = {}
        self._kept: dict[int, Target] = {}
        self._sources: dict[int, Target] = {}  # of requests that wait to read from a peer
        self._depths: Counter[Target] = Counter()
        self._done = 0
        self._unplaced = 0
        self._is_looking = False
        # Of requests that wait for others: how many of these have not ended, and who waits for each.
        self._awaited: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        for number, speed in enumerate(speeds, start=1):
            self._join(f"w{number}", speed)
        for name, at in (joins or {}).items():
            self._agenda.at(at, partial(self._join, name, 1.0))
        for name, at in (fails or {}).items():
            self._agenda.at(at, partial(self._fail, Target(WorkerId(name))))

    def run(self, arrivals: Sequence[Arrival], on_done: Callable[[int], None] | None = None) -> Run:
        """Serve all arrivals. `on_done` is called with the number of requests that have ended."""
        count, record = len(arrivals), self.record
        record.arrivals, record.cached = arrivals, [0] * count
        record.first_s, record.end_s = [math.nan] * count, [math.nan] * count
        record.sent_s, record.held = [math.nan] * count, [0] * count
        record.handed = [False] * count
        record.targets = [Target(WorkerId(""))] * count
        self._unplaced = count
        self._on_done = on_done
        for number, arrival in enumerate(arrivals):
            if arrival.after:
                self._awaited[number] = len(arrival.after)
                for other in arrival.after:
                    self._followers.setdefault(other, []).append(number)
            else:
                self._agenda.at(arrival.at, partial(self._arrive, number, arrival))
        self._repeat(BEAT_S, BEAT_S, lambda: self.placer.report(self.engines))
        if self.placer.refresh_s:
            self._repeat(0.0, self.placer.refresh_s, self.placer.refresh)
        self._agenda.run()
        assert not self._flights, "every request was answered"
        return record

    def began(self, number: int, cached_tokens: int, now: float) -> None:
        """The first token of a request."""
        if number not in self._flights:
            return
        if number in self._computing or not self.record.handed[number] or self._are_peers:
            self.record.cached[number] = cached_tokens
        if number not in self._computing:
            self.record.first_s[number] = now
            self.placer.began(number, now)
            self._look_soon(now)

    def ended(self, number: int, now: float) -> None:
        """The last token of a request, or the only one of a prefill engine."""
        if number in self._computing:
            self._hand_over(number, now)
        elif number in self._flights:
            self.record.end_s[number] = now
            self._leave(number, now, self.record.arrivals[number].output_tokens)

    def _hand_over(self, number: int, now: float) -> None:
        self._kept[number] = self._computing.pop(number)
        self.placer.computed(number, now)
        self._add(self._flights[number], number, now, DECODE)

    def reads(self, number: int, tokens: int) -> None:
        """A decode engine reads so much of what a prefill engine has computed."""
        over = self._links.read(self._kept[number], self._flights[number], tokens, self._agenda.now)
        self._agenda.at(over, partial(self._has_read, number))

    def pulls(self, number: int, cached_tokens: int) -> int:
        """An engine begins to read what it lacks and its peer still holds: so many tokens."""
        source, target = self._sources.pop(number), self._flights[number]
        tokens = self.engines[source].held_tokens(self.record.arrivals[number]) - cached_tokens
        if tokens <= 0:
            return 0
        self.record.handed[number] = True
        over = self._links.read(source, target, tokens, self._agenda.now)
        self._agenda.at(over, partial(self._has_pulled, number, self.engines[target]))
        return tokens

    def _has_pulled(self, number: int, engine: ReferenceEngine, now: float) -> None:
        before = engine.due
        engine.has_read(number, now)
        self._await(engine, before)

    def _has_read(self, number: int, now: float) -> None:
        first, second = self.engines[self._kept.pop(number)], self.engines[self._flights[number]]
        due = first.due, second.due
        first.let_go(number, now)
        second.has_read(number, now)
        self._await(first, due[0])
        self._await(second, due[1])

    def _repeat(self, first: float, every_s: float, act: Callable[[], None]) -> None:
        """Call `act` until all requests are placed: later on it would change nothing."""

        def again(now: float) -> None:
            act()
            if self._unplaced:
                self._agenda.at(now + every_s, again)

        self._agenda.at(first, again)

    def _leave(self, number: int, now: float, output_tokens: int | None) -> None:
        self._depths[self._flights.pop(number)] -= 1
        self.placer.ended(number, now, output_tokens)
        self._look_soon(now)
        for follower in self._followers.pop(number, ()):
            self._awaited[follower] -= 1
            if not self._awaited[follower]:
                arrival = self.record.arrivals[follower]
                self._agenda.at(now + arrival.at, partial(self._arrive, follower, arrival))
        self._done += 1
        if self._on_done is not None:
            self._on_done(self._done)

    def _join(self, name: str, speed: float, _now: float = 0.0) -> None:
        target = Target(WorkerId(name))
        model, blocks, role = self._model.at_speed(speed), self._capacity_blocks, self._roles.of(name)
        if role == PREFILL:
            model = replace(model, step_tokens=max(model.step_tokens, PREFILL_STEP_TOKENS))
        engine = ReferenceEngine(model, blocks, _Sounding(self, target))
        self.engines[target] = engine
        self.record.deepest[target.worker_id] = 0
        labels, connector = self._labels.get(name, {}), PEER if self._are_peers else ""
        self.placer.join(target, engine, card_of(name, model, blocks, labels, role=role, connector=connector))

    def _fail(self, target: Target, now: float) -> None:
        """The engine is gone. Requests without a token are sent elsewhere, the others have failed."""
        engine = self.engines.pop(target)
        engine.due = math.inf
        lost = [number for number, to in self._flights.items() if to == target]
        again = [number for number in lost if math.isnan(self.record.first_s[number])]
        for number in lost:
            if number in again:
                self._depths[self._flights.pop(number)] -= 1
                self.placer.ended(number, now, None)
                self._unplaced += 1
            else:
                self.record.first_s[number] = math.nan
                self._leave(number, now, None)
        self.placer.left(target)
        for number in again:
            self._place(number, self.record.arrivals[number], now)

    def _arrive(self, number: int, arrival: Arrival, now: float) -> None:
        self.record.sent_s[number] = now
        self._place(number, arrival, now)

    def _look(self, now: float) -> None:
        """Place waiting requests: the load has changed."""
        self._is_looking = False
        while [one for one in self._next() if self._place(one, self.record.arrivals[one], now)]:
            pass  # behind each that was placed, another may be next

    def _look_soon(self, now: float) -> None:
        if not self._is_looking and self._next():
            self._is_looking = True
            self._agenda.at(now, self._look)

    def _next(self) -> Sequence[int]:
        return self.placer.next_waiting()

    def _place(self, number: int, arrival: Arrival, now: float) -> bool:
        """Whether the request need not wait."""
        placed = self.placer.place(number, arrival, now)
        if placed is None:
            return False
        target, held_tokens, computes, source = placed
        self._flights[number] = target
        self._unplaced -= 1
        record = self.record
        record.targets[number], record.held[number] = target, held_tokens
        record.handed[number] = computes is not None
        self._depths[target] += 1
        deepest, worker = record.deepest, target.worker_id
        deepest[worker] = max(deepest[worker], self._depths[target])
        if source is not None:
            self._sources[number] = source
        if computes is None:
            self._add(target, number, now, BOTH)
        else:
            self._computing[number] = computes
            self._add(computes, number, now, PREFILL)
        if arrival.leaves_after_s < math.inf:
            self._agenda.at(now + arrival.leaves_after_s, partial(self._cancel, number))
        return True

    def _add(self, target: Target, number: int, now: float, part: str) -> None:
        engine = self.engines[target]
        before = engine.due
        engine.add(number, self.record.arrivals[number], now, part, pulls=number in self._sources)
        self._await(engine, before)

    def _cancel(self, number: int, now: float) -> None:
        target = self._flights.get(number)
        if target is None:
            return
        engine = self.engines[target]
        before = engine.due
        self.record.first_s[number] = math.nan
        self._leave(number, now, None)
        engine.abort(number, now)
        self._await(engine, before)

    def _await(self, engine: ReferenceEngine, before: float) -> None:
        """Have the engine advance when it is due, if that is new."""
        if engine.due not in {before, math.inf}:
            self._agenda.at(engine.due, partial(self._advance, engine))

    def _advance(self, engine: ReferenceEngine, now: float) -> None:
        if now != engine.due:
            return  # its run was cut: the earlier entry has advanced it; or it has failed
        engine.advance(now)
        self._await(engine, now)
