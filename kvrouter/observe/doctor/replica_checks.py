"""Findings about replicas: alone, then against each other and against what agents publish."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from kvrouter.errors import counted
from kvrouter.observe.doctor.findings import Finding, clean, differing, expiring, listed
from kvrouter.observe.doctor.machine import LEAST_DESCRIPTORS
from kvrouter.observe.doctor.replicas import Examined
from kvrouter.observe.document import FollowedFeed, Workers
from kvrouter.observe.listening import Listener
from kvrouter.observe.verify.comparison import AGENT
from kvrouter.observe.verify.comparison import Report as Compared

# Counters of a feed that a healthy one does not have, in the order in which one explains the next.
_FAULTS = ("errors", "contradictions", "digest_mismatches", "malformed", "other_versions", "unsent")
_FEW_DESCRIPTORS = 0.8
# Of problems that audits report: agents' and replicas' findings say them already.
_AUDITED_HERE = ("token ids of", "have one address", "has no KV events", "prefix caching is off")
_MOST_PROBLEMS = 200
_NOT_FOUND = "answered 404 to all"
# Of verify's differences: what other findings report already, and what more time may settle.
_KNOWN_OTHERWISE = ("does not see the replica", "--router-replica-sync")
_NOT_IN_TIME = (
    "were never at the same frame",
    "stays behind",
    "frames behind",
    "only one look at its engine",
)

# Each difference between an agent and its engine names the engine so, and no other one does.
_OF_ENGINE = "its engine"


def check_replica(one: Examined, listener: Listener) -> Iterator[Finding]:
    """Findings about one replica."""
    about = one.url if one.is_given or not one.router_id else f"{one.url} ({one.router_id})"
    if one.trouble:
        yield Finding(_unreachable(one), about, one.trouble)
        return
    if one.announced and one.health is not None and one.health.router_id != one.announced:
        seen = f"replica {one.health.router_id} answers, heartbeats name {one.announced}"
        yield Finding("replica.shared_port", about, seen)
    if one.router_id and listener.peers and one.router_id not in {*listener.peers, *listener.left}:
        yield Finding("replica.stranger", about, f"no heartbeat of {one.router_id} was received")
    if one.ready is not None and one.ready.status == "draining":
        yield Finding("replica.draining", about, "it takes no new requests")
    elif one.ready is not None and one.ready_status != 200:
        yield Finding("replica.not_ready", about, f"{one.ready.status}: {_reasons(one.ready.reasons)}")
    elif one.ready is not None and one.ready.status != "ready":
        yield Finding("replica.degraded", about, _reasons(one.ready.reasons))
    if one.workers is None:
        yield Finding("replica.not_operators", about, one.workers_trouble)
        return
    if one.later is not None and one.later.router_id != one.workers.router_id:
        seen = f"{one.workers.router_id}, then {one.later.router_id}"
        yield Finding("replica.shared_port", about, seen)
    yield from _check_doors(one, about)
    yield from _check_tokens(one.workers, about)
    yield from _check_feeds(one, about)


def _unreachable(one: Examined) -> str:
    if one.is_impostor:
        return "replica.impostor"
    if one.is_tls_trouble:
        return "tls.not_trusted"
    return "replica.unreachable" if one.is_given else "replica.not_examined"


def _reasons(reasons: Sequence[str]) -> str:
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    return "; ".join(clean(reason, 160) for reason in reasons[:3]) + more or "no reason"


def _check_doors(one: Examined, about: str) -> Iterator[Finding]:
    if one.clients_trouble:
        yield Finding("replica.clients_port", about, one.clients_trouble)
    if one.open_at:
        yield Finding("replica.admin_open", about, f"{one.open_at}/routing answers without a key")
    yield from expiring(about, one.expires_s)
    yield from _check_series(one, about)


def _check_series(one: Examined, about: str) -> Iterator[Finding]:
    opened, allowed = one.series.get("process_open_fds", 0), one.series.get("process_max_fds", 0)
    if 0 < allowed < LEAST_DESCRIPTORS:
        yield Finding("replica.descriptors", about, f"it may open at most {allowed}")
    elif allowed and opened > _FEW_DESCRIPTORS * allowed:
        yield Finding("replica.descriptors", about, f"{opened} of {allowed} are open")
    losses = {"worker": one.fleet.workers_lost, "replica": one.fleet.replicas_lost} if one.fleet else {}
    lost = [counted(count, noun) for noun, count in losses.items() if count]
    if lost:
        yield Finding("replica.losses", about, f"{' and '.join(lost)} lost since its start")


def _check_tokens(workers: Workers, about: str) -> Iterator[Finding]:
    for pool, compared in workers.tokens.compared.items():
        if compared.state == "differs":
            found = compared.difference or {}
            seen = f"{pool}: {compared.prompt} at {compared.engine}, position {found.get('position')}"
            yield Finding("replica.tokens", about, f"{seen}: {found.get('remedy', compared.reason)}")
        elif compared.state == "unanswered":
            yield Finding("replica.tokens_unknown", about, f"{pool}: {compared.reason}")


def _check_problems(shown: Sequence[Examined]) -> Iterator[Finding]:
    """What audits say, each once; without what other findings say."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in shown:
        workers = one.workers
        for row in workers.pools if workers is not None else ():
            for text in row.problems:
                found[row.pool, text].append(one.url)
        for target in workers.targets if workers is not None else ():
            for text in target.problems:
                found[f"{target.worker_id}/{target.rank}", text].append(one.url)
    unsaid = [(key, urls) for key, urls in found.items() if not any(part in key[1] for part in _AUDITED_HERE)]
    for (subject, text), urls in unsaid[:_MOST_PROBLEMS]:
        where = urls[0] if len(urls) == 1 else f"{len(urls)} replicas"
        kind = "engine.not_found" if text.startswith(_NOT_FOUND) else "replica.problem"
        yield Finding(kind, subject, f"{clean(text, 400)} (at {where})")


def _check_feeds(one: Examined, about: str) -> Iterator[Finding]:
    """A feed that was not followed at both looks, and counters that have grown between them."""
    if one.workers is None or one.later is None:
        return
    before = {row.feed: row for row in one.workers.feeds}
    for row in one.later.feeds:
        first = before.get(row.feed)
        if first is None:
            continue
        if row.flag or row.state == "broken" or ("live" not in {row.state, first.state} and row.lag):
            seen = f"{row.feed}: {row.state}, {row.lag} frames behind{': ' if row.flag else ''}{row.flag}"
            yield Finding("events.feed_stuck", about, seen)
        if grown := _grown(first, row):
            yield Finding("events.contradictions", about, f"{row.feed}: {grown}")


def _grown(first: FollowedFeed, then: FollowedFeed) -> str:
    grown = {name: then.counters.get(name, 0) - first.counters.get(name, 0) for name in _FAULTS}
    return ", ".join(f"{count:g} {name.replace('_', ' ')}" for name, count in grown.items() if count > 0)


def check_together(replicas: Sequence[Examined], listener: Listener, listened_s: float) -> Iterator[Finding]:
    """Findings about replicas among each other, and about who knows whom."""
    shown = [one for one in replicas if one.workers is not None]
    yield from _check_knowledge(shown, listener, listened_s)
    yield from _check_settings(shown)
    yield from _check_problems(shown)
    yield from _check_prompts(shown)
    yield from _check_ways(shown)


def _check_knowledge(shown: Sequence[Examined], listener: Listener, listened_s: float) -> Iterator[Finding]:
    """Who knows whom. A sender that died before the doctor came may be known at the first look only."""
    heard = {name for name, one in listener.workers.items() if one.card is not None and one.sender.beats > 1}
    lost: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in shown:
        first, last = one.workers, one.later or one.workers
        if first is None or last is None or (listener.peers and one.router_id not in listener.peers):
            continue  # of another namespace
        known = {row.worker_id for row in last.targets}
        if missing := heard - known:
            yield Finding("replica.other_workers", one.url, f"it does not know {listed(missing)}")
        for name in (known | {row.worker_id for row in first.targets}) - {*listener.workers} - listener.left:
            lost["agent.lost", name].append(one.url)
        for name in {*first.namespace_peers, *last.namespace_peers} - {*listener.peers} - listener.left:
            lost["replica.lost", name].append(one.url)
        yield from _check_peers(one, last, listener)
    for (kind, name), urls in lost.items():
        seen = f"no heartbeat in {listened_s:.0f} s; known to {listed(urls, 3)}"
        yield Finding(kind, name, seen)


def _check_peers(one: Examined, workers: Workers, listener: Listener) -> Iterator[Finding]:
    others = {router_id for router_id, peer in listener.peers.items() if peer.sender.beats > 1} - {
        one.router_id
    }
    if not others:
        return
    if not workers.replica_sync:
        yield Finding(
            "replica.alone", one.url, f"it runs without --router-replica-sync next to {listed(others)}"
        )
    elif missing := others - {*workers.namespace_peers}:
        yield Finding("replica.other_replicas", one.url, f"it does not know {listed(missing)}")


def _check_settings(shown: Sequence[Examined]) -> Iterator[Finding]:
    by_revision: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for one in shown:
        if one.routing is None:
            continue
        by_revision[one.routing.epoch, one.routing.revision, one.routing.by].append(one.url)
        if one.routing.not_applied:
            names = "; ".join(f"{name}: {why}" for name, why in list(one.routing.not_applied.items())[:3])
            yield Finding("replica.routing", one.url, f"not applied: {names}")
        if one.routing.refused:
            seen = f"too far ahead, refused: the change of {listed(one.routing.refused)}"
            yield Finding("replica.routing", one.url, seen)
    if len(by_revision) > 1:
        seen = "; ".join(
            f"revision {revision}{f' of epoch {epoch}' if epoch else ''} at {listed(urls, 3)}"
            for (epoch, revision, _), urls in sorted(by_revision.items())[:6]
        )
        yield Finding("replica.routing", "POST /routing", seen)


def _check_prompts(shown: Sequence[Examined]) -> Iterator[Finding]:
    by_model: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in shown:
        for model, tokens in one.prompts.items():
            by_model[model][tokens].append(one.url)
    for model, counts in by_model.items():
        yield from differing("replica.prompts", model, counts, "{} tokens at {}")


def _check_ways(shown: Sequence[Examined]) -> Iterator[Finding]:
    by_pool: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in shown:
        for row in one.workers.pools if one.workers is not None else ():
            if way := one.chat_way(row.pool):
                by_pool[row.pool][way].append(one.url)
    for pool, ways in by_pool.items():
        yield from differing("replica.ways", pool, ways)


def compared_urls(replicas: Sequence[Examined], known: Set[str]) -> list[str]:
    """The replicas of this namespace that can be compared, each once."""
    urls: dict[str, str] = {}
    for one in replicas:
        if one.workers is not None and (not known or one.router_id in known):
            urls.setdefault(one.router_id, one.url)
    return list(urls.values())


def check_compared(compared: Compared) -> Iterator[Finding]:
    """What `kvrouter verify` finds."""
    yield from different(compared.differences)
    for text in compared.notes:
        yield Finding("replica.not_compared", "comparison", text)


def different(texts: Sequence[str]) -> Iterator[Finding]:
    """Findings of `kvrouter verify`'s differences, without what other findings say already."""
    for text in texts:
        if any(part in text for part in _KNOWN_OTHERWISE):
            continue
        about, _, seen = text.partition(": ")
        yield Finding(_kind_of(text, seen), about, seen or text)


def _kind_of(text: str, seen: str) -> str:
    if seen.startswith(f"{AGENT}: "):
        return "agent.no_answer"
    if any(part in text for part in _NOT_IN_TIME):
        return "replica.not_compared"
    return "engine.different" if _OF_ENGINE in seen else "replica.different"
