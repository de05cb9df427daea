"""`kvrouter verify`: whether live replicas hold the same blocks and the same bookings.

    /workers of each replica, again and again ──> Views ──> Comparison ──> Report

Each view is of one moment, but not all of the same one, and traffic goes on meanwhile. What may be
compared is what two replicas hold as of the same frame of the same feed: (incarnation, seq). Under
live traffic two readers stand at the same frame often, if only for moments, so one looks until each
replica has been met at a common frame. A replica that is never met there, or stays behind, is
reported when the time is up; different contents at the same frame are reported at once.

With `--owners` the agents are one more party (see agents.py), which says what it held at every frame; and
each agent is compared with its engine (see engines.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from kvrouter.errors import KvRouterError

_SILENT_ROUNDS = 2
"""A replica that is heard in every round is silent for 0 or 1 of them."""
AGENT = "its agent"
"""The party that publishes a target's blocks."""

Verdict: TypeAlias = Literal["equal", "different", "equal in part", "not checked"]
EQUAL: Verdict = "equal"
DIFFERENT: Verdict = "different"
IN_PART: Verdict = "equal in part"
NOT_CHECKED: Verdict = "not checked"

Content: TypeAlias = tuple[tuple[str, int, str], ...]
"""(what, count, digest) of every set that a feed fills."""


class VerifyError(KvRouterError):
    """The replicas cannot be compared."""


class FeedKey(NamedTuple):
    """A feed as all replicas name it: `owner` is a target of kind kv, a replica of kind sync."""

    kind: str
    pool: str
    owner: str

    def __str__(self) -> str:
        return f"{'blocks' if self.kind == 'kv' else 'bookings'} of {self.owner} in {self.pool}"


@dataclass(frozen=True, slots=True)
class Copy:
    """What a replica holds of one feed, as of a frame."""

    incarnation: int
    seq: int
    content: Content
    lag: int = 0
    trouble: str = ""
    """Why its content does not count now; empty if it does."""


@dataclass(frozen=True, slots=True)
class View:
    """One replica's /workers, as far as it is compared."""

    url: str
    router_id: str
    is_synced: bool
    peers: frozenset[str]
    block_sizes: Mapping[str, int]
    copies: Mapping[FeedKey, Copy]
    """Its own feeds among them: the owner is a party like the others."""
    silent_peers: Mapping[str, int]
    """Replicas that it knows and has not heard of late -> for how many rounds of its heartbeat."""


def read_view(url: str, body: Mapping[str, Any]) -> View:
    """Raises VerifyError for what is no /workers of this version."""
    try:
        return View(
            url,
            body["router_id"],
            body["replica_sync"],
            frozenset(body["namespace_peers"]),
            {pool["pool"]: pool["block_size"] for pool in body["pools"]},
            dict(_copies(body)),
            dict(_silent_peers(body)),
        )
    except (KeyError, TypeError) as error:
        raise VerifyError(f"{url}/workers is not what this version of kvrouter says: {error!r}") from None


def _silent_peers(body: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for peer in body["peers"]:
        if peer["silent_rounds"] >= _SILENT_ROUNDS:
            yield peer["router_id"], peer["silent_rounds"]


def _copies(body: Mapping[str, Any]) -> Iterator[tuple[FeedKey, Copy]]:
    contents = dict(_contents(body))
    for feed in body["feeds"]:
        key = FeedKey(feed["kind"], feed["pool"], feed["owner"])
        trouble = feed["state"] if feed["state"] != "live" else feed["flag"]
        content = contents.get(key, (("bookings", 0, f"{0:016x}"),) if key.kind == "sync" else ())
        yield key, Copy(feed["incarnation"], feed["last_seq"], content, feed["lag"], trouble)
    for booked in body["bookings"] if body["replica_sync"] else ():
        key = FeedKey("sync", booked["pool"], body["router_id"])
        content = contents.get(key, (("bookings", 0, f"{0:016x}"),))
        yield key, Copy(booked["own_feed"]["incarnation"], booked["own_feed"]["seq"], content)


def _contents(body: Mapping[str, Any]) -> Iterator[tuple[FeedKey, Content]]:
    for target in body["targets"]:
        key = FeedKey("kv", target["pool"], f"{target['worker_id']}/{target['rank']}")
        yield key, tuple((each["tier"], each["blocks"], each["digest"]) for each in target["tiers"])
    for booked in body["bookings"]:
        for owner, held in booked["owners"].items():
            yield (
                FeedKey("sync", booked["pool"], owner),
                (("bookings", held["count"], held["digest"]),),
            )


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What an agent's engine, by its own events, says of what the agent publishes."""

    verdict: Verdict
    texts: Sequence[str] = ()
    """What differs, or what was not compared and why."""

    @property
    def is_final(self) -> bool:
        """Whether another look is not needed: what differs may pass, because an agent needs its time."""
        return self.verdict != DIFFERENT


@dataclass(frozen=True, slots=True)
class OwnersView:
    """One look at the owners of blocks."""

    copies: Sequence[tuple[FeedKey, Copy]]
    """What agents held, at each frame since the look before; the last of a feed is as of now."""
    engines: Mapping[FeedKey, EngineCheck]
    errors: Sequence[str]
    """What no agent that is well would do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One feed in the result. `seq` is the newest frame at which two parties were compared; 0: none."""

    feed: str
    incarnation: int
    seq: int
    content: Content
    is_equal: bool
    parties: int
    """How many hold the same: replicas, and the agent if it was asked."""
    agent: Verdict | None = None
    engine: Verdict | None = None
    """None: not asked."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a comparison found."""

    replicas: dict[str, str]
    """URL -> router id."""
    rows: list[Row]
    differences: list[str]
    notes: list[str]
    """What may change soon, although nothing differs."""
    looks: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether every feed was compared, and nothing differed."""
        return not self.differences


@dataclass(slots=True)
class _Track:
    """Where on one feed the replicas were met, since its latest incarnation began."""

    incarnation: int = 0
    seen: dict[int, dict[str, Content]] = field(default_factory=dict)
    """seq -> URL -> content."""
    met: dict[str, set[str]] = field(default_factory=dict)
    """URL -> the replicas that are known to be equal to it, directly or through others."""
    in_step: set[str] = field(default_factory=set)
    last: tuple[int, Content] = (0, ())
    differs: bool = False

    def note(self, url: str, copy: Copy) -> list[str]:
        """A replica stands there; returns those that hold something else at the same frame."""
        if copy.incarnation > self.incarnation:
            self.incarnation = copy.incarnation
            self.seen, self.met, self.in_step, self.last = {}, {}, set(), (0, ())
        if copy.trouble or copy.incarnation < self.incarnation:
            return []
        if not copy.lag:
            self.in_step.add(url)
        here = self.seen.setdefault(copy.seq, {})
        held = _distinct(copy.content)
        different = [other for other, content in here.items() if _distinct(content) != held]
        for other in here.keys() - {url, *different}:
            self._unite(url, other)
            self.last = max(self.last, (copy.seq, copy.content), key=lambda last: last[0])
        here[url] = copy.content
        self.differs = self.differs or bool(different)
        return different

    def _unite(self, one: str, other: str) -> None:
        together = self.met.get(one, {one}) | self.met.get(other, {other})
        for url in together:
            self.met[url] = together


def _distinct(content: Content) -> Content:
    """Without wide tier sets that hold no more than the one before: not everybody has been told of them."""
    if len(content) > 1 and content[-1][1:] == content[-2][1:]:
        return _distinct(content[:-1])
    return content


class Comparison:
    """What is known of the replicas so far. Pure: views go in, words come out."""

    def __init__(self) -> None:
        self.differences: list[str] = []
        """Certain: other contents at the same frame, or settings that exclude agreement."""
        self._tracks: dict[FeedKey, _Track] = {}
        self._latest: dict[str, View] = {}
        self._owned: dict[FeedKey, Copy] | None = None
        """What agents hold now; None: they are not asked."""
        self._engines: Mapping[FeedKey, EngineCheck] = {}

    def add(self, views: Sequence[View]) -> None:
        """One look at all replicas. Raises VerifyError if they are not the different ones they should be."""
        for view in views:
            known = self._latest.setdefault(view.url, view)
            if known.router_id != view.router_id:
                raise VerifyError(
                    f"{view.url} answers as {known.router_id} and as {view.router_id}: it was restarted,"
                    " or several processes share the port (give the --admin-port of each)"
                )
            self._latest[view.url] = view
        if len({view.router_id for view in views}) < len(views):
            raise VerifyError(f"the same replica under two URLs: {', '.join(view.url for view in views)}")
        for view in views:
            for key, copy in view.copies.items():
                self._note(key, view.url, copy)

    def add_owners(self, view: OwnersView) -> None:
        """One look at agents and engines, taken after the look at the replicas."""
        self._owned = dict(view.copies)
        self._engines = view.engines
        for key, copy in view.copies:
            self._note(key, AGENT, copy)
        self.differences += [error for error in view.errors if error not in self.differences]

    def _note(self, key: FeedKey, party: str, copy: Copy) -> None:
        for other in self._tracks.setdefault(key, _Track()).note(party, copy):
            held = self._tracks[key].seen[copy.seq]
            text = (
                f"{key}, as of frame {copy.incarnation}:{copy.seq}: {other} holds"
                f" {_shown(held[other])}, {party} {_shown(copy.content)}"
            )
            self.differences.append(text)

    def pending(self) -> list[str]:
        """What keeps the replicas from being found equal now; under traffic it may pass."""
        views, keys = list(self._latest.values()), self._keys()
        engines = [
            f"{key}: {text}"
            for key, check in sorted(self._engines.items())
            for text in check.texts
            if check.verdict == DIFFERENT
        ]
        return [*_strangers(views), *(text for key in keys for text in self._pending(key, views)), *engines]

    def _keys(self) -> list[FeedKey]:
        followed = {key for view in self._latest.values() for key in view.copies}
        published = {key for key, copy in (self._owned or {}).items() if not copy.trouble}
        return sorted(followed | published)

    def _pending(self, key: FeedKey, views: Sequence[View]) -> Iterator[str]:
        track, standing = self._tracks[key], dict[str, Copy]()
        if self._owned is not None and key.kind == "kv":
            owned = self._owned.get(key)
            if owned is None:
                yield f"{key}: no agent announces them"
            elif owned.trouble:
                yield f"{key}: {AGENT}: {owned.trouble}"
            else:
                standing[AGENT] = owned
        for view in views:
            copy = view.copies.get(key)
            if key.kind == "sync" and not view.is_synced:
                yield f"{key}: {view.url} runs without --router-replica-sync, so it does not follow them"
            elif copy is None:
                yield f"{key}: {view.url} does not follow them"
            elif copy.trouble:
                yield f"{key}: at {view.url}: {copy.trouble}, {copy.lag} frames behind"
            elif view.url not in track.in_step:
                yield f"{key}: {view.url} stays behind, by {copy.lag} frames now"
            else:
                standing[view.url] = copy
        if not track.differs:
            yield from _apart(key, track, standing)

    def report(self, looks: int, seconds: float) -> Report:
        """The result, as of now."""
        views = list(self._latest.values())
        rows = [self._row(key, views) for key in self._keys()]
        differences = [*self.differences, *self.pending()]
        replicas = {view.url: view.router_id for view in views}
        notes = [*_silences(views), *self._not_compared()]
        return Report(replicas, rows, differences, notes, looks, seconds)

    def _row(self, key: FeedKey, views: Sequence[View]) -> Row:
        track, check = self._tracks[key], self._engines.get(key)
        is_equal = not track.differs and not any(self._pending(key, views))
        together = max(track.met.values(), key=len, default=set[str]())
        agent = None
        if self._owned is not None and key.kind == "kv":
            agent = EQUAL if AGENT in track.met and not track.differs else DIFFERENT
        engine = check.verdict if check is not None else None
        return Row(str(key), track.incarnation, *track.last, is_equal, len(together), agent, engine)

    def _not_compared(self) -> Iterator[str]:
        for key, check in sorted(self._engines.items()):
            for text in check.texts if check.is_final else ():
                yield f"{key}: {text}"
        asked = {view.router_id for view in self._latest.values()}
        for key in self._keys() if self._owned is not None else ():
            if key.kind == "sync" and key.owner not in asked:
                yield f"{key}: their owner was not asked: give it as a --replica, too"


def _strangers(views: Sequence[View]) -> Iterator[str]:
    """What must be alike before contents can be."""
    first = views[0]
    for view in views[1:]:
        if view.is_synced != first.is_synced:
            yield f"{first.url} and {view.url}: only one of them has --router-replica-sync"
        if view.block_sizes != first.block_sizes:
            sizes = [dict(each.block_sizes) for each in (first, view)]
            yield f"block sizes: {sizes[0]} at {first.url}, {sizes[1]} at {view.url}"
    for view in views:
        for other in views:
            if other is not view and other.router_id not in view.peers:
                yield f"{view.url} does not see the replica {other.router_id} ({other.url})"


def _silences(views: Sequence[View]) -> Iterator[str]:
    """Bookings of a dead replica are held, and equal, until its lease ends."""
    for view in views:
        for peer, rounds in view.silent_peers.items():
            yield (
                f"{view.url} has not heard the replica {peer} for {rounds} rounds of its heartbeat:"
                " if it is dead, its bookings count until its lease ends"
            )


def _apart(key: FeedKey, track: _Track, standing: Mapping[str, Copy]) -> Iterator[str]:
    """Those that were never met at a frame where the first one was, not even through others."""
    first, *others = standing or [""]
    for url in others:
        if url in track.met.get(first, ()):
            continue
        here, there = (f"{standing[each].incarnation}:{standing[each].seq}" for each in (first, url))
        if first == AGENT and standing[url].seq > standing[first].seq:
            yield f"{key}: {url} is at frame {there}, which {AGENT} has not published: that is at {here}"
        else:
            yield f"{key}: {first} and {url} were never at the same frame (now {here} and {there})"


def _shown(content: Content) -> str:
    return ", ".join(f"{what} {count} ({digest})" for what, count, digest in content) or "nothing"
