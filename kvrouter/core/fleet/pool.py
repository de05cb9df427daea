"""The workers of one base model: their cards and state, one block index, one table of bookings.

    heartbeats ──> workers ──> targets (what may be chosen)
    KV feeds   ──> index   ─┐
    bookings   ──> active  ─┼─> candidates
    texts sent ──> assumed ─┘   of prompts without token ids

Invariant: `targets` holds the ranks of exactly those workers that take requests, ordered by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec.structs import replace

from kvrouter.core.fleet.block_size import PoolBlockSize, others_note
from kvrouter.core.fleet.places import OWN, place_of
from kvrouter.core.fleet.refusals import card_bytes
from kvrouter.core.fleet.split import Split, refusal, split_of
from kvrouter.core.routing.candidates import Candidates, Roster, form_candidates
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.approx import DEFAULT_TTL_S, ApproxIndex
from kvrouter.core.tables.block_index import BlockIndex, IndexBounds
from kvrouter.core.tables.bookings import BookedBudget, BookingTable
from kvrouter.core.wire.heartbeats import BOTH, Card, WorkerBeat
from kvrouter.core.wire.ids import PoolId, Target, WorkerId
from kvrouter.errors import counted
from kvrouter.settings.declare import Settings, setting

NewIndex: TypeAlias = Callable[[IndexBounds, int], BlockIndex]
"""Makes an index from its bounds and placement secret."""


def _label_name(text: str) -> str:
    if not text or {"=", ","} & {*text}:
        raise ValueError("must be the name of one label, without a value, as in zone")
    return text


@dataclass(frozen=True, slots=True)
class PoolSettings(Settings):
    """An operator's settings of routing, the same for every pool."""

    heading = "Routing"

    use_kv_events: bool = setting(
        True,
        "index the engines' KV events; without: assume that prompts stay cached for --router-ttl-s",
        old=("--no-kv-events",),
        is_top=True,
    )
    ttl_s: float = setting(
        DEFAULT_TTL_S,
        "without KV events, or token ids: seconds that a prompt is assumed to stay cached where it was sent; "
        "0: until the worker's cache is full",
        name="router-ttl-s",
        old=("--router-ttl-secs",),
        least=0,
    )
    approx_capacity_blocks: int = setting(
        0,
        "without KV events, or token ids: most blocks that a worker is assumed to hold; "
        "0: the capacity on its card",
        name="router-approx-capacity-blocks",
        least=0,
    )
    inflight_overlap: bool = setting(
        True, "count blocks of requests in flight as cached", name="router-inflight-overlap"
    )
    block_size: int | None = setting(
        None,
        "tokens of one block in prompts' hashes",
        name="kv-cache-block-size",
        least=1,
        default_text="the block size of most workers",
    )
    lora_multiplex: bool = False
    """Whether a request for an adapter may go where the adapter is not loaded (`Multiplex` in filters.py)."""
    counts_tokens: bool = False
    """Whether prompts are tokenized for any policy, because the admission queue counts charged tokens."""
    pd_min_uncached_tokens: int | None = setting(
        None,
        "prefill and decode apart: hand a prompt over if every decode worker lacks more tokens of it",
        least=0,
        default_text="by predicted seconds",
    )
    pd_fallback: Literal["local", "refuse"] = setting(
        "local", "decode workers without a prefill worker: serve whole requests, or none"
    )
    pd_same_label: tuple[str, ...] = setting(
        (),
        "hand over only between workers with an equal label, such as zone",
        metavar="NAME",
        read=_label_name,
        is_repeated=True,
    )
    kv_from_peers: bool = setting(
        False,
        "with weight auto: let workers read blocks from a peer, where that is sooner (connector p2p)",
    )
    index_bounds: IndexBounds = field(default_factory=IndexBounds)
    new_index: NewIndex = BlockIndex
    """Makes a pool's index, such as one that measures itself."""
    placement_secret: int = 0
    """64 random bits of the process: where native tables place hashes (core/tables/table.py)."""

    @property
    def refuses_whole(self) -> bool:
        """Whether decode workers serve no request whose prompt could not be handed over to them."""
        return self.pd_fallback == "refuse"


class Pool:
    """The state of one pool, and the candidates it offers."""

    def __init__(self, pool_id: PoolId, settings: PoolSettings, booked: BookedBudget | None = None) -> None:
        """`booked`: shared with the other pools of the replica."""
        self.id = pool_id
        self.model = ""
        """The base model's name; empty before the first card."""
        self.settings = settings
        self._size = PoolBlockSize(settings.block_size)
        self.block_size = self._size.size
        """For hashing prompts. An engine with another block size has overlap 0."""
        self.lookahead = 0
        """How many tokens behind a block are part of its name, on most targets."""
        self.workers: dict[WorkerId, Worker] = {}
        self.ranks = 0
        """The ranks of all workers, in any state."""
        self.targets: dict[Target, Worker] = {}
        self._is_stale = False  # a worker has changed since `targets` was built
        self._not_targets: dict[Target, str] = {}
        self.twins: dict[WorkerId, WorkerId] = {}
        """Workers that are no targets because a later agent has announced the same engine, and by whom."""
        self.loops: dict[WorkerId, str] = {}
        """Workers that are no targets because a replica listens at their address, and which one."""
        self.claimed: dict[WorkerId, str] = {}
        """Workers that are engines by their answers though a peer names their address as its own."""
        self._replicas: Mapping[str, str] = {}  # by place, see places.py
        self.changes, self.room_blocks = 0, 0
        """How often `targets` was built again; the blocks that all of them have room for, together."""
        self.names: frozenset[str] = frozenset()
        """All model names that clients may use; kept while the pool has no worker."""
        self.lora_names: frozenset[str] = frozenset()
        """The names that are LoRA adapters."""
        self.servers: Counter[str] = Counter()
        """How many workers serve each name of the base model; kept while the pool has no worker."""
        self.uneven_names: frozenset[str] = frozenset()
        """Names of the base model that some workers lack: engines that are renamed one by one."""
        self.max_model_len = 0
        """The longest prompt that any worker takes, in tokens; 0 if not known."""
        self.takes_token_ids = False
        """Whether the engine of a target takes token ids in place of a chat's messages."""
        self.sends_token_ids = False
        """Whether such an engine gets the ids that are computed here."""
        self._distrusts_ids = False
        self.has_equal_contexts = True
        """Whether all targets take prompts of the same length, as far as their cards say."""
        self.index = settings.new_index(settings.index_bounds, settings.placement_secret)
        # Texts are assumed next to an index of KV events, never in it: an engine's digest would not match.
        secret = settings.placement_secret
        self.assumed = BlockIndex(IndexBounds(), secret) if settings.use_kv_events else self.index
        self.approx = ApproxIndex(self.assumed, settings.ttl_s)
        self.active = BookingTable(settings.placement_secret, booked)
        self._roster = Roster()  # `targets` in columns
        self.split = Split()  # the roles of the targets
        self._one_less: set[WorkerId] = set()

    # Workers

    def update(self, worker_id: WorkerId, beat: WorkerBeat, *, settles: bool = True) -> bool:
        """Apply a heartbeat; returns whether the worker is known now: its card has arrived.

        `settles` False: `targets` may be out of date until `settle` is called. It walks all workers (3 ms for
        1,000), so cards that arrive together share one call.
        """
        worker = self.workers.get(worker_id)
        changed = False
        if beat.card is not None and (worker is None or worker.card != beat.card):
            before = worker.targets() if worker is not None else []
            if beat.card.speculates != (worker is not None and worker.card.speculates):
                self.reuse_one_less(worker_id, beat.card.speculates)
            is_engine = worker is not None and worker.is_engine and worker.card.url == beat.card.url
            worker = self.workers[worker_id] = Worker(beat.card, is_engine=is_engine)
            worker.card_bytes = card_bytes(beat.card)
            self.ranks += beat.card.ranks - len(before)
            self._forget_assumed(before, worker.targets())
            self.model = beat.card.model
            changed = True
        if worker is None:
            return False
        if beat.card is not None:
            worker.card_seen = (beat.incarnation, beat.card_version)
        changed = changed or worker.state != beat.state or worker.silent
        worker.incarnation, worker.state, worker.silent = beat.incarnation, beat.state, False
        # others are forged, or from before the card: nothing is kept of them
        worker.ranks = {rank.rank: rank for rank in beat.ranks if rank.rank < worker.card.ranks}
        self._is_stale = self._is_stale or changed
        if not changed:
            self._roster.update_beats(worker)
        if settles:
            self.settle()
        return True

    def avoid(self, replicas: Mapping[str, str]) -> None:
        """Replicas listen at these places: a worker there is no target. Holds after `settle`."""
        self._replicas = replicas
        self._is_stale = self._is_stale or self._at_replicas() != self.loops | self.claimed

    def _at_replicas(self) -> dict[WorkerId, str]:
        """The replica at each worker's address."""
        replicas = self._replicas
        places = [(name, place_of(worker.card.url)) for name, worker in self.workers.items() if replicas]
        return {name: replicas[place] for name, place in places if place in replicas}

    def _find_loops(self) -> None:
        """A peer's word is not enough against a worker's own answers: anyone may forge a heartbeat."""
        found, workers = self._at_replicas(), self.workers
        self.claimed = {name: at for name, at in found.items() if at != OWN and workers[name].is_engine}
        self.loops = {name: at for name, at in found.items() if name not in self.claimed}

    def settle(self) -> None:
        """Build the targets again if a worker has changed."""
        if self._is_stale:
            self._choose_targets()

    def remove(self, worker_id: WorkerId) -> list[Target]:
        """Drop a worker with its blocks; returns its targets. Bookings stay: only their owner ends them."""
        worker = self._take_out(worker_id)
        if worker is None:
            return []
        self._choose_targets()
        return worker.targets()

    def _take_out(self, worker_id: WorkerId) -> Worker | None:
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self.ranks -= worker.card.ranks
            self._one_less.discard(worker_id)
            self._forget_blocks(worker)
        return worker

    def silence(self, worker_ids: set[WorkerId]) -> list[WorkerId]:
        """The leases of these workers ended: drop their blocks; returns the workers that are removed.

        Silent workers stay while the pool has no other target. A request to one may fail, but without any
        target every request would be rejected.
        """
        silent = worker_ids.intersection(self.workers)
        for worker_id in silent:
            self._forget_blocks(self.workers[worker_id])
            self.workers[worker_id].silent = True
        self._choose_targets()
        gone = worker_ids.difference(target.worker_id for target in self.targets)
        for worker_id in gone:
            self._take_out(worker_id)
        self._choose_targets()
        return list(gone)

    def reuse_one_less(self, worker_id: WorkerId, is_so: bool) -> None:
        """Whether the worker's engine computes again the last block that it could reuse (EAGLE, MTP).

        Its card tells, and then its answers.
        """
        if is_so:
            self._one_less.add(worker_id)
        else:
            self._one_less.discard(worker_id)

    def reuses_one_less(self, worker_id: WorkerId) -> bool:
        return worker_id in self._one_less

    def compared_ids(self, worker: Worker, *, are_equal: bool | None) -> None:
        """Token ids of chats that are computed here were compared with those of its engine; None: not yet."""
        worker.has_equal_ids = are_equal
        worker.shapes.clear()
        self._use_ids()

    def distrust_ids(self) -> None:
        """A client's chat has other ids here than at an engine: no engine gets those made here any more."""
        self._distrusts_ids = True
        self._use_ids()

    def _use_ids(self) -> None:
        are_sent = any(worker.sends_token_ids for worker in self.targets.values())
        self.sends_token_ids = are_sent and not self._distrusts_ids

    def unreachable(self, worker_id: WorkerId) -> None:
        """The worker's HTTP port refuses connections: remove it if it is silent."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self.compared_ids(worker, are_equal=None)  # its engine may come back with another template
        if worker is not None and worker.silent:
            self.remove(worker_id)

    def targets_of(self, worker_id: WorkerId) -> list[Target]:
        """All ranks of a worker, in any state; none if the worker is not known."""
        worker = self.workers.get(worker_id)
        return worker.targets() if worker is not None else []

    def capacity_blocks(self, target: Target) -> int:
        """Blocks the target is assumed to have room for; 0 if that is not known.

        For targets with the pool's block size only (`may_assume`): a card counts in its engine's blocks.
        """
        worker = self.workers.get(target.worker_id)
        return self.settings.approx_capacity_blocks or (worker.capacity_blocks if worker else 0)

    def may_hold(self, target: Target) -> bool:
        """Whether the target can hold anything: a rank of a known worker whose engine is not down."""
        worker = self.workers.get(target.worker_id)
        return worker is not None and worker.state != "down" and target.rank < worker.card.ranks

    def assumes(self, *, is_text: bool) -> bool:
        """Whether assumptions are made: without KV events, and of texts always, as no event names them."""
        return is_text or not self.settings.use_kv_events

    def may_assume(self, target: Target, *, is_text: bool = False) -> bool:
        """Whether the target is assumed to hold what was prefilled there."""
        if not self.assumes(is_text=is_text) or not self.may_hold(target):
            return False
        card = self.workers[target.worker_id].card
        return card.prefix_caching is not False and self.block_size in {0, card.block_size}

    def forget_assumed(self, worker_id: WorkerId) -> None:
        """The worker's engine is gone: drop what it is assumed to hold. KV events report the rest."""
        for target in self.targets_of(worker_id):
            self.approx.drop(target)

    def next_round(self, lease_rounds: int, elder_size: int = 0) -> None:
        """A round of the leases has passed; see PoolBlockSize."""
        self._size.next_round(lease_rounds, elder_size)
        self._use_size()

    def _use_size(self) -> None:
        # Assumed blocks have the pool's former size. Blocks from KV events have the sizes of their engines.
        former, self.block_size = self.block_size, self._size.size
        self.active.use_block_size(self.block_size)
        if former not in {0, self.block_size}:
            for worker in self.workers.values():
                for target in worker.targets():
                    self.approx.drop(target)

    def _forget_assumed(self, before: list[Target], now: list[Target]) -> None:
        # A new card may have fewer ranks than before, or another block size.
        gone = set(before).difference(now)
        for target in gone:
            self.index.drop(target)
        for target in gone.union(target for target in now if not self.may_assume(target, is_text=True)):
            self.approx.drop(target)

    def _forget_blocks(self, worker: Worker) -> None:
        for target in worker.targets():
            self.index.drop(target)
            self.approx.drop(target)

    def _choose_targets(self) -> None:
        self._is_stale = False
        self._find_loops()
        takers = [w for name, w in self.workers.items() if w.state == "up" and name not in self.loops]
        eligible = [worker for worker in takers if not worker.silent] or takers
        eligible, self.twins = _one_for_each_engine(eligible)
        self._size.count([worker.card for worker in eligible])
        self._use_size()
        pairs = [(target, worker) for worker in eligible for target in worker.targets()]
        self.lookahead = _most_common([worker.card for worker in eligible if self._shows_lookahead(worker)])
        self.has_equal_contexts = len({worker.card.max_model_len for worker in eligible} - {0}) <= 1
        self.takes_token_ids = any(worker.card.takes_token_ids for worker in eligible)
        self.targets = dict(sorted(pairs, key=lambda pair: pair[0]))
        self._use_ids()
        self._roster = Roster(self.targets.items())
        given = self.settings
        self.split = split_of(
            self.targets, given.pd_same_label, refuses=given.refuses_whole, pulls=given.kv_from_peers
        )
        self._not_targets = self._refusals()
        self.active.line_up(self._roster.targets)
        self.changes += 1
        self.room_blocks = sum(self.capacity_blocks(target) for target in self.targets)
        if self.workers:
            cards = [worker.card for worker in self.workers.values()]
            self.names = frozenset(name for card in cards for name in card.names())
            self.lora_names = frozenset(name for card in cards for name in card.lora_names)
            self.servers = Counter(name for card in cards for name in set(card.base_names()))
            self.uneven_names = frozenset(name for name, count in self.servers.items() if count < len(cards))
            self.max_model_len = max(card.max_model_len for card in cards)

    def sweep(self, hashes: int) -> bool:
        """Sweep a few slots of dropped workers and bookings; returns whether there is more to do."""
        return self.active.sweep(hashes) or self.index.sweep() or self.assumed.sweep()

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no worker, no booking and no block."""
        return not (self.workers or len(self.index) or len(self.assumed)) and self.active.is_empty

    @property
    def has_live_target(self) -> bool:
        """Whether requests are served: by a target alone or by a pair, and its lease has not ended."""
        others = frozenset() if self.split.is_pairs_only else self.split.others
        return any(not worker.silent for target, worker in self.targets.items() if target not in others)

    def size_note(self, worker: Worker) -> str:
        """A sentence if the worker's block size is not the pool's; else empty."""
        size = worker.card.block_size
        if not self.block_size:  # no worker has taken requests yet
            return ""
        if size != self.block_size:
            return f"block size {size}, pool has {self.block_size}: no overlap is predicted"
        ahead = worker.card.lookahead
        if ahead == self.lookahead or not self._shows_lookahead(worker):
            return ""
        return f"look-ahead of {counted(ahead, 'token')}, pool has {self.lookahead}: no overlap is predicted"

    def _shows_lookahead(self, worker: Worker) -> bool:
        """Whether its look-ahead is known: an engine that speculates shows it with its first block."""
        return not worker.card.speculates or any(self.index.blocks(target) for target in worker.targets())

    def sizes_note(self) -> str:
        """One sentence about all targets with another block size; empty if there are none."""
        sizes = {target.worker_id: worker.card.block_size for target, worker in self.targets.items()}
        return others_note(sizes, self.block_size)

    # Candidates

    def in_present_size(self, request: RouteRequest) -> RouteRequest:
        """The request, without hashes if the pool's block size has changed since they were made.

        Its length stays: it has no overlap anywhere, and charges its target like any other request.
        """
        size = self.block_size
        prompts = request.prompts
        if not prompts or not [one for one in prompts if one.block_size not in {0, size}]:
            return request
        prompts = tuple(Prompt((), one.isl, is_estimate=True) for one in prompts)
        return replace(request, prompts=prompts)

    def candidates(
        self, request: RouteRequest, exclude: frozenset[Target] = frozenset(), *, with_prefills: bool = True
    ) -> Candidates:
        """Every target that may serve the request, with its overlap and cost there."""
        formed = form_candidates(
            request,
            self._roster,
            self.assumed if request.is_text else self.index,
            self.active,
            block_size=self.block_size,
            inflight_overlap=self.settings.inflight_overlap,
            with_prefills=with_prefills,
            one_less=self._one_less,
        )
        if self.split.whole is None and not exclude and not request.is_named:  # nearly always
            return formed
        return self.among(formed, self.split.whole, request, exclude)

    def among(
        self,
        formed: Candidates,
        places: Sequence[int] | None,
        request: RouteRequest,
        exclude: frozenset[Target] = frozenset(),
    ) -> Candidates:
        """Of the targets at these places of the roster those that may serve it; None: at all places."""
        if places is not None and not exclude and not request.is_named:
            return formed.only(places)
        roster = self._roster
        places = roster.every_place if places is None else places
        serving = [place for place in places if self._serves(roster.workers[place], request)]
        return formed.only([place for place in serving if roster.targets[place] not in exclude])

    def _serves(self, worker: Worker, request: RouteRequest) -> bool:
        if request.served_name:
            return request.served_name in worker.card.base_names()
        name = request.lora_name
        return name is None or self.settings.lora_multiplex or name in worker.card.lora_names

    def refusals(self, request: RouteRequest) -> dict[Target, str]:
        """Why targets of the pool are not candidates for the request."""
        return self._refusals(request) if request.is_named else self._not_targets

    def _refusals(self, request: RouteRequest | None = None) -> dict[Target, str]:
        """Why targets are not candidates: for this request, or for any."""
        return {
            target: self._why_refused(worker, request)
            for worker in self.workers.values()
            for target in worker.targets()
            if target not in self.targets
            or target in self.split.others
            or (request and not self._serves(worker, request))
        }

    def _why_refused(self, worker: Worker, request: RouteRequest | None) -> str:
        if worker.state != "up":
            return worker.state
        worker_id = WorkerId(worker.card.worker_id)
        if (replica := self.loops.get(worker_id)) is not None:
            return f"has the address of {replica}"
        twin = self.twins.get(worker_id)
        if twin is not None:
            return f"is the same engine as {twin}"
        if worker.card.role != BOTH and worker.targets()[0] in self.targets:
            return refusal(worker.card)
        if worker.silent or request is None:
            return "silent"
        name = request.served_name
        return f"does not serve the name {name!r}" if name else f"has no adapter {request.lora_name!r}"


def _one_for_each_engine(workers: list[Worker]) -> tuple[list[Worker], dict[WorkerId, WorkerId]]:
    """The worker that was announced last for each address, and by which one each other is replaced.

    Two agents of one engine would double its share. `workers` are in the order in which they became known
    here: one that does not serve all that the first of its address does, in the same ranks, never counts. The
    cards of one engine agree, so such a card is forged or a mistake, and could name any start time. Workers
    without an address (simulated ones) are all kept.
    """
    first: dict[str, Worker] = {}
    for worker in workers:
        first.setdefault(_engine(worker), worker)
    last: dict[str, Worker] = {}
    for worker in sorted(workers, key=_announced):
        if _serves_as(worker.card, first[_engine(worker)].card):
            last[_engine(worker)] = worker
    twins = {
        WorkerId(worker.card.worker_id): WorkerId(last[worker.card.url].card.worker_id)
        for worker in workers
        if worker.card.url and last[worker.card.url] is not worker
    }
    return list(last.values()), twins


def _engine(worker: Worker) -> str:
    return worker.card.url or worker.card.worker_id


def _serves_as(card: Card, other: Card) -> bool:
    is_alike = (card.ranks, card.rank_header) == (other.ranks, other.rank_header)
    return is_alike and {*other.names()} <= {*card.names()}


def _most_common(cards: list[Card]) -> int:
    """The look-ahead of most targets; of several the longest."""
    targets: Counter[int] = Counter()
    for card in cards:
        targets[card.lookahead] += card.ranks
    return max(targets, key=lambda lookahead: (targets[lookahead], lookahead), default=0)


def _announced(worker: Worker) -> tuple[int, str]:
    return worker.card.started_at_us, worker.card.worker_id
