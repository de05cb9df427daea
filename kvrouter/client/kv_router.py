"""`KvRouter`: the router of one model inside a Python service.

route(tokens) ──> PlacedRequest: worker, rank, url       the request is booked
its first data byte ──> mark_prefill_completed
its end ──> free, or the end of the `with` block
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import msgspec

from kvrouter.bodies import openai
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
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.policy import AUTO, Candidate, OverlapWeight, Prompt, RouteRequest, parse_wanted
from kvrouter.core.routing.selection import Decision
from kvrouter.core.tables.approx import DEFAULT_TTL_S
from kvrouter.core.wire.hashes import Multimodal, block_seed, media_prompt_hashes, multimodal_id
from kvrouter.core.wire.heartbeats import Card, RankBeat
from kvrouter.core.wire.ids import PoolId, RouterId, Target, WorkerId, check_identifier
from kvrouter.core.wire.senders import SyncSource
from kvrouter.core.wire.values import MOST_ID_CHARACTERS, MOST_RANKS
from kvrouter.errors import ConfigError
from kvrouter.policies import POLICIES, PolicySettings, new_policy
from kvrouter.policies.importing import GuardedPolicies
from kvrouter.prompts.opening import open_tokens
from kvrouter.prompts.settings import TokenOptions
from kvrouter.prompts.ways import Naming, PromptWays
from kvrouter.replica.loop import first_turn
from kvrouter.replica.policy_upkeep import log_mistakes
from kvrouter.tls import trusting
from kvrouter.tokens.prompt import plain_text

# Each call sweeps this many blocks (about 1 ms). A router by hand has no background task that would.
_SWEPT = 512

NewPolicy = str | Callable[[], object]
"""A mode's name, or a callable that returns a custom policy, such as its class: called once per pool."""


class About(TypedDict, total=False):
    """Optional facts about a request."""

    request_id: str
    """For logs and peers; it decides nothing."""
    lora_name: str | None
    salt: str | None
    multimodal: Sequence[Multimodal]
    overlap_weight: OverlapWeight
    temperature: float
    session: str
    text: str
    """The prompt's text, for policies that use it."""
    mode: str
    """A built-in mode with its default settings, for this request only."""
    target: str
    """The worker, or `WORKER/RANK`, to use (mode direct)."""
    priority: int


class KvRouter(HandFed):
    """Places requests on the workers of one model and books them.

    Use `connect` if the workers are on NATS. Otherwise construct one, and pass it the workers (`add_worker`)
    and their KV frames (`apply`). Make all calls from one thread.
    """

    def __init__(
        self,
        block_size: int,
        *,
        policy: NewPolicy = "kv",
        settings: PolicySettings | None = None,
        overlap_weight: OverlapWeight | None = None,
        temperature: float = 0.0,
        use_kv_events: bool = True,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        replica_id: str = "",
    ) -> None:
        """Raises ConfigError.

        `chance()` returns a number in [0, 1), for ties. `replica_id`: the name under which this router shares
        its bookings with its peers (`frames`, `receive`); empty: it has none.
        """
        _check_amounts(overlap_weight=overlap_weight, temperature=temperature, ttl_s=ttl_s)
        if replica_id:
            check_identifier("replica_id", replica_id)
        pool = PoolSettings(use_kv_events, ttl_s, block_size=check_block_size(block_size))
        maker = _maker(policy, settings, overlap_weight, temperature, chance)
        member = ReplicaSettings(pool, synced=bool(replica_id))
        modes = partial(_new_mode, chance)
        replica = replica_with(maker, member, replica_id=replica_id, chance=chance, new_mode=modes)
        super().__init__(replica, clock)
        self._pool = BY_HAND
        self._on_change = _nothing
        self._ways: PromptWays | None = None

    @staticmethod
    @contextlib.asynccontextmanager
    async def connect(
        nats: NatsOptions | str,
        namespace: str,
        model: str | None,
        *,
        policy: NewPolicy = "kv",
        settings: PolicySettings | None = None,
        overlap_weight: OverlapWeight | None = None,
        temperature: float = 0.0,
        use_kv_events: bool = True,
        ttl_s: float = DEFAULT_TTL_S,
        replica_sync: bool = False,
        ready_timeout_s: float = READY_TIMEOUT_S,
        heartbeat_s: float = 1.0,
        tokens: TokenOptions | None = None,
        worker_tls_ca: Path | None = None,
    ) -> AsyncIterator[KvRouter]:
        """A router for a model of a namespace, once its workers are known; None: of the only one served.

        It joins the frontends as one more replica: with `replica_sync` it publishes its bookings and
        receives theirs. At the end it leaves. `tokens`: how `route_body` tokenizes; None: as a frontend
        without flags. `worker_tls_ca`: authorities to trust behind https:// URLs of workers, in addition to
        the system's. Raises NoWorkersError if no worker serves the model within `ready_timeout_s`.
        """
        _check_amounts(overlap_weight=overlap_weight, temperature=temperature, ttl_s=ttl_s)
        member = ReplicaSettings(PoolSettings(use_kv_events, ttl_s), replica_sync, heartbeat_s=heartbeat_s)
        maker = _maker(policy, settings, overlap_weight, temperature, random.random)
        replica = replica_with(maker, member, new_mode=partial(_new_mode, random.random))
        async with joined(replica, nats, namespace, heartbeat_s=heartbeat_s) as replica_loop:
            pool = await until_serving(replica, model, ready_timeout_s, replica_loop.awaited)
            async with open_tokens(tokens or TokenOptions(), replica, trusting(worker_tls_ca)) as tokenizers:
                upkeep = asyncio.create_task(tokenizers.run(), name="tokens")
                try:
                    flush = replica_loop.publishing.flush_soon
                    yield _ConnectedRouter(replica, pool, flush, tokenizers.blocks)
                finally:
                    await _ended(upkeep)

    @property
    def _router(self) -> Router:
        # Looked up each time: the replica drops a pool without workers, and makes a new router with the next
        # worker.
        return self._replica.router(self._pool)

    @property
    def block_size(self) -> int:
        """Tokens of one block; 0 before the first worker."""
        return self._router.pool.block_size

    @property
    def model(self) -> str:
        """The model's name; empty if workers are added by hand."""
        return self._router.pool.model

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
        prefill_tokens_per_s: int = 0,
    ) -> None:
        """Add a worker, or replace what is known of it.

        `kv_blocks`: how many blocks one of its ranks can hold; `prefill_tokens_per_s`: the prompt tokens that
        it computes in a second, roughly, until that is measured. 0 if not known. Raises ConfigError.
        """
        if not 1 <= ranks <= MOST_RANKS:
            raise ConfigError(f"ranks {ranks}: use 1 to {MOST_RANKS}")
        card = Card(
            worker_id=worker_id,
            url=url,
            model="",
            lora_names=tuple(lora_names),
            block_size=self._by_hand().pool.block_size,
            ranks=ranks,
            tiers={"device": kv_blocks},
            labels=dict(labels or {}),
            prefill_tokens_per_s=prefill_tokens_per_s,
            publishes_events=self._replica.settings.pool.use_kv_events,
        )
        self._take_card(card)

    def remove_worker(self, worker_id: str) -> None:
        """Send it no more requests. The caller still frees the requests in flight there."""
        self._by_hand()
        self._take_leave(worker_id)

    def apply(self, frame: bytes, worker_id: str, rank: int = 0) -> None:
        """Apply a frame of this worker's KvPublisher, in order; ignored if the worker is not added."""
        self._by_hand()
        super().apply(frame, worker_id, rank)

    def load(
        self,
        worker_id: str,
        rank: int = 0,
        *,
        running: int | None = None,
        waiting: int | None = None,
        kv_usage: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Replace what is known of a rank's load, as a heartbeat of its worker does. Raises ConfigError.

        Requests running and waiting, and the fraction 0..1 of its blocks in use; None: not reported.
        `metrics` are additional statistics, for custom policies.
        """
        _check_amounts(running=running, waiting=waiting, kv_usage=kv_usage)
        if kv_usage is not None and kv_usage > 1:
            raise ConfigError(f"kv_usage {kv_usage!r}: use a fraction of the blocks, at most 1")
        worker = self._by_hand().pool.workers.get(WorkerId(worker_id))
        if worker is None or not 0 <= rank < worker.card.ranks:
            raise ConfigError(f"load of {worker_id}/{rank}: add a worker with this rank first")
        load = RankBeat(
            rank, 0, 0, running=running, waiting=waiting, kv_usage=kv_usage, metrics=dict(metrics or {})
        )
        # all ranks: a heartbeat replaces what is known of each of them
        self._take_load(WorkerId(worker_id), [*({**worker.ranks, rank: load}).values()])

    # Peers, by hand

    def frames(self) -> list[bytes]:
        """What has happened to the bookings made here since the last call, for `receive` of every peer.

        In order; empty without a `replica_id`.
        """
        return self._by_hand().feed.frames()

    def receive(self, frame: bytes, replica_id: str) -> None:
        """Apply a frame of this peer, as of now. Raises ConfigError without a `replica_id` of this router.

        Deliver every frame from the first one on, in order: later frames wait for a missing one. A repeated
        frame changes nothing.
        """
        self._by_hand()
        if not self._replica.settings.synced:
            raise ConfigError("this KvRouter has no `replica_id`: give it one to have peers")
        check_identifier("replica_id", replica_id)
        self._replica.sync_frame(SyncSource(BY_HAND, RouterId(replica_id)), frame, self._clock())

    def _by_hand(self) -> Router:
        """The router. Raises ConfigError if workers come over NATS."""
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
        """Choose a worker for a prompt and book it there, in one step.

        Call `free` on the result when the request ends.

        `streamed` False: the first byte will not be marked, so the end of prefill is predicted. `exclude`:
        ids of workers that must not be chosen. Raises NoWorkersError.
        """
        return self._placed(self._request(tokens, about), streamed, exclude)

    async def route_body(
        self, body: Mapping[str, Any], *, exclude: Collection[str] = (), **about: Unpack[About]
    ) -> PlacedRequest:
        """`route` for a body with `messages` (a chat) or `prompt`: its tokens are found as in a frontend.

        Without tokens it is placed by what was sent where, else by load. Raises BadRequestError for a
        malformed body, NoWorkersError, and ConfigError if the workers are not on NATS.
        """
        if self._ways is None:
            raise ConfigError("this KvRouter is not on NATS: tokenize the prompt and call `route`")
        parse = openai.parse_chat if "messages" in body else openai.parse_completion
        asked, pool = parse(msgspec.json.encode(body)), self._router.pool
        if asked.model in pool.lora_names:
            about.setdefault("lora_name", asked.model)
        if asked.cache_salt is not None:
            about.setdefault("salt", asked.cache_salt)
        prompts: tuple[Prompt, ...] = ()
        modes = self._router.modes
        needs_tokens = self._router.needs_tokens or modes.of(_mode_of(about)).policy.needs_tokens
        if asked.prompt is not None and needs_tokens:
            naming = Naming(pool, asked.model, about.get("lora_name"), about.get("salt"))
            prompts = await self._ways.hashes(asked.prompt, naming)
            about.setdefault("text", plain_text(asked.prompt))
        request = _request_of(prompts, about, reads_cache=asked.reads_cache)
        return self._placed(request, asked.stream, exclude)

    def _placed(self, asked: RouteRequest, streamed: bool, exclude: Collection[str]) -> PlacedRequest:
        now = self._tend()
        placement, candidates = self._router.route_among(
            asked, now, streamed=streamed, exclude=self._targets_of(exclude)
        )
        self._on_change()
        return PlacedRequest(self._router, placement, candidates, self._clock, self._on_change)

    def explain(
        self, tokens: Sequence[int], *, exclude: Collection[str] = (), **about: Unpack[About]
    ) -> Decision:
        """What `route` would choose and why: every target with its cost terms. Books nothing."""
        asked = self._request(tokens, about)
        return self._router.decide(asked, self._tend(), exclude=self._targets_of(exclude))

    def worker_ids(self) -> list[str]:
        """Workers that take requests now."""
        return list(dict.fromkeys(target.worker_id for target in self._router.pool.targets))

    def _request(self, tokens: Sequence[int], about: About) -> RouteRequest:
        lora_name, size = about.get("lora_name"), self._router.pool.block_size
        prompts: tuple[Prompt, ...] = ()
        if size:  # 0 before the first worker: without a block size there are no blocks to hash
            seed, ahead = block_seed(lora_name, about.get("salt")), self._router.pool.lookahead
            spans = [(start, end, multimodal_id(item)) for start, end, item in about.get("multimodal", ())]
            hashes = media_prompt_hashes(tokens, size, seed, spans, ahead)
            prompts = (Prompt(hashes, len(tokens), block_size=size),)
        return _request_of(prompts, about)

    def _targets_of(self, worker_ids: Collection[str]) -> frozenset[Target]:
        if isinstance(worker_ids, str):  # it would be a collection of one-letter ids
            raise ConfigError(f"exclude {worker_ids!r}: give a list of worker ids")
        wanted = {WorkerId(worker_id) for worker_id in worker_ids}
        return frozenset(target for target in self._router.pool.targets if target.worker_id in wanted)

    def _tend(self) -> float:
        """Apply what is due by the clock: a router by hand has no background task for it."""
        # The background task of a connected router does the same. That is harmless: `due` returns each
        # booking once, and what has expired or was swept is gone.
        now = self._clock()
        for key in self._router.bookings.due(now):
            self._router.bookings.mark_prefill_completed(key, now)
        self._router.pool.approx.expire(now)
        self._router.pool.sweep(_SWEPT)
        log_mistakes(self._router.selection.policy)
        return now


class _ConnectedRouter(KvRouter):
    """A KvRouter whose workers are on NATS. `on_change` publishes what has happened to bookings."""

    def __init__(
        self, replica: Replica, pool: PoolId, on_change: Callable[[], None], ways: PromptWays
    ) -> None:
        HandFed.__init__(self, replica, time.monotonic)
        self._pool = pool
        self._on_change = on_change
        self._ways = ways

    def _by_hand(self) -> Router:
        raise ConfigError("this KvRouter learns of its workers over NATS: add and remove none by hand")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _request_of(prompts: tuple[Prompt, ...], about: About, *, reads_cache: bool = True) -> RouteRequest:
    """Raises ConfigError."""
    _check_amounts(overlap_weight=about.get("overlap_weight"), temperature=about.get("temperature"))
    return RouteRequest(
        _sendable("request_id", about.get("request_id", "")),
        prompts,
        about.get("lora_name"),
        about.get("overlap_weight"),
        about.get("temperature"),
        text=about.get("text", ""),
        session=_sendable("session", about.get("session", "")),
        wanted=parse_wanted(about["target"]) if "target" in about else None,
        priority=about.get("priority", 0),
        mode=_mode_of(about),
        reads_cache=reads_cache,
    )


def _mode_of(about: About) -> str:
    """Raises ConfigError."""
    mode = about.get("mode", "")
    if mode and mode not in POLICIES:
        raise ConfigError(f"mode {mode!r}: use one of {', '.join(POLICIES)}")
    return mode


def _new_mode(chance: Callable[[], float], mode: str) -> BuiltInPolicy:
    return new_policy(mode, PolicySettings(), first_turn(chance))


def _nothing() -> None:
    """A router that is not on NATS has no peers to publish its bookings to."""


def _check_amounts(**amounts: OverlapWeight | None) -> None:
    """Raise ConfigError for an amount that is given and is not a number of at least 0 (a weight: or AUTO)."""
    for name, amount in amounts.items():
        if name == "overlap_weight" and amount == AUTO:
            continue
        if amount is not None and not (isinstance(amount, int | float) and 0 <= amount < math.inf):
            raise ConfigError(f"{name} {amount!r}: use a number of at least 0")


def _sendable(name: str, text: str) -> str:
    """The text, if peers can decode it. Raises ConfigError."""
    # half of a surrogate pair is not printable, and could not be sent
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
        """All targets that may serve the request, before the filters, without the excluded workers."""
        self._router = router
        self._placement = placement
        self._clock = clock
        self._on_change = on_change

    @property
    def worker_id(self) -> str:
        """The worker to send the request to."""
        return self._placement.target.worker_id

    @property
    def rank(self) -> int:
        """The worker's data-parallel rank."""
        return self._placement.target.rank

    @property
    def url(self) -> str:
        """The worker's address, from its card."""
        return self._placement.url

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the request must carry to reach the rank."""
        name = self._placement.rank_header
        return {name: str(self.rank)} if name else {}

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that the worker holds."""
        return self._placement.choice.overlap_blocks

    def mark_prefill_completed(self) -> None:
        """Call at the first data byte. A second call changes nothing."""
        self._router.bookings.first_byte(self._placement.key, self._clock())
        self._on_change()

    def progress(self, output_tokens: int) -> None:
        """Call with the number of tokens of the answer so far; once a second is enough."""
        self._router.bookings.progress(self._placement.key, output_tokens)
        self._on_change()

    def answered(self, status: int) -> None:
        """Pass the status of the worker's answer to a custom policy."""
        self._router.bookings.answered(self._placement.key, status)

    def free(self, output_tokens: int | None = None) -> None:
        """Call when the request has ended, in any way. A second call changes nothing.

        `output_tokens`: the length of the answer, for a custom policy; None: as of the last `progress`.
        """
        self._router.bookings.free(self._placement.key, self._clock(), output_tokens)
        self._on_change()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it. A block that ends without an error counts as answered with status 200."""
        # After an error the prefill may not have ended, so nothing is assumed to be cached.
        if kind is None:
            self._router.bookings.answered(self._placement.key, 200)
            self._router.bookings.mark_prefill_completed(self._placement.key, self._clock())
        self.free()


def _maker(
    policy: NewPolicy,
    settings: PolicySettings | None,
    overlap_weight: OverlapWeight | None,
    temperature: float,
    chance: Callable[[], float],
) -> Callable[[], BuiltInPolicy]:
    if not isinstance(policy, str):
        if settings is not None:
            raise ConfigError(
                "`settings` apply to built-in modes only; configure a custom policy in its callable"
            )
        guarded = GuardedPolicies(getattr(policy, "__name__", type(policy).__name__), policy)
        guarded.begin()
        return guarded
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r}: use one of {', '.join(POLICIES)}, or a custom class")
    given = settings or PolicySettings()
    wanted = replace(
        given,
        overlap_weight=given.overlap_weight if overlap_weight is None else overlap_weight,
        temperature=temperature or given.temperature,
    )
    return lambda: new_policy(policy, wanted, first_turn(chance))
