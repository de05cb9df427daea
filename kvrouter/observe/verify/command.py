"""`kvrouter verify` on the command line: compares until the result is certain, and prints it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from rich.console import Console
from rich.table import Table

from kvrouter.config import read_key
from kvrouter.errors import KvRouterError, counted
from kvrouter.observe.engine import EngineAccess
from kvrouter.observe.output import console
from kvrouter.observe.replica import ReplicaClient, ReplicaError, open_replicas
from kvrouter.observe.settings import ReplicaAccess
from kvrouter.observe.verify.comparison import Comparison, Report, Row, VerifyError, View, read_view
from kvrouter.observe.verify.owners import Owners
from kvrouter.observe.verify.settings import COMMAND, VerifySettings
from kvrouter.settings.read import Loaded, run

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
# Under traffic two replicas are at the same frame only for moments, so looks are frequent. A look at the
# owners requests every new frame of every agent.
_LOOK_EVERY_S, _LOOK_AT_OWNERS_EVERY_S = 0.02, 0.1
_ANSWER_TIMEOUT_S = 5.0


async def compare(
    urls: Sequence[str],
    *,
    timeout_s: float,
    access: ReplicaAccess = ReplicaAccess(),  # noqa: B008  # frozen
    owners: Owners | None = None,
    rest: float = 0.0,
) -> Report:
    """Look at the replicas until they are equal, certainly different, or the time is up.

    With `owners`, agents and engines are compared as well. `rest`: wait at least so many times as long as
    the look took, which is work for the replicas. Raises VerifyError.
    """
    comparison, looks, started = Comparison(), 0, time.monotonic()
    async with open_replicas(urls, access) as replicas:
        while True:
            looked_at = time.monotonic()
            comparison.add(await asyncio.gather(*map(_look, replicas)))
            if owners is not None:
                comparison.add_owners(await owners.look())
            looks += 1
            seconds = time.monotonic() - started
            if comparison.differences or seconds >= timeout_s or not comparison.pending():
                return comparison.report(looks, seconds)
            every_s = _LOOK_EVERY_S if owners is None else _LOOK_AT_OWNERS_EVERY_S
            await asyncio.sleep(max(every_s, rest * (time.monotonic() - looked_at)))


async def _look(replica: ReplicaClient) -> View:
    try:
        return read_view(replica.url, await replica.workers(_ANSWER_TIMEOUT_S))
    except ReplicaError as error:
        raise VerifyError(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    return run(COMMAND, arguments, compare_and_print)


def compare_and_print(loaded: Loaded[VerifySettings]) -> int:
    """Return the exit code."""
    settings = loaded.settings
    try:
        report = asyncio.run(_compare(settings))
        if settings.json is not None:  # first: without the file nothing is printed
            settings.json.write_text(as_json(report))
    except (KvRouterError, OSError) as error:
        print(f"kvrouter verify: {error}", file=sys.stderr)  # noqa: T201
        return UNUSABLE
    show(console(), report)
    return EQUAL if report.is_equal else DIFFERENT


async def _compare(settings: VerifySettings) -> Report:
    async with contextlib.AsyncExitStack() as stack:
        owners = None
        if settings.owners:
            access = EngineAccess(
                read_key("--engine-api-key-file", settings.engine_api_key_file),
                settings.worker_tls_ca,
                dict(settings.kv_replay),
            )
            opening = Owners.open(settings.bus.nats, settings.bus.namespace, access)
            owners = await stack.enter_async_context(opening)
        return await compare(settings.replica, timeout_s=settings.timeout_s, access=settings, owners=owners)


def show(console: Console, report: Report) -> None:
    """Print the table, the differences and the result."""
    table = Table("feed", "frame", "held", "replicas")
    asks_owners = any(row.agent for row in report.rows)
    for name in ("agent", "engine") if asks_owners else ():
        table.add_column(name)
    for row in report.rows:
        held = "\n".join(f"{what} {count:,} {digest}" for what, count, digest in row.content)
        verdicts = [_verdict(row), row.agent, row.engine] if asks_owners else [_verdict(row)]
        table.add_row(row.feed, str(row.seq), held, *map(_coloured, verdicts))
    console.print(table)
    for text in report.differences:
        console.print(f"different: {text}", markup=False, highlight=False, soft_wrap=True)
    for text in report.notes:
        console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
    replicas, looks = counted(len(report.replicas), "replica"), counted(report.looks, "look")
    looked = f"{replicas}, {looks} in {report.seconds:.2f} s"
    console.print(f"{'equal' if report.is_equal else 'different'}: {looked}", highlight=False)


def _verdict(row: Row) -> str:
    if not row.is_equal:
        return "different"
    return "equal" if row.parties > 1 else "only one"


def _coloured(verdict: str | None) -> str:
    return "[bold red]different[/]" if verdict == "different" else verdict or ""


def as_json(report: Report) -> str:
    """The report as JSON."""
    return msgspec.json.format(
        msgspec.json.encode({"equal": report.is_equal, **asdict(report)}), indent=2
    ).decode()
