"""Modes that look at load alone, requests in flight as booked by any replica: `p2c` and `least-loaded`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrouter.core.routing.candidates import requests_of
from kvrouter.core.routing.cost import lowest
from kvrouter.core.routing.policy import Candidate, Policy, PolicyState, RouteRequest


class LeastLoaded(Policy):
    """The fewest requests in flight, at random among the equal."""

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """The least loaded."""
        return lowest(requests_of(candidates), state.random())

    def terms(
        self, _request: RouteRequest, candidates: Sequence[Candidate], _state: PolicyState
    ) -> list[dict[str, float]]:
        """Requests in flight."""
        return request_terms(candidates)


class PowerOfTwo(Policy):
    """Two at random, and of these the one with fewer requests in flight. Source: Ray Serve."""

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """The less loaded of two."""
        return power_of_two(candidates, state.random)

    def terms(
        self, _request: RouteRequest, candidates: Sequence[Candidate], _state: PolicyState
    ) -> list[dict[str, float]]:
        """Requests in flight."""
        return request_terms(candidates)


def power_of_two(candidates: Sequence[Candidate], random: Callable[[], float]) -> int:
    """Of two distinct ones, all pairs equally likely, the one with fewer requests; if equal, either."""
    count = len(candidates)
    first = int(random() * count)
    if count == 1:
        return first
    second = (first + 1 + int(random() * (count - 1))) % count
    return second if candidates[second].requests < candidates[first].requests else first


def fewest_requests(candidates: Sequence[Candidate], among: Sequence[int], chance: float) -> int:
    """Of the candidates at these places, the place of one with the fewest requests."""
    requests = requests_of(candidates)
    return among[lowest([requests[place] for place in among], chance)]


def request_terms(candidates: Sequence[Candidate]) -> list[dict[str, float]]:
    """The one term of all policies that balance requests."""
    return [{"requests": candidate.requests} for candidate in candidates]
