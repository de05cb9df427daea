"""The agent of one engine: learns what the engine is, announces it, publishes its KV events and its load.

engine ──/v1/models, /metrics, /version──> Card ───────────────┐
       ──/health, /metrics, every second──> state, load ───────┼─> Announcer ──> live.worker
       ──ZMQ──> EngineEvents ──> EngineRank ──> KvPublisher ───┴───────────────> live.kv
                                                └── answers on kv-replay
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

import structlog

from kvrouter.bus import Bus, BusPart, Subjects
from kvrouter.bus.rights import AGENT
from kvrouter.config import open_bus
from kvrouter.core.wire.heartbeats import Card, RankBeat, State
from kvrouter.core.wire.ids import WorkerId
from kvrouter.worker.announcer import Announcer
from kvrouter.worker.blocks.engine_blocks import MAX_HELD_BLOCKS
from kvrouter.worker.blocks.state import VERSION, AgentState, Header, StateFile
from kvrouter.worker.drain import Duty, until_drained
from kvrouter.worker.engines.discovery import awaited, kind_named, learn_patiently, learn_with_events
from kvrouter.worker.engines.endpoints import shown
from kvrouter.worker.engines.facts import EngineFacts, build_card, with_discovered
from kvrouter.worker.engines.http import DOWN, EngineError, EngineHttp, Models, remedy_of
from kvrouter.worker.engines.metrics import RankLoad, Scrape
from kvrouter.worker.metrics_port import AgentView, MetricsOf, RankView
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.polled_events import PolledEvents
from kvrouter.worker.pool_choice import Rejoining, choose_pool, pool_name
from kvrouter.worker.publisher import KvPublisher, ReplayAnswers
from kvrouter.worker.rank import EngineRank, RankEvents
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints

log = structlog.get_logger()

# A busy engine may miss a probe of 1 s now and then; three in a row are not load.
MISSES_UNTIL_DOWN = 3
# Between two reads of /v1/models: adapters are loaded and unloaded, and a new process may have another model.
MODELS_EVERY_S = 5.0
# The first heartbeat waits this long for the engine's history, so that it can announce the feeds complete.
SETTLE_S = 2.0


# Opens the events of each rank. They wait there until the engine is known.
OpenEvents: TypeAlias = Callable[[], AbstractAsyncContextManager[Sequence[RankEvents]]]


async def serve(
    options: AgentOptions, stop: asyncio.Event, duty: Duty | None = None, metrics: MetricsOf | None = None
) -> None:
    """Run an agent until `stop` is set, or `duty` is done. Raises KvRouterError."""

    @contextlib.asynccontextmanager
    async def open_events() -> AsyncIterator[list[EngineEvents]]:
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(EngineEvents.open(each)) for each in options.endpoints]

    async with open_bus(options.nats, name=f"worker {options.worker_id}", user=AGENT) as bus:
        await serve_engine(options, bus, open_events, duty or Duty(stop), metrics or MetricsOf())


async def serve_engine(
    options: AgentOptions, bus: Bus, open_events: OpenEvents, duty: Duty, metrics: MetricsOf
) -> None:
    """Run an agent on an open bus, again from its start each time that the worker moves to another pool."""
    may_move = options.model is None
    while True:
        async with open_events() as events:
            pool = await _serve_in_pool(options, bus, events, duty, metrics, may_move=may_move)
        if pool is None:
            return
        options = replace(options, model=pool)
        duty.dismiss()


async def _serve_in_pool(
    options: AgentOptions,
    bus: Bus,
    events: Sequence[RankEvents],
    duty: Duty,
    metrics: MetricsOf,
    *,
    may_move: bool,
) -> str | None:
    """Run an agent in the given pool, or in the one that fits. Returns the pool to which it has to move."""
    started_us = time.time_ns() // 1000
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            EngineHttp.open(options.engine_url, options.api_key, options.tls, options.metrics)
        )
        facts = await learn_patiently(engine, options, duty.leave)
        if facts is None:
            return None
        found = with_discovered(options, facts)
        # The engine may report more ranks than the flags have endpoints.
        for each, settled in zip(events, found.endpoints, strict=False):
            each.learn_replay(settled.replay)
        reported = found.endpoints[len(events) :]
        more = [await _open_events(stack, engine, each) for each in reported]
        events = [*events, *more]
        file = None
        if options.state_file is not None:
            owner = f"{options.namespace}/{options.worker_id}"
            file = stack.enter_context(StateFile.open(options.state_file, owner))
        former = file.read() if file is not None else None
        async with bus.part() as listening:
            options = replace(found, model=await choose_pool(found, listening, facts, duty.leave))
        part = await stack.enter_async_context(bus.part())
        agent = Agent(
            options,
            part,
            engine,
            facts,
            events,
            duty=duty,
            started_us=started_us,
            former=former,
            rejoining=Rejoining(bus, options, pool_name(options, facts)) if may_move else None,
        )
        metrics.bus = bus
        with metrics.including(agent.view):
            return await agent.run(file)


async def _open_events(
    stack: contextlib.AsyncExitStack, engine: EngineHttp, endpoints: EventEndpoints
) -> RankEvents:
    """The events at endpoints that the engine reports: a path of its own, or sockets."""
    if endpoints.events.startswith("http"):
        return PolledEvents(engine)
    return await stack.enter_async_context(EngineEvents.open(endpoints))


class Agent:
    """The agent of an engine that is known."""

    def __init__(
        self,
        options: AgentOptions,
        bus: BusPart,
        engine: EngineHttp,
        facts: EngineFacts,
        events: Sequence[RankEvents],
        *,
        duty: Duty,
        started_us: int,
        former: AgentState | None = None,
        rejoining: Rejoining | None = None,
    ) -> None:
        """`former`: the saved state of the agent's former process. `rejoining`: None in a given pool."""
        self._options = options
        self._bus = bus
        self._engine = engine
        self._facts = facts
        self._events = events
        # New even if the agent continues with the former table (see KvPublisher.restore), and greater than
        # the former one even if the clock was set back: replicas ignore a lower incarnation.
        self._incarnation = max(started_us, former.header.incarnation + 1 if former else 0)
        self._subjects = Subjects(options.namespace)
        self._pool_model = pool_name(options, facts)
        self._ranks = [self._rank(number, former) for number in range(len(events))]
        self._is_answering = asyncio.Event()
        self._is_another = False  # the engine has restarted, and was not learnt again
        self._is_down = False
        # Why the engine is down; empty while it is up.
        self._trouble = ""
        self._answers = ReplayAnswers(bus, [rank.publisher for rank in self._ranks])
        self._duty = duty
        self._rejoining = rejoining
        self._moves_to: str | None = None
        self._loads: Mapping[int, RankLoad] = facts.scrape.loads
        self._logged_lacks: set[str] = set()
        where = {
            "events": shown([each.events for each in options.endpoints]),
            "replay": shown([each.replay for each in options.endpoints]),
        }
        self._announcer = Announcer(
            bus,
            self._subjects,
            self._card(),
            self._incarnation,
            self._rank_beats,
            facts=where,
            on_shared_names=rejoining.tell if rejoining is not None else lambda _: None,
        )

    async def run(self, file: StateFile | None = None) -> str | None:
        """Serve until the duty is done, then publish `leave` and save the state. Raises TakenOverError.

        Returns the pool to which the worker has to move, if that is why it left.
        """
        self._log_lacks()
        self._duty.attend(self._announce_state)
        self._announce_state()
        await self._announcer.subscribe()
        async with asyncio.TaskGroup() as group:
            loops = [
                self._announce(),
                self._watch_health(),
                self._watch_load(),
                self._watch_models(),
                self._keep_state(file),
            ]
            for events, rank in zip(self._events, self._ranks, strict=True):
                loops += [rank.follow(events), rank.read_again(events), rank.send(self._is_answering)]
            tasks = [group.create_task(loop) for loop in loops]
            reason = await self._duty.until_done(self._serve_out(), self._find_pool())
            log.info("worker.leaving", worker=self._options.worker_id, reason=reason)
            self._announcer.leave()  # no await before the cancellations: no heartbeat may follow it
            for task in tasks:
                task.cancel()
        await self._save_state(file)  # not after an error: a successor may own the file by now
        return self._moves_to

    async def _serve_out(self) -> str:
        """Wait for SIGTERM, then drain until --drain-timeout-s. Returns the reason to leave."""
        await self._duty.retired.wait()
        if not self._options.drain_timeout_s:
            return "--drain-timeout-s 0: leaving at once"
        log.info("worker.draining", worker=self._options.worker_id, timeout_s=self._options.drain_timeout_s)
        try:
            async with asyncio.timeout(self._options.drain_timeout_s):
                return await until_drained(self._engine, lambda: self._is_down)
        except TimeoutError:
            return f"--drain-timeout-s {self._options.drain_timeout_s:g} has passed"

    async def _find_pool(self) -> str:
        """Wait until the worker belongs to another pool. Returns the reason to leave."""
        if self._rejoining is None:
            return await asyncio.Future()
        self._moves_to = await self._rejoining.until_better(lambda: self._facts)
        return f"joins pool {self._moves_to}"

    async def _announce(self) -> None:
        """Send heartbeats and answer replays, once the history is known: an earlier answer would be empty."""
        worker_id = WorkerId(self._options.worker_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for events in self._events:
                    await events.settled.wait()
        await self._bus.subscribe(self._subjects.kv_replay(worker_id), self._on_replay)
        self._is_answering.set()
        for rank in self._ranks:
            rank.publisher.flush(time.monotonic())  # so that the first heartbeat has the right frame number
        await self._announcer.run(self._options.heartbeat_s)

    async def _keep_state(self, file: StateFile | None) -> None:
        while file is not None:
            await asyncio.sleep(self._options.state_every_s)
            await self._save_state(file)

    async def _save_state(self, file: StateFile | None) -> None:
        """Save the tables, unless one is in doubt: the state saved before may still prove to be right."""
        if file is not None and self._ranks and all(rank.is_settled for rank in self._ranks):
            await file.save(self._state())

    def _state(self) -> AgentState:
        """The state of all ranks. Without an await, so that each table fits its position."""
        incarnations = [self._incarnation, *(rank.publisher.incarnation for rank in self._ranks)]
        owner = f"{self._options.namespace}/{self._options.worker_id}"
        header = Header(VERSION, owner, self._facts.scrape.started_s, max(incarnations))
        states = [rank.state() for rank in self._ranks]
        return AgentState(header, {state.head.rank: state for state in states if state is not None})

    def _rank(self, number: int, saved: AgentState | None) -> EngineRank:
        scrape, events = self._facts.scrape, self._events[number]
        former = saved.ranks.get(number) if saved else None
        if saved and former and self._is_same_process(saved.header):
            events.resume(former.head.seq, former.head.digest, was_complete=former.head.is_complete)
        publisher = KvPublisher(
            self._bus,
            self._options.worker_id,
            self._facts.block_size(self._options),
            number,
            model=self._pool_model,
            namespace=self._options.namespace,
            incarnation=self._incarnation,
            flush_s=self._options.flush_s,
            # an engine cannot wait for more parents than it has blocks
            max_held_blocks=scrape.device_blocks + scrape.host_blocks or MAX_HELD_BLOCKS,
        )
        rank = EngineRank(
            publisher,
            events.stream,
            scrape.device_blocks,
            started_s=self._incarnation / 1e6,
            former=former,
            adapter=kind_named(self._facts.kind).adapter(),
            has_siblings=len(self._events) > 1,
        )
        rank.set_speculates(speculates=scrape.speculates)
        return rank

    def _is_same_process(self, former: Header) -> bool:
        """False if the engine has certainly restarted. If it may be the same, its batches must prove it."""
        times = {former.engine_started_s, self._facts.scrape.started_s} - {0.0}
        if len(times) > 1:
            log.info("engine.restarted", since="the state was saved", url=self._options.engine_url)
        return len(times) < 2

    def _card(self) -> Card:
        publishers = [rank.publisher for rank in self._ranks]
        return build_card(
            self._options,
            self._facts,
            event_block_size=max((publisher.event_block_size for publisher in publishers), default=0),
            widest_tier=max((publisher.blocks.widest_tier for publisher in publishers), default=0),
            lookahead=max((rank.lookahead for rank in self._ranks), default=0),
            started_at_us=self._incarnation,
            notes=sorted({note for notes in self._notes() for note in notes}),
        )

    def _notes(self) -> Iterator[Sequence[str]]:
        if self._trouble:
            yield [DOWN + self._trouble]
        for rank, events in zip(self._ranks, self._events, strict=True):
            yield rank.notes
            yield events.notes

    def _rank_beats(self) -> list[RankBeat]:
        return [self._rank_beat(number) for number in range(self._options.ranks)]

    def _rank_beat(self, number: int) -> RankBeat:
        load = self._loads.get(number, RankLoad())
        if number >= len(self._ranks):
            return load.beat(number, self._incarnation, 0, is_partial=False)
        rank = self._ranks[number]
        publisher = rank.publisher
        return load.beat(number, publisher.incarnation, publisher.seq, is_partial=rank.is_partial)

    def view(self) -> AgentView:
        """For --metrics-port."""
        ranks = [RankView(self._rank_beat(number), 0) for number in range(self._options.ranks)]
        for number, rank in enumerate(self._ranks[: len(ranks)]):
            blocks = rank.publisher.blocks
            ranks[number] = RankView(ranks[number].beat, blocks.count())
        return AgentView(self._options.worker_id, self._announcer.state, ranks)

    async def _watch_health(self) -> None:
        """After MISSES_UNTIL_DOWN failed probes the engine is down; the next answer brings it back up."""
        misses, now = 0, asyncio.get_running_loop().time
        wait = awaited(self._options, now())
        while True:
            began = now()
            trouble = await self._engine.trouble()
            misses = 0 if trouble is None else misses + 1
            if trouble is not None and misses == MISSES_UNTIL_DOWN:
                self._go_down(trouble)
                wait = awaited(self._options, began)
            elif trouble is None and self._is_down:
                trouble = await self._come_back()
            if trouble is not None and self._is_down and wait.look(now(), str(trouble), remedy_of(trouble)):
                self._note_trouble(trouble)
            # from its begin, so that a slow probe does not delay the next one
            await asyncio.sleep(began + self._options.probe_s - now())

    def _go_down(self, trouble: EngineError) -> None:
        reason, remedy = str(trouble), remedy_of(trouble)
        log.warning("engine.down", url=self._options.engine_url, reason=reason, remedy=remedy)
        self._loads = {}
        for rank in self._ranks:
            rank.go_down()
        self._is_down = True
        self._announce_state()
        self._note_trouble(trouble)

    def _note_trouble(self, trouble: EngineError) -> None:
        """Show on the card why the engine is down: as of now, not each time that another text comes."""
        self._trouble = str(trouble)
        self._announcer.update(self._card())

    def _announce_state(self) -> None:
        """Announce whether the worker takes requests, if that has changed."""
        up: State = "draining" if self._duty.is_draining else "up"
        self._announcer.set_state("down" if self._is_down or self._facts.scrape.is_asleep else up)

    async def _come_back(self) -> EngineError | None:
        """Learn the engine and its history again: it may be another process with another model.

        Returns why it is not up yet. Raises EngineError if the agent must start again.
        """
        if error := await self._learn_again():
            return error  # it answers probes, but is still starting: the next probe tries again
        log.info("engine.up", url=self._options.engine_url)
        # not those that have seen the new process begin: some events can be read only once
        self._restart_events([rank for rank in self._ranks if not rank.is_settled])
        self._trouble = ""
        self._announcer.update(self._card())
        self._is_down = False
        self._announce_state()
        return None

    async def _learn_again(self) -> EngineError | None:
        """Learn what the engine is now; returns why it cannot be asked.

        Raises EngineError if the agent must start again.
        """
        try:
            facts = await learn_with_events(self._engine, self._options)
        except EngineError as error:
            return error
        self._check_model(facts.models)
        self._check_ranks(facts)
        self._note(facts)
        self._log_lacks()
        return None

    async def _watch_models(self) -> None:
        """Announce models and adapters that change while the engine is healthy. Raises EngineError."""
        while True:
            await asyncio.sleep(MODELS_EVERY_S)
            if self._is_down:
                continue
            try:
                models = await self._engine.models()
            except EngineError:
                continue
            self._check_model(models)
            self._facts = replace(self._facts, models=models)
            self._announcer.update(self._card())

    def _check_model(self, models: Models) -> None:
        pool, before, now = self._pool_model, self._facts.models.served_names, models.served_names
        has_gone = pool in before and pool not in now
        # it joined a pool whose name is none of its own
        has_changed = self._rejoining is not None and pool not in before and now != before
        if has_gone or has_changed:
            raise EngineError(
                f"the engine served {before[0]!r} and now serves {now[0]!r}: start the agent again"
            )

    def _check_ranks(self, facts: EngineFacts) -> None:
        """Raise EngineError if this agent would not follow all ranks, or not their events."""
        if facts.endpoints != self._facts.endpoints:
            raise EngineError(
                "the engine publishes its KV events elsewhere than before: start the agent again"
            )
        ranks = with_discovered(self._options, facts).ranks
        if ranks > self._options.ranks:
            raise EngineError(
                f"the engine has {ranks} ranks and had {self._options.ranks}: start the agent again"
            )

    async def _watch_load(self) -> None:
        """Read the metrics once per heartbeat, for the next heartbeat."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            if self._is_down:
                continue
            try:
                scrape = await self._engine.scrape()
            except EngineError:
                self._loads = {}  # unknown, rather than old: frontends then count their own bookings
            else:
                self._note_scrape(scrape)
                await self._learn_by(scrape)
            self._announcer.update(self._card())  # events may have shown a block size or a tier

    async def _learn_by(self, scrape: Scrape) -> None:
        """Learn an engine again that has restarted, or had no metrics and has them now: they show ranks, too.

        Raises EngineError if this agent must be started again for them.
        """
        has_metrics = not self._facts.has_metrics and bool(scrape.loads or scrape.block_size)
        if not (has_metrics or self._is_another) or await self._learn_again():
            return  # the next scrape tries again
        self._is_another = False
        if has_metrics:
            log.info("engine.has_metrics", url=self._options.engine_url)

    def _note_scrape(self, scrape: Scrape) -> None:
        self._loads = scrape.loads
        was_asleep = self._facts.scrape.is_asleep
        # 0: unknown, in an answer that is not the engine's own for example; less: another of its processes
        if scrape.started_s > self._facts.scrape.started_s:
            before, now = self._facts.scrape.device_blocks, scrape.device_blocks
            log.info("engine.restarted", url=self._options.engine_url, blocks_before=before, blocks=now)
            self._is_another = True
            # between two probes; a table with batches of the new process only stays
            self._restart_events([rank for rank in self._ranks if rank.is_older_than(scrape.started_s)])
        self._note(self._facts.with_scrape(scrape))
        if scrape.is_asleep != was_asleep:
            self._change_sleep(is_asleep=scrape.is_asleep)

    def _change_sleep(self, *, is_asleep: bool) -> None:
        """A sleeping engine serves nothing and drops its cache, so after it the cache is empty, too."""
        log.info("engine.asleep" if is_asleep else "engine.awake", url=self._options.engine_url)
        # vLLM publishes this clear with its next step only, so until then its history lacks it
        for rank in self._ranks:
            rank.publisher.cleared()
        self._announce_state()

    def _note(self, facts: EngineFacts) -> None:
        self._facts = facts
        for rank in self._ranks:
            rank.capacity_blocks = facts.scrape.device_blocks
            rank.set_speculates(speculates=facts.scrape.speculates)

    def _log_lacks(self) -> None:
        """Log what the engine lacks, each once: at the start, and of another process of the engine."""
        for lack in self._facts.lacks:
            if lack not in self._logged_lacks:
                log.warning("engine.lacks", worker=self._options.worker_id, lack=lack)
        self._logged_lacks = {*self._facts.lacks}

    def _restart_events(self, ranks: Sequence[EngineRank]) -> None:
        for rank in ranks:
            rank.publisher.event_block_size = 0  # the next card must have nothing of the former process
            self._events[rank.publisher.rank].restart()

    def _on_replay(self, subject: str, payload: bytes, reply: str) -> None:
        self._answers.answer(payload, reply)
