"""What a custom policy sees, and what it answers: the part of routing that users build on.

    candidates ──filters──> eligible ──policy──> an order; its first is the pick (core/routing/selection.py)

The router asks built-in policies differently: see core/routing/builtin_policy.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from kvrouter.core.tables.prefill_speeds import Speed
from kvrouter.core.tables.tenants import Charge
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.errors import BadRequestError

AUTO: Final = "auto"
OverlapWeight: TypeAlias = "float | Literal['auto']"
"""The weight of overlap: a number, or `auto` (docs/concepts/decide.md)."""

_KNOWN = frozenset({"", "exact"})


class Prompt(Struct, frozen=True, gc=False):
    """One prompt: the sequence hashes of its full blocks, and its length in tokens.

    `is_estimate`: only its beginning was tokenized, or nothing; the length is an estimate.
    `block_size`: what the hashes were made with; the pool's may have changed since. 0: the pool's.
    `is_text`: the hashes are of text, which no engine's event names: only assumed blocks match.
    `media`: of a prompt with images or other media: "exact", or why overlap ends before one of them.
    """

    hashes: Sequence[int]
    isl: int
    is_estimate: bool = False
    block_size: int = 0
    is_text: bool = False
    media: str = ""

    @property
    def is_known(self) -> bool:
        """Whether its tokens are those of the engine, as far as they reach."""
        return self.media in _KNOWN


class Wanted(NamedTuple):
    """The target that a client names (mode direct). Rank None: any rank of the worker."""

    worker_id: WorkerId
    rank: int | None = None


class Moved(Struct, frozen=True, gc=False):
    """Why a stream goes on at another worker, and how many tokens its client has."""

    left: Target
    cause: str
    tokens: int


class RouteRequest(Struct, frozen=True, gc=False):
    """One request as routing sees it. `prompts` is empty if the tokens are not known.

    `overlap_weight` and `temperature` override the settings for this request. `text` is filled in only for
    policies that need it; `bucket` is the kind of prompt that the client states (mode two-stage).
    """

    request_id: str
    prompts: tuple[Prompt, ...] = ()
    lora_name: str | None = None
    overlap_weight: OverlapWeight | None = None
    temperature: float | None = None
    text: str = ""
    session: str = ""
    bucket: str = ""
    wanted: Wanted | None = None
    priority: int = 0
    parent_session: str = ""
    """The session that began this one, as an agent begins its subagents."""
    mode: str = ""
    """The mode that the client names; empty: the router's own."""
    now: float = 0.0
    """Seconds on the router's monotonic clock, for custom policies: when the choice is made."""
    speed: Speed = Speed()
    """For custom policies: how fast targets compute prompts, as learnt from first bytes."""
    arrivals_per_s: float = 0.0
    """For custom policies: requests per second, over all replicas."""
    doubt: str = ""
    """For custom policies: why predicted seconds should not be compared; empty if they may be."""
    reads_cache: bool = True
    """False if the engine computes the whole prompt, cached or not: no target has an overlap."""
    served_name: str = ""
    """The base model's name that the client uses, if not every worker of the pool has it."""
    context_tokens: int = 0
    """What prompt and asked output take of an engine's context; 0: it takes any, or all are equally long."""
    may_split: bool = False
    """Whether another worker may compute its prompt, or hand over blocks of it."""
    charge: Charge | None = None
    """What it counts for its tenant; None: that has no limit."""
    moved: Moved | None = None
    """Set if it goes on with a stream."""

    @property
    def isl(self) -> int:
        """Prompt tokens, over all prompts."""
        prompts = self.prompts
        if len(prompts) == 1:  # nearly always: no generator then
            return prompts[0].isl
        return sum([prompt.isl for prompt in prompts]) if prompts else 0

    def unnamed_blocks(self, block_size: int) -> int:
        """Blocks that are charged and have no hash: the end of their prompt was not tokenized."""
        if not block_size:  # of a pool without a worker
            return 0
        # at least 0: a caller of the library may have hashed for another block size
        return sum([max(0, prompt.isl // block_size - len(prompt.hashes)) for prompt in self.prompts])

    @property
    def is_named(self) -> bool:
        """Whether only workers with a name may serve it: that of an adapter, or of the base model."""
        return self.lora_name is not None or bool(self.served_name)

    @property
    def is_text(self) -> bool:
        """Whether its hashes are of text, which no KV event contains: then those of all prompts are."""
        return bool(self.prompts) and self.prompts[0].is_text


# gc=False: hundreds are made for one decision and would trigger collections, and none can be in a cycle.
class Candidate(Struct, frozen=True, gc=False):
    """A target as a policy sees it, for one request. Amounts include the request itself.

    `overlap_blocks`: leading blocks of the prompt that the engine can skip; `widest_blocks` counts all its
    tiers. `prefill_tokens`: the tokens charged on the target plus the request's own. `decode_blocks`: the
    blocks that would be active there, `own_decode_blocks` of them only because of this request. `requests`:
    requests in flight, booked by any replica. `tier_blocks`: the index's depths per tier set, narrowest first
    (of the first prompt). `running`, `waiting`, `kv_usage` and `waiting_loras` are what the engine reports;
    None (or empty) if it does not.
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
    """The part of `widest_blocks` that the index knows; requests in flight hold the rest."""
    running_loras: Sequence[str] | None = None
    """Adapters in use by requests in flight, as the engine reports them; None if it does not."""
    metrics: Mapping[str, float] = {}
    """Statistics that the operator chose, by name (`--metric` of the agent); absent if not reported."""
    block_size: int = 0
    """The pool's block size, in which these blocks count (the card may have another). 0: the card's."""
    wait_s: float = 0.0
    """For custom policies: predicted seconds of the prefill that is left on the target (weight `auto`)."""
    own_s: float = 0.0
    """For custom policies: predicted seconds of the request's own prefill there."""
    left_tokens: float = 0.0
    """For custom policies: `charged_tokens` less the progress of the running prefill; `wait_s` in tokens."""
    head_tokens: int = 0
    """For custom policies: the tokens of the running prefill; 0 if there is none."""
    head_s: float = 0.0
    """For custom policies: seconds since the running prefill began; 0 if there is none."""
    context_tokens: int = 0
    """For custom policies: the tokens of decoding sequences; they make prefill slower."""

    @property
    def charged_tokens(self) -> int:
        """Prefill tokens charged on the target without this request."""
        return self.prefill_tokens - self.own_prefill_tokens

    @property
    def active_blocks(self) -> int:
        """Blocks that requests in flight hold, without this request."""
        return self.decode_blocks - self.own_decode_blocks

    @property
    def overlap_tokens(self) -> int:
        """Prompt tokens that the engine need not compute."""
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
        """The adapters that occupy a place now: the ones in use if the engine reports them, else all."""
        return self.card.lora_names if self.running_loras is None else self.running_loras


Choice: TypeAlias = "Target | Candidate | Sequence[Sequence[Target | Candidate]]"
"""One target, or ranks of targets: of the first with an eligible target, the fewest requests."""


class PolicyHooks:
    """What every policy may define: what it needs to be shown, and which events it is called for."""

    needs_tokens: bool = True
    """Whether it looks at overlap or blocks; if not, prompts need not be tokenized."""
    needs_text: bool = False
    """Whether it looks at `request.text`."""
    refresh_s: float = 0.0
    """Seconds from one `refresh` to the next; 0: never."""

    def on_workers(self, workers: Sequence[Card]) -> None:
        """The workers that take requests, each time they have changed."""

    def on_request_routed(self, request: RouteRequest, target: Target, status: int) -> None:
        """The target's response has begun with this HTTP status. Called once for each attempt.

        502: the connection was lost; 504: the worker timed out; 499: the client disconnected.
        """

    def on_request_end(
        self,
        request: RouteRequest,
        target: Target,
        ttft_s: float | None,
        seconds: float,
        output_tokens: int | None,
    ) -> None:
        """The attempt has ended, in any way, `seconds` after it was sent.

        `ttft_s`: until its first byte; None if there was none, or if the answer is not streamed.
        `output_tokens`: from the answer's usage, else counted events of its stream; None if not known. A
        method that takes four arguments is called without them.
        """

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        """All that the worker held is gone: it has left or is lost, or its engine died or was started again.

        If it still takes requests, `on_workers` is called again.
        """

    async def refresh(self) -> None:
        """Fetch what the next choices depend on. Runs every `refresh_s`, never twice at once."""

    def close(self) -> None:
        """The router stops."""


class Policy(PolicyHooks):
    """Base class of a custom policy (docs/writing-a-policy.md). Only `choose` has to be defined."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        """Where to send the request. Also called when nothing is sent, as in a dry run."""
        raise NotImplementedError


def parse_wanted(text: str) -> Wanted:
    """`w1` or `w1/2`, as the header `x-kvrouter-target` names a target."""
    worker_id, slash, rank = text.partition("/")
    if not worker_id or (slash and not rank.isdecimal()):
        raise BadRequestError(f"target {text!r}: write <worker_id> or <worker_id>/<rank>, as in w1/0")
    return Wanted(WorkerId(worker_id), int(rank) if slash else None)
