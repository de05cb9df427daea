"""Findings about engines: whether they answer at the URLs of the cards, and publish what they compute.

Between the two looks (observe/engine.py), a request that ends, or still runs, leaves less than a block of
generated tokens without an event:

    tokens generated  >  (requests that ended or run) × block size    ⇒  some block was filled and stored
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from kvrouter.bounded_answers import is_alive
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.senders import KvSource
from kvrouter.engine_versions import reaches, since
from kvrouter.observe.doctor.findings import Finding, clean, expiring, listed
from kvrouter.observe.engine import EngineProbe, Engines
from kvrouter.observe.listening import Listener
from kvrouter.worker.engines import discovery
from kvrouter.worker.engines.http import DOWN
from kvrouter.worker.engines.metrics import EngineWork

_NOT_ALLOWED = (401, 403)
# Kinds of engines that have /v1/models.
LISTING = frozenset(discovery.KINDS)


def check_engines(listener: Listener, engines: Engines, held: Mapping[str, int]) -> Iterator[Finding]:
    """Findings about engines, by the cards of their workers. `held`: blocks that replicas know, by worker."""
    for worker_id, card in listener.cards().items():
        is_down = listener.workers[worker_id].beat.state == "down"
        if is_down:
            reasons = [note.removeprefix(DOWN) for note in card.notes if note.startswith(DOWN)]
            yield Finding("engine.down", worker_id, ": ".join([card.url, *reasons[:1]]))
        engine = engines.met.get(card.url)
        if engine is None:
            continue
        if not is_down or engine.models.status:
            yield from _check_answers(worker_id, card, engine)
        yield from _check_events(listener, worker_id, card, engines, held)
    yield from _check_versions(listener.cards())


def _check_answers(worker_id: str, card: Card, engine: EngineProbe) -> Iterator[Finding]:
    models, health = engine.models, engine.health
    if not models.status:
        kind = "tls.not_trusted" if models.is_tls_trouble else "engine.unreachable"
        yield Finding(kind, worker_id, f"{card.url}: {models.trouble}")
        return
    yield from expiring(card.url, models.expires_s)
    if models.status in _NOT_ALLOWED:
        yield Finding("engine.not_asked", worker_id, f"{card.url}/v1/models answers {models.status}")
    elif models.status == 404 and card.engine not in LISTING:
        pass  # a worker of the library need not list its models
    elif models.status != 200 or engine.trouble:
        seen = engine.trouble or f"/v1/models answers {models.status}"
        kind = "engine.unhealthy" if models.status >= 500 else "engine.other_model"
        yield Finding(kind, worker_id, f"{card.url}: {seen}")
    elif missing := {*card.names()} - {*engine.names}:
        seen = f"{card.url} serves {listed(engine.names) or 'nothing'}, not {listed(missing)}"
        yield Finding("engine.other_model", worker_id, seen)
    if not health.status:
        yield Finding("engine.unhealthy", worker_id, f"{card.url}/health: {health.trouble}")
    elif not is_alive(health.status):
        yield Finding("engine.unhealthy", worker_id, f"{card.url}/health answers {health.status}")


def _check_events(
    listener: Listener, worker_id: WorkerId, card: Card, engines: Engines, held: Mapping[str, int]
) -> Iterator[Finding]:
    """An engine that has filled a block, just now or ever, of which replicas know none.

    If they know some, nothing follows: an agent publishes no second copy of a block, such as an equal answer.
    """
    later = engines.later.get(card.url)
    if not card.publishes_events or later is None or held.get(worker_id) != 0:
        return
    feeds = listener.feeds.items()
    own = [feed for key, feed in feeds if isinstance(key, KvSource) and key.worker_id == worker_id]
    if any(feed.stored_blocks for feed in own):
        return
    running = sum(rank.running or 0 for rank in listener.workers[worker_id].beat.ranks)
    before = engines.met[card.url].work
    if later.surely_filled(before, running, card.block_size):
        tokens = (later.generated_tokens or 0) - (before.generated_tokens or 0)
        seen = f"{tokens:.0f} tokens generated while listening, and no block known"
        yield Finding("engine.no_blocks", worker_id, seen)
    elif later.surely_filled(EngineWork(0, 0), running, card.block_size):
        seen = f"{later.generated_tokens:.0f} tokens generated since its start"
        yield Finding("engine.no_blocks_known", worker_id, seen)


def _check_versions(cards: Mapping[WorkerId, Card]) -> Iterator[Finding]:
    by_model: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for worker_id, card in cards.items():
        by_model[card.model][f"{card.engine} {card.engine_version}".strip()].append(worker_id)
        first = since(card.engine).exact_names
        if first and reaches(card.engine_version, first) is False:
            needed = ".".join(map(str, first))
            seen = f"{card.engine} {card.engine_version}: events name salt and adapter from {needed} on"
            yield Finding("engine.old", worker_id, seen)
    for model, versions in by_model.items():
        if len(versions) > 1:
            seen = "; ".join(
                f"{version or 'unknown'}: {len(ids)}" for version, ids in sorted(versions.items())[:8]
            )
            yield Finding("engine.versions", model, clean(seen))
