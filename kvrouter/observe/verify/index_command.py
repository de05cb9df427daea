"""`kvrouter index dump|diff`: reads GET /workers/ID/blocks of replicas, page by page."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple, TextIO
from urllib.parse import quote

from msgspec import UNSET, Struct, UnsetType

from kvrouter.errors import KvRouterError, counted
from kvrouter.observe.output import forget_stdout
from kvrouter.observe.replica import ReplicaClient, ReplicaError, open_replicas
from kvrouter.observe.verify.command import DIFFERENT, EQUAL, UNUSABLE
from kvrouter.observe.verify.index_settings import COMMAND, IndexSettings
from kvrouter.settings.read import Loaded, run

# While events arrive, two replicas are never read at the same frame: what differs is looked at again.
_LOOK_EVERY_S = 0.2
# Blocks of a target that diff names.
_NAMED = 5


class Block(NamedTuple):
    """A block in the index, as a line of `dump`."""

    target: str
    tier: str
    hash: str


class _BlocksLine(Struct, frozen=True):
    """A line of /workers/ID/blocks. `next`: of the last one only, the next page; None: there is none."""

    rank: int = 0
    tier: str = ""
    hashes: list[str] = []
    next: int | UnsetType | None = UNSET


async def blocks_of(replica: ReplicaClient, workers: Sequence[str]) -> AsyncIterator[Block]:
    """The blocks of the workers; none: of all. Raises ReplicaError, also if an answer breaks off."""
    for worker_id in workers or sorted({row.worker_id for row in (await replica.workers()).targets}):
        page: int | None = 0
        while page is not None:
            path, line = f"/workers/{quote(worker_id, safe='')}/blocks?after={page}", _BlocksLine()
            for line in await replica.lines(path, _BlocksLine):
                for hash_ in line.hashes:
                    yield Block(f"{worker_id}/{line.rank}", line.tier, hash_)
            if line.next is UNSET:
                raise ReplicaError(f"{replica.url}{path} broke off")
            page = line.next


async def dump(replica: ReplicaClient, workers: Sequence[str], out: TextIO) -> None:
    """Write a line for each block of the workers; none: of all. Raises ReplicaError."""
    async for block in blocks_of(replica, workers):
        out.write("\t".join(block) + "\n")


async def diff(
    first: ReplicaClient, second: ReplicaClient, workers: Sequence[str], timeout_s: float
) -> tuple[set[Block], set[Block]]:
    """The blocks that only the first replica has in every look, and those of the second.

    Looks until none is left or the time is up. Raises ReplicaError.
    """
    end, only = time.monotonic() + timeout_s, None
    while True:
        one, two = await asyncio.gather(_all_blocks(first, workers), _all_blocks(second, workers))
        only = (one - two, two - one) if only is None else (only[0] & (one - two), only[1] & (two - one))
        if not any(only) or time.monotonic() >= end:
            return only
        await asyncio.sleep(_LOOK_EVERY_S)


async def _all_blocks(replica: ReplicaClient, workers: Sequence[str]) -> set[Block]:
    return {block async for block in blocks_of(replica, workers)}


def differences(url: str, blocks: Iterable[Block]) -> list[str]:
    """A line for each target of whose blocks only this replica has some."""
    by_target: dict[str, list[Block]] = {}
    for block in sorted(blocks):
        by_target.setdefault(block.target, []).append(block)
    return [
        f"{target}: {counted(len(found), 'block')} only in {url}: "
        + " ".join(f"{block.tier}:{block.hash}" for block in found[:_NAMED])
        + (" …" if len(found) > _NAMED else "")
        for target, found in by_target.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[IndexSettings]) -> int:
    try:
        return asyncio.run(_run(loaded.settings))
    except BrokenPipeError:  # as of `dump | head`
        forget_stdout()
        return EQUAL
    except (KvRouterError, OSError) as error:
        print(f"kvrouter index: {error}", file=sys.stderr)  # noqa: T201
        return UNUSABLE


async def _run(settings: IndexSettings) -> int:
    async with open_replicas(settings.replica, settings.access) as replicas:
        if settings.action == "dump":
            await dump(replicas[0], settings.worker, sys.stdout)
            sys.stdout.flush()  # here, where a closed pipe is caught
            return EQUAL
        first, second = replicas
        only = await diff(first, second, settings.worker, settings.timeout_s)
    lines = [*differences(first.url, only[0]), *differences(second.url, only[1])]
    print("\n".join(lines) or "equal")  # noqa: T201
    return DIFFERENT if lines else EQUAL
