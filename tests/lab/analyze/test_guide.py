"""The guide's rules speak only where the figures do."""

from __future__ import annotations

import pytest

from kvrouter.lab.analyze import guide
from kvrouter.lab.analyze.analysis import FleetSize, analyze
from kvrouter.lab.analyze.guide import Advice, advice_of
from kvrouter.lab.simulate.traces import TraceRequest
from kvrouter.settings.commands import command_named
from tests.lab.analyze.traces import in_groups

LARGE = FleetSize(workers=8, blocks_each=100_000, block_size=16)
SMALL = FleetSize(workers=8, blocks_each=20, block_size=16)


def advice(requests: list[TraceRequest], fleet: FleetSize = LARGE) -> dict[str, Advice]:
    """By rule."""
    return {one.rule: one for one in advice_of(analyze(requests, fleet, source="here"))}


def test_equal_buckets() -> None:
    """Three equal groups for eight workers: a group of workers for each, told apart by their first block."""
    found = advice(in_groups([20, 18, 22], shared=20, own=5))

    assert "--router-mode two-stage --stage-one hash --stage-one-blocks 1" == found[guide.BREADTH].flags
    assert "3 buckets of about equal size hold 100%" in found[guide.BREADTH].sentence
    assert "33% of" not in found[guide.SAMPLING].figure
    assert "37% of the requests begin with the same 320 tokens" in found[guide.SAMPLING].figure


@pytest.mark.parametrize("sizes", [[40, 10, 10], [20] * 5, [60]])
def test_other_buckets(sizes: list[int]) -> None:
    """Groups of different sizes, more of them than half the workers, or one alone: no groups of workers."""
    found = advice(in_groups(sizes, shared=20, own=5))

    assert guide.BREADTH not in found or not found[guide.BREADTH].flags


def test_diverse_prompts() -> None:
    """Forty groups: overlap matters, and mode kv needs nothing."""
    found = advice(in_groups([5] * 40, shared=20, own=5))

    assert ("", True) == (found[guide.BREADTH].flags, "prefer overlap" in found[guide.BREADTH].sentence)
    assert ("", True) == (found[guide.HIT_RATE].flags, "Nothing to change" in found[guide.HIT_RATE].sentence)
    assert guide.SAMPLING not in found
    assert "nothing to change" in found[guide.BALANCE].sentence


def test_nothing_shared() -> None:
    """A lower weight for kv-score, and nothing about prefixes."""
    found = advice(in_groups([1] * 50, shared=20, own=5))

    assert found[guide.HIT_RATE].flags.endswith("--kv-overlap-score-weight 0.5")
    assert "endless cache 0.0%" in found[guide.HIT_RATE].figure
    assert "Placement decides 0.0%" in found[guide.BALANCE].sentence
    assert {guide.BLOCKS, guide.HIT_RATE, guide.BALANCE} == {*found}


def test_a_core_that_is_shallow() -> None:
    """A common system prompt that is a small part of long prompts."""
    found = advice(in_groups([40], shared=2, own=38))

    assert found[guide.HIT_RATE].sentence.startswith("The hit rate is low")
    found = advice(in_groups([2] + [1] * 2, shared=400, own=1, common=2))
    assert found[guide.HIT_RATE].sentence.startswith("The core tree is shallow")


def test_memory() -> None:
    """Caches that hold all of it, caches that do not, and more than a million blocks."""
    requests = in_groups([20] * 10, shared=20, own=5)

    assert "hold every block" in advice(requests)[guide.BLOCKS].sentence
    small = advice(requests, SMALL)[guide.BLOCKS]
    assert ("", True) == (small.flags, "More memory can find up to" in small.sentence)
    many = FleetSize(1, guide.MANY_BLOCKS, 1)
    assert (
        "have 1,000,000 blocks or more each"
        in advice(in_groups([65] * 10, shared=1, own=100), many)[guide.BLOCKS].sentence
    )


def test_flags_exist() -> None:
    """Every flag in an advice is one of the frontend's."""
    traces = [in_groups([20, 18, 22], shared=20, own=5), in_groups([1] * 50, shared=20, own=5)]
    given = {word for requests in traces for one in advice(requests).values() for word in one.flags.split()}

    flags = {word for word in given if word.startswith("--")}
    assert len(flags) >= 5
    assert [] == [flag for flag in flags if not command_named("frontend").has(flag)]
