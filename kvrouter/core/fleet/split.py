"""A pool whose workers are of several roles.

    both     whole requests
    prefill  the prompts of requests that a decode worker of its island answers
    decode   what prefill workers hand over; whole requests, too, except with SGLang (PAIRS_ONLY)

An island: the workers that can hand over to each other. Engines refuse others: vLLM compares a hash of
version, layout and way of transfer, so a rolling upgrade has two islands, and no pair crosses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from msgspec import Struct

from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.heartbeats import BOTH, CONNECTORS, DECODE, PAIRS_ONLY, PEER, PREFILL, Card
from kvrouter.core.wire.ids import Target

_Key: TypeAlias = tuple[object, ...]


class Island(Struct, frozen=True):
    """The places of its workers' targets in the roster."""

    prefill: list[int]
    decode: list[int]


class Split(Struct, frozen=True):
    """`whole`: the places of targets that serve whole requests; None: all do. `others`: those that do not.

    `serving`: the targets that get requests, whole or in a pair.
    """

    whole: list[int] | None = None
    others: frozenset[Target] = frozenset()
    serving: Set[Target] = frozenset()
    islands: tuple[Island, ...] = ()
    peers: Mapping[Target, int] = {}
    """Targets that read blocks from each other, those with equal numbers; empty without --kv-from-peers."""
    may_share: bool = False
    """Whether two workers may have a part in one request."""

    @property
    def is_pairs_only(self) -> bool:
        """Whether pairs serve all requests: no worker serves one alone."""
        return bool(self.islands) and not self.whole


def split_of(
    targets: Mapping[Target, Worker], labels: Sequence[str], *, refuses: bool, pulls: bool = False
) -> Split:
    """`targets`: in the order of the roster. `labels`: those in which the two of a pair agree.

    `refuses`: decode workers without a prefill worker serve nothing. `pulls`: whole workers read from peers.
    """
    workers = list(targets.values())
    roles = [worker.card.role for worker in workers]
    peers = _peers(targets, labels) if pulls else {}
    if all(role == BOTH for role in roles):
        return Split(serving=targets.keys(), peers=peers, may_share=bool(peers))
    islands = tuple(_islands(workers, labels))
    paired = {place for island in islands for place in island.decode}
    whole = [
        place
        for place, role in enumerate(roles)
        if role == BOTH
        or (role == DECODE and serves_alone(workers[place].card) and (place in paired or not refuses))
    ]
    serving = set(whole)
    others = frozenset(target for place, target in enumerate(targets) if place not in serving)
    serving |= paired.union(*[island.prefill for island in islands])
    served = {target for at, target in enumerate(targets) if at in serving}
    return Split(whole, others, served, islands, peers, bool(islands or peers))


def _peers(targets: Mapping[Target, Worker], labels: Sequence[str]) -> dict[Target, int]:
    groups: dict[_Key, int] = {}
    cards = {target: worker.card for target, worker in targets.items()}
    return {
        target: groups.setdefault(tuple(terms(card, labels).values()), len(groups))
        for target, card in cards.items()
        if card.role == BOTH and card.kv_connector == PEER and card.kv_address
    }


def _islands(workers: Sequence[Worker], labels: Sequence[str]) -> Iterator[Island]:
    found: dict[_Key, Island] = {}
    for place, worker in enumerate(workers):
        if worker.card.role in {PREFILL, DECODE} and worker.card.kv_connector in CONNECTORS:
            island = found.setdefault(tuple(terms(worker.card, labels).values()), Island([], []))
            (island.prefill if worker.card.role == PREFILL else island.decode).append(place)
    for island in found.values():
        if island.prefill and island.decode:
            yield island


def terms(card: Card, labels: Sequence[str]) -> dict[str, object]:
    """What is equal in an island, by names for people."""
    return {
        "engine": card.engine,
        "engine version": card.engine_version,
        "block size": card.block_size,
        "KV connector": card.kv_connector,
        "kv-hash": card.kv_hash,
        **{f"label {name}": card.labels.get(name) for name in labels},
    }


def serves_alone(card: Card) -> bool:
    """Whether its engine, without another one, can serve a request."""
    return card.role == BOTH or (card.role == DECODE and card.kv_connector not in PAIRS_ONLY)


def refusal(card: Card) -> str:
    """Why a worker serves no whole request."""
    if card.role == PREFILL:
        lack = "" if card.kv_connector in CONNECTORS else f", {card.kv_connector!r} is not served"
        return f"computes prompts only (role prefill{lack})"
    if card.role == DECODE and not serves_alone(card):
        return (
            f"serves only with a prefill worker (role decode, {card.kv_connector}), and only completions and "
            "chats with one prompt and one answer"
        )
    if card.role == DECODE:
        return "has no prefill worker to pair with (--pd-fallback refuse)"
    return (
        f"has role {card.role!r:.64}, which this version does not know (upgrade the replicas, or give its "
        "agent --role both, prefill or decode)"
    )
