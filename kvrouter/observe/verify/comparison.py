"""`kvrouter verify`: whether live replicas hold the same blocks and the same bookings.

    /workers of each replica, again and again ──> Views ──> Comparison ──> Report

The views are of different moments, and traffic goes on between them. Two replicas can be compared only as of
the same frame of the same feed: (incarnation, seq). Under live traffic two readers are at the same frame
often, but only for moments, so the comparison looks until each replica has shared a frame with another. A
replica that never shares a frame, or stays behind, is reported at the end; different contents at the same
frame are reported at once.

With `--owners` the agents are one more party (see agents.py), whose content is known at every frame; and each
agent is compared with its engine (see engines.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from kvrouter.errors import KvRouterError
from kvrouter.observe.document import Workers

# A replica whose heartbeat arrives in every round is silent for 0 or 1 rounds.
_SILENT_ROUNDS = 2
# The party that publishes a target's blocks.
AGENT = "its agent"

Verdict: TypeAlias = Literal["equal", "different", "equal in part", "not checked"]
EQUAL: Verdict = "equal"
DIFFERENT: Verdict = "different"
IN_PART: Verdict = "equal in part"
NOT_CHECKED: Verdict = "not checked"

# The set behind the tiers, of an engine with several KV groups only.
RESUME_POINTS = "resume points"

# (name, count, digest) of every set that a feed fills.
Content: TypeAlias = tuple[tuple[str, int, str], ...]
_NO_BOOKINGS: Content = (("bookings", 0, f"{0:016x}"),)


class VerifyError(KvRouterError):
    """The replicas cannot be compared."""


class FeedKey(NamedTuple):
    """A feed: of kind kv its `owner` is a target, of kind sync a replica."""

    kind: str
    pool: str
    owner: str

    def __str__(self) -> str:
        return f"{'blocks' if self.kind == 'kv' else 'bookings'} of {self.owner} in {self.pool}"


@dataclass(frozen=True, slots=True)
class Copy:
    """A replica's copy of one feed, as of a frame."""

    incarnation: int
    seq: int
    content: Content
    lag: int = 0
    # Why the content does not count now; empty if it counts.
    problem: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """The compared parts of one replica's /workers."""

    url: str
    router_id: str
    is_synced: bool
    peers: frozenset[str]
    block_sizes: Mapping[str, int]
    # Its own feeds included: the owner is a party like the others.
    copies: Mapping[FeedKey, Copy]
    # Peers whose heartbeats are missing -> the number of rounds without one.
    silent_peers: Mapping[str, int]


def read_view(url: str, shown: Workers) -> View:
    """What is compared of /workers."""
    silent = {peer.router_id: peer.silent_rounds for peer in shown.peers}
    return View(
        url,
        shown.router_id,
        shown.replica_sync,
        frozenset(shown.namespace_peers),
        {pool.pool: pool.block_size for pool in shown.pools},
        dict(_copies(shown)),
        {router_id: rounds for router_id, rounds in silent.items() if rounds >= _SILENT_ROUNDS},
    )


def _copies(shown: Workers) -> Iterator[tuple[FeedKey, Copy]]:
    contents = dict(_contents(shown))
    for feed in shown.feeds:
        key = FeedKey(feed.kind, feed.pool, feed.owner)
        problem = feed.state if feed.state != "live" else feed.flag
        content = contents.get(key, _NO_BOOKINGS if key.kind == "sync" else ())
        yield key, Copy(feed.incarnation, feed.last_seq, content, feed.lag, problem)
    for booked in shown.bookings if shown.replica_sync else ():
        key = FeedKey("sync", booked.pool, shown.router_id)
        own = booked.own_feed
        yield key, Copy(own.incarnation, own.seq, contents.get(key, _NO_BOOKINGS))


def _contents(shown: Workers) -> Iterator[tuple[FeedKey, Content]]:
    for target in shown.targets:
        key = FeedKey("kv", target.pool, f"{target.worker_id}/{target.rank}")
        content = [(each.tier, each.blocks, each.digest) for each in target.tiers]
        if (points := target.resume_points) is not None:
            content.append((RESUME_POINTS, points.blocks, points.digest))
        yield key, tuple(content)
    for booked in shown.bookings:
        for owner, held in booked.owners.items():
            yield FeedKey("sync", booked.pool, owner), (("bookings", held.count, held.digest),)


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The comparison of an agent with the events of its engine."""

    verdict: Verdict
    # What differs, or what was not compared and why.
    texts: Sequence[str] = ()

    @property
    def is_final(self) -> bool:
        """Whether no further look is needed. A difference may disappear: an agent needs time to publish."""
        return self.verdict != DIFFERENT


@dataclass(frozen=True, slots=True)
class OwnersView:
    """One look at the owners of blocks."""

    # The contents of agents at each frame since the look before. The last copy of a feed is the present one.
    copies: Sequence[tuple[FeedKey, Copy]]
    engines: Mapping[FeedKey, EngineCheck]
    # Behaviour that no correct agent shows.
    errors: Sequence[str]


@dataclass(frozen=True, slots=True)
class Row:
    """One feed in the result. `seq` is the newest frame at which two parties were compared; 0: none."""

    feed: str
    incarnation: int
    seq: int
    content: Content
    is_equal: bool
    # The number of replicas with the same content, plus one for the agent if it takes part.
    parties: int
    # None: without --owners.
    agent: Verdict | None = None
    engine: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a comparison."""

    replicas: dict[str, str]  # URL -> router id
    rows: list[Row]
    differences: list[str]
    # What may change soon, or was not compared, although nothing differs.
    notes: list[str]
    looks: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether every feed was compared, and nothing differed."""
        return not self.differences


@dataclass(slots=True)
class _Track:
    """The frames of one feed at which replicas were seen, in its latest incarnation."""

    incarnation: int = 0
    seen: dict[int, dict[str, Content]] = field(default_factory=dict)  # seq -> URL -> content
    # URL -> the replicas that are known to be equal to it, directly or through others.
    met: dict[str, set[str]] = field(default_factory=dict)
    in_step: set[str] = field(default_factory=set)
    last: tuple[int, Content] = (0, ())
    differs: bool = False

    def note(self, url: str, copy: Copy) -> list[str]:
        """Note a replica's copy; returns the replicas with another content at the same frame."""
        if copy.incarnation > self.incarnation:
            self.incarnation = copy.incarnation
            self.seen, self.met, self.in_step, self.last = {}, {}, set(), (0, ())
        if copy.problem or copy.incarnation < self.incarnation:
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
    """Without wider tier sets that add no block: only readers whose ops named such a tier keep them."""
    if content and content[-1][0] == RESUME_POINTS:
        return (*_distinct(content[:-1]), content[-1])
    if len(content) > 1 and content[-1][1:] == content[-2][1:]:
        return _distinct(content[:-1])
    return content


class Comparison:
    """What is known of the replicas so far. Pure: it takes views and returns texts."""

    def __init__(self) -> None:
        # Certain ones: other contents at the same frame, or errors of an agent.
        self.differences: list[str] = []
        self._tracks: dict[FeedKey, _Track] = {}
        self._latest: dict[str, View] = {}
        # The present contents of agents; None: without --owners.
        self._owned: dict[FeedKey, Copy] | None = None
        self._engines: Mapping[FeedKey, EngineCheck] = {}

    def add(self, views: Sequence[View]) -> None:
        """Take one look at all replicas. Raises VerifyError unless each URL leads to a different replica."""
        for view in views:
            known = self._latest.setdefault(view.url, view)
            if known.router_id != view.router_id:
                raise VerifyError(
                    f"{view.url} answers as {known.router_id} and as {view.router_id}: it was restarted,"
                    " or several processes share the port (give the --admin-port of each)"
                )
            self._latest[view.url] = view
        if len({view.router_id for view in views}) < len(views):
            raise VerifyError(f"two URLs lead to the same replica: {', '.join(view.url for view in views)}")
        for view in views:
            for key, copy in view.copies.items():
                self._note(key, view.url, copy)

    def add_owners(self, view: OwnersView) -> None:
        """Take one look at agents and engines, made after the look at the replicas."""
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
        """The reasons why the replicas do not count as equal yet; under traffic they may disappear."""
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
        published = {key for key, copy in (self._owned or {}).items() if not copy.problem}
        return sorted(followed | published)

    def _pending(self, key: FeedKey, views: Sequence[View]) -> Iterator[str]:
        track, standing = self._tracks[key], dict[str, Copy]()
        if self._owned is not None and key.kind == "kv":
            owned = self._owned.get(key)
            if owned is None:
                yield f"{key}: no agent announces them"
            elif owned.problem:
                yield f"{key}: {AGENT}: {owned.problem}"
            else:
                standing[AGENT] = owned
        for view in views:
            copy = view.copies.get(key)
            if key.kind == "sync" and not view.is_synced:
                yield f"{key}: {view.url} runs without --router-replica-sync, so it does not follow them"
            elif copy is None:
                yield f"{key}: {view.url} does not follow them"
            elif copy.problem:
                yield f"{key}: at {view.url}: {copy.problem}, {copy.lag} frames behind"
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
                yield f"{key}: their owner was not compared: give it as a --replica, too"


def _strangers(views: Sequence[View]) -> Iterator[str]:
    """Settings that must be equal before contents can be."""
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
    """Bookings of a dead replica are kept, and are equal, until its lease ends."""
    for view in views:
        for peer, rounds in view.silent_peers.items():
            yield (
                f"{view.url} has not received a heartbeat of the replica {peer} for {rounds} rounds:"
                " if it is dead, its bookings count until its lease ends"
            )


def _apart(key: FeedKey, track: _Track, standing: Mapping[str, Copy]) -> Iterator[str]:
    """Parties that never shared a frame with the first one, neither directly nor through others."""
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
