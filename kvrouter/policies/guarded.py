"""Your own policy behind a guard: whatever it does, a request finds a worker.

    choose ──> a target, or ranks ──> an order of the eligible
       └─ raises, or answers what cannot be used ──> the fewest requests; counted, and told once

The router calls a custom policy only through `GuardedPolicy`. It counts errors by the method they happened
in; the first of each kind waits in `take_news` for the shell to log it.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, Policy, RouteRequest
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target, WorkerId

ANSWER = "answer"
"""The kind of trouble where `choose` has returned what cannot be used."""
_SHOWN_CHARACTERS = 200
_ENDS = (KeyboardInterrupt, SystemExit)
"""These end the process. A CancelledError of a plain call ends nothing: it came from some result."""


class Trouble(NamedTuple):
    """Something that an own policy did wrong, for the first time. `where`: the method, or `answer`."""

    policy: str
    where: str
    what: str
    traceback: str


class UnusableChoiceError(Exception):
    """What `choose` has returned names nobody who is eligible."""


class GuardedPolicy(BuiltInPolicy):
    """Asks `policy`, and keeps its mistakes from the requests. `name` is for people."""

    def __init__(self, policy: Policy, name: str) -> None:
        self.policy = policy
        self.name = name
        self.needs_tokens = bool(getattr(policy, "needs_tokens", True))
        self.needs_text = bool(getattr(policy, "needs_text", False))
        self.refresh_s = float(getattr(policy, "refresh_s", 0.0))
        self.troubles: Counter[str] = Counter()
        """By where: a method of the policy, or `answer`."""
        self._news: list[Trouble] = []

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return self.order(request, candidates, moment)[0]

    def order(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Sequence[int]:
        """Its ranks, the fewest requests first in each; least-loaded if it fails."""
        try:
            ranks = places_of(self.policy.choose(request, list(candidates)), candidates)  # it may sort them
        except UnusableChoiceError as error:
            self.note(ANSWER, str(error))
            ranks = [list(range(len(candidates)))]
        except _ENDS:
            raise
        except BaseException as error:
            self.failed("choose", error)
            ranks = [list(range(len(candidates)))]
        requests = candidates.requests()
        return [place for rank in ranks for place in _by_requests(rank, requests, moment)]

    def terms(
        self,
        _request: RouteRequest,
        candidates: Candidates,
        _moment: Moment,
        _chosen: Candidate | None = None,
    ) -> list[dict[str, float]]:
        """What most policies look at; by what yours has judged only it knows."""
        return [
            {
                "overlap_blocks": one.overlap_blocks,
                "prefill_blocks": one.prefill_blocks,
                "decode_blocks": one.decode_blocks,
                "requests": one.requests,
            }
            for one in candidates
        ]

    def on_workers(self, workers: Sequence[Card]) -> None:
        """Passed on."""
        self._call("on_workers", workers)

    def on_request_routed(self, request: RouteRequest, target: Target, status: int) -> None:
        """Passed on."""
        self._call("on_request_routed", request, target, status)

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        """Passed on."""
        self._call("on_worker_removed", worker_id)

    async def refresh(self) -> None:
        """Passed on; whoever runs it bounds its time."""
        try:
            await self.policy.refresh()
        except Exception as error:
            self.failed("refresh", error)

    def close(self) -> None:
        """Passed on."""
        self._call("close")

    def _call(self, method: str, *arguments: object) -> None:
        hook: Callable[..., object] | None = getattr(self.policy, method, None)
        if hook is None:
            return  # it need not derive from Policy
        try:
            hook(*arguments)
        except _ENDS:
            raise
        except BaseException as error:
            self.failed(method, error)

    def failed(self, where: str, error: BaseException) -> None:
        """A method of the policy has raised."""
        self.note(where, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))

    def note(self, where: str, what: str, trace: str = "") -> None:
        """Count a trouble; the first of its kind is news."""
        self.troubles[where] += 1
        if self.troubles[where] == 1:
            self._news.append(Trouble(self.name, where, what, trace))

    def take_news(self) -> list[Trouble]:
        """What has gone wrong for the first time since this was last asked."""
        news, self._news = self._news, []
        return news


def places_of(answer: object, candidates: Sequence[Candidate]) -> list[list[int]]:
    """What `choose` has returned, as places among the candidates. Raises UnusableChoiceError.

    In ranks whoever is not eligible, or stood in a rank before, is passed over; there must be somebody left.
    """
    ranks = _ranks_of(answer)
    left = {candidate.target: place for place, candidate in enumerate(candidates)}
    places = [[left.pop(target) for target in map(_target, rank) if target in left] for rank in ranks]
    if not any(places):
        shown = ", ".join(str(_target(one)) for rank in ranks for one in rank)[:_SHOWN_CHARACTERS]
        raise UnusableChoiceError(f"choose returned nobody who is eligible: {shown or 'an empty list'}")
    return places


def _ranks_of(answer: object) -> Sequence[Sequence[Target | Candidate]]:
    if isinstance(answer, Target | Candidate):
        return [[answer]]
    if isinstance(answer, Sequence) and all(map(_is_rank, answer)):
        return answer
    shown = repr(answer)[:_SHOWN_CHARACTERS]
    raise UnusableChoiceError(f"choose returned {shown}: return a Target, a Candidate, or a list of lists")


def _is_rank(rank: object) -> bool:
    """Whether it is a list of targets; a Target is a tuple itself."""
    if isinstance(rank, Target | str) or not isinstance(rank, Sequence):
        return False
    return all(isinstance(one, Target | Candidate) for one in rank)


def _target(one: Target | Candidate) -> Target:
    return one.target if isinstance(one, Candidate) else one


def _by_requests(rank: Sequence[int], requests: Sequence[int], moment: Moment) -> list[int]:
    """The fewest requests in flight first, at random among the equal."""
    if len(rank) == 1:
        return list(rank)
    return sorted(rank, key=lambda place: (requests[place], moment.random()))
