"""What a simulated fleet is asked."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from kvrouter.errors import ConfigError
from kvrouter.lab.simulate import generated, workloads
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.generated import WORKLOADS
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from kvrouter.policies import PolicySettings

REQUESTS = read_trace(CONVERSATION_EXCERPT, 200)


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_requests(name: str) -> None:
    """A seed gives the same arrivals, in order; another seed gives others."""
    workload = generated.named(name, REQUESTS)

    drawn = workload.draw(1)
    assert drawn == workload.draw(1) != workload.draw(2)
    begins = [one for one in drawn if not one.after]
    assert all(one.at <= other.at for one, other in pairwise(begins))
    assert all(max(one.after, default=-1) < number for number, one in enumerate(drawn))
    assert all(len(one.hashes) == one.prompt_tokens // 512 for one in drawn)


@pytest.mark.parametrize("name", ["trace", "docs", "zero"])
def test_seeds_change_times_only(name: str) -> None:
    """Seeds have the same prompts, so that their figures differ by chance alone."""
    workload = generated.named(name, REQUESTS)

    assert [one.hashes for one in workload.draw(1)] == [one.hashes for one in workload.draw(2)]


def test_moments_within_a_timestamp() -> None:
    """The trace counts in steps of 3 s; requests come before the next timestamp, in their order."""
    drawn = workloads.trace(REQUESTS).draw(3)

    for request, arrival in zip(REQUESTS, drawn, strict=True):
        assert request.arrival_s <= arrival.at < request.arrival_s + 3.0 or request.arrival_s == drawn[-1].at
    assert len({one.at for one in drawn}) == len(drawn)


def test_pace() -> None:
    """Twice as fast: half the time."""
    workload = workloads.trace(REQUESTS)

    assert [one.at / 2 for one in workload.draw(1)] == [one.at for one in workload.arrivals(1, 2.0)]


def test_leaving() -> None:
    """A tenth of the clients leaves within 5 s; the others stay."""
    drawn = generated.hot().arrivals(1, 1.0, leaving=0.1)
    patience = [one.leaves_after_s for one in drawn if one.leaves_after_s < math.inf]

    assert 0.07 < len(patience) / len(drawn) < 0.13
    assert max(patience) <= 5.0


def test_achievable() -> None:
    """What was asked before, without the last token; a warm-up fills the cache and is not counted."""
    asked = [Arrival(0, [1, 2], 1024, 1), Arrival(1, [1, 2, 3], 1600, 1), Arrival(2, [1, 2], 1024, 1)]

    assert workloads.Achievable(1024 + 512, 1024 + 512) == workloads.achievable(asked, 3)
    assert workloads.Achievable(512, 512) == workloads.achievable(asked, 3, warm_up=2)


def test_a_pooled_cache_has_the_size_of_the_fleet() -> None:
    """Two blocks: the prompt that came last pushes out the first one."""
    asked = [Arrival(0, [1, 2], 1025, 1), Arrival(1, [3, 4], 1025, 1), Arrival(2, [1, 2], 1025, 1)]

    assert workloads.Achievable(1024, 0) == workloads.achievable(asked, 2)
    assert workloads.Achievable(1024, 1024) == workloads.achievable(asked, 4)


def test_sharing() -> None:
    """Nothing of `zero` is shared; requests of `hot` share eight blocks, siblings of a burst sixteen."""
    zero, hot = workloads.zero(REQUESTS).draw(0), generated.hot().draw(0)
    bursts = generated.siblings().draw(0)

    assert workloads.working_set_blocks(zero) == sum(len(one.hashes) for one in zero)
    assert {tuple(hot[0].hashes[:8])} == {tuple(one.hashes[:8]) for one in hot}
    assert len(hot) == len({one.hashes[8] for one in hot})
    assert 300 == len({tuple(one.hashes[:16]) for one in bursts})


def test_questions_about_documents() -> None:
    """A document is asked about several times, and questions share its whole blocks."""
    drawn = generated.docs(count=500, documents=100).draw(0)

    by_document: dict[int, list[Arrival]] = {}
    for one in drawn:
        by_document.setdefault(one.hashes[0], []).append(one)
    most = max(by_document.values(), key=len)
    shared = set(most[0].hashes).intersection(*(one.hashes for one in most[1:]))
    assert len(most) > 10
    assert min(len(one.hashes) for one in most) - 1 <= len(shared)


def test_stages() -> None:
    """A warm-up asks each prompt once; then its rate and a pause are kept, and the warm-up is not counted."""
    stages = generated.stages_of("10x2!,0x60,5x4")
    workload = generated.named("shared-prefix:groups=4,prompts=5", REQUESTS, stages)
    drawn = workload.draw(1)

    assert (40, 20) == (len(drawn), workload.warm_up)
    assert 20 == len({one.hashes[-1] for one in drawn[:20]})
    assert 4 == len({tuple(one.hashes[:11]) for one in drawn})
    assert drawn[20].at - drawn[19].at > 60
    assert {7200} == {one.prompt_tokens for one in drawn}


@pytest.mark.parametrize(
    "text", ["", "3", "3x", "-1x2", "3x0", "3x20,46x25!", "3x20!", "1000x100000", "nanx1"]
)
def test_stages_that_mean_nothing(text: str) -> None:
    """A clear error instead."""
    with pytest.raises(ValueError, match=r"RATExSECONDS|come first|at most"):
        generated.stages_of(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hto", "did you mean"),
        ("hot:turns=3", "use prefixes, count"),
        ("trace:count=3", "use none"),
        ("hot:prefixes=0", "above 0"),
        ("agents:steps=1.5", "whole number"),
        ("agents:tool=x", "must be a number"),
    ],
)
def test_wrong_names_and_numbers(text: str, says: str) -> None:
    """The message says what there is."""
    with pytest.raises(ValueError, match=says):
        generated.workload_name(text)


def test_stages_are_for_some() -> None:
    """Others have a pace of their own."""
    with pytest.raises(ConfigError, match="leave it out for docs"):
        generated.named("docs", REQUESTS, generated.stages_of("1x1"))


@pytest.mark.parametrize("name", ["multi-turn:sessions=20", "agents:tasks=10"])
def test_requests_wait_for_answers(name: str) -> None:
    """A request that follows others comes after their ends, and its prompt begins as one of theirs."""
    run = Cell(generated.named(name, REQUESTS), 3.0, workers=2).run("kv", PolicySettings(), 0)
    followers = [(number, one) for number, one in enumerate(run.arrivals) if one.after]

    assert len(followers) > 40
    for number, one in followers:
        assert run.sent_s[number] == max(run.end_s[other] for other in one.after) + one.at
        if len(one.after) == 1:
            before = run.arrivals[one.after[0]].hashes
            assert before == one.hashes[: len(before)], "the prompt before, and more"
    assert any(len(one.after) > 1 for _, one in followers) == name.startswith("agents")


def test_a_chat_has_no_load() -> None:
    """How fast its requests come depends on the answers."""
    with pytest.raises(ConfigError, match="use --pace"):
        _ = Cell(generated.multi_turn(3), 1.0, load=0.5).offered_pace
