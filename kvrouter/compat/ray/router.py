"""Ray Serve's `RequestRouter`, as a custom policy.

choose ──> choose_replicas, driven once ──> ranks
              └─ it suspends ──> SuspendedError: the guard decides, and the log gives the advice
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from kvrouter.compat.ray.mixins import FIFOMixin, LocalityMixin, MultiplexMixin
from kvrouter.compat.ray.replicas import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RunningReplica,
    pending,
    replicas_of,
)
from kvrouter.core.routing.policy import Candidate, Choice, Policy, RouteRequest
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.errors import KvRouterError

# The status of an attempt that no replica has taken: 499 the client left, 502 lost, 504 silent.
_NOT_TAKEN = {499, 502, 504}


# Of Ray's constructor. What they name is not here, so they have no effect.
_RAYS_ARGUMENTS = {
    "deployment_id", "handle_source", "self_actor_id", "self_actor_handle", "use_replica_queue_len_cache",
    "get_curr_time_s", "create_replica_wrapper_func", "initial_backoff_s", "backoff_multiplier",
    "max_backoff_s",
}  # fmt: skip
_USE_QUEUE_LEN = "RunningReplica.queue_len has the requests in flight of all frontends"
# Methods of Ray's RequestRouter that a subclass may define there, and what to use here.
_NOT_CALLED = {
    "on_new_queue_len_info": _USE_QUEUE_LEN,
    "on_send_request": _USE_QUEUE_LEN,
    "decrement_queue_len_cache": _USE_QUEUE_LEN,
    "on_replica_actor_unavailable": "a worker that does not answer is no candidate until it does",
    "create_replica_wrapper": "replicas are views of kvrouter's candidates",
}


class _Views(dict[ReplicaID, RunningReplica]):
    """The replicas that may be chosen. By its id any known one is found: a tree may name one that is full."""

    def __init__(self, shown: Iterable[RunningReplica], known: Mapping[ReplicaID, RunningReplica]) -> None:
        super().__init__((one.replica_id, one) for one in shown)
        self._known = known

    def __missing__(self, replica_id: ReplicaID) -> RunningReplica:
        return self._known[replica_id]


class SuspendedError(KvRouterError):
    """`choose_replicas` has waited for something."""


class RequestRouter(Policy):
    """Base class of a request router. A subclass defines `choose_replicas`, and need not call `__init__`."""

    needs_text = True  # PendingRequest.args
    request_router_kwargs: ClassVar[Mapping[str, Any]] = {}
    """What `initialize_state` is called with."""

    _deployment_id = None
    _use_replica_queue_len_cache = True
    _is_initialized = False
    _replicas: dict[ReplicaID, RunningReplica]
    _replica_id_set: set[ReplicaID]
    _known: dict[ReplicaID, RunningReplica]

    def __new__(cls, *_args: Any, **_arguments: Any) -> RequestRouter:
        """With the state that is needed even if a subclass has an `__init__` of its own.

        Raises TypeError without `choose_replicas`.
        """
        if cls.choose_replicas is RequestRouter.choose_replicas:
            raise TypeError(f"{cls.__name__} defines no choose_replicas")
        made = super().__new__(cls)
        made._replicas, made._replica_id_set, made._known = {}, set(), {}
        return made

    def __init__(self, *_args: Any, **arguments: Any) -> None:
        """Ray's arguments name its actors. Raises TypeError for any other."""
        if unknown := sorted(arguments.keys() - _RAYS_ARGUMENTS):
            raise TypeError(
                f"{type(self).__name__} has no argument {unknown[0]!r}; "
                "initialize_state gets those in request_router_kwargs"
            )

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Let its `on_request_routed` be called with kvrouter's arguments, too.

        Raises TypeError if it defines a method that Ray calls and kvrouter does not.
        """
        super().__init_subclass__(**arguments)
        for name, instead in _NOT_CALLED.items():
            if name in cls.__dict__:
                raise TypeError(f"{cls.__name__}.{name} is not called in kvrouter: {instead}")
        if "on_request_routed" in cls.__dict__:
            cls.on_request_routed = _translated(cls.__dict__["on_request_routed"])  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}; if it is a name of Ray's: docs/coming-from-ray.md"
            " has what there is in kvrouter"
        )

    # --- what a subclass may define, as in Ray ---

    def initialize_state(self, **_arguments: Any) -> None:
        """Called once, with `request_router_kwargs`, before anything else."""

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Any:
        """Ranks of replicas, the best first; of a rank the shortest queue is taken, of equal ones the first.

        May be `async def`, if it never has to wait.
        """
        raise NotImplementedError

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The replica is gone, and all that it held."""
        self._replicas.pop(replica_id, None)
        self._replica_id_set.discard(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has ended there, in any way."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas that take requests have changed."""
        self._show(replicas)

    # --- what a subclass may call, as in Ray ---

    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]:
        """The replicas by id."""
        return self._replicas

    def select_available_replicas(
        self, candidates: Sequence[RunningReplica] | None = None
    ) -> list[RunningReplica]:
        """Those with fewer requests in flight than they run at once."""
        shown = self._replicas.values() if candidates is None else candidates
        return [one for one in shown if one.queue_len < one.max_ongoing_requests]

    @property
    def replica_queue_len_cache(self) -> Mapping[ReplicaID, int]:
        """Requests in flight by replica, booked by all frontends."""
        return self._replica_queue_len_cache

    @property
    def _replica_queue_len_cache(self) -> Mapping[ReplicaID, int]:
        return {one.replica_id: one.queue_len for one in self._replicas.values()}

    async def _probe_queue_lens(
        self, replicas: Sequence[RunningReplica], _backoff_index: int
    ) -> list[tuple[RunningReplica, int | None]]:
        return [(one, one.queue_len) for one in replicas]

    # --- as kvrouter calls it ---

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        """Ask `choose_replicas`. Raises SuspendedError."""
        self._begin()
        replicas = [RunningReplica.of(one) for one in candidates]
        self._show(replicas)
        # a list of its own: a router may sort or empty it
        answer = self.choose_replicas(list(replicas), pending(request))
        ranks = _driven(answer) if inspect.isawaitable(answer) else answer
        named = _in_order(ranks)
        if _is_for_later(named, replicas):
            return [[one.replica_id.target for one in replicas]]
        return [[one.replica_id.target] for one in named]

    def on_workers(self, workers: Sequence[Card]) -> None:
        """Tell `update_replicas`."""
        self._begin()
        now = [replica for card in workers for replica in replicas_of(card)]
        # what a subclass compares with is the fleet, not the candidates of the last decision
        self._show(list(self._known.values()))
        self._known = {one.replica_id: one for one in now}
        self.update_replicas(now)

    def on_request_end(self, request: RouteRequest, target: Target, *_facts: Any, **_more: Any) -> None:
        """Tell `on_request_completed`."""
        self.on_request_completed(ReplicaID(str(Target(*target))), request.request_id)

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        """Each of its ranks was a replica."""
        dead = [one.replica_id for one in self._known.values() if one.card.worker_id == worker_id]
        for replica_id in dead:
            del self._known[replica_id]  # its next engine is a new replica
            self.on_replica_actor_died(replica_id)

    def _begin(self) -> None:
        if not self._is_initialized:
            self.initialize_state(**self.request_router_kwargs)
            self._is_initialized = True

    def _show(self, replicas: Iterable[RunningReplica]) -> None:
        self._replicas = _Views(replicas, self._known)
        self._replica_id_set = set(self._replicas)


class PowerOfTwoChoicesRequestRouter(FIFOMixin, LocalityMixin, MultiplexMixin, RequestRouter):
    """Ray's default: of two replicas drawn at random, the one with the shorter queue."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Two of those with the adapter, or of the nearest ones."""
        wants = pending_request is not None and pending_request.metadata.multiplexed_model_id
        apply = self.apply_multiplex_routing if wants else self.apply_locality_routing
        ids = apply(pending_request)
        near = [one for one in candidate_replicas if one.replica_id in ids]
        return [random.sample(near, min(2, len(near)))]


def _in_order(ranks: Iterable[Iterable[RunningReplica]]) -> list[RunningReplica]:
    """As Ray takes them: of a rank the shortest queue, of equal ones the first; full ones last."""
    ordered = [one for rank in ranks for one in sorted(rank, key=lambda one: one.queue_len)]
    return sorted(ordered, key=lambda one: one.queue_len >= one.max_ongoing_requests)


def _is_for_later(named: Sequence[RunningReplica], replicas: Sequence[RunningReplica]) -> bool:
    """Whether Ray would ask again after a while: none named may be chosen, or there is none to name.

    An empty answer is a mistake, unless all replicas are full.
    """
    if named:
        return not {one.replica_id for one in named} & {one.replica_id for one in replicas}
    return all(one.queue_len >= one.max_ongoing_requests for one in replicas)


def _driven(answer: Awaitable[Any]) -> Any:
    """Its result; choice and booking are one step, so it may not wait. Raises SuspendedError."""
    steps: Any = answer.__await__()
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    with contextlib.suppress(RuntimeError):  # it waits in a `finally`, too
        steps.close()
    raise SuspendedError(
        "choose_replicas waited for something; fetch it in `async def refresh`, which runs every refresh_s"
        " seconds in the background, and use its latest result"
    )


def _translated(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def on_request_routed(self: Any, request: Any, target: Any, result: Any) -> None:
        if not isinstance(request, RouteRequest):  # a subclass calls it through super()
            method(self, request, target, result)
        elif result not in _NOT_TAKEN:
            method(self, pending(request), ReplicaID(str(Target(*target))), ReplicaResult(result))

    return on_request_routed
