"""`scripts/bench walks`: files that a chat, a KV event and an AddRequest run through, and the pictures."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from scripts.kit.bench.walks import LIMITS, Step, lines, make_walks, written

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("core", ["native"], indirect=True)
def test_walks_are_within_their_limits(nats_url: str, tiny: Path) -> None:
    """A longer one needs a higher limit, with its reason. Each goes from one end to the other."""
    walks = make_walks(nats_url, uuid.uuid4().hex, tiny)

    for name, limit in LIMITS.items():
        files = [f"{step.file}: {step.function}" for step in walks[name]]
        assert len(files) <= limit, "\n".join([name, *files])
        assert "bus/connection.py" in {step.file for step in walks[name]}
    parts = {name: list(dict.fromkeys(step.part for step in steps)) for name, steps in walks.items()}
    assert parts == {
        "chat": ["replica a"],
        "kv event": ["agent", "replica b"],
        "add request": ["replica a", "replica b"],
    }
    assert "policies/kv.py" in {step.file for step in walks["chat"]}


def test_a_walk_on_the_page() -> None:
    """A line for each file, below the part where it is called."""
    steps = [
        Step("agent", "outer/first.py", "First.on"),
        Step("replica b", "outer/inner/second.py", "made.<locals>.take"),
        Step("replica b", "third.py", "<lambda>"),
    ]

    assert [" ".join(line.split()) for line in lines(steps)] == [
        "agent:",
        "outer/first.py First.on",
        "replica b:",
        "outer/inner/second.py made.take",
        "third.py <lambda>",
    ]


def test_the_page_has_the_walks() -> None:
    """`--plots` writes them again: their numbers of files, and the files."""
    page = (ROOT / "docs/concepts/design.md").read_text()

    changed = written(page, {name: [Step("agent", f"{name}.py", "run")] for name in LIMITS})

    assert len(LIMITS) == changed.count(": 1 files.** ")
    assert len(LIMITS) == changed.count("```\nagent:\n  ") == changed.count("  run\n```\n")
    assert page.partition("## Walks")[0] == changed.partition("## Walks")[0]
