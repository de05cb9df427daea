"""What a policy is shown and what it returns. A policy picks; the router owns everything else.

    candidates ──filters──> eligible ──policy──> an order; its first is the pick (core/routing/selection.py)

All modes see the same frozen `Candidate`. What a mode must remember between two picks stands in
`PolicyState`, which the router owns, so that a policy itself is a value: settings, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from kvrouter.core.routing.cost import Prompt
from kvrouter.core.tables.no_hit_lru import NoHitLru
from kvrouter.core.tables.rates import PrefillRates
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.tables.text_index import TextIndex
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.errors import BadRequestError


class Wanted(NamedTuple):
    """The target a client names (mode direct). Rank None: any of the worker's."""

    worker_id: WorkerId
    rank: int | None = None


class RouteRequest(Struct, frozen=True):
    """One request as routing sees it. `prompts` is empty where the tokens are not known.

    `overlap_weight` and `temperature` override the settings for this request. `text` is there only
    for policies that need it; `bucket` is what a client says its kind of prompt is (two-stage).
    """

    request_id: str
    prompts: tuple[Prompt, ...] = ()
    lora_name: str | None = None
    overlap_weight: float | None = None
    temperature: float | None = None
    text: str = ""
    session: str = ""
    bucket: str = ""
    wanted: Wanted | None = None
    priority: int = 0
    mode: str = ""
    """The mode that the client asks for; empty: the router's own."""

    @property
    def isl(self) -> int:
        """Prompt tokens, over all prompts."""
        if len(self.prompts) == 1:
            return self.prompts[0].isl
        return sum([prompt.isl for prompt in self.prompts])


class Candidate(Struct, frozen=True, gc=False):
    """A target as a policy sees it, for one request. Amounts include the request itself.

    `prefill_tokens` are those charged on the target plus the request's own; `decode_blocks` the
    blocks that would be active there, `own_decode_blocks` of them only through this request;
    `requests` those in flight, booked by any replica. `tier_blocks` are the index's depths per tier
    set, narrowest first (of the first prompt). `running`, `waiting`, `kv_usage` and `waiting_loras` are
    what the engine reports of itself, None (or nothing) if it does not.
    """

    target: Target
    overlap_blocks: int
    widest_blocks: int
    own_prefill_tokens: int
    own_decode_blocks: int
    prefill_tokens: int
    prefill_blocks: float
    decode_blocks: int
    requests: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    card: Card
    tier_blocks: Sequence[int] = ()
    waiting_loras: Sequence[str] = ()
    indexed_blocks: int = 0
    """Of `widest_blocks` those that the index knows; the others are held by requests in flight."""
    running_loras: Sequence[str] | None = None
    """Adapters in use by requests in flight, as the engine reports them; None if it does not."""
    metrics: Mapping[str, float] = {}
    """Statistics of an operator's own, by name (`--metric` of the agent); absent if not reported."""
    block_size: int = 0
    """Of the pool, in which blocks are counted here; the card counts in blocks of its own. 0: the card's."""

    @property
    def charged_tokens(self) -> int:
        """Prefill tokens that requests in flight still have before them."""
        return self.prefill_tokens - self.own_prefill_tokens

    @property
    def active_blocks(self) -> int:
        """Blocks that requests in flight hold."""
        return self.decode_blocks - self.own_decode_blocks

    @property
    def overlap_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        return self.overlap_blocks * (self.block_size or self.card.block_size)

    @property
    def labels(self) -> Mapping[str, str]:
        """The worker's labels: zone, node, group and the like."""
        return self.card.labels

    @property
    def lora_names(self) -> Sequence[str]:
        """The adapters it serves."""
        return self.card.lora_names

    @property
    def loaded_loras(self) -> Sequence[str]:
        """The adapters that take a place now: those in use, where the engine tells, or else all it serves."""
        return self.card.lora_names if self.running_loras is None else self.running_loras


Choice: TypeAlias = "Target | Candidate | Sequence[Sequence[Target | Candidate]]"
"""One, or ranks of them: the first rank with somebody eligible wins, and within it the fewest requests."""


@dataclass(slots=True)
class PolicyState:
    """What a policy may use beside the candidates; the router owns it.

    `random()` returns a number in [0, 1). `overlap_weight` None means the mode's own default.
    """

    random: Callable[[], float]
    overlap_weight: float | None = None
    temperature: float = 0.0
    turn: int = 0
    unseen: float = 0.0
    """Bookings of other replicas that a decision cannot know of yet (core/routing/unseen.py)."""
    now: float = 0.0
    group_turn: int = 0
    """Turns over groups of workers (two-stage), beside those over workers."""
    rates: PrefillRates = field(default_factory=PrefillRates)
    texts: TextIndex = field(default_factory=TextIndex)
    cold: NoHitLru = field(default_factory=NoHitLru)
    sessions: SessionTable = field(default_factory=SessionTable)

    def forget(self, target: Target) -> None:
        """The target is gone."""
        self.rates.forget(target)
        self.texts.remove(target)
        self.cold.forget(target)
        self.sessions.drop(target)


class Policy:
    """Picks one of the candidates; there is always at least one.

    Your own (docs/writing-a-policy.md) has to define only `choose`, and remembers for itself. The modes
    of kvrouter/policies define `pick` instead: what they remember is in the router's `PolicyState`.
    """

    needs_tokens: bool = True
    """Whether it looks at overlap or blocks; if not, prompts need not be tokenized."""
    needs_text: bool = False
    """Whether it looks at `request.text`."""
    remembers_text = False
    """Whether it looks at the texts that targets have computed (`PolicyState.texts`)."""
    needs_sessions = False
    """Whether it looks at where sessions are bound to."""
    reads_tables = False
    """Whether its terms come from tables of the state, too, and so change with time."""
    decisive: tuple[str, ...] = ()
    """The terms that decide: candidates equal in these are ties. None named: all terms do."""
    refresh_s: float = 0.0
    """Seconds from one `refresh` to the next; 0: never."""

    # Your own policy

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        """Where the request shall go. Also asked when nothing is sent, as in a dry run."""
        raise NotImplementedError

    def on_workers(self, workers: Sequence[Card]) -> None:
        """Those who take requests now, whenever that has changed."""

    def on_request_routed(self, request: RouteRequest, target: Target, status: int) -> None:
        """The target's answer has begun with this HTTP status. Called once for each attempt.

        502: the connection was lost; 504: it said nothing for too long; 499: the client has left.
        """

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        """The worker has left or is lost, and with it all it held."""

    async def refresh(self) -> None:
        """Fetch what `choose` shall know. Runs beside it, every `refresh_s`, never twice at once."""

    def close(self) -> None:
        """The router ends."""

    # The modes of kvrouter/policies

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """The index of the candidate to use."""
        raise NotImplementedError

    def order(
        self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> Sequence[int]:
        """The pick, then those to try if it fails; one that names no others is asked again."""
        return (self.pick(request, candidates, state),)

    def terms(
        self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> list[dict[str, float]]:
        """What each candidate was judged by, to explain a decision. Changes nothing."""
        return [{} for _ in candidates]

    def routed(self, request: RouteRequest, choice: Candidate, state: PolicyState) -> None:
        """The request has been booked on this candidate."""


def parse_wanted(text: str) -> Wanted:
    """`w1` or `w1/2`, as the header `x-kvrouter-target` names a target."""
    worker_id, slash, rank = text.partition("/")
    if not worker_id or (slash and not rank.isdecimal()):
        raise BadRequestError(f"target {text!r}: write <worker_id> or <worker_id>/<rank>, as in w1/0")
    return Wanted(WorkerId(worker_id), int(rank) if slash else None)
