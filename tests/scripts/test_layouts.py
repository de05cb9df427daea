"""`scripts.kit.vllm.layouts`: predictions for an engine of any layout, on a recorded one."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import msgpack

from scripts.kit.vllm.layouts import MOST_TOKENS, Prediction, prompts

RECORDED = Path(__file__).parents[1] / "data" / "vllm_hybrid.msgpack"


def test_a_hybrid_model() -> None:
    """With all its groups every request is predicted exactly, with one of them too much for some."""
    found = Prediction(32)
    for tokens, cached_tokens, payloads in msgpack.unpackb(RECORDED.read_bytes())[:24]:
        found.compare(tokens, cached_tokens)
        for payload in payloads:
            found.apply(payload)

    assert 24 == found.tally["all groups: exact"]
    assert found.tally["one group: over"]
    assert 24 == found.tally["one group: exact"] + found.tally["one group: over"]


def test_prompts() -> None:
    """They go on from former ones, and are as long as the engine takes."""
    past = [[7] * 600]

    some = list(islice(prompts(random.Random(1), past, 32), 200))

    assert any(one[:20] == [7] * 20 for one in some)
    assert all(0 < len(one) <= MOST_TOKENS for one in some)
