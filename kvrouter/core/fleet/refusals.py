"""What is kept of each sender, in bytes, and the senders of which nothing more is kept.

    a card, a heartbeat ──weight──> Budget: of one sender, and of all ──room──> kept
                                       └──no room──> Refusals: named as a problem, for a lease

Anyone who may publish on NATS can invent senders, and fill what each may send with short names. So not the
bytes of a message are counted but those that it takes here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from kvrouter.core.wire.heartbeats import Card, RankBeat, RouterBeat

SenderT = TypeVar("SenderT", bound=Hashable)

# A string of Python without its characters, with its place in a tuple; an entry of a dict with its key.
_STRING_BYTES, _ENTRY_BYTES = 64, 160
_STRUCT_BYTES = 512
# A rank that a card names: its target with a place in each of the pool's dicts and columns.
_RANK_BYTES = 256
# A card with 1,000 adapters of 60 characters takes 120 KiB.
WORKER_BYTES = 256 * 1024
# 16,384 workers with 8 KiB each; a usual card takes 2 KiB.
WORKERS_BYTES = 128 * 1024 * 1024
# 256 pools take 80 KiB.
PEER_BYTES = 128 * 1024
PEERS_BYTES = 32 * 1024 * 1024
# Peers that a peer hears, for the dashboard: of more, none is kept.
HEARD_MOST = 256
# Refused senders that are named at a time.
NAMED_MOST = 64


class Budget(Generic[SenderT]):
    """The bytes that senders take. `one`: of one sender at most; `total`: of all."""

    def __init__(self, one: int, total: int) -> None:
        self.used = 0
        """Of all of them."""
        self.taken: dict[SenderT, int] = {}
        """Of each."""
        self._one, self._total = one, total

    def take(self, sender: SenderT, size: int) -> str:
        """Count what the sender takes from now on; returns why it may not, and then counts nothing new."""
        if size > self._one:
            return f"it takes {size:,} bytes of memory, and one may take {self._one:,}"
        more = size - self.taken.get(sender, 0)
        if self.used + more > max(self._total, self.used):
            return f"all of its kind take {self.used:,} bytes of memory, and may take {self._total:,}"
        self.used += more
        self.taken[sender] = size
        return ""

    def free(self, sender: SenderT) -> None:
        """The sender is gone."""
        self.used -= self.taken.pop(sender, 0)


class Refusals:
    """Senders whose cards or heartbeats are refused, and why: until a good one, or for a lease."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._rounds: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def refuse(self, sender: str, reason: str) -> None:
        """A message of the sender was refused. Only the first NAMED_MOST senders are named."""
        if sender in self._reasons or len(self._reasons) < NAMED_MOST:
            self._reasons[sender], self._rounds[sender] = reason[:300], 0

    def accept(self, sender: str) -> None:
        """A message of the sender was taken."""
        if self._reasons.pop(sender, None) is not None:
            del self._rounds[sender]

    def next_round(self, rounds: int) -> None:
        """A round of the leases has passed. `rounds`: how long a refused sender is named."""
        for sender in list(self._rounds):
            self._rounds[sender] += 1
            if self._rounds[sender] > rounds:
                self.accept(sender)

    def named(self) -> dict[str, str]:
        """The reason for each sender."""
        return dict(self._reasons)


def card_bytes(card: Card) -> int:
    """About what a card takes here, with a target for each of its ranks."""
    texts = (card.worker_id, card.url, card.model, card.engine, card.engine_version, card.tokenizer)
    half = (card.role, card.kv_connector, card.kv_address, card.kv_hash)
    named = (
        card.served_names, card.lora_names, card.notes, card.tiers, card.labels, card.labels.values(),
        card.kv_engine_ids,
    )  # fmt: skip
    return _STRUCT_BYTES + _RANK_BYTES * card.ranks + _strings(texts + half) + sum(map(_strings, named))


def rank_bytes(rank: RankBeat) -> int:
    """About what the load of a rank takes here."""
    if not (rank.waiting_loras or rank.running_loras or rank.metrics):
        return _STRUCT_BYTES
    loras = _strings(rank.waiting_loras) + _strings(rank.running_loras or ())
    return _STRUCT_BYTES + loras + _ENTRY_BYTES * len(rank.metrics) + sum(map(len, rank.metrics))


def peer_bytes(beat: RouterBeat) -> int:
    """About what the heartbeat of a replica takes here, without the workers that it names."""
    entries = len(beat.feeds) + len(beat.serves) + 2 * len(beat.hears or ())
    settings = beat.routing.settings if beat.routing is not None else {}
    return 4 * _STRUCT_BYTES + _ENTRY_BYTES * entries + _strings(settings) + _strings(settings.values())


def _strings(texts: Iterable[str]) -> int:
    return sum(_STRING_BYTES + len(text) for text in texts)
