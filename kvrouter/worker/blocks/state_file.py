"""The file in which an agent keeps its state: read once, replaced whole every few seconds.

A new file is written beside the old one and renamed over it, so whatever kills the agent, one of
the two is there and whole. It holds token ids (of blocks held back): only its owner may read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from kvrouter.worker.blocks.state import (
    AgentState,
    DamagedStateError,
    ForeignStateError,
    RankHead,
    decode_state,
    digest_of_file,
    encode_state,
)

log = structlog.get_logger()


class StateFile:
    """One agent's state file. A file that is somebody else's is left alone; a damaged one is replaced."""

    def __init__(self, path: Path, owner: str, writer: ThreadPoolExecutor) -> None:
        self._path = path
        self._owner = owner
        self._writer = writer
        self._is_ours = True
        self._has_failed = False
        self._written: tuple[RankHead, ...] | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, owner: str) -> Iterator[StateFile]:
        """At the end what is being written is finished. One thread: writes keep their order."""
        with ThreadPoolExecutor(1, thread_name_prefix="state") as writer:
            yield cls(path, owner, writer)

    def load(self) -> AgentState | None:
        """What the agent before left; None, and a word about it, if that cannot be used."""
        try:
            return decode_state(self._path.read_bytes(), self._owner)
        except FileNotFoundError:
            log.info("state.none", file=str(self._path))
        except DamagedStateError as error:
            log.warning("state.damaged", file=str(self._path), reason=str(error), next="starting without")
        except (ForeignStateError, OSError) as error:
            self._is_ours = False
            log.error(
                "state.refused",
                file=str(self._path),
                reason=str(error),
                next="starting without, and writing none: give another --state-file",
            )
        return None

    async def save(self, state: AgentState) -> None:
        """Replace the file. The state is encoded here in slices, and written by a thread."""
        heads = tuple(rank.head for rank in state.ranks.values())
        if not self._is_ours or heads == self._written:
            return
        pieces = []
        for piece in encode_state(state):
            pieces.append(piece)
            await asyncio.sleep(0)
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
    """Write a whole file beside the old one, then put it in its place."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.writelines(pieces)
        file.write(digest_of_file(pieces))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
