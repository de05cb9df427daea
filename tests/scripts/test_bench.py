"""`scripts/bench`: a short run of each command that needs no fleet, and the arithmetic of those that do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from kvrouter.lab.simulate import workloads
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from scripts.kit.bench import decisions, instructions
from scripts.kit.bench.__main__ import COMMANDS, main
from scripts.kit.bench.meter import cpu_ns


def test_cpu_time(tmp_path: Path) -> None:
    """cpu_ns sums the nanoseconds of all threads of a process."""
    for thread, used in ((7, 1500), (8, 20)):
        task = tmp_path / "7" / "task" / str(thread)
        task.mkdir(parents=True)
        (task / "schedstat").write_text(f"{used} 99 3\n")

    assert 1520 == cpu_ns(7, tmp_path)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small measurements, as figures are not tested."""
    cell = Cell(workloads.trace(read_trace(CONVERSATION_EXCERPT, 100)), 0.5, load=0.6, workers=2)
    group = decisions.Group("a few requests", ("kv:8", "round-robin"), [cell])
    monkeypatch.setattr(decisions, "groups", lambda: {"small": group})


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("command", "figures"),
    [
        ("policies --targets 2 --runs 1 --seconds 0.001", "figures"),
        ("decisions --seeds 1 --jobs 1", "groups"),
        ("tokens --runs 1 --sizes 100 --texts 20 --bursts 0", "times"),
    ],
)
def test_runs(command: str, figures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, and a file with the same figures and the machine."""
    file = tmp_path / "figures.json"

    assert 0 == main([*command.split(), "--json", str(file)])

    written = json.loads(file.read_text())
    assert written[figures]
    assert {"date", "cpu", "kvrouter"} <= written.keys()
    assert capsys.readouterr().out


def test_tokens_of_no_bpe_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that fastokens does not read is an error with the reason."""
    Tokenizer(models.Unigram()).save(str(tmp_path / "tokenizer.json"))

    assert 1 == main(["tokens", "--model-path", str(tmp_path)])
    assert "fastokens is off for" in capsys.readouterr().err


def test_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile's last line has its sum, without idle time; without valgrind it is an error."""
    assert 63395 == instructions.total("summary: 12\n\nfn=(1)\n15 63395\n\ntotals: 63395\n")
    one = instructions.cost(100, 50_000, 1_000.0)
    assert (490.0, 10.0) == (one.instructions, one.idle)
    assert 1 == instructions.table({"kv": {"short": one}}, {"kv": {"short": one}}).row_count
    monkeypatch.setenv("PATH", str(tmp_path))

    assert 1 == main(["instructions", "--share", "0.001"])

    assert "valgrind is not on PATH: install valgrind" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command is there, says what it measures, and can write a file."""
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])

    assert "--json FILE" in capsys.readouterr().out


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a sub-command the list is printed; an unknown one is an error."""
    assert 0 == main([])
    said = capsys.readouterr().out
    assert all(f"  {command} " in said for command in COMMANDS)
    assert 2 == main(["nothing"])
    assert "no sub-command 'nothing'" in capsys.readouterr().err
