"""After any loss reader and source hold the same, once the link is clean and a heartbeat has arrived."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.ops import Op
from tests.core.links import Link, malformed
from tests.long import examples

nodes = st.integers(0, 47)
changes = st.one_of(
    st.tuples(st.just("store"), nodes, st.integers(0, 2)),
    st.tuples(st.just("remove"), nodes, st.integers(0, 2)),
    st.tuples(st.sampled_from(["clear", "check"])),
)
fates = st.sampled_from(["deliver", "deliver", "deliver", "drop", "twice", "late", "damaged", "unreadable"])
step = st.one_of(
    st.tuples(st.just("frame"), st.lists(changes, min_size=1, max_size=3), fates),
    st.tuples(st.just("frame"), st.lists(changes, min_size=1, max_size=3), fates),
    st.tuples(st.sampled_from(["heartbeat", "late frames", "exchange", "ask"])),
    st.tuples(st.sampled_from(["answer", "no answer", "damaged answer"])),
    st.tuples(st.just("restart"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from([0.05, 1.0, 12.0])),
)
steps = st.one_of(st.lists(step, max_size=10), st.lists(step, min_size=20, max_size=60))


class LossyLink(Link):
    """A link that follows a plan of losses, delays and restarts."""

    def __init__(self, seed: int, tier_sets: int, ring_frames: int) -> None:
        super().__init__(seed, tier_sets=tier_sets, ring_frames=ring_frames)
        self.max_bytes = 400
        self.late: list[bytes] = []
        self.awaited: bytes | None = None
        self.tier_sets = tier_sets

    def follow(self, plan: list[Any]) -> None:
        """Take each step, and check the index's invariants after it."""
        for step in plan:
            self._step(*step)
            self.index.check()

    def _step(self, kind: str, *facts: Any) -> None:  # as drawn
        match kind:
            case "frame":
                ops = [op for change in facts[0] for op in self._ops(*change)]
                for frame in self.source.append(ops):
                    self._meet_fate(frame, facts[1])
            case "heartbeat":
                self.heartbeat()
            case "late frames":
                self.deliver(*reversed(self.late))
                self.late.clear()
            case "restart":
                self._restart(lost=facts[0])
            case "time":
                self.now += facts[0]
            case _:
                self._recover(kind)

    def _ops(self, change: str, *facts: int) -> list[Op]:
        if change == "store":
            return self.owner.store(facts[0], facts[1] % self.tier_sets)
        if change == "remove":
            return self.owner.remove(facts[0], facts[1] % self.tier_sets)
        return self.owner.clear() if change == "clear" else self.owner.check()

    def _meet_fate(self, frame: bytes, fate: str) -> None:
        arriving = {"deliver": [frame], "twice": [frame, frame], "damaged": [malformed(frame)]}
        arriving["unreadable"] = [frame[:-1]]
        self.deliver(*arriving.get(fate, []))
        if fate == "late":
            self.late.append(frame)

    def _restart(self, lost: bool) -> None:
        """Begin a new incarnation: empty, or with the state file's table and one frame already sent."""
        if lost:
            self.owner.lose()
        self.new_source(self.source.incarnation + 1)
        if not lost:
            self.source.append(self.owner.check())

    def _recover(self, kind: str) -> None:
        if kind == "exchange" and self.awaited is None:
            self.exchange()
        elif kind == "ask" and self.awaited is None:
            self.awaited = self.ask()
        elif self.awaited is not None and kind != "exchange":
            self._report(kind)

    def _report(self, kind: str) -> None:
        answer, self.awaited = self.awaited or b"", None
        if kind == "no answer":
            self.reader.failed(self.now)
        else:
            self.reader.answer(b"\xc1" if kind == "damaged answer" else answer, self.now)

    def clean(self) -> None:
        """Lose nothing from now on. Open questions fail."""
        if self.awaited is not None:
            self._report("no answer")
        self.settle(seconds=60.0)


@examples(400)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([1, 3, 4096]), steps)
def test_any_loss_is_repaired(seed: int, tier_sets: int, ring_frames: int, plan: list[Any]) -> None:
    """Index and owner agree in every tier, frames are applied again, and a Check confirms it."""
    link = LossyLink(seed, tier_sets, ring_frames)

    link.follow(plan)
    link.clean()

    assert link.agrees()
    mismatches = link.reader.counters.digest_mismatches
    link.send([*link.owner.store(3), *link.owner.check()])
    assert link.agrees()
    assert mismatches == link.reader.counters.digest_mismatches
    assert 0 == link.reader.lag


@examples(100)
@given(st.integers(0, 2**32), steps)
def test_clean_link_needs_no_question(seed: int, plan: list[Any]) -> None:
    """On a clean link no Check ever differs, and the reader asks nothing after the first question."""
    link = LossyLink(seed, 2, 4096)
    link.heartbeat()

    link.follow([(kind, facts[0], "deliver") for kind, *facts in plan if kind == "frame"])

    assert link.agrees()
    assert 0 == link.reader.counters.digest_mismatches
    assert [] == link.requests
