"""The figures of a trace."""

from __future__ import annotations

import pytest

from kvrouter.errors import KvRouterError
from kvrouter.lab.analyze.analysis import Analysis, FleetSize, Prefix, analyze
from kvrouter.lab.simulate.traces import (
    CONVERSATION_EXCERPT,
    TraceError,
    TraceRequest,
    read_trace,
)
from kvrouter.lab.simulate.workloads import achievable, as_arrival
from tests.lab.analyze.traces import in_groups, request

FLEET = FleetSize(workers=4, blocks_each=1000, block_size=16)


def figures(requests: list[TraceRequest], fleet: FleetSize = FLEET) -> Analysis:
    """Of a trace."""
    return analyze(requests, fleet, source="here")


def test_conversation_excerpt() -> None:
    """The first 700 requests: 18.7 % with an endless cache, depth / ISL p50 0.173."""
    requests = read_trace(CONVERSATION_EXCERPT, 700)
    fleet = FleetSize(8, 27_000, 16)
    found = figures(requests, fleet)

    rates = found.rates
    assert (700, 234.0, 0.187, 0.173) == (
        found.requests, found.span_s, round(rates.endless, 3), round(found.core.ratio_p50, 3),
    )  # fmt: skip
    assert (101, True) == (len(found.core.ratios), found.core.ratios == sorted(found.core.ratios))
    assert pytest.approx(found.core.ratio_p50, abs=0.002) == found.core.ratios[50]
    assert (15_534, 2_169) == (found.core.distinct, found.core.nodes)
    assert (Prefix(1.0, 700, 512), 98) == (found.breadth.trunk, found.breadth.prefixes)
    assert rates.random < 0.5 * rates.perfect < rates.perfect < rates.endless
    # as the simulator counts them, which leaves out the ids of partial blocks
    possible = achievable([as_arrival(one) for one in requests], fleet.tokens // 512)
    assert possible.endless / found.prompt_tokens == pytest.approx(rates.endless, abs=0.001)
    assert possible.pooled / found.prompt_tokens == pytest.approx(rates.pooled, abs=0.001)


def test_hits_are_whole_blocks_without_the_last_token() -> None:
    """Of 40 tokens 32 are in full blocks; of 32 one block is reused, since the last token is computed."""
    found = figures([request(0, 1, 2, 3, tokens=40), request(1, 1, 2, 3, tokens=40), request(2, 1, 2)])

    assert (32 + 16) / 112 == found.rates.endless
    assert {16: 48 / 112, 32: 32 / 112, 64: 0.0, 128: 0.0} == found.rates.by_block_size
    assert (40, 40, 10) == (found.input.p50, found.input.p99, found.output.p50 if found.output else 0)


def test_blocks_of_ids() -> None:
    """Ids of 512 tokens say nothing of 16-token sharing, and ids of 24 fit no block of 16."""
    found = figures([request(0, 1, 2, id_tokens=512), request(1, 1, 3, id_tokens=512)])

    assert {16, 32, 64, 128} == {*found.rates.by_block_size}
    assert {0.25} == {*found.rates.by_block_size.values()}
    with pytest.raises(TraceError, match="--block-size 16"):
        figures([request(0, 1, id_tokens=24)])


def test_prefixes() -> None:
    """Three groups part after two common ids; each prefix counts what its requests have in common."""
    found = figures(in_groups([6, 3, 1], shared=4, own=1, common=2))

    breadth = found.breadth
    assert Prefix(1.0, 10, 32) == breadth.trunk
    assert [Prefix(0.6, 6, 96), Prefix(0.3, 3, 96)] == breadth.top
    assert (2, 3) == (breadth.prefixes, breadth.separating_blocks)
    assert pytest.approx(0.1) == breadth.alone
    assert pytest.approx(0.81 / 0.45) == breadth.effective
    assert [(0.1, 2)] == [(one.least, one.prefixes) for one in breadth.classes if one.prefixes]


def test_working_set() -> None:
    """Distinct blocks, those visited again, and how long they stay."""
    found = figures(in_groups([5, 5], shared=4, own=1))

    working = found.working_set
    assert (18 * 16, 8 * 16, 64_000) == (working.distinct, working.reused, working.capacity)
    assert pytest.approx(64_000 * 9 / (18 * 16)) == working.lifetime_s
    assert pytest.approx(1.0) == sum(found.hits_by_age.values())
    assert [2.0] == [*found.hits_by_age], "the groups come in turn, a second apart"


def test_small_caches() -> None:
    """Random placement computes a prefix on every worker; a cache that is too small has nothing."""
    groups = in_groups([20] * 10, shared=20, own=2)

    large, small = figures(groups), figures(groups, FleetSize(4, 10, 16))

    assert large.rates.random < 0.9 * large.rates.perfect
    assert large.rates.perfect == large.rates.pooled == large.rates.endless
    assert small.rates.pooled < 0.1 * small.rates.endless
    assert (0.25, 4.0) == (min(small.rates.by_cache_size), max(small.rates.by_cache_size))


def test_unknown_lengths_of_answers() -> None:
    """Kept decisions do not contain them."""
    found = figures([TraceRequest(0.0, 20, 0, (1,), 16)])

    assert found.output is None
    assert (0.0, {}) == (found.rates.endless, found.hits_by_age)


def test_no_requests() -> None:
    """The error names the source."""
    with pytest.raises(KvRouterError, match="here: no requests"):
        figures([])
