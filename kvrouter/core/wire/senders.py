"""The senders of live messages: NATS subjects are made from them, and leases and feeds are kept by them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvrouter.core.wire.ids import PoolId, RouterId, Target, WorkerId

Message: TypeAlias = tuple[str, bytes, str]
"""A message of NATS: subject, payload, and the subject for answers or nothing."""


class WorkerSource(NamedTuple):
    """A worker's heartbeat."""

    worker_id: WorkerId


class RouterSource(NamedTuple):
    """A replica's heartbeat."""

    router_id: RouterId


class KvSource(NamedTuple):
    """The KV feed of one rank."""

    pool: PoolId
    worker_id: WorkerId
    rank: int

    @property
    def target(self) -> Target:
        """The target whose blocks the feed describes."""
        return Target(self.worker_id, self.rank)


class SyncSource(NamedTuple):
    """A replica's bookings in one pool."""

    pool: PoolId
    router_id: RouterId


class AwaitedSource(NamedTuple):
    """A worker that a peer knows, and whose heartbeat has not arrived here yet."""

    worker_id: WorkerId


Feed: TypeAlias = KvSource | SyncSource
Source: TypeAlias = WorkerSource | RouterSource | AwaitedSource | KvSource | SyncSource


def name(source: Feed) -> str:
    """A feed's name in logs and `/ready`: `kv w1/0`, `sync 3f2a in POOL`."""
    if isinstance(source, KvSource):
        return f"kv {source.target}"
    return f"sync {source.router_id} in {source.pool}"
