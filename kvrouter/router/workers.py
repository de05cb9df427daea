"""Engines that callers register (POST /workers, `upsert_worker`), and who acts as the agent of each.

N replicas are told of the same engine, and one of them reports it: its heartbeats, its card, its KV events.

    watching ──no agent is heard, for a random moment──> acting ──another one began later──> watching
        └── a change was registered here: at once ──────────┘ └─ deleted, shut down: it leaves

There is no vote: a replica that begins announces the worker, and all others hear of it within milliseconds.
If two begin at once, the later one stays (worker/announcer.py). An agent that dies is silent for a lease;
then another one begins, and reads the engine's history again by its replay endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvrouter.bus import NatsOptions
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import WorkerId, is_worker_id
from kvrouter.core.wire.values import MOST_RANKS, Amount, BlockSize, Line, Text, url_error
from kvrouter.errors import BadRequestError, TakenIdError, UnknownTargetError, leaves
from kvrouter.router.asked import DEFAULT, FIRST_RANK, RankNumber, WorkerName
from kvrouter.router.placing import ENDPOINT
from kvrouter.worker.announce import announce, connect
from kvrouter.worker.announcer import TakenOverError
from kvrouter.worker.engines.discovery import kind_named
from kvrouter.worker.options import offset_port
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints

log = structlog.get_logger()

MOST_ENGINES = 1024
# Registered at once by all replicas, an engine gets its agent after a random part of this.
SPREAD_S = 0.2
# Between two looks whether an engine has an agent, and after one that failed.
LOOK_S, PAUSE_S = 0.05, 2.0
# A registration returns once the worker can be chosen, or after this.
REGISTER_S = 5.0
# A label of every worker that was registered, with a digest of its facts: others have agents of their own.
REGISTERED = "registered"
# What older replicas announce instead of a digest.
_NO_DIGEST = "yes"
# The address of an engine without HTTP: no host has it (RFC 2606), and no two engines share one.
NO_HTTP = "http://engine-{}.invalid"


class Registration(Struct, frozen=True):
    """An engine, in the fields of Dynamo's service. Unknown fields are ignored."""

    worker_id: WorkerName
    endpoint: Text
    block_size: BlockSize
    model_name: Annotated[Line, Meta(min_length=1)] = DEFAULT
    kv_events_endpoint: Text | None = None
    kv_events_endpoints: Annotated[dict[str, Text], Meta(max_length=MOST_RANKS)] | None = None
    replay_endpoint: Text | None = None
    data_parallel_start_rank: RankNumber | None = None
    data_parallel_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)] | None = None
    max_num_batched_tokens: Amount | None = None
    total_kv_blocks: Amount | None = None

    @property
    def name(self) -> str:
        return str(self.worker_id)

    @property
    def digest(self) -> str:
        """The same for two registrations with the same facts: 16 hex digits."""
        facts = msgspec.json.encode(replace(self, worker_id=self.name), order="sorted")
        return hashlib.blake2b(facts, digest_size=8).hexdigest()

    def endpoints(self) -> list[EventEndpoints | None]:
        """Of each rank; None: it publishes no events. Raises BadRequestError."""
        first, size, replay = (
            self.data_parallel_start_rank or 0,
            self.data_parallel_size or 1,
            self.replay_endpoint,
        )
        only = {str(first): self.kv_events_endpoint} if self.kv_events_endpoint else {}
        events = [(self.kv_events_endpoints or only).get(str(first + rank)) for rank in range(size)]
        for endpoint in filter(None, (*events, replay)):
            if not endpoint.startswith("tcp://") or "*" in endpoint:
                raise BadRequestError(f"{endpoint[:100]!r}: use tcp://HOST:PORT, where the engine publishes")
        return [
            EventEndpoints(one, offset_port("replay_endpoint", replay, rank) if replay else None)
            if one
            else None
            for rank, one in enumerate(events)
        ]

    def check(self) -> None:
        """Raise BadRequestError for what no agent could follow."""
        if not is_worker_id(self.name):
            raise BadRequestError(f"worker_id {self.name[:100]!r}: use a number, or A-Z a-z 0-9 _ -")
        if not self.endpoint or not self.endpoint.isprintable():
            raise BadRequestError("`endpoint` is empty, or no text: give the engine's address")
        self.endpoints()

    def card(self) -> Mapping[str, Any]:
        """What `announce` takes."""
        labels = {REGISTERED: self.digest} | ({ENDPOINT: self.endpoint} if url_error(self.endpoint) else {})
        labels |= {FIRST_RANK: str(self.data_parallel_start_rank)} if self.data_parallel_start_rank else {}
        return {
            "url": NO_HTTP.format(self.name) if ENDPOINT in labels else self.endpoint,
            "model": self.model_name,
            "tiers": {"device": self.total_kv_blocks or 0},
            "max_batched_tokens": self.max_num_batched_tokens or 0,
            "labels": labels,
        }


class RegisteredEngines:
    """The engines that were registered here. `nats`: where agents announce, as `--nats` has it."""

    def __init__(
        self,
        replica: Replica,
        nats: NatsOptions | str,
        namespace: str,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.acting: set[str] = set()
        """Those whose agent is in this process."""
        self._replica = replica
        self._nats = nats
        self._namespace = namespace
        self._chance = chance
        self._engines: dict[str, Registration] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()  # two changes of one engine at once would leave an agent behind

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    async def upsert(self, engine: Registration) -> None:
        """Register an engine, or replace what is known of it; waits until it can be chosen."""
        engine.check()
        if not (is_known := engine.name in self._engines):
            self._check_free(engine)
        if len(self._engines) >= MOST_ENGINES and not is_known:
            raise BadRequestError(f"{MOST_ENGINES} engines are registered here: delete some, or run agents")
        async with self._changing:
            if self._engines.get(engine.name) != engine:
                await self._stop(engine.name)
                self._engines[engine.name] = engine
                keep = self._keep(engine, has_changed=is_known)
                self._tasks[engine.name] = asyncio.create_task(keep, name=f"engine {engine.name}")
        try:
            async with asyncio.timeout(REGISTER_S):
                while not self._is_announced(engine):
                    if not is_known:
                        self._check_free(engine)  # it may just have been registered elsewhere
                    await asyncio.sleep(LOOK_S / 5)
        except TakenIdError:
            await self.delete(engine.name)
            raise
        except TimeoutError:
            pass

    async def change(self, name: str, changes: Mapping[str, Any]) -> None:
        """Replace these fields. Raises UnknownTargetError or BadRequestError."""
        if name not in self._engines:
            raise UnknownTargetError(f"worker {name[:100]!r} was not registered here: POST /workers first")
        given = {
            field: value for field, value in changes.items() if value is not None and field != "worker_id"
        }
        try:
            engine = msgspec.convert(msgspec.to_builtins(self._engines[name]) | given, Registration)
        except msgspec.ValidationError as error:
            raise BadRequestError(f"nothing was changed: {error}") from None
        await self.upsert(engine)

    async def delete(self, name: str) -> None:
        """Its agent, if it is here, leaves. Raises UnknownTargetError."""
        async with self._changing:
            if self._engines.pop(name, None) is None:
                raise UnknownTargetError(
                    f"worker {name[:100]!r} was not registered here: its own agent ends it"
                )
            await self._stop(name)

    async def close(self) -> None:
        """All agents here leave; other replicas take over."""
        self._engines.clear()
        for name in [*self._tasks]:
            await self._stop(name)

    async def _stop(self, name: str) -> None:
        if task := self._tasks.pop(name, None):
            task.cancel()
            await asyncio.wait([task])

    def has_agent(self, engine: Registration) -> bool:
        """Whether an agent, here or elsewhere, reports the worker now."""
        return any(True for _ in self._cards(engine.name))

    def _is_announced(self, engine: Registration) -> bool:
        """Whether an agent reports the worker with these facts."""
        return any(_is_of(card, engine) for card in self._cards(engine.name))

    def _check_free(self, engine: Registration) -> None:
        """Raise TakenIdError if the worker is announced with other facts than these."""
        for card in self._cards(engine.name):
            if REGISTERED not in card.labels:
                raise TakenIdError(
                    f"worker {engine.name!r} has an agent of its own: give another `worker_id`"
                )
            if not _is_of(card, engine):
                raise TakenIdError(
                    f"worker {engine.name!r} is registered at another replica with other facts (block_size "
                    f"{card.block_size}, model_name {card.model[:100]!r}, …): give the same, or change them "
                    "there (PATCH), or give another `worker_id`"
                )

    def _cards(self, name: str) -> Iterator[Card]:
        pools = (router.pool for router in self._replica.routers.values())
        found = (pool.workers.get(WorkerId(name)) for pool in pools)
        return (one.card for one in found if one is not None and not one.silent)

    async def _keep(self, engine: Registration, *, has_changed: bool) -> None:
        """Be its agent whenever there is none, or, if it `has_changed`, none that announces the change."""
        is_kept = self._is_announced if has_changed else self.has_agent
        while True:
            while is_kept(engine):  # noqa: ASYNC110  # silence has no event
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(self._chance() * SPREAD_S)
            if is_kept(engine):
                continue
            try:
                await self._act(engine, is_kept)
            except Exception as error:
                reasons = leaves(error)
                if all(isinstance(one, TakenOverError) for one in reasons):
                    is_kept = self.has_agent
                    log.info("engine.agent_elsewhere", worker=engine.name, as_here=self._is_announced(engine))
                else:
                    facts = {"reason": str(reasons[0]), "retry_s": PAUSE_S}
                    log.warning("engine.agent_failed", worker=engine.name, **facts)
                await asyncio.sleep(PAUSE_S)

    async def _act(self, engine: Registration, is_kept: Callable[[Registration], bool]) -> None:
        """Announce it, and follow its events, until cancelled. Raises TakenOverError in a group."""
        began_us, followed = time.time_ns() // 1000, list[tuple[EngineRank, EngineEvents]]()
        async with contextlib.AsyncExitStack() as stack:
            bus = await stack.enter_async_context(connect(self._nats, name=f"engine {engine.name}"))
            publishers = []
            for number, endpoints in enumerate(engine.endpoints()):
                publisher = KvPublisher(bus, engine.name, engine.block_size, number, incarnation=began_us)
                publishers.append(publisher)
                if endpoints is not None:
                    events = await stack.enter_async_context(EngineEvents.open(endpoints))
                    followed.append((_rank(engine, publisher, events), events))
            if is_kept(engine):  # another one began meanwhile
                return
            card = announce(bus, publishers, namespace=self._namespace, **engine.card())
            announced = await stack.enter_async_context(card)
            announced.partial = lambda: {one.publisher.rank for one, _ in followed if one.is_partial}
            self.acting.add(engine.name)
            stack.callback(self.acting.discard, engine.name)
            log.info("engine.agent_here", worker=engine.name, endpoint=engine.endpoint)
            async with asyncio.TaskGroup() as group:
                for rank, events in followed:
                    group.create_task(rank.follow(events))
                    group.create_task(rank.read_again(events))
                await asyncio.Event().wait()


def _is_of(card: Card, engine: Registration) -> bool:
    return card.labels.get(REGISTERED) in {engine.digest, _NO_DIGEST}


def _rank(engine: Registration, publisher: KvPublisher, events: EngineEvents) -> EngineRank:
    blocks, started_s = engine.total_kv_blocks or 0, publisher.incarnation / 1e6
    adapter = kind_named("").adapter()  # Dynamo's engines publish events in vLLM's form
    return EngineRank(publisher, events.stream, blocks, started_s=started_s, adapter=adapter)
