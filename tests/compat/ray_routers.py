"""The five request routers of Ray's documents, for --router-policy.

Uniform and ThroughputAware are whole, and only their imports are changed. The others are put together from parts.

Sources, under the Apache License 2.0: Ray Serve, "Use Custom Algorithm for Request Routing" (Uniform,
ThroughputAware) and "Request routing" (the recommended pattern, StatefulRouter); Ray Serve LLM,
"PrefixCacheAffinityRouter for LLM inference optimization", and `initialize_state` of Ray 2.60's prefix_aware_router.py.
"""

# ruff: noqa
# mypy: ignore-errors

import asyncio
import random
import time
from typing import Dict, List, Optional

import kvrouter.compat.ray as ray
from kvrouter.compat.ray import (
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    PowerOfTwoChoicesRequestRouter,
    PrefixTreeActor,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)


class UniformRequestRouter(RequestRouter):
    async def choose_replicas(
        self,
        candidate_replicas: List[RunningReplica],
        pending_request: Optional[PendingRequest] = None,
    ) -> List[List[RunningReplica]]:
        print("UniformRequestRouter routing request")
        random.shuffle(candidate_replicas)
        return [candidate_replicas]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: ReplicaResult,
    ):
        print("on_request_routed callback is called!!")


class ThroughputAwareRequestRouter(FIFOMixin, MultiplexMixin, LocalityMixin, RequestRouter):
    async def choose_replicas(
        self,
        candidate_replicas: List[RunningReplica],
        pending_request: Optional[PendingRequest] = None,
    ) -> List[List[RunningReplica]]:
        top_ranked_replicas: Dict[ReplicaID, RunningReplica] = {}
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            # Take the best set of replicas for the multiplexed model
            ranked_replicas_multiplex: List[RunningReplica] = (
                self.rank_replicas_via_multiplex(
                    replicas=candidate_replicas,
                    multiplexed_model_id=pending_request.metadata.multiplexed_model_id,
                )
            )[0]

            # Filter out replicas that are not available (queue length exceed max ongoing request)
            ranked_replicas_multiplex = self.select_available_replicas(candidates=ranked_replicas_multiplex)

            for replica in ranked_replicas_multiplex:
                top_ranked_replicas[replica.replica_id] = replica

        # Take the best set of replicas in terms of locality
        ranked_replicas_locality: List[RunningReplica] = self.rank_replicas_via_locality(
            replicas=candidate_replicas
        )[0]

        # Filter out replicas that are not available (queue length exceed max ongoing request)
        ranked_replicas_locality = self.select_available_replicas(candidates=ranked_replicas_locality)

        for replica in ranked_replicas_locality:
            top_ranked_replicas[replica.replica_id] = replica

        print("ThroughputAwareRequestRouter routing request")

        # Sort the replicas by throughput.
        return [
            sorted(
                [replica for replica in top_ranked_replicas.values()],
                key=lambda r: r.routing_stats.get("throughput", 0),
            )
        ]


class StatefulRouter(RequestRouter):
    def __init__(self):
        self.lock = asyncio.Lock()  # For async code
        self.state = {}

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        async with self.lock:  # Protect shared state
            # Update state
            self.state[pending_request.metadata.request_id] = len(candidate_replicas)
            return [[candidate_replicas[-1]]]


class _Store:
    """The singleton of pattern 1. `_get` waits, as a call of an actor does."""

    class _Reference:
        async def remote(self):
            await asyncio.sleep(0)
            return {"busy": ["w1/0"]}

    get = _Reference()


class MetricStoreRouter(RequestRouter):
    state_actor = _Store()

    # Recommended pattern: Async operation
    async def choose_replicas(self, candidate_replicas, pending_request=None):
        state = await self.state_actor.get.remote()
        return self._select(state, candidate_replicas)

    def _select(self, state, candidate_replicas):
        return [[r for r in candidate_replicas if r.replica_id not in state["busy"]]]


class RefreshedMetricStoreRouter(MetricStoreRouter):
    """The same after the advice: what it waits for is fetched in the background."""

    refresh_s = 0.05
    state = None

    async def refresh(self):
        self.state = await self.state_actor.get.remote()

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        return self._select(self.state or {"busy": []}, candidate_replicas)


class ReadyStoreRouter(MetricStoreRouter):
    """A store whose answer is there: what is awaited never suspends."""

    class _Ready:
        async def remote(self):
            return await self._read()

        async def _read(self):
            return {"busy": ["w1/0"]}

    state_actor = type("Ready", (), {"get": _Ready()})


class TextRouter(RequestRouter):
    """Keeps the arguments of the requests that were routed."""

    def __init__(self):
        self.seen = []

    def choose_replicas(self, candidate_replicas, pending_request=None):
        return [candidate_replicas]

    def on_request_routed(self, pending_request, replica_id, result):
        self.seen.append(pending_request.args)


class PrefixCacheAffinityRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    def initialize_state(self, imbalanced_threshold=10, match_rate_threshold=0.1, tree_actor=None):
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold
        if tree_actor is None:
            deployment_name = self._deployment_id.name if self._deployment_id else None
            app_name = self._deployment_id.app_name if self._deployment_id else None
            actor_name = "LlmPrefixTreeActor"
            actor_namespace_components = [SERVE_NAMESPACE]

            if app_name:
                actor_namespace_components.append(app_name)
            if deployment_name:
                actor_namespace_components.append(deployment_name)
            actor_namespace = "::".join(actor_namespace_components)

            self._tree_actor = PrefixTreeActor.options(
                name=actor_name,
                namespace=actor_namespace,
                get_if_exists=True,
                lifetime="detached",
            ).remote()

            # Register the actor with the controller for cleanup on serve.shutdown()
            controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            ray.get(controller._register_shutdown_cleanup_actor.remote(self._tree_actor))
        else:
            self._tree_actor = tree_actor

    def _extract_text_from_request(self, pending_request):
        for arg in pending_request.args:
            for valid_input_type in ["messages", "prompt"]:
                if hasattr(arg, valid_input_type):
                    return getattr(arg, valid_input_type)
        raise ValueError("No request with message or prompt attribute found in pending_request.args")

    async def _prefix_match_best_replicas(self, pending_request, candidate_replicas):
        chosen_replica_id_strings = []
        if pending_request is not None and pending_request.args is not None and len(pending_request.args) > 0:
            input_text = self._extract_text_from_request(pending_request)
            if input_text is not None:
                # Check for imbalanced load.
                highest_queue_len = 0
                lowest_queue_len = float("inf")
                not_in_cache: List[ReplicaID] = []
                if self._use_replica_queue_len_cache:
                    # Populate available queue lens from the cache.
                    for r in candidate_replicas:
                        queue_len = self._replica_queue_len_cache.get(r.replica_id)
                        if queue_len is None or queue_len >= r.max_ongoing_requests:
                            not_in_cache.append(r)
                        else:
                            highest_queue_len = max(highest_queue_len, queue_len)
                            lowest_queue_len = min(lowest_queue_len, queue_len)
                else:
                    not_in_cache = candidate_replicas
                if len(not_in_cache) > 0:
                    for r, queue_len in await self._probe_queue_lens(
                        not_in_cache,
                        0,
                    ):
                        if queue_len is None:
                            continue
                        highest_queue_len = max(highest_queue_len, queue_len)
                        lowest_queue_len = min(lowest_queue_len, queue_len)

                is_imbalanced = highest_queue_len - lowest_queue_len > self._imbalanced_threshold
                if not is_imbalanced:
                    # Convert candidate replica IDs to strings for prefix matching.
                    candidate_replica_ids_strings = [
                        r.replica_id.to_full_id_str() for r in candidate_replicas
                    ]
                    (
                        matched_text,
                        matched_tenant_id_strings,
                    ) = ray.get(
                        self._tree_actor.prefix_match.remote(input_text, candidate_replica_ids_strings)
                    )
                    match_rate = len(matched_text) / len(input_text)
                    if match_rate < self._match_rate_threshold:
                        smallest_tenants_id_strings = ray.get(self._tree_actor.get_smallest_tenants.remote())
                        if smallest_tenants_id_strings is not None and len(smallest_tenants_id_strings) > 0:
                            chosen_replica_id_strings = smallest_tenants_id_strings
                    else:
                        if matched_tenant_id_strings is not None and len(matched_tenant_id_strings) > 0:
                            chosen_replica_id_strings = matched_tenant_id_strings
        return [
            [
                self._replicas[ReplicaID.from_full_id_str(chosen_id_string)]
                for chosen_id_string in chosen_replica_id_strings
            ]
        ]

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        # Get fallback replicas from PowerOfTwoChoicesRequestRouter
        fallback_replicas = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self,
            candidate_replicas=candidate_replicas,
            pending_request=pending_request,
        )
        if pending_request is None or not fallback_replicas:
            return fallback_replicas
        chosen_replicas = await self._prefix_match_best_replicas(pending_request, candidate_replicas)
        if chosen_replicas[0]:
            return chosen_replicas
        return fallback_replicas

    def update_replicas(self, replicas: List[RunningReplica]):
        old_ids = set(self._replica_id_set)
        super().update_replicas(replicas)
        new_ids = set(self._replica_id_set)
        added = new_ids - old_ids
        removed = old_ids - new_ids
        if added:
            added_strings = [rid.to_full_id_str() for rid in added]
            ray.get(self._tree_actor.add_tenants.remote(added_strings, time.time()))
        if removed:
            removed_strings = [rid.to_full_id_str() for rid in removed]
            ray.get(self._tree_actor.remove_tenants.remote(removed_strings))

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: ReplicaResult,
    ):
        """Called when a request is routed to a replica.

        This is used as a callback to update the state of the request router
        after a response is generated.
        """
        # Right now this only inserts the prompt into the prefix tree, not the response (streaming response makes things complicated)
        if pending_request is not None and pending_request.args is not None and len(pending_request.args) > 0:
            input_text = self._extract_text_from_request(pending_request)
            if input_text is not None:
                # Insert into prefix tree
                ray.get(self._tree_actor.insert.remote(input_text, replica_id.to_full_id_str(), time.time()))

    def on_replica_actor_died(self, replica_id: ReplicaID):
        """Drop replica from replica set so it's not considered for future requests."""
        super().on_replica_actor_died(replica_id)
        ray.get(self._tree_actor.remove_tenants.remote([replica_id.to_full_id_str()]))
