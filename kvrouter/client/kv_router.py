"""`KvRouter`: the router of one model inside somebody's own service.

route(tokens) ──> PlacedRequest: worker, rank, url       the request is booked
its first data byte ──> mark_prefill_completed
its end ──> free, or the end of the `with` block
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Self, TypedDict, Unpack

from kvrouter.bus import NatsOptions
from kvrouter.client.membership import (
    BY_HAND,
    READY_TIMEOUT_S,
    HandFed,
    check_block_size,
    joined,
    replica_with,
    until_serving,
)
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import Placement, Router
from kvrouter.core.routing.cost import Prompt
from kvrouter.core.routing.policy import Candidate, Policy, RouteRequest, parse_wanted
from kvrouter.core.routing.selection import Decision
from kvrouter.core.tables.approx import DEFAULT_TTL_S
from kvrouter.core.wire.hashes import Multimodal, block_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import PoolId, Target, WorkerId
from kvrouter.core.wire.values import MOST_ID_CHARACTERS
from kvrouter.errors import ConfigError
from kvrouter.policies import POLICIES, PolicySettings, new_policy
from kvrouter.policies.importing import OwnPolicies
from kvrouter.replica.policy_upkeep import log_mistakes

_SWEPT = 512
"""Blocks of what has ended, taken off at each call."""

NewPolicy = str | Callable[[], object]
"""A mode's name, or what makes a policy of one's own, such as its class; called once for each pool."""


class About(TypedDict, total=False):
    """What else there is to know of a request."""

    request_id: str
    """Only shown."""
    lora_name: str | None
    salt: str | None
    multimodal: Sequence[Multimodal]
    overlap_weight: float
    temperature: float
    session: str
    text: str
    """Of the prompt, for policies that look at it."""
    target: str
    """The worker, or `WORKER/RANK`, that shall serve it (mode direct)."""
    priority: int


class KvRouter(HandFed):
    """Places requests on the workers of one model, and knows what is in flight where.

    Use `connect` where the workers are on NATS; else make one and tell it of workers (`add_worker`) and
    their KV frames (`apply`). All calls belong into one thread.
    """

    def __init__(
        self,
        block_size: int,
        *,
        policy: NewPolicy = "kv",
        settings: PolicySettings | None = None,
        overlap_weight: float | None = None,
        temperature: float = 0.0,
        use_kv_events: bool = True,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_amounts(overlap_weight=overlap_weight, temperature=temperature, ttl_s=ttl_s)
        pool = PoolSettings(use_kv_events, ttl_s, block_size=check_block_size(block_size))
        replica = replica_with(
            _maker(policy, settings),
            ReplicaSettings(pool),
            overlap_weight=overlap_weight,
            temperature=temperature,
        )
        super().__init__(replica, clock)
        self._pool = BY_HAND
        self._on_change = _nothing

    @staticmethod
    @contextlib.asynccontextmanager
    async def connect(
        nats: NatsOptions | str,
        namespace: str,
        model: str,
        *,
        policy: NewPolicy = "kv",
        settings: PolicySettings | None = None,
        overlap_weight: float | None = None,
        temperature: float = 0.0,
        use_kv_events: bool = True,
        ttl_s: float = DEFAULT_TTL_S,
        replica_sync: bool = False,
        ready_timeout_s: float = READY_TIMEOUT_S,
        heartbeat_s: float = 1.0,
    ) -> AsyncIterator[KvRouter]:
        """A router for a model of a namespace while this is open; begins when its workers are known.

        It is one more replica beside the frontends: with `replica_sync` it shares its bookings with
        theirs, and sees theirs. At the end it leaves. Raises NoWorkersError if nobody serves the model
        in time.
        """
        _check_amounts(overlap_weight=overlap_weight, temperature=temperature, ttl_s=ttl_s)
        member = ReplicaSettings(PoolSettings(use_kv_events, ttl_s), replica_sync, heartbeat_s=heartbeat_s)
        replica = replica_with(
            _maker(policy, settings), member, overlap_weight=overlap_weight, temperature=temperature
        )
        async with joined(replica, nats, namespace, heartbeat_s=heartbeat_s) as replica_loop:
            pool = await until_serving(replica, model, ready_timeout_s)
            yield _ConnectedRouter(replica, pool, replica_loop.publishing.flush_soon)

    @property
    def _router(self) -> Router:
        # Not kept: a pool without workers is given up after a while, and begins again with the next worker.
        return self._replica.router(self._pool)

    # Workers, by hand

    def add_worker(
        self,
        worker_id: str,
        *,
        url: str = "",
        ranks: int = 1,
        kv_blocks: int = 0,
        lora_names: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """A worker takes requests; told again, what it says replaces what was known.

        `kv_blocks`: how many blocks one of its ranks can hold; 0 if that is not known. Raises ConfigError.
        """
        if not 1 <= ranks <= 1024:
            raise ConfigError(f"ranks {ranks}: use 1 to 1024")
        card = Card(
            worker_id=worker_id,
            url=url,
            model="",
            lora_names=tuple(lora_names),
            block_size=self._by_hand().pool.block_size,
            ranks=ranks,
            tiers={"device": kv_blocks},
            labels=dict(labels or {}),
            publishes_events=self._replica.settings.pool.use_kv_events,
        )
        self._hear(card)

    def remove_worker(self, worker_id: str) -> None:
        """It takes no more requests. Requests in flight there are still to be freed."""
        self._by_hand()
        self._goodbye(worker_id)

    def apply(self, frame: bytes, worker_id: str, rank: int = 0) -> None:
        """A frame that this worker's KvPublisher has sent, in order; ignored for a worker not added."""
        self._by_hand()
        super().apply(frame, worker_id, rank)

    def _by_hand(self) -> Router:
        return self._router

    # Requests

    def route(
        self,
        tokens: Sequence[int],
        *,
        streamed: bool = True,
        exclude: Collection[str] = (),
        **about: Unpack[About],
    ) -> PlacedRequest:
        """Choose a worker for a prompt and book it there, in one step. Free what this returns.

        `streamed` False: there is no first byte to tell of, so the end of prefill is predicted. `exclude`:
        ids of workers that shall not be chosen. Raises NoWorkersError.
        """
        now = self._tend()
        asked = self._request(tokens, about)
        placement = self._router.route(asked, now, streamed=streamed, exclude=self._targets_of(exclude))
        self._on_change()
        return PlacedRequest(self._router, placement, self._router.considered, self._clock, self._on_change)

    def explain(
        self, tokens: Sequence[int], *, exclude: Collection[str] = (), **about: Unpack[About]
    ) -> Decision:
        """What `route` would choose and why: every target with the terms it was judged by. Books nothing."""
        asked = self._request(tokens, about)
        return self._router.decide(asked, self._tend(), exclude=self._targets_of(exclude))

    def worker_ids(self) -> list[str]:
        """Who takes requests now."""
        return list(dict.fromkeys(target.worker_id for target in self._router.pool.targets))

    def _request(self, tokens: Sequence[int], about: About) -> RouteRequest:
        _check_amounts(overlap_weight=about.get("overlap_weight"), temperature=about.get("temperature"))
        lora_name, size = about.get("lora_name"), self._router.pool.block_size
        prompts: tuple[Prompt, ...] = ()
        if size:  # else nobody is there to serve it
            hashes = block_hashes(
                tokens,
                size,
                lora_name=lora_name,
                salt=about.get("salt"),
                multimodal=about.get("multimodal", ()),
            )
            prompts = (Prompt(sequence_hashes(hashes), len(tokens), block_size=size),)
        return RouteRequest(
            _sendable("request_id", about.get("request_id", "")),
            prompts,
            lora_name,
            about.get("overlap_weight"),
            about.get("temperature"),
            text=about.get("text", ""),
            session=_sendable("session", about.get("session", "")),
            wanted=parse_wanted(about["target"]) if "target" in about else None,
            priority=about.get("priority", 0),
        )

    def _targets_of(self, worker_ids: Collection[str]) -> frozenset[Target]:
        if isinstance(worker_ids, str):
            raise ConfigError(f"exclude {worker_ids!r}: give a list of worker ids")
        wanted = {WorkerId(worker_id) for worker_id in worker_ids}
        return frozenset(target for target in self._router.pool.targets if target.worker_id in wanted)

    def _tend(self) -> float:
        """What the clock brings, where no task looks at it."""
        now = self._clock()
        for key in self._router.due(now):
            self._router.mark_prefill_completed(key, now)
        self._router.pool.approx.expire(now)
        self._router.pool.sweep(_SWEPT)
        log_mistakes(self._router.selection.policy)
        return now


class _ConnectedRouter(KvRouter):
    """A KvRouter whose workers are on NATS. `on_change` publishes what has happened to bookings."""

    def __init__(self, replica: Replica, pool: PoolId, on_change: Callable[[], None]) -> None:
        HandFed.__init__(self, replica, time.monotonic)
        self._pool = pool
        self._on_change = on_change

    def _by_hand(self) -> Router:
        raise ConfigError("this KvRouter learns of its workers over NATS: add and remove none by hand")


def _nothing() -> None:
    """Nobody shares the bookings of a router that is not on NATS."""


def _check_amounts(**amounts: float | None) -> None:
    """Raise ConfigError for one that is given and is no number of at least 0."""
    for name, amount in amounts.items():
        if amount is not None and not (isinstance(amount, int | float) and 0 <= amount < math.inf):
            raise ConfigError(f"{name} {amount!r}: use a number of at least 0")


def _sendable(name: str, text: str) -> str:
    """The text, which peers are to read. Raises ConfigError."""
    if len(text) > MOST_ID_CHARACTERS or not text.isprintable():
        raise ConfigError(f"{name} {text[:80]!r}: use at most {MOST_ID_CHARACTERS} printable characters")
    return text


class PlacedRequest:
    """A request that is booked on a target. `with` frees it at the end of the block."""

    def __init__(
        self,
        router: Router,
        placement: Placement,
        candidates: Sequence[Candidate],
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self.candidates = candidates
        """All it was chosen from."""
        self._router = router
        self._placement = placement
        self._clock = clock
        self._on_change = on_change

    @property
    def worker_id(self) -> str:
        """Where it goes."""
        return self._placement.target.worker_id

    @property
    def rank(self) -> int:
        """The data-parallel rank there."""
        return self._placement.target.rank

    @property
    def url(self) -> str:
        """The worker's address, as it announced it."""
        return self._placement.url

    @property
    def headers(self) -> dict[str, str]:
        """What the request has to carry to reach the rank."""
        name = self._placement.rank_header
        return {name: str(self.rank)} if name else {}

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that are there already."""
        return self._placement.choice.overlap_blocks

    def mark_prefill_completed(self) -> None:
        """The first data byte is here. A second time changes nothing."""
        self._router.first_byte(self._placement.key, self._clock())
        self._on_change()

    def progress(self, output_tokens: int) -> None:
        """The answer has this many tokens so far; once a second is often enough."""
        self._router.progress(self._placement.key, output_tokens)
        self._on_change()

    def answered(self, status: int) -> None:
        """Tell a policy of one's own with which status the worker has answered."""
        self._router.answered(self._placement.key, status)

    def free(self) -> None:
        """The request has ended, in whatever way. A second time changes nothing."""
        self._router.free(self._placement.key)
        self._on_change()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it; a block that ends without an error has had its answer."""
        if kind is None:
            self._router.answered(self._placement.key, 200)
            self._router.mark_prefill_completed(self._placement.key, self._clock())
        self.free()


def _maker(policy: NewPolicy, settings: PolicySettings | None) -> Callable[[], Policy]:
    if not isinstance(policy, str):
        if settings is not None:
            raise ConfigError("settings are those of a mode; what makes your own policy can set it up")
        own = OwnPolicies(getattr(policy, "__name__", type(policy).__name__), policy)
        own.begin()
        return own
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r}: use one of {', '.join(POLICIES)}, or a class of your own")
    return lambda: new_policy(policy, settings or PolicySettings())
