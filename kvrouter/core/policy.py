"""What a policy is shown and what it returns. A policy picks; the router owns everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from kvrouter.core.cost import Prompt
from kvrouter.core.ids import Target


class RouteRequest(Struct, frozen=True):
    """One request as routing sees it. `prompts` is empty where the tokens are not known.

    `overlap_weight` and `temperature` override the settings for this request.
    """

    request_id: str
    prompts: tuple[Prompt, ...] = ()
    lora_name: str | None = None
    overlap_weight: float | None = None
    temperature: float | None = None

    @property
    def isl(self) -> int:
        """Prompt tokens, over all prompts."""
        return sum(prompt.isl for prompt in self.prompts)


class Candidate(Struct, frozen=True, gc=False):
    """A target as a policy sees it, for one request. Amounts include the request itself.

    `prefill_tokens` are those charged on the target plus the request's own; `decode_blocks` the
    blocks that would be active there, `own_decode_blocks` of them only through this request;
    `requests` those in flight, booked by any replica.
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
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    indexed_blocks: int = 0
    """Of `widest_blocks` those that the index knows; the others are held by requests in flight."""


@dataclass(slots=True)
class PolicyState:
    """What a policy may use beside the candidates; the router owns it.

    `random()` returns a number in [0, 1).
    """

    random: Callable[[], float]
    overlap_weight: float = 1.0
    temperature: float = 0.0
    turn: int = 0
    unseen: float = 0.0
    """Bookings of other replicas that a decision cannot know of yet (core/unseen.py)."""


class Policy(Protocol):
    """Picks one of the candidates; there is always at least one."""

    needs_tokens: bool
    """Whether it looks at overlap or blocks; if not, prompts need not be tokenized."""

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """The index of the candidate to use."""
        ...
