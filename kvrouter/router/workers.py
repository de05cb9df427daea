"""The engines that callers have registered, and who acts as the agent of each.

N replicas are told of the same engine, and one of them reports it: its heartbeats, its card, its KV events.

    watching ──nobody announces it, or older facts, for a random moment──> acting
        ^                                                                     │
        ├── another one began later: its facts count here, too ───────────────┤
        └── deleted, shut down: it leaves ────────────────────────────────────┘

There is no vote: a replica that begins announces the worker, and all others hear of it within milliseconds.
If two begin at once, the later one stays (worker/announcer.py). An agent that dies is silent for a lease;
then another one begins, and reads the engine's history again by its replay endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import structlog

from kvrouter.bus import NatsOptions
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import BadRequestError, TakenIdError, UnknownTargetError, leaves
from kvrouter.router.registrations import REGISTERED, Registered, Registration, registered_in
from kvrouter.worker.announce import announce, connect
from kvrouter.worker.announcer import TakenOverError
from kvrouter.worker.engines.discovery import kind_named
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.sockets import EngineEvents

log = structlog.get_logger()

MOST_ENGINES = 1024
# Registered at once by all replicas, an engine gets its agent after a random part of this.
SPREAD_S = 0.2
# Between two looks whether an engine has an agent, and after one that failed.
LOOK_S, PAUSE_S = 0.05, 2.0
# A registration returns once the worker can be chosen, or after this.
REGISTER_S = 5.0


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
        self.now_us = _now_us
        """The time, in µs since 1970; clocks of replicas differ."""
        self._replica = replica
        self._nats = nats
        self._namespace = namespace
        self._chance = chance
        self._engines: dict[str, Registered] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, tuple[Card, Registered | None]] = {}  # cards that were read
        self._changing = asyncio.Lock()  # two changes of one engine at once would leave an agent behind

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    async def upsert(self, engine: Registration) -> None:
        """Register an engine, or replace what all replicas know of it; waits until it can be chosen."""
        engine.check()
        engine, name = engine.as_served(), engine.name
        if any(REGISTERED not in card.labels for card in self._cards(name)):
            raise TakenIdError(f"worker {name!r} has an agent of its own: give another `worker_id`")
        if len(self._engines) >= MOST_ENGINES and name not in self._engines:
            raise BadRequestError(f"{MOST_ENGINES} engines are registered here: delete some, or run agents")
        async with self._changing:
            former = self._newest(name)
            if former is None or former.engine != engine:
                at_us = max(self.now_us(), former.at_us + 1 if former is not None else 0)
                await self._begin(name, Registered(at_us, engine))
            elif name not in self._engines:
                await self._begin(name, former)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REGISTER_S):
                while not self.is_announced(name):  # noqa: ASYNC110  # heartbeats have no event
                    await asyncio.sleep(LOOK_S / 5)

    async def change(self, name: str, changes: Mapping[str, Any]) -> None:
        """Replace these fields. Raises UnknownTargetError or BadRequestError."""
        if name not in self._engines:
            raise UnknownTargetError(f"worker {name[:100]!r} was not registered here: POST /workers first")
        facts = msgspec.to_builtins((self._newest(name) or self._engines[name]).engine)
        given = {
            field: value for field, value in changes.items() if value is not None and field != "worker_id"
        }
        if "kv_events_endpoint" in given:
            facts["kv_events_endpoints"] = None
        try:
            engine = msgspec.convert(facts | given, Registration)
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
            self._seen.pop(name, None)
            await self._stop(name)

    async def close(self) -> None:
        """All agents here leave; other replicas take over."""
        self._engines.clear()
        for name in [*self._tasks]:
            await self._stop(name)

    def is_announced(self, name: str) -> bool:
        """Whether an agent, here or elsewhere, reports the worker now as it was registered last."""
        newest = self._newest(name)
        return any(REGISTERED not in card.labels or self._facts(card) == newest for card in self._cards(name))

    async def _begin(self, name: str, registered: Registered) -> None:
        is_change = name in self._engines
        await self._stop(name)
        self._engines[name] = registered
        keep = self._keep(name, at_once=is_change)
        self._tasks[name] = asyncio.create_task(keep, name=f"engine {name}")

    async def _stop(self, name: str) -> None:
        if task := self._tasks.pop(name, None):
            task.cancel()
            await asyncio.wait([task])

    def _newest(self, name: str) -> Registered | None:
        """What was registered last, here or elsewhere."""
        newest = self._engines.get(name)
        for heard in filter(None, map(self._facts, self._cards(name))):
            if newest is None or heard.is_after(newest):
                newest = heard
        return newest

    def _facts(self, card: Card) -> Registered | None:
        seen = self._seen.get(card.worker_id)
        if seen is None or seen[0] is not card:
            seen = self._seen[card.worker_id] = card, registered_in(card, self.now_us())
        return seen[1]

    def _cards(self, name: str) -> Iterator[Card]:
        pools = (router.pool for router in self._replica.routers.values())
        found = (pool.workers.get(WorkerId(name)) for pool in pools)
        return (one.card for one in found if one is not None and not one.silent)

    async def _keep(self, name: str, *, at_once: bool) -> None:
        """Be its agent whenever there is none with the newest facts."""
        pause_s = LOOK_S
        while True:
            while self.is_announced(name):
                self._engines[name] = self._newest(name) or self._engines[name]  # known if that agent dies
                pause_s = LOOK_S
                await asyncio.sleep(LOOK_S)
            if not at_once:
                await asyncio.sleep(self._chance() * SPREAD_S)
                if self.is_announced(name):
                    continue
            at_once = False
            try:
                await self._act(self._newest(name) or self._engines[name])
            except Exception as error:
                reasons = leaves(error)
                if all(isinstance(one, TakenOverError) for one in reasons):
                    log.info("engine.agent_elsewhere", worker=name)
                else:
                    pause_s = PAUSE_S
                    facts = {"reason": str(reasons[0]), "retry_s": PAUSE_S}
                    log.warning("engine.agent_failed", worker=name, **facts)
                await asyncio.sleep(pause_s)  # short at first: the other one may have older facts
                pause_s = PAUSE_S

    async def _act(self, registered: Registered) -> None:
        """Announce it, and follow its events, until cancelled. Raises TakenOverError in a group."""
        engine, followed = registered.engine, list[tuple[EngineRank, EngineEvents]]()
        # after the agent that it replaces, whatever the clocks say
        began_us = max([self.now_us(), *(card.started_at_us + 1 for card in self._cards(engine.name))])
        async with contextlib.AsyncExitStack() as stack:
            bus = await stack.enter_async_context(connect(self._nats, name=f"engine {engine.name}"))
            publishers = []
            for number, endpoints in enumerate(engine.endpoints()):
                publisher = KvPublisher(bus, engine.name, engine.block_size, number, incarnation=began_us)
                publishers.append(publisher)
                if endpoints is not None:
                    events = await stack.enter_async_context(EngineEvents.open(endpoints))
                    followed.append((_rank(engine, publisher, events), events))
            if self.is_announced(engine.name):  # another one began meanwhile
                return
            card = announce(bus, publishers, namespace=self._namespace, **registered.card())
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


def _now_us() -> int:
    return time.time_ns() // 1000


def _rank(engine: Registration, publisher: KvPublisher, events: EngineEvents) -> EngineRank:
    blocks, started_s = engine.total_kv_blocks or 0, publisher.incarnation / 1e6
    adapter = kind_named("").adapter()  # Dynamo's engines publish events in vLLM's form
    return EngineRank(publisher, events.stream, blocks, started_s=started_s, adapter=adapter)
