"""`kvrouter index dump|diff`: reads GET /workers/ID/blocks of replicas, page by page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple, TextIO
from urllib.parse import quote

import aiohttp
import msgspec

from kvrouter.bounded_answers import no_answer
from kvrouter.config import read_key
from kvrouter.errors import KvRouterError, counted
from kvrouter.observe.verify.command import DIFFERENT, EQUAL, NOT_FOR_CLIENTS, UNUSABLE, WHERE_TO_ASK
from kvrouter.observe.verify.comparison import VerifyError
from kvrouter.observe.verify.index_settings import COMMAND, IndexSettings
from kvrouter.observe.verify.settings import ReplicaAccess
from kvrouter.settings.read import Loaded, run
from kvrouter.tls import trusting

# While events arrive, two replicas are never read at the same frame: what differs is looked at again.
_LOOK_EVERY_S = 0.2
_ANSWER_TIMEOUT_S = 30.0
_NO_WORKER = "the replica knows no such worker"
# Blocks of a target that diff names.
_NAMED = 5


class Block(NamedTuple):
    """A block in the index, as a line of `dump`."""

    target: str
    tier: str
    hash: str


class ReplicaIndex:
    """The index of one replica, over HTTP."""

    def __init__(self, http: aiohttp.ClientSession, url: str, tls_name: str | None) -> None:
        self.url = url
        self._http = http
        self._tls_name = tls_name

    async def state(self) -> dict[str, Any]:
        """/workers. Raises VerifyError."""
        return _decoded(b"".join([line async for line in self.lines("/workers")]), self.url)

    async def workers(self) -> list[str]:
        """The ids of all workers. Raises VerifyError."""
        return sorted({row["worker_id"] for row in (await self.state())["targets"]})

    async def blocks(self, worker_id: str) -> AsyncIterator[Block]:
        """The blocks of a worker. Raises VerifyError, also if an answer breaks off."""
        page: int | None = 0
        while page is not None:
            last: dict[str, Any] = {}
            path = f"/workers/{quote(worker_id, safe='')}/blocks?after={page}"
            async for line in self.lines(path):
                last = _decoded(line, self.url)
                for hash_ in last.get("hashes", ()):
                    yield Block(f"{worker_id}/{last['rank']}", last["tier"], hash_)
            if "next" not in last:
                raise VerifyError(f"{self.url}{path} broke off")
            page = last["next"]

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """The lines of an answer. Raises VerifyError."""
        try:
            async with self._http.get(f"{self.url}{path}", server_hostname=self._tls_name) as response:
                if response.status in NOT_FOR_CLIENTS:
                    why = _NO_WORKER if b"/workers lists them" in await response.read() else WHERE_TO_ASK
                    raise VerifyError(f"{self.url}{path} answers {response.status}: {why}")
                if response.status != 200:
                    raise VerifyError(f"{self.url}{path} answers {response.status}")
                rest = b""
                async for data, _ in response.content.iter_chunks():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield line
                if rest:
                    yield rest
        except (aiohttp.ClientError, TimeoutError) as error:
            raise VerifyError(f"{self.url} cannot be reached: {no_answer(error)}") from None


def _decoded(line: bytes, url: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise VerifyError(f"{url} does not answer in JSON: {error}") from None


@contextlib.asynccontextmanager
async def open_replicas(urls: Sequence[str], access: ReplicaAccess) -> AsyncIterator[list[ReplicaIndex]]:
    """The indexes of replicas. Raises ConfigError."""
    key = read_key("--admin-key-file", access.admin_key_file)
    connector = aiohttp.TCPConnector(ssl=trusting(access.tls_ca, "--tls-ca"))
    timeout = aiohttp.ClientTimeout(sock_connect=_ANSWER_TIMEOUT_S, sock_read=_ANSWER_TIMEOUT_S)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as http:
        yield [ReplicaIndex(http, url, access.tls_name) for url in urls]


async def dump(replica: ReplicaIndex, workers: Sequence[str], out: TextIO) -> None:
    """Write a line for each block of the workers; none: of all. Raises VerifyError."""
    for worker_id in workers or await replica.workers():
        async for block in replica.blocks(worker_id):
            out.write("\t".join(block) + "\n")


async def diff(
    first: ReplicaIndex, second: ReplicaIndex, workers: Sequence[str], timeout_s: float
) -> tuple[set[Block], set[Block]]:
    """The blocks that only the first replica has in every look, and those of the second.

    Looks until none is left or the time is up. Raises VerifyError.
    """
    end = time.monotonic() + timeout_s
    only_first, only_second = await _differences(first, second, workers)
    while (only_first or only_second) and time.monotonic() < end:
        await asyncio.sleep(_LOOK_EVERY_S)
        now = await _differences(first, second, workers)
        only_first, only_second = only_first & now[0], only_second & now[1]
    return only_first, only_second


async def _differences(
    first: ReplicaIndex, second: ReplicaIndex, workers: Sequence[str]
) -> tuple[set[Block], set[Block]]:
    one, two = await asyncio.gather(_all_blocks(first, workers), _all_blocks(second, workers))
    return one - two, two - one


async def _all_blocks(replica: ReplicaIndex, workers: Sequence[str]) -> set[Block]:
    return {
        block for worker_id in workers or await replica.workers() async for block in replica.blocks(worker_id)
    }


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
    except BrokenPipeError:  # | head; what Python flushes at its end goes nowhere, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EQUAL
    except (KvRouterError, OSError) as error:
        print(f"kvrouter index: {error}", file=sys.stderr)  # noqa: T201
        return UNUSABLE


async def _run(settings: IndexSettings) -> int:
    async with open_replicas(settings.replica, settings.access) as replicas:
        if settings.action == "dump":
            await dump(replicas[0], settings.worker, sys.stdout)
            sys.stdout.flush()
            return EQUAL
        first, second = replicas
        only = await diff(first, second, settings.worker, settings.timeout_s)
    lines = [*differences(first.url, only[0]), *differences(second.url, only[1])]
    print("\n".join(lines) or "equal")  # noqa: T201
    return DIFFERENT if lines else EQUAL
