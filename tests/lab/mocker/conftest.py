"""Fixtures of the mocker's tests: a naive reader of KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from kvrouter.lab.mocker.events import CPU, GPU, KvEvent, RemovedBlocks, StoredBlocks


class Shadow:
    """A cache rebuilt from events alone, as a careful reader would: one reference per physical block.

    It raises as soon as an event leaves a block whose parent is in neither tier.
    """

    def __init__(self) -> None:
        self.copies: dict[str, Counter[int]] = {GPU: Counter(), CPU: Counter()}
        self.parents: dict[int, int | None] = {}

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Apply a batch, with a check after every event."""
        for event in events:
            self._apply(event)
            self.check()

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, StoredBlocks):
            self._store(event)
        elif isinstance(event, RemovedBlocks):
            for engine_hash in event.block_hashes:
                self._remove(event.medium or GPU, engine_hash)
        else:
            for tier in self.copies.values():
                tier.clear()

    def _store(self, event: StoredBlocks) -> None:
        parent = event.parent_block_hash
        for engine_hash in event.block_hashes:
            self.parents[engine_hash] = parent
            self.copies[event.medium or GPU][engine_hash] += 1
            parent = engine_hash

    def _remove(self, medium: str, engine_hash: int) -> None:
        copies = self.copies[medium]
        assert copies[engine_hash] > 0, "removed what was not there"
        copies[engine_hash] -= 1
        if not copies[engine_hash]:
            del copies[engine_hash]

    def check(self) -> None:
        """Each tier set is closed: device, and device with host."""
        for held in (self.device, self.device | self.host):
            assert all(self.parents[engine_hash] in held | {None} for engine_hash in held)

    @property
    def device(self) -> set[int]:
        """Hashes with a copy on the device."""
        return set(self.copies[GPU])

    @property
    def host(self) -> set[int]:
        """Hashes kept on the host."""
        return set(self.copies[CPU])

    def depth(self, hashes: Iterable[int]) -> int:
        """Leading hashes that are in either tier."""
        held = self.device | self.host
        depth = 0
        for engine_hash in hashes:
            if engine_hash not in held:
                break
            depth += 1
        return depth


@pytest.fixture
def shadow() -> Shadow:
    """An empty shadow."""
    return Shadow()


@pytest.fixture(scope="session")
def new_shadow() -> Callable[[], Shadow]:
    """A function that makes shadows, for tests that need one per example."""
    return Shadow
