"""The engine that jumps over equal steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import ConfigError
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.reference_engine import ReferenceEngine
from kvrouter.lab.simulate.step_model import LARGE_STEPS, ORDERS, REFERENCE, StepModel
from tests.lab.simulate.naive_engine import NaiveEngine, Times
from tests.long import examples

BLOCK = 8

# A step takes a multiple of 40 ns: with these no request comes or leaves exactly at the end of one.
GAPS_S = [0.000100001, 0.001120001, 0.013720001, 0.051920001, 0.200320001]
SMALL = replace(REFERENCE, step_tokens=12, max_num_seqs=4, block_size=BLOCK)


class Recorder:
    """Records the times of requests, and the blocks that a router would know."""

    def __init__(self) -> None:
        self.times: dict[int, Times] = {}
        self.known: set[int] = set()

    def began(self, number: int, cached_tokens: int, now: float) -> None:
        self.times[number] = (now, math.nan, cached_tokens)

    def ended(self, number: int, now: float) -> None:
        first, _, cached = self.times[number]
        self.times[number] = (first, now, cached)

    def stored(self, hashes: Sequence[int]) -> None:
        self.known.update(hashes)

    def removed(self, hashes: Sequence[int]) -> None:
        assert self.known.issuperset(hashes), "only what was stored is removed"
        self.known.difference_update(hashes)

    def reads(self, number: int, tokens: int) -> None:
        raise AssertionError("requests are whole here")

    def pulls(self, number: int, cached_tokens: int) -> int:
        raise AssertionError("no request has a peer here")


def serve(
    model: StepModel, capacity: int, arrivals: Sequence[Arrival], leaves: dict[int, float] | None = None
) -> Recorder:
    """Serve the arrivals; those that leave have no times."""
    recorder = Recorder()
    engine = ReferenceEngine(model, capacity, recorder)
    things = [(one.at, 0, number) for number, one in enumerate(arrivals)]
    things += [(when, 1, number) for number, when in (leaves or {}).items()]
    for when, is_leaving, number in [*sorted(things), (math.inf, 0, 0)]:
        while engine.due < when:
            engine.advance(engine.due)
        if when == math.inf:
            break
        if is_leaving:
            engine.abort(number, when)
        else:
            engine.add(number, arrivals[number], when)
    for number in leaves or {}:
        recorder.times.pop(number, None)
    assert 0 == engine.num_running == engine.num_waiting
    assert 0 == engine.kv_usage
    assert capacity >= len(recorder.known)
    return recorder


def request(at: float, prompt: int, output: int, family: int = 0, shared: int = 0) -> Arrival:
    """A prompt that shares its first `shared` blocks with its family."""
    own = hash((at, prompt, output)) & (1 << 40) - 1
    blocks = [
        hash((family, place)) if place < shared else hash((own, place)) for place in range(prompt // BLOCK)
    ]
    return Arrival(at, blocks, prompt, output)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Requests over a few steps. Times that differ, as an idle engine begins a step with the first."""
    made = []
    at = 0.0
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from(GAPS_S))
        prompt, output = draw(st.integers(1, 60)), draw(st.integers(1, 30))
        made.append(request(at, prompt, output, draw(st.integers(0, 2)), draw(st.integers(0, 8))))
    return made


@examples(1000, 30)
@given(
    arrivals(),
    st.sampled_from([12, 16, 40]),
    st.sampled_from(ORDERS),
    st.integers(1, 3),
    st.sampled_from([0.5, 1.0]),
    st.dictionaries(st.integers(0, 11), st.sampled_from(GAPS_S), max_size=3),
)
def test_times_of_a_step_by_step_engine(
    asked: list[Arrival], capacity: int, order: str, parallel: int, speed: float, leaving: dict[int, float]
) -> None:
    """First and last tokens, and cached tokens, equal a version without jumps."""
    model = replace(SMALL, order=order, parallel=parallel, speed=speed)
    leaves = {number: asked[number].at + after for number, after in leaving.items() if number < len(asked)}

    expected = NaiveEngine(model, capacity).serve(asked, leaves)
    fast = serve(model, capacity, asked, leaves).times

    stayed = set(range(len(asked))).difference(leaves)
    assert {number: pytest.approx(expected[number]) for number in stayed} == {
        number: fast[number] for number in stayed
    }


def test_one_request() -> None:
    """Two steps of prefill and two of decoding, counted by hand."""
    ((first, last, cached),) = serve(REFERENCE, 10, [Arrival(1.0, [7, 8], 1500, 3)]).times.values()

    prefill_s = 2 * 6e-3 + 1500 * 50e-6
    decode_s = 2 * (6e-3 + 20e-6) + (1501 + 1502) * 40e-9
    assert [pytest.approx(1 + prefill_s), pytest.approx(1 + prefill_s + decode_s)] == [first, last]
    assert 0 == cached


def test_last_token_is_computed() -> None:
    """A prompt whose blocks are all cached computes its last block again."""
    whole = [Arrival(0.0, [7, 8], 1024, 1), Arrival(9.0, [7, 8], 1024, 1)]

    assert 512 == serve(REFERENCE, 10, whole).times[1][2]


def test_deepest_blocks_are_evicted_first() -> None:
    """Of the oldest request, and only as many as needed."""
    recorder = serve(
        REFERENCE,
        4,
        [Arrival(0.0, [1, 2], 1024, 1), Arrival(1.0, [3], 600, 1), Arrival(2.0, [4], 1000, 1)],
    )

    assert {1, 3, 4} == recorder.known


def test_too_large() -> None:
    """A request that never fits is an error when it comes."""
    with pytest.raises(ConfigError, match="1024 \\+ 1 tokens does not fit in 2 blocks"):
        serve(REFERENCE, 2, [Arrival(0.0, [1, 2], 1024, 1)])


@pytest.mark.parametrize("model", [REFERENCE, LARGE_STEPS])
def test_predicted_ttft(model: StepModel) -> None:
    """The prediction of an engine with a queue and nothing to wait for is right within a step."""
    engine = ReferenceEngine(model, 1000, recorder := Recorder())
    for number in range(4):
        engine.add(number, Arrival(0.0, [], 3000 + number, 50), 0.0)
    asked = Arrival(0.05, [], 4000, 50)

    predicted = engine.predicted_ttft_s(asked, 0.05)
    engine.add(9, asked, 0.05)
    while 9 not in recorder.times:
        engine.advance(engine.due)

    assert pytest.approx(recorder.times[9][0] - 0.05, abs=2 * model.base_s) == predicted


def test_prediction_counts_prompts_before_it() -> None:
    """A sibling in the queue will have computed the shared blocks."""
    engine = ReferenceEngine(REFERENCE, 1000, Recorder())
    engine.add(1, Arrival(0.0, [1, 2, 3, 4], 2100, 50), 0.0)

    assert 4 == engine.match([1, 2, 3, 4, 9], 2600)
    assert 0 == engine.match([9, 2], 1100)
