"""SGLang's events, built as in its source, through its adapter and a publisher."""

from __future__ import annotations

import msgpack

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.ops import decode_frame
from kvrouter.worker.engines.sglang import PAGE_OF_ONE, SglangAdapter
from kvrouter.worker.publisher import KvPublisher
from tests.worker.closed_sets import ClosedSets
from tests.worker.fakes import FakeBus

PAGE = 4
TOKENS = list(range(3 * PAGE))
NAMES = [*sequence_hashes(block_hashes(TOKENS, PAGE))]
# The engine's hashes of the three pages, signed.
PAGES = [-(2**63), -7, 12]


class Bench:
    """An adapter with a publisher, and a reader of its frames."""

    def __init__(self) -> None:
        self.adapter = SglangAdapter()
        self._bus = FakeBus()
        self._publisher = KvPublisher(self._bus, "w", PAGE, model="m", incarnation=1)
        self._reader = ClosedSets()

    def receive(self, *events: object) -> list[set[int]]:
        """Apply a batch without a rank, as SGLang sends without data parallelism; returns the tier sets."""
        payload = msgpack.packb([1.5, events])
        self.adapter.publish(self.adapter.decode(payload), self._publisher)
        self._publisher.flush(1.0)
        self._publisher.blocks.check()
        for _, frame in self._bus.take():
            self._reader.apply(decode_frame(frame).ops or ())
        return self._reader.tiers


def stored(index: int, medium: str | None = "GPU") -> list[object]:
    """One page of the chain, in a separate event."""
    parent = PAGES[index - 1] if index else None
    tokens = TOKENS[index * PAGE : (index + 1) * PAGE]
    return ["BlockStored", [PAGES[index]], parent, tokens, PAGE, None, medium]


def test_pages() -> None:
    """Each page is an event; its sequence hashes are those of the router."""
    assert set(NAMES) == Bench().receive(*(stored(index) for index in range(3)))[0]


def test_old_wire() -> None:
    """Older SGLangs send no medium."""
    bench = Bench()
    bench.receive(stored(0)[:6])

    assert set() == bench.receive(["BlockRemoved", [PAGES[0]]])[0]


def test_removed_parent_first() -> None:
    """A node's pages are removed parent first; no block below a hole stays published meanwhile."""
    bench = Bench()
    bench.receive(*(stored(index) for index in range(3)))

    assert {NAMES[0]} == bench.receive(["BlockRemoved", [PAGES[1]], "GPU"])[0]
    assert {NAMES[0]} == bench.receive(["BlockRemoved", [PAGES[2]], "GPU"])[0]
    assert set(NAMES[:2]) == bench.receive(stored(1))[0]


def test_host_tier() -> None:
    """A page that is in host memory when it leaves the device stays there."""
    bench = Bench()
    bench.receive(stored(0), stored(0, "CPU"), ["BlockRemoved", [PAGES[0]], "GPU"])

    assert [set(), {NAMES[0]}] == bench.receive()[:2]


def test_cleared() -> None:
    """AllBlocksCleared removes every block."""
    bench = Bench()
    bench.receive(stored(0))

    assert set() == bench.receive(["AllBlocksCleared"])[0]


def test_pages_of_one_token() -> None:
    """A page of one token is rejected; the reason names `--page-size`."""
    bench = Bench()

    assert set() == bench.receive(["BlockStored", [5], None, [1], 1, None, "GPU"])[0]
    assert {PAGE_OF_ONE: 1} == bench.adapter.skipped
    assert "--page-size" in PAGE_OF_ONE


def test_pairs_of_tokens() -> None:
    """With EAGLE the token ids are pairs: such a page cannot be named, and that is counted."""
    bench = Bench()
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5]]

    assert set() == bench.receive(["BlockStored", [5], None, pairs, PAGE, None, "GPU"])[0]
    assert ["BlockStored that cannot be read"] == [reason[:31] for reason in bench.adapter.skipped]
