"""The agent beside an engine: learns what it is, announces it, bridges its KV events, reports its load.

engine ──/v1/models, /metrics, /version──> Card ───────────┐
       ──/health, /metrics, every second──> state, load ───┼─> Announcer ──> live.worker
       ──ZMQ──> ZmqFeed ──> EngineRank ──> KvPublisher ────┴──────────────> live.kv
                                                └── answers on kv-replay
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from kvrouter.bus import Bus, BusPart, Subjects
from kvrouter.config import open_bus
from kvrouter.core.feeds.trust import ANSWERS_A_SECOND, PerSecond
from kvrouter.core.wire.heartbeats import Card, RankBeat, State
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import decode_request
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.announcer import Announcer
from kvrouter.worker.blocks.engine_blocks import MAX_HELD_BLOCKS
from kvrouter.worker.blocks.state import VERSION, AgentState, Header, StateFile
from kvrouter.worker.drain import Duty, until_drained
from kvrouter.worker.engines.discovery import learn, learn_patiently
from kvrouter.worker.engines.facts import EngineFacts, build_card, can_report, with_discovered
from kvrouter.worker.engines.http import EngineError, EngineHttp, Models
from kvrouter.worker.engines.metrics import RankLoad, Scrape
from kvrouter.worker.engines.sglang import SglangAdapter
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.sockets import ZmqFeed

log = structlog.get_logger()

MISSES_UNTIL_DOWN = 3
MODELS_EVERY_S = 5.0
"""Between two looks at what the engine serves: adapters come and go, a new process may have another model."""
SETTLE_S = 2.0
"""How long the first heartbeat waits until it is known what of the engine's history there is."""


async def serve(options: AgentOptions, stop: asyncio.Event, duty: Duty | None = None) -> None:
    """Run an agent until `stop` is set, or `duty` is done. Raises KvRouterError."""
    async with contextlib.AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(ZmqFeed.open(feed)) for feed in options.feeds]
        bus = await stack.enter_async_context(open_bus(options.nats, name=f"worker {options.worker_id}"))
        await serve_engine(options, bus, feeds, duty or Duty(stop))


async def serve_engine(options: AgentOptions, bus: Bus, feeds: Sequence[ZmqFeed], duty: Duty) -> None:
    """Run an agent on a bus and feeds that are open: what the engine sends before it is known waits there."""
    started_us = time.time_ns() // 1000
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            EngineHttp.open(options.engine_url, options.api_key, options.tls_ca)
        )
        engine.own_metrics = options.metrics
        facts = await learn_patiently(engine, options, duty.leave)
        if facts is None:
            return
        found = with_discovered(options, facts)
        for feed, settled in zip(feeds, found.feeds, strict=False):
            feed.learn_replay(settled.replay)
        more = [await stack.enter_async_context(ZmqFeed.open(feed)) for feed in found.feeds[len(feeds) :]]
        options, feeds = found, [*feeds, *more]
        file = None
        if options.state_file is not None:
            owner = f"{options.namespace}/{options.worker_id}"
            file = stack.enter_context(StateFile.open(options.state_file, owner))
        former = file.load() if file is not None else None
        part = stack.enter_context(bus.part())
        agent = Agent(options, part, engine, facts, feeds, duty=duty, started_us=started_us, former=former)
        await agent.run(file)


class Agent:
    """One engine's agent, once the engine is known."""

    def __init__(
        self,
        options: AgentOptions,
        bus: BusPart,
        engine: EngineHttp,
        facts: EngineFacts,
        feeds: Sequence[ZmqFeed],
        *,
        duty: Duty,
        started_us: int,
        former: AgentState | None = None,
    ) -> None:
        """`former` is what the agent before left.

        A restarted agent is a new incarnation, even where it goes on with the former table: that of
        its heartbeats must be greater anyway, and that of its feeds see `KvPublisher.restore`. It is
        greater than the former ones also where the clock has been put back.
        """
        self._options = options
        self._bus = bus
        self._engine = engine
        self._facts = facts
        self._feeds = feeds
        self._incarnation = max(started_us, former.header.incarnation + 1 if former else 0)
        self._subjects = Subjects(options.namespace)
        self._pool_model = options.model or facts.models.served_names[0]
        self._ranks = [self._rank(number, former) for number in range(len(feeds))]
        self._is_answering = asyncio.Event()
        self._is_down = False
        self._answers = PerSecond(ANSWERS_A_SECOND)
        self._duty = duty
        self._loads: Mapping[int, RankLoad] = facts.scrape.loads
        self._announcer = Announcer(bus, self._subjects, self._card(), self._incarnation, self._rank_beats)

    async def run(self, file: StateFile | None = None) -> None:
        """Serve until the duty is done, then say `leave` and keep the state. Raises TakenOverError."""
        self._duty.attend(self._show_state)
        self._show_state()
        await self._announcer.subscribe()
        async with asyncio.TaskGroup() as group:
            loops = [
                self._announce(),
                self._watch_health(),
                self._watch_load(),
                self._watch_models(),
                self._keep_state(file),
            ]
            for feed, rank in zip(self._feeds, self._ranks, strict=True):
                loops += [rank.follow(feed), rank.read_again(feed), self._publish(rank)]
            tasks = [group.create_task(loop) for loop in loops]
            reason = await self._duty.until_done(self._serve_out())
            log.info("worker.leaving", worker=self._options.worker_id, reason=reason)
            self._announcer.leave()
            for task in tasks:
                task.cancel()
        await self._save_state(file)  # not after an error: the file may be our successor's

    async def _serve_out(self) -> str:
        """Once the duty is to retire: drain, for as long as that may take. Returns why it is over."""
        await self._duty.retired.wait()
        if not self._options.drain_timeout_s:
            return "--drain-timeout 0: nothing is waited for"
        log.info("worker.draining", worker=self._options.worker_id, timeout_s=self._options.drain_timeout_s)
        try:
            async with asyncio.timeout(self._options.drain_timeout_s):
                return await until_drained(self._engine, lambda: self._is_down)
        except TimeoutError:
            return f"--drain-timeout {self._options.drain_timeout_s:g} has passed"

    async def _announce(self) -> None:
        """Heartbeats, and answers: not before it is known what there is, or readers would see nothing."""
        worker_id = WorkerId(self._options.worker_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for feed in self._feeds:
                    await feed.settled.wait()
        await self._bus.subscribe(self._subjects.kv_replay(worker_id), self._on_replay)
        self._is_answering.set()
        for rank in self._ranks:
            rank.publisher.flush(time.monotonic())  # so that the first heartbeat tells of it
        await self._announcer.run(self._options.heartbeat_s)

    async def _publish(self, rank: EngineRank) -> None:
        """Send frames, once whoever misses one can ask for it."""
        await self._is_answering.wait()
        await rank.publisher.run()

    async def _keep_state(self, file: StateFile | None) -> None:
        while file is not None:
            await asyncio.sleep(self._options.state_every_s)
            await self._save_state(file)

    async def _save_state(self, file: StateFile | None) -> None:
        """Keep the tables, unless one is in doubt: what was kept last may still be proven."""
        if file is not None and self._ranks and all(rank.is_settled for rank in self._ranks):
            await file.save(self._state())

    def _state(self) -> AgentState:
        """All ranks in one plain call: each table fits its position."""
        incarnations = [self._incarnation, *(rank.publisher.incarnation for rank in self._ranks)]
        owner = f"{self._options.namespace}/{self._options.worker_id}"
        header = Header(VERSION, owner, self._facts.scrape.started_s, max(incarnations))
        states = [rank.state() for rank in self._ranks]
        return AgentState(header, {state.head.rank: state for state in states if state is not None})

    def _rank(self, number: int, agent_before: AgentState | None) -> EngineRank:
        scrape, feed = self._facts.scrape, self._feeds[number]
        former = agent_before.ranks.get(number) if agent_before else None
        if agent_before and former and self._is_same_process(agent_before.header):
            feed.resume(former.head.seq, former.head.digest, was_complete=former.head.is_complete)
        publisher = KvPublisher(
            self._bus,
            self._options.worker_id,
            self._options.block_size or scrape.block_size,
            number,
            model=self._pool_model,
            namespace=self._options.namespace,
            incarnation=self._incarnation,
            flush_s=self._options.flush_s,
            max_held_blocks=scrape.device_blocks + scrape.host_blocks or MAX_HELD_BLOCKS,
        )
        repairs = can_report(self._options, self._facts.version, self._facts.kind)
        return EngineRank(
            publisher,
            feed.stream,
            scrape.device_blocks,
            repairs=repairs,
            former=former,
            adapter=SglangAdapter() if self._facts.kind == "sglang" else VllmAdapter(),
            has_siblings=len(self._feeds) > 1,
        )

    def _is_same_process(self, former: Header) -> bool:
        """False if the engine has certainly restarted since; the bytes of its batches tell for sure."""
        times = {former.engine_started_s, self._facts.scrape.started_s} - {0.0}
        if len(times) > 1:
            log.info("engine.restarted", since="the state was kept", url=self._options.engine_url)
        return len(times) < 2

    def _card(self) -> Card:
        publishers = [rank.publisher for rank in self._ranks]
        return build_card(
            self._options,
            self._facts,
            event_block_size=max((publisher.event_block_size for publisher in publishers), default=0),
            widest_tier=max((publisher.blocks.widest_tier for publisher in publishers), default=0),
            started_at_us=self._incarnation,
            repairs_by_report=any(rank.repairs for rank in self._ranks),
            notes=sorted({note for notes in self._notes() for note in notes}),
        )

    def _notes(self) -> Iterator[list[str]]:
        for rank, feed in zip(self._ranks, self._feeds, strict=True):
            yield rank.notes
            yield feed.notes

    def _rank_beats(self) -> list[RankBeat]:
        return [self._rank_beat(number) for number in range(self._options.ranks)]

    def _rank_beat(self, number: int) -> RankBeat:
        load = self._loads.get(number, RankLoad())
        if number >= len(self._ranks):
            return load.beat(number, self._incarnation, 0, is_partial=False)
        rank = self._ranks[number]
        publisher = rank.publisher
        return load.beat(number, publisher.incarnation, publisher.seq, is_partial=rank.tell_partial())

    async def _watch_health(self) -> None:
        """Three misses in a row mean down; then the engine's answer means up, and everything anew."""
        misses = 0
        while True:
            is_healthy, _ = await asyncio.gather(
                self._engine.is_healthy(), asyncio.sleep(self._options.probe_s)
            )
            misses = 0 if is_healthy else misses + 1
            if misses == MISSES_UNTIL_DOWN:
                self._go_down()
            elif misses == 0 and self._is_down:
                await self._come_back()

    def _go_down(self) -> None:
        log.warning("engine.down", url=self._options.engine_url)
        self._loads = {}
        for rank in self._ranks:
            rank.go_down()
        self._is_down = True
        self._show_state()

    def _show_state(self) -> None:
        """Announce at once whether the worker takes requests, if that has changed."""
        up: State = "draining" if self._duty.is_draining else "up"
        self._announcer.set_state("down" if self._is_down else up)

    async def _come_back(self) -> None:
        """Up again, perhaps another process with another model: learn it and its history anew."""
        try:
            facts = await learn(self._engine, self._options)
        except EngineError:
            return  # the next probe tries again
        self._check_model(facts.models)
        if facts.feeds != self._facts.feeds:
            raise EngineError(
                "the engine publishes its KV events elsewhere than before: start the agent again"
            )
        log.info("engine.up", url=self._options.engine_url)
        self._note(facts)
        self._restart_feeds(self._ranks)
        self._announcer.update(self._card())
        self._is_down = False
        self._show_state()

    async def _watch_models(self) -> None:
        """Announce what the engine serves now, without its health having failed. Raises EngineError."""
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
        if self._options.model is None and models.served_names[0] != self._pool_model:
            raise EngineError(
                f"the engine served {self._pool_model!r} and now serves {models.served_names[0]!r}: "
                "start the agent again"
            )

    async def _watch_load(self) -> None:
        """Look at the metrics once per heartbeat; what they say is in the next one."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            if self._is_down:
                continue
            try:
                self._note_scrape(await self._engine.scrape())
            except EngineError:
                self._loads = {}
            self._announcer.update(self._card())  # events may have shown a block size or a tier

    def _note_scrape(self, scrape: Scrape) -> None:
        self._loads = scrape.loads
        if scrape.started_s != self._facts.scrape.started_s:
            # restarted between two probes; a table that has only seen the new process stays
            self._restart_feeds([rank for rank in self._ranks if rank.is_older_than(scrape.started_s)])
        self._note(self._facts.with_scrape(scrape))

    def _note(self, facts: EngineFacts) -> None:
        self._facts = facts
        for rank in self._ranks:
            rank.capacity_blocks = facts.scrape.device_blocks
            rank.set_repairs(can_report(self._options, facts.version, facts.kind))

    def _restart_feeds(self, ranks: Sequence[EngineRank]) -> None:
        for rank in ranks:
            rank.publisher.event_block_size = 0  # the card that follows has nothing of the process before
            self._feeds[rank.publisher.rank].restart()

    def _on_replay(self, subject: str, payload: bytes, reply: str) -> None:
        try:
            request = decode_request(payload)
        except MalformedFrameError as error:
            log.warning("replay.malformed", error=str(error))
            return
        if isinstance(request.part, int) and 0 <= request.part < len(self._ranks) and reply:
            publisher = self._ranks[request.part].publisher
            now = time.monotonic()
            if self._answers.allows(now):
                self._bus.publish(reply, publisher.answer(request, self._bus.max_payload, now))
