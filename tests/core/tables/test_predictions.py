"""Predictions against the engines' reports: counts, windows, alarms."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouter.core.tables.predictions import (
    ANNOUNCE_S,
    ERROR_BLOCKS,
    LEAST,
    MAX_EXPECTED,
    WINDOW,
    Alarm,
    Prediction,
    PredictionKind,
    PredictionTable,
    Usage,
    WorkerRecord,
)
from kvrouter.core.wire.ids import Target
from tests.core.worlds import T1, T2, W1, W2

CHAT, TEXT, TOKENS = PredictionKind("chat"), PredictionKind("text"), PredictionKind("tokens")


def predicted(blocks: int, **facts: Any) -> Prediction:
    """A prediction for a prompt of 100 tokens on worker 1, block size 16."""
    fields: dict[str, Any] = {"target": T1, "kind": TEXT, "isl": 100, "block_size": 16, **facts}
    return Prediction(blocks=blocks, **fields)


def observed(*pairs: tuple[Prediction, Usage]) -> WorkerRecord:
    """Worker 1's record after these answers."""
    table = PredictionTable()
    for prediction, usage in pairs:
        table.observe(prediction, usage)
    return table.records[W1]


def raised(record: WorkerRecord, kind: PredictionKind = TEXT) -> set[str]:
    """The names of the alarms that are raised."""
    own = {"uncached": record.uncached, "uneven": record.uneven, "inexact": record.inexact}
    evidence = record.evidence(kind)
    own |= {"lengths": evidence.lengths, "unannounced": evidence.unannounced, "blind": evidence.blind}
    return {name for name, alarm in own.items() if alarm.is_raised}


@pytest.mark.parametrize(
    ("blocks", "cached_tokens", "result", "bucket"),
    [
        (4, 64, "exact", "0"),
        (0, 0, "exact", "0"),
        (4, 48, "over", "1"),
        (4, 0, "over", "4"),
        (4, 60, "over", "1"),
        (3, 64, "under", "-1"),
        (0, 64, "under", "-4"),
        (3, 50, "under", "0"),
        (6, 0, "over", "16"),
        (500, 0, "over", "+Inf"),
        (0, 16 * 500, "under", "-256"),
    ],
)
def test_counts(blocks: int, cached_tokens: int, result: str, bucket: str) -> None:
    """Each prediction is exact, over or under, and falls into the bucket of its error in blocks."""
    record = observed((predicted(blocks), Usage(100, cached_tokens)))

    assert {(result, "index"): 1} == record.predictions
    assert bucket == [*map(str, ERROR_BLOCKS), "+Inf"][record.errors.index(1)]
    assert (blocks * 16, cached_tokens) == (record.predicted_tokens, record.reported_tokens)


def test_one_block_less_is_learnt() -> None:
    """Always exactly one block less than could be reused: the engine's rule, and not an alarm."""
    table = PredictionTable()
    for number in range(LEAST):
        assert (None if number < LEAST else True) is table.reuses_one_less(W1)
        table.observe(predicted(4), Usage(100, 48))

    assert table.reuses_one_less(W1)
    assert set() == raised(table.records[W1])

    for _ in range(WINDOW):  # predicted by that rule from now on
        table.observe(predicted(3, is_one_less=True), Usage(100, 48))
    assert table.reuses_one_less(W1)
    assert table.records[W1].predictions["exact", "index"] == WINDOW


def test_one_block_less_is_unlearnt() -> None:
    """An engine that reuses all again, or was taken for such a one by its metrics alone: no alarm either."""
    table = PredictionTable()
    for _ in range(WINDOW):
        table.observe(predicted(3, is_one_less=True), Usage(100, 64))

    assert table.reuses_one_less(W1) is False
    assert set() == raised(table.records[W1])


@pytest.mark.parametrize(
    "facts", [{"in_flight": True}, {"is_firm": False}, {"is_estimate": True}, {"is_single": False}]
)
def test_answers_that_say_nothing_of_the_rule(facts: dict[str, bool]) -> None:
    """A difference that something else may explain."""
    table = PredictionTable()
    for _ in range(WINDOW):
        table.observe(predicted(4, **facts), Usage(100, 48))

    assert table.reuses_one_less(W1) is None


def test_seldom_one_block_less() -> None:
    """A block that is missing now and then is no rule."""
    table = PredictionTable()
    for number in range(3 * WINDOW):
        table.observe(predicted(4), Usage(100, 48 if number % 4 else 64))

    assert table.reuses_one_less(W1) is False


def test_in_flight_is_counted_apart() -> None:
    """Blocks of a request in flight may not exist yet: counted apart, without an alarm."""
    record = observed(*[(predicted(4, in_flight=True), Usage(100, 0))] * WINDOW)

    assert {("over", "in_flight"): WINDOW} == record.predictions
    assert set() == raised(record)


def test_doubtful_is_counted_apart() -> None:
    """Predictions that a known reason may prove wrong; those in flight stay in flight."""
    record = observed(
        (predicted(4, is_firm=False), Usage(100, 0)),
        (predicted(4, is_firm=False, in_flight=True), Usage(100, 0)),
        (predicted(4), Usage(100, 64)),
    )

    assert {("over", "doubtful"): 1, ("over", "in_flight"): 1, ("exact", "index"): 1} == record.predictions


@pytest.mark.parametrize("facts", [{"is_firm": False}, {"in_flight": True}, {"is_single": False}])
def test_doubtful_predictions_raise_no_alarm(facts: dict[str, Any]) -> None:
    """Waiting behind others, a feed that lags, siblings, several prompts: no evidence."""
    record = observed(*[(predicted(4, **facts), Usage(100, 0))] * WINDOW)

    assert set() == raised(record)


def test_several_prompts_are_not_compared() -> None:
    """Engines report the cached tokens of one prompt only; the number of prompt tokens counts all prompts."""
    record = observed((predicted(4, is_single=False), Usage(101, 0)))

    assert {} == record.predictions
    assert {"different": 1} == record.lengths


def test_nothing_known_nothing_compared() -> None:
    """Without usage, or without token ids, nothing is counted."""
    record = observed((predicted(4), Usage()), (predicted(0, isl=0, kind=None), Usage(100, 64)))

    assert ({}, {}) == (record.predictions, record.lengths)


def test_absent_means_none_cached() -> None:
    """Some vLLM omit the field when it is 0: so it is read once the worker has reported the field."""
    record = observed((predicted(0), Usage(100, None)))
    assert {} == record.predictions

    record = observed(
        (predicted(1), Usage(100, 16)), (predicted(1), Usage(100, None)), (predicted(1), Usage())
    )
    assert {("exact", "index"): 1, ("over", "index"): 1} == record.predictions


def test_absent_means_unknown() -> None:
    """If a worker has reported a 0, a missing field means that it does not know."""
    record = observed((predicted(0), Usage(100, 0)), *[(predicted(4), Usage(100, None))] * WINDOW)

    assert {("exact", "index"): 1} == record.predictions
    assert set() == raised(record)


@pytest.mark.parametrize(
    ("blocks", "usage"),
    [(4, Usage(140, 64)), (3, Usage(100, 64)), (0, Usage(100, 64)), (3, Usage(60, 0))],
    ids=["other length", "known end", "known to the engine", "short text"],
)
def test_estimates(blocks: int, usage: Usage) -> None:
    """Estimated lengths and ends are no evidence against a tokenizer, or an index."""
    record = observed(*[(predicted(blocks, is_estimate=True), usage)] * WINDOW)

    assert {} == record.lengths
    assert raised(record) <= ({"inexact"} if not usage.cached_tokens else set())


def test_uncached_estimates() -> None:
    """With many blocks predicted for an estimated prompt, 0 cached tokens raise the alarm."""
    record = observed(*[(predicted(4, is_estimate=True), Usage(70, 0))] * WINDOW)

    assert "uncached" in raised(record)


ALWAYS: dict[str, tuple[int, Usage, set[str]]] = {
    "other lengths": (4, Usage(104, 64), {"lengths"}),
    "other lengths, nothing cached reported": (4, Usage(104), {"lengths"}),
    "never predicted": (0, Usage(100, 64), {"blind", "inexact"}),
    "never there": (4, Usage(100, 0), {"uncached", "inexact"}),
    "no whole blocks": (4, Usage(100, 72), {"uneven", "inexact"}),
    "two blocks off": (4, Usage(100, 32), {"inexact"}),
    "right": (4, Usage(100, 64), set()),
    "nothing to reuse": (0, Usage(100, 0), set()),
}


@pytest.mark.parametrize("case", ALWAYS)
def test_alarms(case: str) -> None:
    """If the first requests all fail, the eighth raises the alarm, not an earlier one."""
    blocks, usage, expected = ALWAYS[case]
    answers = [(predicted(blocks), usage)] * LEAST

    assert set() == raised(observed(*answers[1:]))
    assert expected == raised(observed(*answers))


def test_alarm_after_good_times() -> None:
    """An alarm that needs nearly all outcomes bad is raised within a window after the last good one."""
    alarm = Alarm(0.9, 0.5)
    for _ in range(1000):
        alarm.note(False)
    noted = 0
    while not alarm.is_raised:
        alarm.note(True)
        noted += 1

    assert LEAST < noted < WINDOW


def test_alarm_is_over() -> None:
    """It clears when half of the window is good again, and does not flicker on the way."""
    alarm = Alarm(0.9, 0.5)
    for _ in range(WINDOW):
        alarm.note(True)
    states = []
    for _ in range(WINDOW):
        alarm.note(False)
        states.append(alarm.is_raised)

    assert [True] * (WINDOW // 2 - 1) + [False] * (WINDOW // 2 + 1) == states
    assert WINDOW == alarm.total


def test_kinds_are_judged_apart() -> None:
    """Chats that fail are not hidden by texts that succeed."""
    table = PredictionTable()
    for _ in range(LEAST):
        table.observe(predicted(4, kind=CHAT), Usage(110, 64))
        for _ in range(5):
            table.observe(predicted(4, kind=TEXT), Usage(100, 64))
    record = table.records[W1]

    assert {"lengths"} == raised(record, CHAT)
    assert set() == raised(record, TEXT)
    assert record.evidence(TEXT).lengths.is_well


def test_announced() -> None:
    """A block that events name in time confirms the worker; a block that they never name does not."""
    table, held = PredictionTable(), {1}
    for hash_ in (1, 2, 3):
        table.expect(T1, TEXT, [hash_], 10.0)
    table.look(10.0, lambda _, hash_: hash_ in held)
    assert {"found": 1} == table.records[W1].announced

    held.add(2)
    table.look(10.0 + ANNOUNCE_S / 2, lambda _, hash_: hash_ in held)
    table.look(10.0 + ANNOUNCE_S - 0.01, lambda _, hash_: hash_ in held)
    assert {"found": 2} == table.records[W1].announced

    table.look(10.0 + ANNOUNCE_S, lambda _, hash_: hash_ in held)
    assert {"found": 2, "missing": 1} == table.records[W1].announced


def test_announcements_that_prove_nothing() -> None:
    """While a feed lags, no block counts as missing."""
    table = PredictionTable()
    table.expect(T1, TEXT, [1], 10.0)
    table.look(99.0, lambda *_: None)
    table.look(99.0, lambda *_: False)

    assert {} == table.records


def test_never_announced() -> None:
    """Eight served requests without an event raise the alarm; it clears when half of them are found."""
    table = PredictionTable()
    for hash_ in range(LEAST):
        table.expect(T1, TOKENS, [hash_], 0.0)
    table.look(ANNOUNCE_S, lambda *_: False)
    assert {"unannounced"} == raised(table.records[W1], TOKENS)

    for hash_ in range(LEAST):
        table.expect(T1, TOKENS, [hash_], 10.0)
    table.look(10.0, lambda *_: True)
    assert set() == raised(table.records[W1], TOKENS)


def test_equal_requests_are_one_piece_of_evidence() -> None:
    """A hundred equal requests count once; requests that only begin alike count each."""
    table = PredictionTable()
    for _ in range(100):
        table.expect(T1, TEXT, [1, 2], 0.0)
    table.look(ANNOUNCE_S, lambda *_: False)
    assert {"missing": 1} == table.records[W1].announced

    for own in range(50):
        table.expect(T1, TEXT, [1, own], 0.0)
    table.look(ANNOUNCE_S, lambda *_: False)
    assert {"missing": 51} == table.records[W1].announced


def test_bounded() -> None:
    """Expectations beyond the bound are not kept; records end with their workers."""
    table = PredictionTable()
    for hash_ in range(2 * MAX_EXPECTED):
        table.expect(Target(W2), TEXT, [hash_], 0.0)
    table.look(0.0, lambda *_: True)
    table.observe(predicted(1), Usage(100, 16))
    assert MAX_EXPECTED == table.records[W2].announced["found"]

    table.keep({W1})

    assert [W1] == list(table.records)
    assert T2.worker_id == W2
