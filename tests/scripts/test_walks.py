"""`scripts/bench walks`: files that a chat, a KV event and an AddRequest run through, as on the page."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit.bench.walks import HEADING, LIMITS, Clock, Step, Walk, lines, make_walks, section

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("core", ["native"], indirect=True)
async def test_walks_are_within_their_limits(nats_url: str, tmp_path: Path) -> None:
    """A longer one needs a higher limit, with its reason. Each goes from one end to the other."""
    build_tiny_model(tmp_path)

    walks = await make_walks(nats_url, uuid.uuid4().hex, tmp_path)

    assert list(LIMITS) == [walk.name for walk in walks]
    for walk in walks:
        files = [f"{step.file}: {step.function}" for step in walk.steps]
        assert len(files) <= LIMITS[walk.name], "\n".join([walk.name, *files])
    chat, kv_event, add_request = walks
    assert {"replica a"} == {step.part for step in chat.steps}
    assert "policies/kv.py" in {step.file for step in chat.steps}
    assert ["agent", "replica b"] == list(dict.fromkeys(step.part for step in kv_event.steps))
    assert ["replica a", "replica b"] == list(dict.fromkeys(step.part for step in add_request.steps))
    for walk in walks:
        assert "bus/connection.py" in {step.file for step in walk.steps}


def test_a_held_clock() -> None:
    """It stands still, and goes on from there."""
    clock = Clock()
    with clock.held():
        held_at = clock.time()
        while time.monotonic() <= held_at:  # the system's clock has moved
            pass
        assert clock.time() == held_at
    assert held_at <= clock.time() <= time.monotonic()


def test_a_walk_on_the_page() -> None:
    """A line for each file, below the part where it is called."""
    walk = Walk(
        "kv event",
        [
            Step("agent", "outer/first.py", "First.on"),
            Step("replica b", "outer/inner/second.py", "made.<locals>.take"),
            Step("replica b", "third.py", "<lambda>"),
        ],
    )

    assert [" ".join(line.split()) for line in lines(walk)] == [
        "agent:",
        "1 outer/first.py First.on",
        "replica b:",
        "2 outer/inner/second.py made.take",
        "3 third.py <lambda>",
    ]
    assert "**A KV event: 3 files.**" in section([walk])


def test_the_page_has_the_walks() -> None:
    """They are its end, from the heading on, so that `--plots` can write them again."""
    _, heading, end = (ROOT / "docs/concepts/design.md").read_text().partition(HEADING)

    assert heading
    assert len(LIMITS) == end.count(" files.** ")
