"""The feeds a replica follows: one reader each, and the replay requests they need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import ParamSpec, TypeVar

from kvrouter.core.feeds.lease import Leases
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.receipt import FAILED, REFUSED, UNKNOWN, FrameVerdict, Receipt
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.wire.heartbeats import Heard
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.ops import ReplayRequest
from kvrouter.core.wire.senders import Feed, KvSource, Source, SyncSource
from kvrouter.core.wire.values import MOST_AMOUNT

# The most feeds at a time; further ones are ignored. A reader takes about 3 KB before it holds anything, and
# anyone with permission to publish can name new feeds.
MOST_FEEDS = 65_536
# Of these, of peers' bookings: 32 replicas in 256 pools. A heartbeat of a peer visits all of its own.
MOST_SYNC_FEEDS = 8192
# The most feeds that keep a chunk of a snapshot in memory (512 KB and more) until it is loaded.
MOST_LOADING = 16
# Feeds of each kind that one look for questions visits: about 0.2 ms.
_VISITED_MOST = 256
_MOST_FAILURES = 100
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Following:
    """Readers by feed. Each has a lease; `new_reader` makes one without any state.

    Each step of a reader is guarded. If it raises, that is a bug here, triggered by a message. It breaks that
    feed only, and the shell logs it.

    Invariant: every reader that is not at rest is in `_restless`, or in `_silent` if its last question got no
    answer, or if it is a peer's and has answered none; every reader that loads is in `_loading`. `due` and
    `load` visit only these, of thousands, as they run many times a second.
    """

    def __init__(self, leases: Leases[Source], new_reader: Callable[[Feed], FeedReader]) -> None:
        self.readers: dict[Feed, FeedReader] = {}
        self._leases = leases
        self._new_reader = new_reader
        self._cancelled: list[Feed] = []
        self._restless: dict[Feed, FeedReader] = {}
        self._silent: dict[Feed, FeedReader] = {}
        self._loading: dict[Feed, FeedReader] = {}
        self._ranks: dict[WorkerId, set[KvSource]] = {}
        self._pools: dict[RouterId, set[SyncSource]] = {}
        self._sync_feeds = 0
        self._failures: deque[tuple[Feed, Exception]] = deque(maxlen=_MOST_FAILURES)

    # What arrives

    def heartbeat(
        self, source: Feed, incarnation: int, seq: int, interval_ms: int | None, now: float
    ) -> bool:
        """A heartbeat with the seq of the feed. The feed is followed from now on; False: there is no room."""
        reader = self.readers.get(source)
        if reader is None:
            if not self._has_room(source):
                return False
            reader = self._begin(source, self._new_reader(source))
            self._leases.renew(source)
        if self._step(source, reader, now, reader.heartbeat, incarnation, seq, now):
            self._leases.renew(source, interval_ms)
        self._look_at(source, reader)
        return True

    def kv_frame(self, source: KvSource, data: bytes, now: float) -> Receipt:
        """A frame of a worker's events; unknown if the worker's card is missing."""
        reader = self.readers.get(source)
        if reader is None:
            return UNKNOWN
        receipt = self._step(source, reader, now, reader.frame, data, now)
        self._look_at(source, reader)
        return receipt or FAILED

    def sync_frame(self, source: SyncSource, data: bytes, now: float) -> Receipt:
        """A frame of a peer's bookings.

        A frame may be the first message about a feed. Only a valid frame begins it: otherwise each forged
        replica id would leave a reader behind, and a line in the log.
        """
        reader = self.readers.get(source)
        if reader is None:
            if not self._has_room(source):
                return REFUSED
            reader = self._new_reader(source)
        receipt = self._step(source, reader, now, reader.frame, data, now) or FAILED
        if receipt.verdict is FrameVerdict.TAKEN:
            if source not in self.readers:
                self._begin(source, reader)
            self._leases.renew(source)
        elif source not in self.readers:
            return REFUSED
        self._look_at(source, reader)
        return receipt

    # What to do

    def due(self, now: float, most: int) -> list[tuple[Feed, ReplayRequest]]:
        """The replay requests to send now, at most `most`.

        Each call visits some feeds in turn, and those that have answered nothing last: invented ones, however
        many, neither delay the others nor take more time.
        """
        requests: list[tuple[Feed, ReplayRequest]] = []
        most = min(most, MOST_LOADING - sum(reader.is_loading for reader in self._loading.values()))
        for feeds in (self._restless, self._silent):
            for source, reader in list(islice(feeds.items(), _VISITED_MOST)):
                if len(requests) >= most:
                    return requests
                del feeds[source]
                request = self._step(source, reader, now, reader.due, now)
                if request is not None:
                    requests.append((source, request))
                if request is not None or not reader.is_at_rest:
                    feeds[source] = reader
        return requests

    def load(self, hashes: int, now: float) -> bool:
        """One slice of a snapshot, if one is being loaded."""
        for source, reader in list(self._loading.items()):
            if reader.is_loading:
                self._step(source, reader, now, reader.work, hashes, now)
                return True
            del self._loading[source]
        return False

    def answered(self, source: Feed, data: bytes, now: float) -> Receipt:
        """A request was answered; unknown if the source has left meanwhile."""
        reader = self.readers.get(source)
        if reader is None:
            return UNKNOWN
        receipt = self._step(source, reader, now, reader.answer, data, now) or FAILED
        if self._silent.pop(source, None) is not None:
            self._restless[source] = reader
        if reader.is_loading:
            self._loading[source] = reader
        return receipt

    def failed(self, source: Feed, now: float) -> None:
        """A request was not answered."""
        reader = self.readers.get(source)
        if reader is not None:
            reader.failed(now)
            if self._restless.pop(source, None) is not None:
                self._silent[source] = reader

    def heard(self) -> tuple[Heard, dict[RouterId, Heard]]:
        """How the workers' caches are followed, and each peer's bookings."""
        caches: list[FeedReader] = []
        bookings: dict[RouterId, list[FeedReader]] = {}
        for source, reader in self.readers.items():
            if isinstance(source, SyncSource):
                bookings.setdefault(source.router_id, []).append(reader)
            else:
                caches.append(reader)
        return _heard(caches), {router_id: _heard(readers) for router_id, readers in bookings.items()}

    @property
    def has_failed(self) -> bool:
        """Whether `take_failures` returns any."""
        return bool(self._failures)

    def take_failures(self) -> list[tuple[Feed, Exception]]:
        """Steps that have raised since the last call, the last hundred at most."""
        failures = list(self._failures)
        self._failures.clear()
        return failures

    def _step(  # a step is a callable and its arguments
        self,
        source: Feed,
        reader: FeedReader,
        now: float,
        step: Callable[_P, _R],
        *arguments: _P.args,
        **named: _P.kwargs,
    ) -> _R | None:
        try:
            return step(*arguments, **named)
        except Exception as error:
            self._failures.append((source, error))
            reader.break_down(now)
            return None

    # Ends

    def end(self, source: Feed) -> None:
        """Drop the reader. The next heartbeat begins a new one, which accepts any incarnation."""
        self._leases.forget(source)
        reader = self.readers.pop(source, None)
        for feeds in (self._restless, self._silent, self._loading):
            feeds.pop(source, None)
        if isinstance(source, KvSource):
            self._forget_rank(source)
        elif reader is not None:
            self._forget_pool(source)
        if reader is not None:
            reader.close()
            if reader.is_asking:
                self._cancelled.append(source)

    def end_worker(self, worker_id: WorkerId) -> None:
        """End the feeds of all its ranks."""
        self._end_all(self._ranks.get(worker_id, ()))

    def look_again(self, worker_id: WorkerId) -> None:
        """The worker's card may have changed."""
        for source in self._ranks.get(worker_id, ()):
            self.readers[source].look_again()

    def end_ranks(self, pool_id: PoolId, worker_id: WorkerId, ranks: int) -> None:
        """End the feeds of the ranks that a worker no longer has."""
        sources = self._ranks.get(worker_id, ())
        self._end_all(source for source in sources if source.pool == pool_id and source.rank >= ranks)

    def end_router(self, router_id: RouterId) -> set[PoolId]:
        """End a peer's feeds in all pools, and return these."""
        sources = list(self._pools.get(router_id, ()))
        self._end_all(sources)
        return {source.pool for source in sources}

    def end_pools(self, pools: Collection[PoolId]) -> None:
        """End the peers' feeds in pools that are gone."""
        if pools:
            self._end_all(source for source in self._sync() if source.pool in pools)

    def pools_with_bookings(self) -> set[PoolId]:
        """Pools in which a peer has had bookings, by its heartbeats."""
        return {source.pool for source in self._sync() if self.readers[source].source_seq}

    def take_cancelled(self) -> list[Feed]:
        """Feeds that ended while an answer was awaited, since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def _end_all(self, sources: Iterable[Feed]) -> None:
        for source in list(sources):
            self.end(source)

    def _begin(self, source: Feed, reader: FeedReader) -> FeedReader:
        self.readers[source] = reader
        if isinstance(source, KvSource):
            self._ranks.setdefault(source.worker_id, set()).add(source)
        else:
            self._pools.setdefault(source.router_id, set()).add(source)
            self._sync_feeds += 1
        return reader

    def _has_room(self, source: Feed) -> bool:
        has_room = len(self.readers) < MOST_FEEDS
        return has_room and (isinstance(source, KvSource) or self._sync_feeds < MOST_SYNC_FEEDS)

    def _forget_rank(self, source: KvSource) -> None:
        ranks = self._ranks.get(source.worker_id, set())
        ranks.discard(source)
        if not ranks:
            self._ranks.pop(source.worker_id, None)

    def _forget_pool(self, source: SyncSource) -> None:
        self._sync_feeds -= 1
        feeds = self._pools[source.router_id]
        feeds.discard(source)
        if not feeds:
            del self._pools[source.router_id]

    def _look_at(self, source: Feed, reader: FeedReader) -> None:
        """After each message. An answer needs no call: a feed that awaits one is restless."""
        if reader.is_at_rest or source in self._silent:
            return
        is_claim = isinstance(source, SyncSource) and not reader.has_answered
        (self._silent if is_claim else self._restless)[source] = reader

    def _sync(self) -> Iterator[SyncSource]:
        return (source for sources in self._pools.values() for source in sources)


def _heard(readers: Sequence[FeedReader]) -> Heard:
    # A forged heartbeat makes any lag: within the range of the wire, or peers would refuse ours.
    return Heard(
        feeds=len(readers),
        live=sum(reader.state is FeedState.LIVE for reader in readers),
        lag=min(sum(reader.lag for reader in readers), MOST_AMOUNT),
        mismatches=sum(reader.counters.digest_mismatches for reader in readers),
    )
