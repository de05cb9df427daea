"""Modes that look at no cache: `round-robin`, `random`, `p2c`, `least-loaded`, and `direct`, a named target.

Requests in flight are those booked by any replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import lowest
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.errors import BadRequestError, NoWorkersError


@dataclass(slots=True)
class RoundRobin(BuiltInPolicy):
    """Each candidate in turn, ordered by target."""

    turn: int = 0

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Candidates, _moment: Moment) -> int:
        return self.turn % len(candidates)

    def routed(self, _request: RouteRequest, _choice: Candidate, _moment: Moment) -> None:
        # not in `pick`: a dry run must not take a turn
        self.turn += 1


class Random(BuiltInPolicy):
    """Any candidate, all equally likely."""

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return int(moment.random() * len(candidates))


class _Balancing(BuiltInPolicy):
    """Looks at requests in flight alone."""

    needs_tokens = False

    def terms(
        self,
        _request: RouteRequest,
        candidates: Candidates,
        _moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        return [{"requests": requests} for requests in candidates.requests()]


class LeastLoaded(_Balancing):
    """The fewest requests in flight, at random among the equal."""

    def pick(self, _request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return lowest(candidates.requests(), moment.random())


class PowerOfTwo(_Balancing):
    """Two at random, and of these the one with fewer requests in flight. Source: Ray Serve."""

    def pick(self, _request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return power_of_two(candidates, moment.random)


class Direct(BuiltInPolicy):
    """The target that the client names; of a worker named without a rank the one with the fewest requests."""

    needs_tokens = False

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        """Raises BadRequestError if no target is named, NoWorkersError if it takes no requests."""
        wanted = request.wanted
        if wanted is None:
            raise BadRequestError(
                "mode direct needs a target: send the header x-kvrouter-target: <worker_id>"
            )
        worker_id, rank = wanted
        targets = candidates.targets()
        places = [
            place
            for place, target in enumerate(targets)
            if target.worker_id == worker_id and rank in {None, target.rank}
        ]
        if not places:  # it exists, or the frontend would have answered 404: it drains, is down or full
            named = worker_id if rank is None else f"{worker_id}/{rank}"
            known = ", ".join(map(str, targets))
            raise NoWorkersError(f"the wanted target {named} takes no requests now; there are: {known}")
        return fewest_requests(candidates, places, moment.random())


def power_of_two(candidates: Candidates, random: Callable[[], float]) -> int:
    """Of two distinct ones, all pairs equally likely, the one with fewer requests; if equal, either."""
    count = len(candidates)
    first = int(random() * count)
    if count == 1:
        return first
    # an offset of 1 to count - 1 from the first: distinct without drawing again
    second = (first + 1 + int(random() * (count - 1))) % count
    # two Candidates are cheaper than a column of a thousand
    return second if candidates[second].requests < candidates[first].requests else first


def fewest_requests(candidates: Candidates, among: Sequence[int], chance: float) -> int:
    """Of the candidates at these indices, the index of one with the fewest requests."""
    requests = candidates.requests()
    return among[lowest([requests[place] for place in among], chance)]
