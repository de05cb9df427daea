"""Mode prefix-affinity: Ray's order of rules, on texts and loads by hand."""

from __future__ import annotations

import math

import pytest

from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.tables.text_index import TextIndex
from kvrouter.policies.prefix_affinity import PrefixAffinity
from tests.policies.tables import candidate, columns, moment, picked, target

TEXT = "0123456789" * 10
"""A hundred characters."""


def asking(text: str = TEXT) -> RouteRequest:
    """A request with this text."""
    return RouteRequest("req", text=text)


def knowing(**texts: str) -> TextIndex:
    """An index after one text was sent to each worker."""
    index = TextIndex()
    for name, text in texts.items():
        index.insert(target(name), text, 0.0)
    return index


def workers(*requests: int) -> list[Candidate]:
    """w1, w2, … with these numbers of requests."""
    return [candidate(f"w{number}", requests=load) for number, load in enumerate(requests, start=1)]


def test_longest_match() -> None:
    """The worker with the longest match wins, although its tree is the largest."""
    index = knowing(w1=TEXT[:90] + "x" * 500, w2=TEXT[:40], w3="y")

    assert ["w1"] == picked(PrefixAffinity(), workers(5, 0, 0), asking(), texts=index)


@pytest.mark.parametrize(("matched", "winner"), [(9, "w3"), (10, "w1")])
def test_match_rate_threshold_is_strict(matched: int, winner: str) -> None:
    """Below a rate of 0.1 the smallest tree wins; at exactly 10 of 100 characters the match."""
    index = knowing(w1=TEXT[:matched] + "x" * 50, w2="y" * 30, w3="z" * 20)

    assert [winner] == picked(PrefixAffinity(), workers(0, 0, 0), asking(), texts=index)


@pytest.mark.parametrize(("requests", "winner"), [((10, 0), ["w1"]), ((11, 0), ["w2"])])
def test_imbalance_is_strict(requests: tuple[int, int], winner: list[str]) -> None:
    """A difference of 10 requests is balanced; from 11 on the power of two choices decides."""
    index = knowing(w1=TEXT)

    assert winner == picked(PrefixAffinity(), workers(*requests), asking(), texts=index)


def test_infinite_imbalance_threshold() -> None:
    """As in Ray since December 2025, load never overrules the match."""
    index = knowing(w1=TEXT)

    assert ["w1"] == picked(PrefixAffinity(math.inf), workers(500, 0), asking(), texts=index)


def test_equal_matches_go_by_requests() -> None:
    """Of the workers with the longest match the fewest requests win; ties are random."""
    index = knowing(w1=TEXT, w2=TEXT, w3=TEXT, w4="")

    assert ["w2", "w3"] == picked(PrefixAffinity(), workers(4, 2, 2, 0), asking(), texts=index)


def test_equal_trees_go_by_requests() -> None:
    """Of several smallest trees the one with the fewest requests wins."""
    index = knowing(w1="abc", w2="xyz", w3="longer")

    assert ["w2"] == picked(PrefixAffinity(), workers(1, 0, 0), asking(), texts=index)


def test_new_worker_has_the_smallest_tree() -> None:
    """A worker that has received no text has the smallest tree."""
    assert ["w2"] == picked(PrefixAffinity(), workers(0, 3), asking(), texts=knowing(w1="abc"))


def test_no_text_is_power_of_two() -> None:
    """Without a text, the less loaded of two random workers wins."""
    assert ["w2"] == picked(PrefixAffinity(), workers(1, 0), asking(""), texts=knowing(w1=TEXT))


def test_empty_tree_is_power_of_two() -> None:
    """No prefix data: of two random workers the less loaded one, so also the second of three."""
    assert ["w1", "w2"] == picked(PrefixAffinity(), workers(0, 1, 2), asking())
    elsewhere = knowing(w9=TEXT)  # not a candidate
    assert ["w1", "w2"] == picked(PrefixAffinity(), workers(0, 1, 2), asking(), texts=elsewhere)


def test_only_candidates_count() -> None:
    """The best match among the candidates, not among all targets."""
    index = knowing(w1=TEXT[:50], w2=TEXT[:20], w9=TEXT)

    assert ["w1"] == picked(PrefixAffinity(), workers(0, 0), asking(), texts=index)


def test_terms() -> None:
    """Each candidate's match rate, tree size and requests."""
    index = knowing(w1=TEXT[:50], w2="x" * 7)

    assert [
        {"requests": 2, "match_rate": 0.5, "tree_chars": 50},
        {"requests": 0, "match_rate": 0.0, "tree_chars": 7},
    ] == PrefixAffinity().terms(asking(), columns(workers(2, 0)), moment(texts=index))
