"""KV between simulated engines: prefill and decode apart, or from peers; the wire; rules to compare with.

placer: a pair ──> prefill engine ──last token of the prompt──> decode engine: blocks reserved
                    blocks pinned <──────── read over the wire ────────┘ └──> one step: first token
                                              │
             each end serves its reads in order, and only what the decode engine lacks is sent

From peers: a whole engine reserves all blocks, reads what its peer still holds, and computes the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from kvrouter.core.fleet.router import Placement, Router
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import BOTH, DECODE, PREFILL
from kvrouter.core.wire.ids import Target

# Before the first byte of a read: asking the prefill engine, and registering with it.
LATENCY_S = 0.003
# Prompt tokens of a prefill engine's step, at least: no answer waits for the end of its steps.
PREFILL_STEP_TOKENS = 8192
# Of Llama-3-8B: 32 layers, keys and values of 8 heads with 128 numbers of 2 bytes.
KV_BYTES_PER_TOKEN = 131_072
GBPS = 200.0


@dataclass(frozen=True, slots=True)
class Roles:
    """The first engines of the fleet compute prompts, the next ones generate; others serve whole requests.

    None compute prompts only: all are whole, and read from each other.
    """

    prefill: int
    decode: int
    gbps: float = GBPS
    """What each engine sends, and what each receives, in 10^9 bits a second."""
    kv_bytes: int = KV_BYTES_PER_TOKEN

    def of(self, name: str) -> str:
        """The role of engine `w1`, `w2`, ..."""
        place = int(name[1:]) - 1 if name[1:].isdecimal() else self.prefill + self.decode
        if place < self.prefill:
            return PREFILL
        return DECODE if place < self.prefill + self.decode else BOTH

    @property
    def token_s(self) -> float:
        """Seconds that the KV of a token takes on the wire."""
        return 8 * self.kv_bytes / (self.gbps * 1e9)

    def __str__(self) -> str:
        if not self.prefill:
            return "whole, from peers"
        return f"{self.prefill}P+{self.decode}D"


class Links:
    """Each engine sends its reads one after the other, and so receives them: when each read ends."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._free_at: defaultdict[tuple[str, Target], float] = defaultdict(float)

    def read(self, sender: Target, receiver: Target, tokens: int, now: float) -> float:
        """The time at which so many tokens have been read."""
        ends = ("sends", sender), ("receives", receiver)
        over = max(now, *(self._free_at[end] for end in ends)) + tokens * self._token_s
        self._free_at.update(dict.fromkeys(ends, over))
        return over + LATENCY_S


# --- rules: which prompts their decode worker computes itself ---

Stays: TypeAlias = Callable[[int, int], bool]
"""By the tokens that the decode worker lacks, and those of the prompt."""


def _dynamo(uncached: int, prompt: int) -> bool:
    """Dynamo's conditional disaggregation with its defaults."""
    return uncached < 2048 and uncached < 0.7 * prompt


def _llm_d(uncached: int, _prompt: int) -> bool:
    """llm-d's prefix-based decider with the threshold of its example."""
    return uncached < 512


def _always(_uncached: int, _prompt: int) -> bool:
    return False


def _never(_uncached: int, _prompt: int) -> bool:
    return True


RULE = "@"
"""Between a mode and its rule: `kv@auto`. Without one, the engines serve whole requests."""
AUTO_RULE = "auto"
PEERS = "peers"
"""In the place of a rule: whole engines that read from each other."""
PUBLISHED: Mapping[str, Stays] = {"dynamo": _dynamo, "llm-d": _llm_d, "always": _always, "never": _never}
RULES = (AUTO_RULE, *PUBLISHED)


def route_by(stays: Stays, router: Router, request: RouteRequest, now: float) -> Placement:
    """Route by a published rule: the router's pair, of which the decode worker may serve alone.

    The router is set to hand every prompt over.
    """
    pair = router.decide(request, now)
    answers = next(one.candidate for one in pair.verdicts if one.target == pair.target)
    if pair.prefill is None or answers is None or not stays(answers.own_prefill_tokens, request.isl):
        return router.route(request, now)
    others = frozenset(router.pool.targets) - {answers.target}
    return router.route_among(replace(request, may_split=False), now, avoid=others)[0]
