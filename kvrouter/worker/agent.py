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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from kvrouter.bus import Bus, Subjects
from kvrouter.config import open_bus
from kvrouter.core.beats import Card, RankBeat
from kvrouter.core.events import TIERS, decode_request
from kvrouter.core.ids import WorkerId
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.announcer import Announcer
from kvrouter.worker.engine_http import EngineError, EngineHttp, Models
from kvrouter.worker.load import RankLoad, Scrape
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq_feed import ZmqFeed

log = structlog.get_logger()

MISSES_UNTIL_DOWN = 3
RANK_HEADER = "X-data-parallel-rank"
_LEARN_EVERY_S = 0.5
_SAY_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine said about itself at one time."""

    models: Models
    version: str
    scrape: Scrape


async def serve(options: AgentOptions, stop: asyncio.Event) -> None:
    """Run an agent until `stop` is set. Raises TakenOverError, ConfigError."""
    incarnation = time.time_ns() // 1000
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EngineHttp.open(options.engine_url, options.api_key))
        facts = await learn_patiently(engine, options, stop)
        if facts is None:
            return
        bus = await stack.enter_async_context(open_bus(options.nats, name=f"worker {options.worker_id}"))
        feeds = [await stack.enter_async_context(ZmqFeed.open(feed)) for feed in options.feeds]
        agent = Agent(options, bus, engine, facts, feeds, incarnation=incarnation)
        await agent.run(stop)


async def learn(engine: EngineHttp, options: AgentOptions) -> EngineFacts:
    """Ask the engine what it is. Raises EngineError."""
    models = await engine.models()
    try:
        scrape = await engine.scrape()
    except EngineError:
        if options.block_size is None:
            raise
        scrape = Scrape()
    if not (options.block_size or scrape.block_size):
        raise EngineError("/metrics tells no block size: give --kv-cache-block-size")
    return EngineFacts(models, await engine.version(), scrape)


async def learn_patiently(
    engine: EngineHttp, options: AgentOptions, stop: asyncio.Event
) -> EngineFacts | None:
    """Wait for the engine, saying so now and then; None if told to stop before it is up."""
    said_at = float("-inf")
    while not stop.is_set():
        try:
            return await learn(engine, options)
        except EngineError as error:
            if time.monotonic() - said_at >= _SAY_EVERY_S:
                said_at = time.monotonic()
                log.info("engine.awaited", url=options.engine_url, reason=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEARN_EVERY_S):
                await stop.wait()
    return None


def build_card(
    options: AgentOptions,
    facts: EngineFacts,
    *,
    block_size: int | None,
    widest_tier: int,
    started_at_us: int,
) -> Card:
    """The card of an engine; `block_size` and `widest_tier` are what its events have shown."""
    models, scrape = facts.models, facts.scrape
    return Card(
        worker_id=options.worker_id,
        url=(options.advertise_url or options.engine_url).rstrip("/"),
        model=options.model or models.served_names[0],
        served_names=models.served_names,
        lora_names=models.lora_names,
        block_size=block_size or options.block_size or scrape.block_size,
        ranks=options.ranks,
        rank_header=RANK_HEADER if options.ranks > 1 else "",
        tiers=_tiers(scrape, widest_tier),
        max_model_len=models.max_model_len,
        max_batched_tokens=options.max_batched_tokens,
        max_sequences=options.max_sequences,
        engine="vllm",
        engine_version=facts.version,
        labels=dict(options.labels),
        started_at_us=started_at_us,
        publishes_events=bool(options.feeds),
    )


def _tiers(scrape: Scrape, widest_tier: int) -> dict[str, int]:
    capacities = {"device": scrape.device_blocks, "host": scrape.host_blocks, "disk": 0}
    widest = max(widest_tier, 1 if scrape.host_blocks else 0)
    return {name: capacities[name] for name in TIERS[: widest + 1]}


class Agent:
    """One engine's agent, once the engine is known."""

    def __init__(
        self,
        options: AgentOptions,
        bus: Bus,
        engine: EngineHttp,
        facts: EngineFacts,
        feeds: Sequence[ZmqFeed],
        *,
        incarnation: int,
    ) -> None:
        self._options = options
        self._bus = bus
        self._engine = engine
        self._facts = facts
        self._feeds = feeds
        self._incarnation = incarnation
        self._subjects = Subjects(options.namespace)
        self._pool_model = options.model or facts.models.served_names[0]
        self._ranks = [self._rank(number) for number in range(len(feeds))]
        self._loads: Mapping[int, RankLoad] = facts.scrape.loads
        self._announcer = Announcer(bus, self._subjects, self._card(), incarnation, self._rank_beats)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then say `leave`. Raises TakenOverError."""
        worker_id = WorkerId(self._options.worker_id)
        await self._bus.subscribe(self._subjects.kv_replay(worker_id), self._on_replay)
        await self._announcer.subscribe()
        log.info("worker.up", worker=worker_id, card=self._announcer.card.model, ranks=self._options.ranks)
        async with asyncio.TaskGroup() as group:
            loops = [self._announcer.run(self._options.heartbeat_s), self._watch_health(), self._watch_load()]
            for feed, rank in zip(self._feeds, self._ranks, strict=True):
                loops += [feed.run(rank.on_action), rank.publisher.run()]
            tasks = [group.create_task(loop) for loop in loops]
            await stop.wait()
            self._announcer.leave()
            for task in tasks:
                task.cancel()

    def _rank(self, number: int) -> EngineRank:
        scrape = self._facts.scrape
        publisher = KvPublisher(
            self._bus,
            self._options.worker_id,
            self._options.block_size or scrape.block_size,
            number,
            model=self._pool_model,
            namespace=self._options.namespace,
            incarnation=self._incarnation,
            flush_s=self._options.flush_s,
        )
        return EngineRank(publisher, scrape.device_blocks)

    def _card(self) -> Card:
        publishers = [rank.publisher for rank in self._ranks]
        return build_card(
            self._options,
            self._facts,
            block_size=publishers[0].block_size if publishers else None,
            widest_tier=max((publisher.blocks.widest_tier for publisher in publishers), default=0),
            started_at_us=self._incarnation,
        )

    def _rank_beats(self) -> list[RankBeat]:
        return [self._rank_beat(number) for number in range(self._options.ranks)]

    def _rank_beat(self, number: int) -> RankBeat:
        load = self._loads.get(number, RankLoad())
        if number >= len(self._ranks):
            return RankBeat(number, self._incarnation, 0, False, load.running, load.waiting, load.kv_usage)
        rank, stream = self._ranks[number], self._feeds[number].stream
        return RankBeat(
            number,
            rank.publisher.incarnation,
            rank.publisher.seq,
            rank.is_partial(has_all_batches=stream.is_complete),
            load.running,
            load.waiting,
            load.kv_usage,
        )

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
            elif misses == 0 and self._announcer.state == "down":
                await self._come_back()

    def _go_down(self) -> None:
        log.warning("engine.down", url=self._options.engine_url)
        self._loads = {}
        for rank in self._ranks:
            rank.publisher.cleared()
        self._announcer.set_state("down")

    async def _come_back(self) -> None:
        """Up again, perhaps another process with another model: learn it and its history anew."""
        try:
            facts = await learn(self._engine, self._options)
        except EngineError:
            return  # the next probe tries again
        if self._options.model is None and facts.models.served_names[0] != self._pool_model:
            raise EngineError(
                f"the engine served {self._pool_model!r} and now serves {facts.models.served_names[0]!r}: "
                "start the agent again"
            )
        log.info("engine.up", url=self._options.engine_url)
        self._note(facts)
        self._restart_feeds(self._ranks)
        self._announcer.update(self._card())
        self._announcer.set_state("up")

    async def _watch_load(self) -> None:
        """Look at the metrics once per heartbeat; what they say is in the next one."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            if self._announcer.state == "down":
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
        self._note(replace(self._facts, scrape=scrape))

    def _note(self, facts: EngineFacts) -> None:
        self._facts = facts
        for rank in self._ranks:
            rank.capacity_blocks = facts.scrape.device_blocks

    def _restart_feeds(self, ranks: Sequence[EngineRank]) -> None:
        for rank in ranks:
            self._feeds[rank.publisher.rank].restart()

    def _on_replay(self, subject: str, payload: bytes, reply: str) -> None:
        try:
            request = decode_request(payload)
        except MalformedFrameError as error:
            log.warning("replay.malformed", error=str(error))
            return
        if isinstance(request.part, int) and 0 <= request.part < len(self._ranks) and reply:
            publisher = self._ranks[request.part].publisher
            self._bus.publish(reply, publisher.answer(request, self._bus.max_payload, time.monotonic()))
