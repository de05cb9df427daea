"""/v1/models for the whole fleet: each name once, as listed by the pool that serves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.pools import pool_serving
from kvrouter.core.wire.heartbeats import Card


class ModelEntry(msgspec.Struct, frozen=True):
    """One entry of /v1/models: a base model, or a LoRA adapter with its base model as `parent`."""

    id: str
    created_s: int
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


def model_entries(pools: Iterable[Pool]) -> list[ModelEntry]:
    """Pools by id; in each the base models, then the adapters. All replicas list the same."""
    known = sorted(pools, key=lambda pool: pool.id)
    listed = [(pool, entry) for pool in known for entry in _of_pool(pool)]
    return [entry for pool, entry in listed if pool_serving(entry.id, known) is pool]


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
    for name in card.served_names or (card.model,):
        yield ModelEntry(name, _created_s(card), card.model, None, card.max_model_len or None)


def _adapters(card: Card) -> Iterator[ModelEntry]:
    base = card.served_names[0] if card.served_names else card.model
    for name in card.lora_names:
        yield ModelEntry(name, _created_s(card), name, base, None)


def _created_s(card: Card) -> int:
    return card.started_at_us // 1_000_000


def models_body(models: Iterable[ModelEntry]) -> bytes:
    """The JSON of /v1/models, as vLLM lists them."""
    return msgspec.json.encode({"object": "list", "data": [_listed(model) for model in models]})


def model_body(model: ModelEntry) -> bytes:
    """The JSON of /v1/models/NAME."""
    return msgspec.json.encode(_listed(model))


def _listed(model: ModelEntry) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "kvrouter",
        "root": model.root or model.id,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
    }
