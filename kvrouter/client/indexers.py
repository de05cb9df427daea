"""Overlap of a prompt with each worker: `KvIndexer` by KV events, `ApproxKvIndexer` by what was sent."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

from kvrouter.bus import NatsOptions
from kvrouter.client.membership import (
    BY_HAND,
    READY_TIMEOUT_S,
    HandFed,
    by_worker,
    check_block_size,
    deepest_first,
    joined,
    replica_with,
    until_serving,
)
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import ReplicaSettings
from kvrouter.core.fleet.router import Router
from kvrouter.core.tables.approx import DEFAULT_TTL_S, ApproxIndex
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import prompt_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import BlockHash, Target, WorkerId
from kvrouter.core.wire.values import MOST_RANKS
from kvrouter.errors import ConfigError
from kvrouter.policies.baseline import Random


class KvIndexer(HandFed):
    """The blocks of one model's workers, from the KV events they publish.

    Frames arrive over NATS inside `subscribe`, or by hand with `apply`; not both.
    """

    def __init__(self, block_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        settings = ReplicaSettings(PoolSettings(block_size=check_block_size(block_size)))
        super().__init__(replica_with(Random, settings), clock)  # any policy: this chooses nothing
        self.block_size = block_size
        self._pool = BY_HAND
        self._ranks: dict[str, int] = {}

    def apply(self, frame: bytes, worker_id: str, rank: int = 0) -> None:
        """Apply a frame of this worker's KvPublisher, in order; the first one adds the worker."""
        if not 0 <= rank < MOST_RANKS:
            raise ConfigError(f"rank {rank}: use 0 to {MOST_RANKS - 1}")
        if rank >= self._ranks.get(worker_id, 0):
            self._take_card(
                Card(worker_id=worker_id, url="", model="", block_size=self.block_size, ranks=rank + 1)
            )
            self._ranks[worker_id] = rank + 1
        super().apply(frame, worker_id, rank)

    def remove_worker(self, worker_id: str) -> None:
        """Drop the worker and its blocks."""
        if self._ranks.pop(worker_id, None) is not None:
            self._take_leave(worker_id)

    @contextlib.asynccontextmanager
    async def subscribe(
        self,
        nats: NatsOptions | str,
        namespace: str = "default",
        *,
        model: str | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> AsyncIterator[KvIndexer]:
        """Follow the workers of a namespace while inside, once their blocks are known.

        `model` is needed where several are served. Raises NoWorkersError if no worker serves it within
        `ready_timeout_s`, and ConfigError if the model's blocks have another size.
        """
        if self._ranks:
            raise ConfigError("this KvIndexer is fed by hand: make another one to subscribe")
        async with joined(self._replica, nats, namespace) as replica_loop:
            workers = replica_loop.awaited
            self._pool = await until_serving(self._replica, model, ready_timeout_s, workers)
            self._check_size(self._replica.routers[self._pool])
            yield self

    def find_matches_for_request(
        self, tokens: Sequence[int], lora_name: str | None = None, salt: str | None = None
    ) -> dict[str, int]:
        """Leading blocks of the prompt that each worker holds, on its best rank; the deepest first.

        Workers that hold none are left out.
        """
        return by_worker(self.find_matches_by_target(tokens, lora_name, salt))

    def find_matches_by_target(
        self, tokens: Sequence[int], lora_name: str | None = None, salt: str | None = None
    ) -> dict[Target, int]:
        """The same for each `(worker_id, rank)`."""
        return self._matches(_chain(tokens, self.block_size, lora_name, salt))

    def find_matches_by_hashes(self, hashes: Sequence[BlockHash]) -> dict[Target, int]:
        """The same for the prompt's block hashes (`block_hashes`)."""
        return self._matches(sequence_hashes(hashes))

    def _matches(self, chain: Sequence[int]) -> dict[Target, int]:
        router = self._replica.routers.get(self._pool)
        return {} if router is None else deepest_first(router.pool.index.overlap(chain))

    def _check_size(self, router: Router) -> None:
        sizes = {worker.card.block_size for worker in router.pool.workers.values()}
        if sizes and self.block_size not in sizes:
            known = ", ".join(map(str, sorted(sizes)))
            raise ConfigError(
                f"block_size {self.block_size}: the workers of {router.pool.model!r} have {known}"
            )


class ApproxKvIndexer:
    """For engines without events: blocks sent to a worker are assumed to stay there for `ttl_s`."""

    def __init__(
        self, block_size: int, ttl_s: float = DEFAULT_TTL_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not ttl_s > 0:  # `<=` would let NaN pass
            raise ConfigError(f"ttl_s {ttl_s:g}: use seconds, above 0")
        self.block_size = check_block_size(block_size)
        self._clock = clock
        self._index = BlockIndex(placement_secret=secrets.randbits(64))  # see `new_table`
        self._approx = ApproxIndex(self._index, ttl_s)

    def process_routing_decision_for_request(
        self,
        tokens: Sequence[int],
        worker_id: str,
        rank: int = 0,
        lora_name: str | None = None,
        salt: str | None = None,
    ) -> None:
        """Assume that the worker holds the blocks of a prompt that was sent to it."""
        chain = _chain(tokens, self.block_size, lora_name, salt)
        self._approx.insert(Target(WorkerId(worker_id), rank), chain, self._clock())
        self._index.sweep()

    def remove_worker(self, worker_id: str) -> None:
        """Drop the worker and all its assumed blocks."""
        for target in self._index.targets():
            if target.worker_id == worker_id:
                self._approx.drop(target)

    def find_matches_for_request(
        self, tokens: Sequence[int], lora_name: str | None = None, salt: str | None = None
    ) -> dict[str, int]:
        """Leading blocks of the prompt that each worker is assumed to hold, on its best rank."""
        return by_worker(self.find_matches_by_target(tokens, lora_name, salt))

    def find_matches_by_target(
        self, tokens: Sequence[int], lora_name: str | None = None, salt: str | None = None
    ) -> dict[Target, int]:
        """The same for each `(worker_id, rank)`."""
        self._approx.expire(self._clock())
        return deepest_first(self._index.overlap(_chain(tokens, self.block_size, lora_name, salt)))


def _chain(tokens: Sequence[int], block_size: int, lora_name: str | None, salt: str | None) -> Sequence[int]:
    return prompt_hashes(tokens, block_size, lora_name=lora_name, salt=salt)
