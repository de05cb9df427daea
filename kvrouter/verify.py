"""`kvrouter verify`: whether live replicas hold the same blocks and the same bookings.

    /workers of each replica, again and again ──> Views ──> Comparison ──> Report

Each view is of one moment, but not all of the same one, and traffic goes on meanwhile. What may be
compared is what two replicas hold as of the same frame of the same feed: (incarnation, seq). Under
live traffic two readers stand at the same frame often, if only for moments, so one looks until each
replica has been met at a common frame. A replica that is never met there, or stays behind, is
reported when the time is up; different contents at the same frame are reported at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from kvrouter.config import up_to_a_day
from kvrouter.errors import KvRouterError
from kvrouter.tls import trusting

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
_LOOK_EVERY_S = 0.02
_ANSWER_TIMEOUT_S = 5.0
_SILENT_ROUNDS = 2
"""A replica that is heard in every round is silent for 0 or 1 of them."""
_PIPE_WIDTH = 160
"""Columns where no terminal says how many it has: 80 would break digests."""

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
class Row:
    """One feed in the result. `seq` is the newest frame at which two replicas were compared; 0: none."""

    feed: str
    incarnation: int
    seq: int
    content: Content
    is_equal: bool


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
        different = [other for other, content in here.items() if content != copy.content]
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


class Comparison:
    """What is known of the replicas so far. Pure: views go in, words come out."""

    def __init__(self) -> None:
        self.differences: list[str] = []
        """Certain: other contents at the same frame, or settings that exclude agreement."""
        self._tracks: dict[FeedKey, _Track] = {}
        self._latest: dict[str, View] = {}

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
            self._note(view)

    def _note(self, view: View) -> None:
        for key, copy in view.copies.items():
            for other in self._tracks.setdefault(key, _Track()).note(view.url, copy):
                held = self._tracks[key].seen[copy.seq]
                text = (
                    f"{key}, as of frame {copy.incarnation}:{copy.seq}: {other} holds"
                    f" {_shown(held[other])}, {view.url} {_shown(copy.content)}"
                )
                self.differences.append(text)

    def pending(self) -> list[str]:
        """What keeps the replicas from being found equal now; under traffic it may pass."""
        views = list(self._latest.values())
        keys = sorted({key for view in views for key in view.copies})
        return [*_strangers(views), *(text for key in keys for text in self._pending(key, views))]

    def _pending(self, key: FeedKey, views: Sequence[View]) -> Iterator[str]:
        track, standing = self._tracks[key], dict[str, Copy]()
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
        unsettled = {key for key in self._tracks if any(self._pending(key, views))}
        rows = []
        for key in sorted({key for view in views for key in view.copies}):
            track = self._tracks[key]
            is_equal = not track.differs and key not in unsettled
            rows.append(Row(str(key), track.incarnation, *track.last, is_equal))
        differences = [*self.differences, *self.pending()]
        replicas = {view.url: view.router_id for view in views}
        return Report(replicas, rows, differences, list(_silences(views)), looks, seconds)


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
        if url not in track.met.get(first, ()):
            places = [f"{standing[each].incarnation}:{standing[each].seq}" for each in (first, url)]
            yield f"{key}: {first} and {url} were never at the same frame (now {' and '.join(places)})"


def _shown(content: Content) -> str:
    return ", ".join(f"{what} {count} ({digest})" for what, count, digest in content) or "nothing"


async def compare(
    urls: Sequence[str], *, timeout_s: float, tls_ca: Path | None = None, tls_name: str | None = None
) -> Report:
    """Look at the replicas until they are found equal or different. Raises VerifyError."""
    comparison, looks, started = Comparison(), 0, time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(ssl=trusting(tls_ca, "--tls-ca"))
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        while True:
            comparison.add(await asyncio.gather(*(_look(http, url, tls_name) for url in urls)))
            looks += 1
            seconds = time.monotonic() - started
            if comparison.differences or seconds >= timeout_s or not comparison.pending():
                return comparison.report(looks, seconds)
            await asyncio.sleep(_LOOK_EVERY_S)


async def _look(http: aiohttp.ClientSession, url: str, tls_name: str | None) -> View:
    try:
        async with http.get(f"{url}/workers", server_hostname=tls_name) as response:
            body = await response.read()
            if response.status != 200:
                raise VerifyError(f"{url}/workers answers {response.status}")
        return read_view(url, msgspec.json.decode(body, type=dict[str, Any]))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise VerifyError(f"{url} cannot be reached: {error or type(error).__name__}") from None
    except msgspec.DecodeError as error:
        raise VerifyError(f"{url}/workers is not JSON: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and say it in the exit code."""
    flags = _parser().parse_args(arguments)
    urls = [_url(text) for text in flags.replica]
    try:
        if len(set(urls)) < max(2, len(urls)):
            raise VerifyError("give two different replicas or more: --replica URL --replica URL")
        report = asyncio.run(
            compare(urls, timeout_s=flags.timeout, tls_ca=flags.tls_ca, tls_name=flags.tls_name)
        )
        if flags.json is not None:
            flags.json.write_text(as_json(report))
    except (KvRouterError, OSError) as error:
        print(f"kvrouter verify: {error}", file=sys.stderr)  # noqa: T201
        return UNUSABLE
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    show(Console(width=None if is_wide else _PIPE_WIDTH), report)
    return EQUAL if report.is_equal else DIFFERENT


def show(console: Console, report: Report) -> None:
    """The table, then the differences or the verdict."""
    table = Table("feed", "frame", "held", "")
    for row in report.rows:
        held = "\n".join(f"{what} {count:,} {digest}" for what, count, digest in row.content)
        table.add_row(row.feed, str(row.seq), held, "equal" if row.is_equal else "[bold red]different[/]")
    console.print(table)
    for text in report.differences:
        console.print(f"different: {text}", markup=False, highlight=False, soft_wrap=True)
    for text in report.notes:
        console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    looked = f"{len(report.replicas)} replicas, {report.looks} looks in {report.seconds:.2f} s"
    console.print(f"{'equal' if report.is_equal else 'different'}: {looked}", highlight=False)


def as_json(report: Report) -> str:
    """The same for machines."""
    return msgspec.json.format(
        msgspec.json.encode({"equal": report.is_equal, **asdict(report)}), indent=2
    ).decode()


def _url(text: str) -> str:
    return (text if "://" in text else f"http://{text}").rstrip("/")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrouter verify",
        description="Compare the blocks and bookings that live replicas hold, also under traffic.",
        epilog="Exit code 0: equal; 1: different; 2: a replica cannot be reached, or wrong flags.",
    )
    add = parser.add_argument
    add("--replica", action="append", default=[], metavar="URL", help="a frontend; at least two")
    add("--timeout", type=up_to_a_day, default=15.0, metavar="S", help="how long to look (%(default)s)")
    add("--tls-ca", type=Path, metavar="FILE", help="authorities trusted beside the system's, for https://")
    add("--tls-name", metavar="NAME", help="name in the certificates, where it is not the URLs'")
    add("--json", type=Path, metavar="FILE", help="write the result there, too")
    return parser
