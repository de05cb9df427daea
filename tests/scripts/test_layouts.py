"""`scripts/test-vllm DIR --layouts`, on a recorded engine and its parts: tests start no real one."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgpack
import msgspec
import pytest

from kvrouter.worker.engines.vllm import BlockStored
from scripts.kit.engine_tests.layouts import LAYOUTS, MOST_TOKENS, Prediction, main, prompts, row

BLOCK = 32
RECORDED = Path(__file__).parents[1] / "data" / "vllm_hybrid.msgpack"


def stored(tokens: list[int], first: int, parent: int | None) -> bytes:
    """A batch of the engine."""
    hashes: list[int | bytes] = list(range(first, first + len(tokens) // BLOCK))
    event = BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=BLOCK)
    return msgspec.msgpack.encode([0.0, [event], 0])


def test_predictions_are_compared_with_answers() -> None:
    """What is held is predicted, without the block of the last token; too much and too little differ."""
    tokens = list(range(4 * BLOCK))
    found = Prediction(BLOCK)
    found.apply(stored(tokens, 1, None))

    for cached_blocks in (3, 2, 4):
        found.compare(tokens, cached_blocks * BLOCK, "", "")
    found.compare([*tokens, 1], 4 * BLOCK, "", "")
    found.compare([*tokens, 1], 0, "", "a salt of its own")

    assert found.tally["all groups: exact"] == 3
    assert (found.tally["all groups: over"], found.tally["all groups: under"]) == (1, 1)
    assert found.tally["requests"] == 5


def test_a_hybrid_model() -> None:
    """With all its groups every request is predicted exactly, with one of them too much for some."""
    found = Prediction(32)
    for tokens, cached_tokens, payloads in msgpack.unpackb(RECORDED.read_bytes())[:24]:
        found.compare(tokens, cached_tokens, "", "")
        for payload in payloads:
            found.apply(payload)

    assert 24 == found.tally["all groups: exact"]
    assert found.tally["one group: over"]
    assert 24 == found.tally["one group: exact"] + found.tally["one group: over"]


def test_engine_that_was_started_again_holds_nothing() -> None:
    """Its blocks are gone from the prediction."""
    tokens = list(range(2 * BLOCK))
    found = Prediction(BLOCK)
    found.apply(stored(tokens, 1, None))

    found.forget()
    found.compare([*tokens, 1], 0, "", "")

    assert found.tally["all groups: exact"] == 1


def test_prompts_end_at_every_place_of_a_block() -> None:
    """Also exactly at its end, and one token further."""
    past: list[list[int]] = []
    wanted = prompts(random.Random(1), past, BLOCK)
    for _ in range(400):
        past.append(next(wanted))

    assert {len(one) % BLOCK for one in past} == set(range(BLOCK))
    assert all(0 < len(one) <= MOST_TOKENS for one in past)


def test_row() -> None:
    """Exact, over and under, by all groups and by one."""
    tally = Counter({"requests": 5, "hits": 4, "all groups: exact": 5, "one group: over": 2})

    assert row("plain", tally) == "| plain | 5 (4) | 5 / 0 / 0 | 0 / 2 / 0 |"


def test_unknown_layout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names that there are."""
    with pytest.raises(SystemExit):
        main([".", "mamba"])

    error = capsys.readouterr().err
    assert "no layout 'mamba'" in error
    assert all(name in error for name in LAYOUTS)
