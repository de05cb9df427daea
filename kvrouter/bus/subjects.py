"""Every NATS subject, in one place (docs/concepts/design.md#wire).

    kvrouter.<ns>.hello                               joiner → all
    kvrouter.<ns>.live.worker.<worker_id>             agent → all: heartbeat
    kvrouter.<ns>.live.kv.<pool>.<worker_id>.<rank>   agent → all: KV frames
    kvrouter.<ns>.live.router.<router_id>             replica → replicas: heartbeat
    kvrouter.<ns>.live.sync.<pool>.<router_id>        replica → replicas: bookings
    kvrouter.<ns>.kv-replay.<worker_id>               request: replay or snapshot
    kvrouter.<ns>.sync-replay.<router_id>             request: replay or snapshot
    kvrouter.<ns>.answer.kv.<worker_id>.<asker>.<token>      agent → asker: the answer
    kvrouter.<ns>.answer.sync.<router_id>.<asker>.<token>    replica → asker: the answer
    kvrouter.<ns>.place                               request: a call for any router of placement
    kvrouter.<ns>.place.<router_id>                   request: a call for this one
    kvrouter.<ns>.placed.<caller>.<…>                 router → caller: the answer

An answer has the name of its sender in its subject, so that NATS's permissions can keep agents from answering
for another. (`_INBOX` would let each agent answer for all. `allow_responses` lets an agent that publishes to
itself choose any subject as the one for answers.)

A worker id may be `<group>.<name>`: its subjects have one token more, and a wildcard of NATS is all workers
of a group. Users that versions before wrote may not subscribe to `group_answers`: processes do so when they
first ask such a worker.

All live traffic shares one wildcard, because NATS keeps order only within one subscription.
"""

from __future__ import annotations

import re
from typing import Literal

from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId, check_identifier, is_identifier, is_worker_id
from kvrouter.core.wire.senders import Feed, KvSource, RouterSource, Source, SyncSource, WorkerSource

# As NATS's wildcards: without a group, and in one.
EVERY_WORKER = (WorkerId("*"), WorkerId("*.*"))
_TOKENS = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")  # no wildcard, and nothing else of NATS's own
_RANK = re.compile(r"[0-9]{1,4}")  # ranks are below 1,024


class Subjects:
    """The subjects of one namespace."""

    def __init__(self, namespace: str) -> None:
        check_identifier("namespace", namespace)
        self._name(namespace)

    @classmethod
    def of_every_namespace(cls) -> Subjects:
        """For the rights of users: NATS's wildcard stands for the namespace."""
        subjects = cls.__new__(cls)  # `__init__` rejects wildcards
        subjects._name("*")
        return subjects

    def _name(self, namespace: str) -> None:
        self.namespace = namespace
        self._root = f"kvrouter.{namespace}"
        self.hello = f"{self._root}.hello"
        self.live = f"{self._root}.live.>"
        self.place = f"{self._root}.place"
        self.everything = f"{self._root}.>"
        self._live_parts = self.live.count(".")  # the parts in front of the `>`

    def live_worker(self, worker_id: WorkerId) -> str:
        """A worker's heartbeats."""
        return f"{self._root}.live.worker.{worker_id}"

    def live_kv(self, pool: PoolId, worker_id: WorkerId, rank: int | Literal["*"]) -> str:
        """The KV feed of one rank."""
        return f"{self._root}.live.kv.{pool}.{worker_id}.{rank}"

    def live_router(self, router_id: RouterId) -> str:
        """A replica's heartbeats."""
        return f"{self._root}.live.router.{router_id}"

    def live_sync(self, pool: PoolId, router_id: RouterId) -> str:
        """A replica's sync feed for one pool."""
        return f"{self._root}.live.sync.{pool}.{router_id}"

    def kv_replay(self, worker_id: WorkerId) -> str:
        """The subject of replay requests to an agent."""
        return f"{self._root}.kv-replay.{worker_id}"

    def sync_replay(self, router_id: RouterId) -> str:
        """The subject of replay requests to a replica."""
        return f"{self._root}.sync-replay.{router_id}"

    def replay(self, feed: Feed) -> str:
        """The subject of replay requests to the owner of a feed."""
        if isinstance(feed, KvSource):
            return self.kv_replay(feed.worker_id)
        return self.sync_replay(feed.router_id)

    def answer(self, feed: Feed, asker: str, token: str) -> str:
        """The subject for the answer to one replay request."""
        if isinstance(feed, KvSource):
            return self.kv_answer(feed.worker_id, asker, token)
        return self.sync_answer(feed.router_id, asker, token)

    def kv_answer(self, worker_id: WorkerId, asker: str, token: str) -> str:
        """The subject for an agent's answer to one request."""
        return f"{self._root}.answer.kv.{worker_id}.{asker}.{token}"

    def sync_answer(self, router_id: RouterId, asker: str, token: str) -> str:
        """The subject for a replica's answer to one request."""
        return f"{self._root}.answer.sync.{router_id}.{asker}.{token}"

    def place_at(self, router_id: RouterId) -> str:
        """The subject of calls for one router of placement."""
        return f"{self._root}.place.{router_id}"

    def placed(self, caller: str, token: str) -> str:
        """The subject for the answer to one such call."""
        return f"{self._root}.placed.{caller}.{token}"

    def caller(self, subject: str) -> str:
        """Who awaits an answer on this subject; empty: it is none of `placed`."""
        start = self.placed("", "")[:-1]
        match subject.removeprefix(start).split("."):
            case [caller, _, *_] if subject.startswith(start) and _TOKENS.fullmatch(subject):
                return caller
        return ""

    def answers(self, asker: str) -> str:
        """All answers to one process but those of workers in groups."""
        return f"{self._root}.answer.*.*.{asker}.*"

    def group_answers(self, asker: str) -> str:
        """All answers of workers in groups to one process."""
        return f"{self._root}.answer.kv.*.*.{asker}.*"

    def parse_live(self, subject: str) -> Source | None:
        """The sender in a live subject; None if the subject is not one of these, or has an invalid name."""
        match subject.split(".")[self._live_parts :]:
            case ["worker", *names] if is_worker_id(worker_id := ".".join(names)):
                return WorkerSource(WorkerId(worker_id))
            case ["kv", pool, *names, rank] if (
                is_identifier(pool) and is_worker_id(worker_id := ".".join(names)) and _RANK.fullmatch(rank)
            ):
                return KvSource(PoolId(pool), WorkerId(worker_id), int(rank))
            case ["router", router_id] if is_identifier(router_id):
                return RouterSource(RouterId(router_id))
            case ["sync", pool, router_id] if is_identifier(pool) and is_identifier(router_id):
                return SyncSource(PoolId(pool), RouterId(router_id))
            case _:
                return None
