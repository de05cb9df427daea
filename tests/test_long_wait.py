"""Waits without a limit say what they wait for, at growing intervals."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvrouter.long_wait import FIRST_S, MOST_S, LongWait

STEPS = st.lists(st.floats(0.01, 2000.0), max_size=60)


def spoken(times: list[float], began_at: float = 0.0) -> list[float]:
    """At which of these times a wait speaks."""
    wait = LongWait("engine.awaited", "an engine", began_at)
    return [at for at in times if wait.look(at, "refused", "start it")]


def test_it_says_all_of_it() -> None:
    """A line has what is awaited, since when, why the last attempt failed, what to do, and own facts."""
    wait = LongWait("engine.awaited", "an engine", 100.0, url="http://h:1")
    with capture_logs() as logs:
        assert not wait.look(109.9, "first", "a")
        assert wait.look(110.0, "refused", "start it")

    (line,) = logs
    since = line.pop("since")
    assert {
        "event": "engine.awaited",
        "log_level": "warning",
        "awaited": "an engine",
        "url": "http://h:1",
        "waited_s": 10,
        "reason": "refused",
        "remedy": "start it",
    } == line
    assert since.endswith("Z")


def test_looks_every_second() -> None:
    """The first line comes after ten seconds; then the intervals double up to ten minutes."""
    assert [10, 20, 40, 80, 160, 320, 640, 1240, 1840] == spoken([float(at) for at in range(2000)])


@given(STEPS, st.floats(0.0, 1e9))
def test_looks_at_any_times(steps: list[float], began_at: float) -> None:
    """Never before the first interval; no two lines for one interval; never silent for two of the longest."""
    times = [began_at + at for at in accumulate(steps)]
    said = spoken(times, began_at)

    assert all(at - began_at >= FIRST_S * 0.999 for at in said)
    assert len(said) <= 7 + (times[-1] - began_at if times else 0.0) / MOST_S
    bounds = [began_at, *said, *times[-1:]]
    widest = max(steps, default=0.0)
    assert all(later - earlier <= 2 * MOST_S + widest for earlier, later in pairwise(bounds))
