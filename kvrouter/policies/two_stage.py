"""Mode `two-stage`: first a group of workers, then `kv` within it (the tuning guide's meta-router)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import InBlocks, InSeconds
from kvrouter.core.routing.policy import Candidate, OverlapWeight, RouteRequest
from kvrouter.core.wire.heartbeats import Card
from kvrouter.errors import ConfigError
from kvrouter.policies.kv import Kv

ROUND_ROBIN, HASH, HEADER = "round-robin", "hash", "header:"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")


def read_header_name(text: str) -> str:
    """The name of a header in lower case, as requests have it. Raises ValueError."""
    if not _HEADER_NAME.fullmatch(text):
        raise ValueError("must be the name of a header: 1 to 64 letters, digits or -")
    return text.lower()


@dataclass(slots=True)
class TwoStage(BuiltInPolicy):
    """Source: NVIDIA Dynamo, "KV router performance tuning": a meta-router over dedicated KV routers.

    Groups are the values of the card label `group_label`; workers without it form one group. Stage one:
    `round-robin` over the groups; `hash`, the rendezvous hash of the prompt's first `blocks` blocks; or
    `header:NAME`, where the header names a group, or any other value, which is then hashed. A request without
    such a key takes a turn. With rendezvous hashing, a group that joins or leaves moves only its own prompts.
    """

    stage_one: str = ROUND_ROBIN
    blocks: int = 4
    group_label: str = "group"
    within: Kv = field(default_factory=Kv)
    turn: int = 0

    decisive = ("in_group", "cost")
    reads_speed = True

    def __post_init__(self) -> None:
        if self.stage_one not in {ROUND_ROBIN, HASH} and not self.stage_one.removeprefix(HEADER):
            raise ConfigError("stage one header: needs a name, as in header:x-bucket")
        if self.stage_one not in {ROUND_ROBIN, HASH} and not self.stage_one.startswith(HEADER):
            raise ConfigError(f"stage one {self.stage_one!r}: use round-robin, hash or header:NAME")
        if self.blocks < 1:
            raise ConfigError(f"stage one over {self.blocks} blocks: use at least 1")

    @property
    def overlap_weight(self) -> OverlapWeight:  # type: ignore[override]
        return self.within.overlap_weight

    @property
    def temperature(self) -> float:  # type: ignore[override]
        return self.within.temperature

    @property
    def header(self) -> str:
        """The request header that states the bucket; empty if stage one does not use one."""
        return self.stage_one.removeprefix(HEADER) if self.stage_one.startswith(HEADER) else ""

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        group = self._group_of(request, candidates)
        places = [place for place, one in enumerate(self._labels(candidates)) if one == group]
        return places[self.within.pick(request, candidates.at(places), moment)]

    def costs(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> InBlocks | InSeconds:
        return self.within.costs(request, candidates, moment)

    def routed(self, request: RouteRequest, choice: Candidate, moment: Moment) -> None:
        self.within.routed(request, choice, moment)
        # Only a request without a key takes a turn: if every request did, alternating requests with and
        # without a key would always give the same groups to the latter.
        self.turn += not self._key(request)

    def _group_of(self, request: RouteRequest, candidates: Candidates) -> str:
        groups = sorted(set(self._labels(candidates)))
        key = self._key(request)
        if not key:
            return groups[self.turn % len(groups)]
        if key in groups:
            return key
        # not hash(): it differs from process to process, and all replicas must choose the same group
        return max(groups, key=lambda group: xxh3_64_intdigest(f"{group}\0{key}".encode()))

    def _key(self, request: RouteRequest) -> str:
        """What the group is chosen by; empty: the request takes a turn."""
        if self.header:
            return request.bucket
        if self.stage_one == ROUND_ROBIN or not request.prompts or not request.prompts[0].hashes:
            return ""
        hashes = request.prompts[0].hashes  # a sequence hash also stands for all blocks before it
        return f"\0{hashes[min(self.blocks, len(hashes)) - 1]}"  # \0: as no group is named

    def _labels(self, candidates: Candidates) -> list[str]:
        return [self._label(card) for card in candidates.cards()]

    def _label(self, card: Card) -> str:
        return card.labels.get(self.group_label, "")

    def terms(
        self,
        request: RouteRequest,
        candidates: Candidates,
        moment: Moment,
        chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        """The terms of `kv`, and whether the candidate is in the request's group."""
        # from the choice if there is one: since then the turn has advanced
        group = (
            self._group_of(request, candidates) if chosen is None else chosen.labels.get(self.group_label, "")
        )
        costs = self.within.terms(request, candidates, moment)
        return [
            row | {"in_group": float(label == group)}
            for label, row in zip(self._labels(candidates), costs, strict=True)
        ]
