"""Modes that look at nothing: `round-robin` and `random`; and `direct`, where the client chooses."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.routing.candidates import targets_of
from kvrouter.core.routing.policy import Candidate, Policy, PolicyState, RouteRequest
from kvrouter.errors import BadRequestError, NoWorkersError
from kvrouter.policies.load import fewest_requests


class RoundRobin(Policy):
    """Each candidate in turn, in the order of their names."""

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """The next one. Candidates come ordered by target."""
        state.turn += 1
        return (state.turn - 1) % len(candidates)


class Random(Policy):
    """Any candidate, all equally likely."""

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """A uniform choice."""
        return int(state.random() * len(candidates))


class Direct(Policy):
    """The target that the client names; of a worker named without a rank the one with the fewest requests."""

    needs_tokens = False

    def pick(self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """The named one. Raises BadRequestError if none is named, NoWorkersError if it takes no requests."""
        wanted = request.wanted
        if wanted is None:
            raise BadRequestError(
                "mode direct needs a target: send the header x-kvrouter-target: <worker_id>"
            )
        worker_id, rank = wanted
        targets = targets_of(candidates)
        places = [
            place
            for place, target in enumerate(targets)
            if target.worker_id == worker_id and rank in {None, target.rank}
        ]
        if not places:
            named = worker_id if rank is None else f"{worker_id}/{rank}"
            known = ", ".join(map(str, targets))
            raise NoWorkersError(f"the wanted target {named} takes no requests now; there are: {known}")
        return fewest_requests(candidates, places, state.random())
