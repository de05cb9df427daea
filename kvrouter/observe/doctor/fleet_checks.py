"""Findings about NATS traffic: who is in the namespace, how regular heartbeats are, and frames on the way."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.senders import name
from kvrouter.errors import counted
from kvrouter.observe.doctor.findings import Finding, clean, listed
from kvrouter.observe.listening import HeardWorker, Listener
from kvrouter.worker.engines.endpoints import contradictions

# Heartbeats in a row that may be missing before a lease (5) is in danger.
_LATE_BEATS = 3
_MOST_NAMESPACES = 5
# Of two workers, nobody can say which one is wrong. Other GPUs of one model differ by less, as a rule.
_FEW_WORKERS, _LEAST_CAPACITY = 2, 0.25


def check_presence(
    listener: Listener, namespace: str, listened_s: float, others: set[str]
) -> Iterator[Finding]:
    """Whether there are agents and replicas. `others`: namespaces that were heard if this one is silent."""
    within = f"within {listened_s:.0f} s"
    if not listener.senders:
        heard = f"; namespaces heard: {listed(others, _MOST_NAMESPACES)}" if others else ""
        yield Finding("fleet.silent", namespace, f"no heartbeat {within}{heard}")
        return
    if not listener.workers:
        yield Finding("fleet.no_workers", namespace, f"no heartbeat of an agent {within}")
    if not listener.peers:
        yield Finding("fleet.no_replicas", namespace, f"no heartbeat of a replica {within}")
    for subject, why in listener.unreadable.items():
        yield Finding("fleet.unreadable", subject, why)


def check_agents(listener: Listener, now: float, *, is_whole: bool) -> Iterator[Finding]:
    """Findings about each agent, from its heartbeats and card. `is_whole`: see `check_frames`."""
    for worker_id, one in listener.workers.items():
        yield from _check_agent(worker_id, one, now if is_whole else one.sender.last_at)
    cards = [card for card in listener.cards().values() if card.url]
    for url, count in Counter(card.url for card in cards).items():
        if count > 1:
            ids = listed(card.worker_id for card in cards if card.url == url)
            yield Finding("agent.shared_engine", url, f"on the cards of {ids}")
    yield from _check_endpoints(cards)
    yield from _check_block_sizes(cards)
    yield from _check_capacities(cards)


def _check_agent(worker_id: str, one: HeardWorker, now: float) -> Iterator[Finding]:
    sender = one.sender
    if sender.turned_back > 1:
        seen = f"{sender.turned_back} of {sender.beats} heartbeats are of an older start than others"
        yield Finding("agent.twice", worker_id, seen)
    elif sender.beats > 1 and sender.gap_s(now) > _LATE_BEATS * sender.interval_s + 0.5:
        seen = f"{sender.gap_s(now):.1f} s without a heartbeat, its interval is {sender.interval_s:g} s"
        yield Finding("agent.late", worker_id, seen)
    if one.beat.state == "draining":
        yield Finding("agent.draining", worker_id, "state draining")
    if one.card is None:
        yield Finding(
            "agent.no_card", worker_id, f"{sender.beats} heartbeats without a card, and no answer to a hello"
        )
        return
    partial = [rank.rank for rank in one.beat.ranks if rank.partial]
    if partial:
        notes = f": {'; '.join(one.card.notes[:2])}" if one.card.notes else ""
        yield Finding("agent.partial", worker_id, f"rank {listed(map(str, partial))} is partial{notes}")
    if one.card.prefix_caching is False:
        yield Finding("agent.no_prefix_caching", worker_id, one.card.url)
    elif not one.card.publishes_events:
        yield Finding("agent.no_events", worker_id, f"{one.card.engine or 'engine'} at {one.card.url}")


def _check_endpoints(cards: Sequence[Card]) -> Iterator[Finding]:
    """Agents that read events elsewhere than their engines report, by the notes on their cards."""
    found = {card.worker_id: contradictions(card.notes) for card in cards}
    # where an agent reads, and where its engine publishes -> the worker
    ways = {(each.given, each.reported): name for name, every in found.items() for each in every}
    for worker_id, every in found.items():
        if not every:
            continue
        seen = "; ".join(f"{each.what} at {each.reported}, read at {each.given}" for each in every[:2])
        # by the whole address: engines of several hosts have the same ports
        others = {ways.get((each.reported, each.given), worker_id) for each in every} - {worker_id}
        exchanged = f"; exchanged with {listed(others)}" if others else ""
        yield Finding("agent.other_events", worker_id, f"{clean(seen, 230)}{exchanged}")


def _check_block_sizes(cards: Sequence[Card]) -> Iterator[Finding]:
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for card in cards:
        sizes[card.model][card.block_size] += 1
    for model, counts in sizes.items():
        if len(counts) > 1:
            seen = ", ".join(f"{size}: {counted(count, 'worker')}" for size, count in counts.most_common(5))
            yield Finding("fleet.block_sizes", model, seen)


def _check_capacities(cards: Sequence[Card]) -> Iterator[Finding]:
    """Engines with far fewer blocks than the others of their model."""
    tokens: dict[str, dict[str, int]] = defaultdict(dict)
    for card in cards:
        if card.tiers and all(card.tiers.values()):
            tokens[card.model][card.worker_id] = sum(card.tiers.values()) * card.block_size
    for capacities in tokens.values():
        usual = median(capacities.values())
        for worker_id, capacity in capacities.items():
            if len(capacities) > _FEW_WORKERS and capacity < _LEAST_CAPACITY * usual:
                seen = f"room for {capacity:,} tokens per rank; {usual:,.0f} in the median of its model"
                yield Finding("engine.capacity", worker_id, seen)


def check_frames(listener: Listener, *, is_whole: bool) -> Iterator[Finding]:
    """Whether the frames of every feed came once, in order and readable.

    `is_whole`: the connection was never lost. NATS drops a client that cannot keep up, and its frames.
    """
    for source, feed in listener.feeds.items():
        if feed.malformed:
            yield Finding("events.unreadable", name(source), feed.malformed)
        if feed.missing and is_whole:
            yield Finding(
                "events.gaps",
                name(source),
                f"{feed.missing} of {feed.frames + feed.missing} frames did not arrive",
            )
        if feed.repeated or feed.unsent > 1:
            seen = (
                f"{feed.repeated} frames came again or late, {feed.unsent} heartbeats count fewer than came"
            )
            yield Finding("events.order", name(source), seen)
