"""Whether prefill and decode apart would pay: the sentence, its figures, and the simulator's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrouter.lab.analyze.analysis import Analysis, FleetSize, analyze
from kvrouter.lab.analyze.apart import MOST_BUSY, apart_of, sentences
from kvrouter.lab.simulate.step_model import REFERENCE, StepModel
from kvrouter.lab.simulate.traces import TraceRequest

FLEET = FleetSize(workers=8, blocks_each=40_000, block_size=16)
RATE = 361 / 60


def asked(rate: float, prompt: int, answer: int, fleet: FleetSize = FLEET) -> Analysis:
    """A minute of equal requests that share nothing."""
    blocks = prompt // 512
    requests = [
        TraceRequest(one / rate, prompt, answer, tuple(range(one * blocks, one * blocks + blocks)))
        for one in range(int(60 * rate) + 1)  # the last one after 60 s
    ]
    return analyze(requests, fleet, source="test")


def said(found: Analysis, pace: float = 1.0, model: StepModel = REFERENCE) -> str:
    apart = apart_of(found, model, pace)
    return " ".join(sentences(found, apart, model))


def test_long_prompts_and_answers() -> None:
    """The rule of thumb: whole engines take d / (1 − busy) for a token, the decode engines d."""
    found = asked(6.0, 10_240, 400)
    apart = apart_of(found, REFERENCE, 1.0)

    assert apart is not None
    assert RATE * 10_240 * 50e-6 / 8 == pytest.approx(apart.busy, rel=1e-6)
    assert (4, 4, True) == (apart.prefill, apart.decode, apart.pays)
    assert apart.busy * 8 / 4 == pytest.approx(apart.prefill_busy)
    assert apart.prefill_busy < MOST_BUSY
    # a step of a whole engine without prompts, with the sequences that decode at the same time
    step_s = REFERENCE.base_s + RATE * 400 * apart.whole_s / 8 * (20e-6 + 40e-9 * 10_440)
    assert step_s / (1 - apart.busy) == pytest.approx(apart.whole_s, rel=1e-6)
    text = said(found)
    assert (
        "Split as 4P+4D if tokens must come faster than every 12.4 ms: prompts take 39% of the time" in text
    )
    assert "--workers 8 --prefill-workers 4 --decode-workers 4" in text


def test_short_prompts() -> None:
    """Little is gained, and the sentence says how little."""
    text = said(asked(6.0, 1024, 400))

    assert "Stay whole: prompts take 4% of the time of 8 whole engines, and a token comes every 6." in text


def test_too_few_engines() -> None:
    text = said(asked(6.0, 10_240, 400), pace=4.0)

    assert text.endswith("apart this rate needs more than 8.")  # without a command for no decode engines


def test_no_room_for_answers() -> None:
    """Few blocks: the decode engines cannot hold the requests that they would generate."""
    text = said(asked(6.0, 10_240, 400, replace(FLEET, blocks_each=1500)))

    assert "Stay whole: as 4P+4D the decode engines have room for 96,000 tokens, and requests hold" in text


def test_a_slower_engine_needs_more_of_them() -> None:
    """The speed that a live router has measured takes the place of the step model's."""
    found = asked(6.0, 10_240, 400)
    slower = apart_of(found, replace(REFERENCE, prefill_token_s=70e-6), 1.0)

    assert slower is not None
    assert 5 == slower.prefill


def test_unknown_answers() -> None:
    """As from --live without --output-tokens."""
    found = replace(asked(6.0, 1024, 400), output=None)

    assert apart_of(found, REFERENCE, 1.0) is None
    assert "give --output-tokens N" in said(found)
