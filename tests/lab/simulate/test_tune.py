"""`kvrouter tune`: a search in the simulator, and its test on other requests."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from kvrouter.frontend.settings import COMMAND as FRONTEND
from kvrouter.lab.simulate import generated
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.measures import Measures
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from kvrouter.lab.simulate.workloads import trace
from kvrouter.lab.tune.__main__ import command_line, main
from kvrouter.lab.tune.search import (
    DEFAULT,
    MODES,
    PUBLISHED,
    HeldOut,
    Search,
    SearchResult,
    Tried,
    TunedSettings,
    drawn,
)
from kvrouter.policies.endpoint_picker import load_endpoint_picker
from kvrouter.settings.read import load
from tests.long import IS_LONG

CELL = Cell(trace(read_trace(CONVERSATION_EXCERPT, 200)), 0.5, load=0.7, workers=4)


@pytest.mark.parametrize("mode", MODES)
def test_every_choice_can_be_served(mode: str) -> None:
    """A frontend takes the flags and behaves as simulated; the same for the file of mode scored."""
    for number in range(8 if IS_LONG else 2):
        drawn_from = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number))
        drawn_from.enqueue_trial({"mode": mode})
        choice = drawn(drawn_from.ask(), with_sessions=True)

        served = load(FRONTEND, choice.flags(), {}).settings

        policy = choice.settings()
        assert replace(policy, scored=None) == replace(served.policy, scored=None)
        assert choice.frontend.queue_threshold == served.admission.threshold
        assert choice.frontend.session_affinity == served.rules.filters.session_affinity
        if choice.weights:
            assert policy.scored == load_endpoint_picker(choice.endpoint_picker_config()).policy


def test_winner_is_tested_on_what_the_search_has_not_seen() -> None:
    """Trials have the first 70 % of the requests, the test the others; engines are the same."""
    search = Search(CELL, "ttft", trials=3, seeds=2, jobs=1, seed=3)
    first, whole = search._cells()

    assert 140 == len(first.workload.draw(0)) == whole.workload.warm_up
    assert first.capacity_blocks == whole.capacity_blocks == CELL.capacity_blocks
    assert first.offered_pace == whole.offered_pace

    found = search.run()

    assert [DEFAULT, PUBLISHED] == [one.choice for one in found.tested[:2]]
    assert 3 == len(found.tried)
    assert found.gain.is_better <= (found.winner != DEFAULT)
    assert found == search.run(), "the same seed gives the same result"


gain = Search(CELL, "ttft", trials=1, seeds=2, jobs=1, seed=0)._gain


def test_gain_needs_every_seed() -> None:
    """Better on average is not enough."""
    figures = CELL.measure("round-robin", DEFAULT.settings(), 0)

    def runs(*ttft_p90_s: float) -> list[Measures]:
        return [replace(figures, ttft_p90_s=value) for value in ttft_p90_s]

    mixed, clear = gain(runs(2, 2), runs(1, 2.2)), gain(runs(2, 2), runs(1, 1.5))

    assert not mixed.is_better
    assert clear.is_better
    assert (-0.375, -0.5, -0.25) == clear.ttft


def test_pareto() -> None:
    """Only trials that no other beats in both times."""
    figures = CELL.measure("round-robin", DEFAULT.settings(), 0)
    tried = [
        Tried(TunedSettings(str(place)), replace(figures, ttft_p90_s=ttft, itl_p90_s=itl))
        for place, (ttft, itl) in enumerate([(1, 9), (2, 5), (3, 6), (4, 1), (1, 10)])
    ]
    found = SearchResult(tried, [HeldOut(DEFAULT, [figures])], gain([figures], [figures]))

    assert ["0", "1", "3"] == [one.choice.mode for one in found.pareto()]


def test_sessions_are_searched_where_there_are_some() -> None:
    """A trace has no sessions."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    drawn_ = [drawn(study.ask(), with_sessions=False) for _ in range(30)]

    assert {"off"} == {one.frontend.session_affinity for one in drawn_}
    chats = Cell(generated.named("multi-turn:sessions=10", ()), 1.0, workers=2)
    assert Search(chats, "ttft", 3, 2, 1, 1).run().tried


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the test, the trials that none beats, and flags, or that none is better."""
    file = tmp_path / "tuned.json"

    code = main(
        [str(CONVERSATION_EXCERPT), "--requests=150", "--workers=4", "--load=0.7", "--trials=3",
         "--seeds=2", "--slo-ttft-s=3", f"--json={file}"]
    )  # fmt: skip

    written, printed = json.loads(file.read_text()), capsys.readouterr()
    assert code == 0
    assert "goodput (TTFT below 3 s, ITL below 50 ms)" in printed.out
    assert ("gain over the default" if written["is_better"] else "no better than the default") in printed.out
    assert 3 == len(written["trials"])
    assert "--router-mode" in written["command"]
    assert "runs: 19 of 19" in printed.err or "runs:" in printed.err


def test_command_line_names_the_file() -> None:
    """Mode scored needs its EndpointPickerConfig."""
    choice = TunedSettings("scored", weights={"queue-scorer": 1.0})

    assert ["--router-mode=scored", "--router-config=FILE"] == shlex.split(command_line(choice))[2:]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--load=0.5", "--pace=2"], "--load and --pace"),
        (["--kv-tokens=9", "--cache=2"], "--kv-tokens and --cache"),
        (["--requests=20", "--kv-tokens=1", "--trials=0"], "--trials"),
    ],
)
def test_wrong_settings(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what to change."""
    assert 2 == main([str(CONVERSATION_EXCERPT), *flags])
    assert problem in capsys.readouterr().err


def test_short_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot be divided into a search and a test."""
    file = tmp_path / "short.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')

    assert 2 == main([str(file)])
    assert "at least 20 are needed" in capsys.readouterr().err
