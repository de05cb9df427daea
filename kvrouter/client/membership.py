"""How a library object learns of workers: as a member on NATS, or by hand.

joined    ──> a ReplicaLoop keeps its Replica in step, as in a frontend
HandFed   ──> the caller passes cards and frames, and carries replay requests to the workers
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping

import structlog

from kvrouter.bus import NatsOptions, Subjects
from kvrouter.bus.rights import FRONTEND
from kvrouter.config import open_bus
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import PoolId, Target, WorkerId, check_worker_id
from kvrouter.core.wire.ops import VERSION, ReplayRequest
from kvrouter.core.wire.senders import KvSource
from kvrouter.errors import ConfigError, NoWorkersError
from kvrouter.replica.awaited import AwaitedWorkers
from kvrouter.replica.loop import ReplicaLoop, empty_replica
from kvrouter.replica.policy_upkeep import PolicyUpkeep
from kvrouter.replica.recovery import RECOVERIES

log = structlog.get_logger()

BY_HAND = PoolId("by-hand")
"""The pool of workers that are not on NATS."""
READY_TIMEOUT_S = 60.0
# Between two checks whether the first recovery is complete: no event reports it.
_LOOK_S = 0.01


def replica_with(
    new_policy: Callable[[], BuiltInPolicy],
    settings: ReplicaSettings,
    *,
    replica_id: str = "",
    chance: Callable[[], float] = random.random,
    new_mode: Callable[[str], BuiltInPolicy] | None = None,
) -> Replica:
    """A replica without any state whose pools use these policies, and `new_mode` for requests with a mode."""

    def rules(_pool: PoolId) -> RouterRules:
        return RouterRules(new_policy(), chance, new_policy=new_mode)

    return empty_replica(settings, rules, replica_id)


@contextlib.asynccontextmanager
async def joined(
    replica: Replica, nats: NatsOptions | str, namespace: str, *, heartbeat_s: float = 1.0
) -> AsyncIterator[ReplicaLoop]:
    """The replica is a member of the namespace while inside, over its own connection."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            open_bus(nats, name=f"library-{replica.router_id}", user=FRONTEND)
        )
        replica_loop = ReplicaLoop(replica, bus, Subjects(namespace), heartbeat_s=heartbeat_s)
        upkeep = PolicyUpkeep(replica)
        stack.callback(upkeep.close)
        await replica_loop.subscribe()
        await stack.enter_async_context(_running(replica_loop, upkeep))
        stack.enter_context(bus.leaving(replica_loop.publishing.leave))  # last: needs the tasks and the bus
        yield replica_loop


@contextlib.asynccontextmanager
async def _running(replica_loop: ReplicaLoop, upkeep: PolicyUpkeep) -> AsyncIterator[None]:
    # Not a task group: it would wrap an exception of the caller's block in an ExceptionGroup.
    tasks = [asyncio.create_task(replica_loop.run()), asyncio.create_task(upkeep.run())]
    for task in tasks:
        task.add_done_callback(_log_if_failed)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _log_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("library.task_failed", exc_info=task.exception())


async def until_serving(
    replica: Replica, model: str | None, timeout_s: float, workers: AwaitedWorkers
) -> PoolId:
    """The model's pool, once the first recovery is complete. Raises NoWorkersError.

    Keep its id, not its router: a pool without workers is given up after a while, and may come back.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    wait = workers.begin("the only model that is served" if model is None else f"model {model!r}", began)
    while True:
        unready = replica.readiness.not_ready(loop.time())
        missing = unready or _why_not_serving(replica, model)
        if not missing:
            return replica.router_for(model).pool.id
        reasons, remedy = "; ".join(missing), workers.remedy()
        if loop.time() >= began + timeout_s:
            raise NoWorkersError(f"not ready after {timeout_s:g} s: {reasons}: {remedy}")
        if not unready:  # else the loop of the replica says what it waits for
            wait.look(loop.time(), reasons, remedy)
        await asyncio.sleep(_LOOK_S)


def _why_not_serving(replica: Replica, model: str | None) -> list[str]:
    names = sorted({name for router in replica.routers.values() for name in router.pool.names})
    if (model is None and len(replica.routers) == 1) or model in names:
        return []
    wanted = "several models are served: name one" if model is None else f"no worker serves {model!r}"
    return [f"{wanted}; there are: {', '.join(names) or 'none'}"]


class HandFed:
    """A replica without NATS: workers and frames arrive by calls.

    The transport may lose or repeat frames: `missing` returns what to ask of which worker
    (`KvPublisher.answer` there), and `replayed` takes the answer.
    """

    def __init__(self, replica: Replica, clock: Callable[[], float]) -> None:
        self._replica = replica
        self._clock = clock

    def apply(self, frame: bytes, worker_id: str, rank: int = 0) -> None:
        """Apply a frame of this worker's KvPublisher, in order. A malformed frame counts as lost."""
        self._replica.feeds.kv_frame(KvSource(BY_HAND, WorkerId(worker_id), rank), frame, self._clock())

    def missing(self) -> list[tuple[Target, ReplayRequest]]:
        """What to ask of which target now: frames that were lost or published before this began."""
        now = self._clock()
        return [
            (feed.target, request)
            for feed, request in self._replica.feeds.due(now, RECOVERIES)
            if isinstance(feed, KvSource)
        ]

    def replayed(self, target: Target, answer: bytes | None) -> None:
        """Load the answer of a worker; None if it did not answer."""
        now, source = self._clock(), KvSource(BY_HAND, target.worker_id, target.rank)
        if answer is None:
            self._replica.feeds.failed(source, now)
            return
        self._replica.feeds.answered(source, answer, now)
        while self._replica.work(now):  # all at once: here no task does it in slices
            pass

    def _take_card(self, card: Card) -> None:
        check_worker_id("worker_id", card.worker_id)
        # Incarnation 0 for all: calls arrive in order, so there are no late heartbeats of a former life.
        ranks = [RankBeat(rank, 0, 0) for rank in range(card.ranks)]
        beat = WorkerBeat(VERSION, 0, "up", BY_HAND, ranks, 1, card)
        self._replica.take_worker_beat(WorkerId(card.worker_id), beat, self._clock())

    def _take_load(self, worker_id: WorkerId, ranks: list[RankBeat]) -> None:
        beat = WorkerBeat(VERSION, 0, "up", BY_HAND, ranks, 1)
        self._replica.take_worker_beat(worker_id, beat, self._clock())

    def _take_leave(self, worker_id: str) -> None:
        beat = WorkerBeat(VERSION, 0, "leave", BY_HAND, [], 1)
        self._replica.take_worker_beat(WorkerId(worker_id), beat, self._clock())


def by_worker(overlap: Mapping[Target, int]) -> dict[str, int]:
    """The deepest overlap of each worker's ranks. Input and result are ordered deepest first."""
    best: dict[str, int] = {}
    for target, depth in overlap.items():
        best.setdefault(target.worker_id, depth)
    return best


def deepest_first(overlap: Mapping[Target, int]) -> dict[Target, int]:
    """Ordered by depth, then by name."""
    return dict(sorted(overlap.items(), key=lambda found: (-found[1], found[0])))


def check_block_size(block_size: int) -> int:
    """The block size. Raises ConfigError if it is not at least 1."""
    if block_size < 1:
        raise ConfigError(f"block_size {block_size}: use that of the engines, at least 1")
    return block_size
