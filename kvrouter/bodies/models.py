"""/v1/models for the whole fleet: each name once, as listed by the pool that serves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.pools import pool_serving
from kvrouter.core.wire.heartbeats import Card

_NONE: Mapping[str, str] = MappingProxyType({})


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """/v1/models/NAME, as vLLM has it: a base model, or a LoRA adapter with its base model as `parent`."""

    id: str
    object: Literal["model"] = "model"
    created_s: int = msgspec.field(name="created")
    owned_by: Literal["kvrouter"] = "kvrouter"
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """/v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


def model_entries(pools: Iterable[Pool], aliases: Mapping[str, str] = _NONE) -> list[ModelEntry]:
    """Pools by id; in each the base models, then the adapters; at last the aliases of these.

    All replicas list the same. An alias with the name of a model stands for its own model.
    """
    known = sorted(pools, key=lambda pool: pool.id)
    listed = [(pool, entry) for pool in known for entry in _of_pool(pool)]
    own = {entry.id: entry for pool, entry in listed if pool_serving(entry.id, known) is pool}
    others = [
        msgspec.structs.replace(own[model], id=alias) for alias, model in aliases.items() if model in own
    ]
    return [entry for entry in own.values() if entry.id not in aliases] + others


def _of_pool(pool: Pool) -> list[ModelEntry]:
    """If several workers serve a name, the entry comes from the worker that started first."""
    cards = [worker.card for worker in pool.workers.values()]
    # All replicas must reply the same, in whatever order they learned of the workers.
    cards.sort(key=lambda card: (card.started_at_us, card.worker_id))
    found = [entry for card in cards for entry in _bases(card)]
    found += [entry for card in cards for entry in _adapters(card)]
    entries: dict[str, ModelEntry] = {}
    for entry in found:
        entries.setdefault(entry.id, entry)
    return list(entries.values())


def _bases(card: Card) -> Iterator[ModelEntry]:
    for name in card.base_names():
        yield ModelEntry(
            id=name,
            created_s=_created_s(card),
            root=card.model or name,
            max_model_len=card.max_model_len or None,
        )


def _adapters(card: Card) -> Iterator[ModelEntry]:
    base = card.served_names[0] if card.served_names else card.model
    for name in card.lora_names:
        yield ModelEntry(id=name, created_s=_created_s(card), root=name, parent=base)


def _created_s(card: Card) -> int:
    return card.started_at_us // 1_000_000
