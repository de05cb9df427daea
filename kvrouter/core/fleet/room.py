"""Before a decision: whether a request may be routed now, and with whom it waits if not.

No worker can serve it at all                                   → now: `route` says why not
somebody that it may go to is not full                          → now
all that it may go to are full                                  → it waits
--max-ongoing-requests took the last one out                    → it waits: there will be room
another filter did                                              → now: `route` refuses it

Only filters that must hold count, and a hard session: a preferred worker that is full keeps nobody
waiting while others are not. What waiting is: core/routing/admission.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.admission import AdmissionQueue
from kvrouter.core.routing.filters import Filter, Locality, MaxOngoing, Multiplex, Session
from kvrouter.core.routing.policy import Candidate, RouteRequest


def has_room(router: Router, request: RouteRequest, now: float, queue: AdmissionQueue) -> bool:
    """Whether the request may be routed now. Books nothing and counts no turn."""
    selection = router.selection
    selection.state.now = now
    request = replace(request, prompts=())  # what it would find cached does not matter here, and costs most
    left: Sequence[Candidate] = router.pool.candidates(request)
    for filter_ in selection.filters:
        if left and not _is_preference(filter_):
            left = filter_.keep(request, left, selection.state)
            if not left:
                return not isinstance(filter_, MaxOngoing)
    return not queue.is_saturated(left)


def lane_of(router: Router, request: RouteRequest, now: float) -> str:
    """Requests of one lane may go to the same targets, and so wait for each other."""
    selection, bound = router.selection, None
    if request.session and any(isinstance(one, Session) and one.is_hard for one in selection.filters):
        bound = selection.state.sessions.target_of(request.session, now)
    return f"{request.lora_name or ''} {bound or ''}"


def _is_preference(filter_: Filter) -> bool:
    if isinstance(filter_, Session):
        return not filter_.is_hard
    return isinstance(filter_, Multiplex | Locality)
