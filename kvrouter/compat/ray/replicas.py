"""What a request router of Ray Serve is shown: replicas and requests, as views of kvrouter's."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target, WorkerId

_NO_DEPLOYMENT = "a router serves one model, whose name is in RunningReplica.card.model"
_NOT_CALLED = "the frontend sends requests, no router does"
# Names of Ray's that have no counterpart, and what to use.
_INSTEAD = {
    "messages": "prompt has the text of all messages",
    "future": _NOT_CALLED,
    "reset_future": _NOT_CALLED,
    "resolved": _NOT_CALLED,
    "try_send_request": _NOT_CALLED,
    "call_method": _NOT_CALLED,
    "push_proxy_handle": _NOT_CALLED,
    "actor_id": "replica_id names it",
    "deployment_id": _NO_DEPLOYMENT,
    "app_name": _NO_DEPLOYMENT,
    "is_streaming": "routers see text, adapter and session of a request",
    "route": "routers see text, adapter and session of a request",
}


class _Shown:
    """Names that Ray has and a frontend has not are refused with what to use, or where to look."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        instead = _INSTEAD.get(name, "it has other names")
        raise AttributeError(f"{kind} has no {name!r} in kvrouter: {instead} (docs/coming-from-ray.md)")


class ReplicaID(_Shown, str):
    """A target as text: `w1/0`, the worker and its data-parallel rank."""

    __slots__ = ()

    @property
    def unique_id(self) -> str:
        """The same text."""
        return str(self)

    def to_full_id_str(self) -> str:
        """The same text."""
        return str(self)

    @classmethod
    def from_full_id_str(cls, full_id_str: str) -> ReplicaID:
        """The id of a text."""
        return cls(full_id_str)

    @property
    def target(self) -> Target:
        """As kvrouter has it."""
        worker_id, _, rank = self.rpartition("/")
        return Target(WorkerId(worker_id), int(rank))


@dataclass(frozen=True, slots=True)
class ReplicaResult(_Shown):
    """A replica has taken a request. `status`: of its HTTP response."""

    status: int


@dataclass(frozen=True, slots=True)
class RunningReplica(_Shown):
    """A target under Ray's names. Between decisions it has a card alone, and no load."""

    replica_id: ReplicaID
    card: Card
    candidate: Candidate | None = None

    @classmethod
    def of(cls, candidate: Candidate) -> RunningReplica:
        """A candidate of a decision."""
        return cls(ReplicaID(str(candidate.target)), candidate.card, candidate)

    @property
    def node_id(self) -> str:
        """Label `node`; empty without one."""
        return self.card.labels.get("node", "")

    @property
    def availability_zone(self) -> str | None:
        """Label `zone`."""
        return self.card.labels.get("zone")

    @property
    def multiplexed_model_ids(self) -> set[str]:
        """The adapters that occupy a place now."""
        return set(self.card.lora_names if self.candidate is None else self.candidate.loaded_loras)

    @property
    def routing_stats(self) -> Mapping[str, float]:
        """The statistics of its agent's `--metric`: what a deployment's `record_routing_stats` returns."""
        return {} if self.candidate is None else self.candidate.metrics

    @property
    def replica_metadata(self) -> dict[str, Any]:
        """All labels of its agent: what a deployment's `record_replica_metadata` returns."""
        return dict(self.card.labels)

    @property
    def max_ongoing_requests(self) -> int:
        """Sequences that its engine runs at once; the largest number if they are not known."""
        return self.card.max_sequences or sys.maxsize

    @property
    def queue_len(self) -> int:
        """Requests in flight, booked by all frontends. As Ray's queue length cache has it."""
        return 0 if self.candidate is None else self.candidate.requests

    async def get_queue_len(self, *, deadline_s: float = 0.0) -> int:
        """The same, known without asking the replica."""
        return self.queue_len


@dataclass(frozen=True, slots=True)
class RequestMetadata(_Shown):
    """Which request it is. `multiplexed_model_id`: the adapter; empty for the base model."""

    request_id: str
    internal_request_id: str
    multiplexed_model_id: str = ""
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class PromptArgument(_Shown):
    """The request's body, as far as a router is shown it. `prompt`: its text, or that of all its messages."""

    prompt: str


@dataclass(slots=True)
class RequestRoutingContext:
    """What Ray notes between attempts. Here a decision is one attempt."""

    multiplexed_start_matching_time: float | None = None
    tried_fewest_multiplexed_models: bool = False
    tried_first_multiplexed_models: bool = False
    tried_same_node: bool = False
    tried_same_az: bool = False
    should_backoff: bool = False


@dataclass(slots=True)
class PendingRequest(_Shown):
    """A request. `args` has one PromptArgument, or none if the text is not known (token ids)."""

    args: list[Any]
    kwargs: dict[Any, Any]
    metadata: RequestMetadata
    created_at: float
    """When it came: seconds since 1970, as `time.time()`."""
    routing_context: RequestRoutingContext = field(default_factory=RequestRoutingContext)


def pending(request: RouteRequest) -> PendingRequest:
    """The request under Ray's names."""
    metadata = RequestMetadata(
        request.request_id, request.request_id, request.lora_name or "", request.session
    )
    created_at = time.time() - max(0.0, time.monotonic() - request.now)  # Ray's is a date, `now` is monotonic
    return PendingRequest([PromptArgument(request.text)] if request.text else [], {}, metadata, created_at)


def replicas_of(card: Card) -> list[RunningReplica]:
    """One for each data-parallel rank."""
    targets = [Target(WorkerId(card.worker_id), rank) for rank in range(card.ranks)]
    return [RunningReplica(ReplicaID(str(target)), card) for target in targets]
