"""A custom policy behind a guard: its errors never leave a request without a worker.

    choose ──> a target, or ranks ──> the eligible targets in order
       └─ raises, or returns something unusable ──> the fewest requests; counted, and logged the first time

The router calls a custom policy only through `GuardedPolicy`. It counts errors by the method they happened
in; the first of each kind waits in `take_news` for the shell to log it.
"""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, Policy, RouteRequest
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target, WorkerId

# `Trouble.where` if `choose` returned something unusable.
ANSWER = "answer"

# Of `on_request_end`. Before it was passed the output tokens, it took one fewer.
END_ARGUMENTS = 5

_SHOWN_CHARACTERS = 200

# Only these may end the process. A CancelledError from a plain call does not cancel this task: the policy has
# read the result of a future that was cancelled.
_ENDS = (KeyboardInterrupt, SystemExit)


class Trouble(NamedTuple):
    """An error of a custom policy, reported the first time. `where`: the method, or `answer`."""

    policy: str
    where: str
    what: str
    traceback: str


class UnusableChoiceError(Exception):
    """`choose` returned no eligible target."""


class GuardedPolicy(BuiltInPolicy):
    """Calls `policy`, and falls back to the fewest requests when it fails. `name` is for logs."""

    reads_speed = True

    def __init__(self, policy: Policy, name: str) -> None:
        self.policy = policy
        self.name = name
        # read once: the frontend decides by them before it calls the policy, and must not meet its errors
        self.needs_tokens = bool(getattr(policy, "needs_tokens", True))
        self.needs_text = bool(getattr(policy, "needs_text", False))
        self.refresh_s = float(getattr(policy, "refresh_s", 0.0))
        end = getattr(policy, "on_request_end", None)
        self.reads_ends = end is not None and getattr(end, "__func__", None) is not Policy.on_request_end
        self._hears_output = takes(end, END_ARGUMENTS)
        self.troubles: Counter[str] = Counter()
        """Errors by where: a method of the policy, or `answer`."""
        self._news: list[Trouble] = []

    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        return self.order(request, candidates, moment)[0]

    def order(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Sequence[int]:
        """Its ranks, the fewest requests first in each; all candidates so ordered if it fails."""
        try:
            # a list of its own: a policy may sort or empty it, and the candidates are kept for /decisions
            shown = candidates.in_time(moment.now, moment.speed)
            ranks = places_of(self.policy.choose(_in_time(request, moment), shown), candidates)
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
        """What most policies look at: the terms of a custom policy are not known."""
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
        self._call("on_workers", workers)

    def on_request_routed(self, request: RouteRequest, target: Target, status: int) -> None:
        self._call("on_request_routed", request, target, status)

    def on_request_end(
        self,
        request: RouteRequest,
        target: Target,
        ttft_s: float | None,
        seconds: float,
        output_tokens: int | None,
    ) -> None:
        more = (output_tokens,) if self._hears_output else ()
        self._call("on_request_end", request, target, ttft_s, seconds, *more)

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        self._call("on_worker_removed", worker_id)

    async def refresh(self) -> None:
        """Refresh the policy. The caller limits the time (PolicyUpkeep)."""
        try:
            await self.policy.refresh()
        except Exception as error:
            self.failed("refresh", error)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: object) -> None:
        hook: Callable[..., object] | None = getattr(self.policy, method, None)
        if hook is None:
            return  # a custom policy need not derive from Policy
        try:
            hook(*arguments)
        except _ENDS:
            raise
        except BaseException as error:
            self.failed(method, error)

    def failed(self, where: str, error: BaseException) -> None:
        """Count an exception of a method of the policy."""
        self.note(where, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))

    def note(self, where: str, what: str, trace: str = "") -> None:
        """Count an error; the first one of its kind is kept for the log."""
        self.troubles[where] += 1
        if self.troubles[where] == 1:
            self._news.append(Trouble(self.name, where, what, trace))

    def take_news(self) -> list[Trouble]:
        """The errors that occurred for the first time since the last call."""
        news, self._news = self._news, []
        return news


def _in_time(request: RouteRequest, moment: Moment) -> RouteRequest:
    """The request with what is known as of the moment of the choice."""
    return replace(
        request,
        now=moment.now,
        speed=moment.speed,
        arrivals_per_s=moment.arrivals_per_s,
        doubt=moment.doubt,
    )


def takes(method: object, count: int) -> bool:
    """Whether a bound method can be called with this number of arguments."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def places_of(answer: object, candidates: Sequence[Candidate]) -> list[list[int]]:
    """What `choose` returned, as indices of the candidates. Raises UnusableChoiceError.

    A target in a rank is ignored if it is not eligible or stood in an earlier rank; one must be left.
    """
    ranks = _ranks_of(answer)
    left = {candidate.target: place for place, candidate in enumerate(candidates)}
    places = [[left.pop(target) for target in map(_target, rank) if target in left] for rank in ranks]
    if not any(places):
        shown = ", ".join(str(_target(one)) for rank in ranks for one in rank)[:_SHOWN_CHARACTERS]
        raise UnusableChoiceError(f"choose returned no eligible target: {shown or 'an empty list'}")
    return places


def _ranks_of(answer: object) -> Sequence[Sequence[Target | Candidate]]:
    if isinstance(answer, Target | Candidate):
        return [[answer]]
    if isinstance(answer, Sequence) and all(map(_is_rank, answer)):
        return answer
    shown = repr(answer)[:_SHOWN_CHARACTERS]
    raise UnusableChoiceError(f"choose returned {shown}: return a Target, a Candidate, or a list of lists")


def _is_rank(rank: object) -> bool:
    # a Target is a tuple, and a str a sequence: neither is a rank
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
