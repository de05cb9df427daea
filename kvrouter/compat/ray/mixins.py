"""Ray Serve's mixins for request routers. Each expects a `RequestRouter` beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrouter.compat.ray.replicas import PendingRequest, ReplicaID, RunningReplica

Ranks = list[list[RunningReplica]]


class FIFOMixin:
    """Nothing to add: a choice never waits, and the admission queue keeps the order (docs/policies.md)."""


class MultiplexMixin:
    """Routes by the adapters that replicas have loaded."""

    _replicas: dict[ReplicaID, RunningReplica]

    def rank_replicas_via_multiplex(
        self, replicas: Sequence[RunningReplica], multiplexed_model_id: str
    ) -> Ranks:
        """Three ranks: those that have it, of the others those with the fewest adapters, all others."""
        ranks: Ranks = [[], [], []]
        fewest = self._fewest()
        for one in replicas:
            loaded = one.multiplexed_model_ids
            ranks[0 if multiplexed_model_id in loaded else 1 if len(loaded) == fewest else 2].append(one)
        return ranks

    def apply_multiplex_routing(self, pending_request: PendingRequest | None = None) -> set[ReplicaID]:
        """Those of the first rank that is not empty; all without a request."""
        if pending_request is None:
            return set(self._replicas)
        wanted = pending_request.metadata.multiplexed_model_id
        ranks = self.rank_replicas_via_multiplex(list(self._replicas.values()), wanted)
        return {one.replica_id for one in next(filter(None, ranks), [])}

    def _fewest(self) -> int:
        return min((len(one.multiplexed_model_ids) for one in self._replicas.values()), default=0)


class LocalityMixin:
    """Routes by distance from the frontend's own place; without one all are equally near."""

    _self_node_id: str | None = None
    _self_availability_zone: str | None = None
    _replicas: dict[ReplicaID, RunningReplica]

    def __init__(
        self,
        self_node_id: str | None = None,
        prefer_local_node_routing: bool = True,
        prefer_local_az_routing: bool = True,
        self_availability_zone: str | None = None,
        *args: Any,
        **arguments: Any,
    ) -> None:
        """The place is that of the labels `node` and `zone`; one that is not preferred does not count."""
        super().__init__(*args, **arguments)
        self._self_node_id = self_node_id if prefer_local_node_routing else None
        self._self_availability_zone = self_availability_zone if prefer_local_az_routing else None

    def rank_replicas_via_locality(self, replicas: Sequence[RunningReplica]) -> Ranks:
        """Three ranks: the same node, the same zone, all others."""
        if not self._self_node_id and not self._self_availability_zone:
            return [list(replicas), [], []]
        ranks: Ranks = [[], [], []]
        for one in replicas:
            if self._self_node_id and one.node_id == self._self_node_id:
                ranks[0].append(one)
            elif self._self_availability_zone and one.availability_zone == self._self_availability_zone:
                ranks[1].append(one)
            else:
                ranks[2].append(one)
        return ranks

    def apply_locality_routing(self, pending_request: PendingRequest | None = None) -> set[ReplicaID]:
        """Those of the first rank that is not empty; all without a request."""
        if pending_request is None:
            return set(self._replicas)
        ranks = self.rank_replicas_via_locality(list(self._replicas.values()))
        return {one.replica_id for one in next(filter(None, ranks), [])}
