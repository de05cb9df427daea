"""The saved state of an agent: its bytes, and the file (docs/concepts/design.md#agent-state).

    magic │ u32 length, record │ u32 length, record │ … │ xxh3_128 of everything before
            Header
Records are msgpack. Each is encoded in well under a millisecond, from an image that no longer changes, and
other tasks run in between: so a large table never delays a heartbeat.

The file is read once at the start, and replaced as a whole every few seconds. The new file is written under
another name and then renamed, so a complete file exists at every moment, also if the agent is killed. It
contains token ids (of blocks held back), so only its owner may read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import structlog
from msgspec import Struct
from xxhash import xxh3_128

from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.errors import KvRouterError
from kvrouter.worker.blocks.engine_blocks import BlocksImage, EngineHash, Held, Known
from kvrouter.worker.blocks.resume_points import GroupImage

MAGIC = b"kvrouter agent state\n"
VERSION = 1
# A record of this size is encoded in well under a millisecond.
ROWS_PER_RECORD = 1000
_DIGEST_BYTES = 16


class ForeignStateError(KvRouterError):
    """The file belongs to another agent, or is not an agent's state."""


class DamagedStateError(KvRouterError):
    """The file is an agent's state, but it cannot be used."""


class Header(Struct, frozen=True, array_like=True, tag=0):
    """The owner of the state. `incarnation` is the greatest one that this agent and its feeds have used."""

    version: int
    owner: str
    engine_started_s: float
    incarnation: int


class RankHead(Struct, frozen=True, array_like=True, tag=1):
    """One rank as of the engine's batch `seq`, whose bytes have `digest`. EngineRank explains the rest."""

    rank: int
    seq: int
    digest: bytes
    is_complete: bool
    is_whole: bool
    is_mended: bool
    # Only the release before this one sets these two: its frontends asked vLLM to announce reused blocks.
    expects_reports: bool
    removals: int
    group: int | None
    first_ts: float | None
    event_block_size: int
    lookahead: int = 0


class KnownRows(Struct, frozen=True, array_like=True, tag=2):
    """Some of the known blocks of the rank of the RankHead before."""

    rows: Sequence[tuple[EngineHash, Known]]


class HeldRows(Struct, frozen=True, array_like=True, tag=3):
    """Some of the blocks that this rank holds back."""

    rows: Sequence[tuple[EngineHash, Held]]


class GroupRows(Struct, frozen=True, array_like=True, tag=4):
    """One of its KV groups besides the published one: some engine hashes, with their references."""

    group: int
    needed: int
    rows: Sequence[tuple[EngineHash, int]]


_Record: TypeAlias = Header | RankHead | KnownRows | HeldRows | GroupRows
_encode = msgspec.msgpack.Encoder().encode
_decode_record: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(_Record)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's table and position."""

    head: RankHead
    image: BlocksImage


@dataclass(frozen=True, slots=True)
class AgentState:
    """All ranks of an agent that have applied a batch, by number."""

    header: Header
    ranks: Mapping[int, RankState] = field(default_factory=dict)


def encode_state(state: AgentState) -> Iterator[bytes]:
    """The file without its last 16 bytes, in small pieces."""
    yield MAGIC
    for record in _records(state):
        data = _encode(record)
        yield len(data).to_bytes(4, "little") + data


def digest_of_file(pieces: Iterable[bytes]) -> bytes:
    """The last 16 bytes of the file."""
    digest = xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def decode_state(data: bytes, owner: str) -> AgentState:
    """Decode a file. Raises ForeignStateError if it is not `owner`'s, DamagedStateError if it is unusable."""
    if not data.startswith(MAGIC[: len(data)]):  # a file cut off inside the magic is damaged, not foreign
        raise ForeignStateError("it does not begin like an agent's state")
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest_of_file([body]) != digest:
        raise DamagedStateError(f"the digest at its end is not that of its {len(data)} bytes")
    try:
        records = [_decode_record.decode(record) for record in _cut(body)]
    except UNREADABLE as error:
        raise DamagedStateError(f"a record cannot be read: {error}") from None
    if not records or not isinstance(records[0], Header) or records[0].version != VERSION:
        raise DamagedStateError(f"its version is not {VERSION}")
    if records[0].owner != owner:
        raise ForeignStateError(f"it belongs to {records[0].owner!r}, and this agent is {owner!r}")
    return AgentState(records[0], _gather(records[1:]))


def _records(state: AgentState) -> Iterator[_Record]:
    yield state.header
    for rank in state.ranks.values():
        yield rank.head
        for known in _slices(rank.image.known):
            yield KnownRows(known)
        for held in _slices(rank.image.held):
            yield HeldRows(held)
        for number, group in rank.image.groups.items():
            yield GroupRows(number, group.needed, ())  # also a group without a block counts
            for refs in _slices(group.refs):
                yield GroupRows(number, group.needed, refs)


def _slices(table: Mapping[EngineHash, _V]) -> Iterator[list[tuple[EngineHash, _V]]]:
    rows = iter(table.items())
    while part := list(islice(rows, ROWS_PER_RECORD)):
        yield part


def _cut(body: bytes) -> Iterator[memoryview]:
    view, start = memoryview(body), len(MAGIC)
    while start < len(body):
        end = start + 4 + int.from_bytes(view[start : start + 4], "little")
        yield view[start + 4 : end]
        start = end


def _gather(records: Sequence[_Record]) -> dict[int, RankState]:
    ranks: dict[int, RankState] = {}
    image = BlocksImage({}, {})
    for record in records:
        match record:
            case RankHead():
                image = BlocksImage({}, {})
                ranks[record.rank] = RankState(record, image)
            case KnownRows():
                image.known.update(record.rows)
            case HeldRows():
                image.held.update(record.rows)
            case GroupRows():
                group = image.groups.setdefault(record.group, GroupImage(record.needed, {}))
                group.refs.update(record.rows)
            case _:
                raise DamagedStateError("it has two headers")
    return ranks


log = structlog.get_logger()


class StateFile:
    """One agent's state file. The file of another agent is never changed; a damaged one is replaced."""

    def __init__(self, path: Path, owner: str, writer: ThreadPoolExecutor) -> None:
        self._path = path
        self._owner = owner
        self._writer = writer
        self._is_writable = True
        self._has_failed = False
        self._written: tuple[RankHead, ...] | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, owner: str) -> Iterator[StateFile]:
        """The block ends after the last write. A single thread keeps writes in order."""
        with ThreadPoolExecutor(1, thread_name_prefix="state") as writer:
            yield cls(path, owner, writer)

    def read(self) -> AgentState | None:
        """The saved state; None, and a log entry, without a usable one."""
        try:
            return decode_state(self._path.read_bytes(), self._owner)
        except FileNotFoundError:
            log.info("state.none", file=str(self._path))
        except DamagedStateError as error:
            log.warning("state.damaged", file=str(self._path), reason=str(error), next="starting without it")
        except (ForeignStateError, OSError) as error:
            self._is_writable = False
            log.error(
                "state.rejected",
                file=str(self._path),
                reason=str(error),
                next="starting without it, and writing none: give another --state-file",
            )
        return None

    async def save(self, state: AgentState) -> None:
        """Replace the file, if the state has changed. Errors are logged, the first in a row only."""
        heads = tuple(rank.head for rank in state.ranks.values())
        if not self._is_writable or heads == self._written:
            return
        pieces = []
        for piece in encode_state(state):
            pieces.append(piece)
            await asyncio.sleep(0)  # other tasks run between two records
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, replace_file, self._path, pieces)
        except OSError as error:
            self._fail(error)
        else:
            self._written, self._has_failed = heads, False

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            log.error("state.not_written", file=str(self._path), reason=str(error))
        self._has_failed = True


def replace_file(path: Path, pieces: Sequence[bytes]) -> None:
    """Write a complete file under another name, then rename it to `path`."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.writelines(pieces)
        file.write(digest_of_file(pieces))
        file.flush()
        os.fsync(file.fileno())  # before the rename: after a power cut the new name could have no content
    fresh.replace(path)
