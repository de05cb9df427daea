"""When all of a worker's first answers are 404, and when that is over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.routing.first_answers import FEWEST, FirstAnswers

NEUTRAL = st.sampled_from([401, 403, 408, 429, 500, 502, 503, 504])


def after(*statuses: int) -> bool:
    """Whether these answers are the problem."""
    answers = FirstAnswers()
    for status in statuses:
        answers.note(status)
    return answers.are_not_found


@given(st.lists(st.sampled_from([200, 201, 400, 401, 404, 422, 429, 500, 502])))
def test_any(statuses: list[int]) -> None:
    """Only 404s count, and any answer of a route that exists ends it for good."""
    proves = {200, 201, 400, 422} & set(statuses)

    assert after(*statuses) == (not proves and statuses.count(404) >= FEWEST)


@given(st.lists(NEUTRAL, max_size=8), st.sampled_from([200, 204, 400, 422]))
def test_ends(between: list[int], good: int) -> None:
    """It begins with the last of FEWEST, ends with one good answer and does not return."""
    assert not after(*between, *[404] * (FEWEST - 1))
    assert after(*between, *[404] * FEWEST, *between)
    assert not after(*[404] * FEWEST, good, *[404] * FEWEST)
