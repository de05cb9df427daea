"""SGLang's events, built as in its source, through its adapter and a publisher."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import pytest

from kvrouter.core.wire.hashes import block_hashes, block_seed, seeded_block_hashes, sequence_hashes
from kvrouter.core.wire.ops import decode_frame
from kvrouter.worker.engines.sglang import EXTERNAL, PAGE_OF_ONE, PAIRS, SglangAdapter
from kvrouter.worker.publisher import KvPublisher
from tests.worker.closed_sets import ClosedSets
from tests.worker.fakes import FakeBus

PAGE = 4
TOKENS = list(range(3 * PAGE))
NAMES = [*sequence_hashes(block_hashes(TOKENS, PAGE))]
# The engine's hashes of the three pages, signed.
PAGES = [-(2**63), -7, 12]
# Payloads by name, in hex, made by SGLang 0.5.23 (tests/data/README.md): three pages from token 100 on.
_HEX = json.loads(Path(__file__, "../../../data/sglang_events_0.5.23.json").resolve().read_text())
RECORDED = {name: bytes.fromhex(payload) for name, payload in _HEX.items()}


def names_of(lora: str | None = None, salt: str | None = None) -> set[int]:
    """The sequence hashes of the recorded tokens."""
    blocks = seeded_block_hashes(range(100, 112), PAGE, block_seed(lora, salt), [()] * 3)
    return set(sequence_hashes(blocks))


class Bench:
    """An adapter with a publisher, and a reader of its frames."""

    def __init__(self) -> None:
        self.adapter = SglangAdapter()
        self._bus = FakeBus()
        self._publisher = KvPublisher(self._bus, "w", PAGE, model="m", incarnation=1)
        self._reader = ClosedSets()

    def receive(self, *events: object) -> list[set[int]]:
        """Apply a batch without a rank, as SGLang sends without data parallelism; returns the tier sets."""
        return self.receive_payload(msgpack.packb([1.5, events]))

    def receive_payload(self, payload: bytes) -> list[set[int]]:
        """Apply a batch as it was sent."""
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
    """Each page is an event; its sequence hashes equal the router's."""
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


@pytest.mark.parametrize(
    ("event", "lora", "salt"),
    [
        ("stored", None, None),
        ("salted", None, "s"),
        ("lora", "adapter", None),
        ("lora_salted", "adapter", "s"),
        ("bigram", None, None),
        ("bigram_salted", None, "s"),
    ],
)
def test_newest_wire(event: str, lora: str | None, salt: str | None) -> None:
    """Pages of the newest version have the names of requests with the same adapter and salt, pairs or not."""
    bench = Bench()
    names = names_of(lora, salt)

    assert names == bench.receive_payload(RECORDED[event])[0]
    assert {} == bench.adapter.skipped
    assert [PAIRS] * event.startswith("bigram") == bench.adapter.notes


def test_salted_pages_leave_plain_ones() -> None:
    """The same tokens with a salt are other blocks, and each goes with its own removal."""
    bench = Bench()
    bench.receive_payload(RECORDED["stored"])
    bench.receive_payload(RECORDED["salted"])

    assert names_of() == bench.receive_payload(RECORDED["removed_salted"])[0]
    assert set() == bench.receive_payload(RECORDED["removed"])[0]


def test_newest_media() -> None:
    """CPU_PINNED is host memory, DISK a disk, EXTERNAL a pool of several workers that does not count."""
    bench = Bench()
    bench.receive_payload(RECORDED["stored"])

    assert [set(), names_of()] == bench.receive_payload(RECORDED["to_host"])[:2]
    assert [set(), names_of(), names_of()] == bench.receive_payload(RECORDED["to_disk"])
    assert [set(), names_of(), names_of()] == bench.receive_payload(RECORDED["external"])
    assert {EXTERNAL: 2} == bench.adapter.skipped
    assert [set()] * 3 == bench.receive_payload(RECORDED["cleared"])


@pytest.mark.parametrize(("medium", "tier"), [("CPU_TIER1", 1), ("CPU_TIER2", 2), ("cpu", 1)])
def test_older_media(medium: str, tier: int) -> None:
    """Versions before named the tiers by numbers."""
    tiers = Bench().receive(stored(0, medium))

    assert [NAMES[0] in names for names in tiers] == [number >= tier for number in range(3)]


def test_pairs_in_arrays() -> None:
    """Pairs came in arrays before."""
    pairs = [[token, token + 1] for token in TOKENS[:PAGE]]

    assert {NAMES[0]} == Bench().receive(["BlockStored", [5], None, pairs, PAGE, None, "GPU"])[0]


@pytest.mark.parametrize("ids", [[[1], [2], [3], [4]], [[1, 2, 3]] * 4, [1, 2, 3, "4"], [-1, 2, 3, 4]])
def test_odd_tokens(ids: list[object]) -> None:
    """Ids that are neither numbers nor pairs make no name; the event is counted."""
    bench = Bench()

    assert set() == bench.receive(["BlockStored", [5], None, ids, PAGE, None, "GPU"])[0]
    assert ["BlockStored that cannot be read"] == [reason[:31] for reason in bench.adapter.skipped]


def test_tokens_that_do_not_fit() -> None:
    bench = Bench()
    bench.receive(["BlockStored", [5], None, [1, 2, 3], PAGE, None, "GPU"])
    bench.receive(["BlockStored", [6], None, [], 0, None, "GPU"])

    assert {"BlockStored whose tokens do not fit its hashes": 2} == bench.adapter.skipped


def test_nameless_adapter() -> None:
    """A page of an adapter without a name is not published, and its removal stays in balance."""
    bench = Bench()

    assert set() == bench.receive(["BlockStored", [5], None, TOKENS[:PAGE], PAGE, 3, "GPU"])[0]
    assert set() == bench.receive(["BlockRemoved", [5], "GPU"])[0]
