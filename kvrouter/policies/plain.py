"""Modes that do not look at the cache: `round-robin` and `random`."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.policy import Candidate, PolicyState, RouteRequest


class RoundRobin:
    """Each candidate in turn, in the order of their names."""

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """The next one. Candidates come ordered by target."""
        state.turn += 1
        return (state.turn - 1) % len(candidates)


class Random:
    """Any candidate, all equally likely."""

    needs_tokens = False

    def pick(self, _request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState) -> int:
        """A uniform choice."""
        return int(state.random() * len(candidates))
