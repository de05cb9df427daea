"""Writes stored and removed blocks down as ops: neighbours share one op."""

from __future__ import annotations

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import MAX_FRAME_HASHES, Cleared, Op, Removed, Stored


class OpWriter:
    """Collects single steps in order; a Stored op is one chain, a Removed op one tier."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._run: list[int] = []
        self._tier = 0
        self._parent: int | None = None
        self._is_storing = False

    def store(self, tier: int, parent: int | None, sequence: int) -> None:
        """Add a block below `parent`: to the open chain if it goes on from there."""
        run = self._run
        goes_on = run and run[-1] == parent and self._is_storing and self._tier == tier
        if not goes_on or len(run) >= MAX_FRAME_HASHES:
            self._end_run()
            self._is_storing, self._tier, self._parent = True, tier, parent
        self._run.append(sequence)

    def remove(self, tier: int, sequence: int) -> None:
        """Take a block out of `tier` and all narrower ones."""
        goes_on = not self._is_storing and self._tier == tier
        if not goes_on or len(self._run) >= MAX_FRAME_HASHES:
            self._end_run()
            self._is_storing, self._tier = False, tier
        self._run.append(sequence)

    def clear(self) -> None:
        """Take out everything; what was written before no longer matters."""
        self._run = []
        self._ops = [Cleared()]

    def take(self) -> list[Op]:
        """What was written since the last time."""
        self._end_run()
        ops, self._ops = self._ops, []
        return ops

    def _end_run(self) -> None:
        run, self._run = self._run, []
        if not run:
            return
        hashes = pack_hashes(run)
        self._ops.append(
            Stored(self._tier, self._parent, hashes) if self._is_storing else Removed(self._tier, hashes)
        )
