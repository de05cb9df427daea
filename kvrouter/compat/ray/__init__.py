"""Ray Serve's names for request routers: a router's imports change (docs/coming-from-ray.md).

Names and signatures are those of `ray.serve.request_router`, and what PrefixCacheAffinityRouter uses of Ray.
A subclass of `RequestRouter` is a policy: `--router-policy package.module:Class` takes it.
"""

from kvrouter.compat.ray.mixins import FIFOMixin, LocalityMixin, MultiplexMixin
from kvrouter.compat.ray.prefix_tree import (
    SERVE_CONTROLLER_NAME,
    SERVE_LOGGER_NAME,
    SERVE_NAMESPACE,
    ActorHandle,
    PrefixTreeActor,
    get,
    get_actor,
)
from kvrouter.compat.ray.replicas import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestMetadata,
    RunningReplica,
)
from kvrouter.compat.ray.router import PowerOfTwoChoicesRequestRouter, RequestRouter, SuspendedError

__all__ = [
    "SERVE_CONTROLLER_NAME",
    "SERVE_LOGGER_NAME",
    "SERVE_NAMESPACE",
    "ActorHandle",
    "FIFOMixin",
    "LocalityMixin",
    "MultiplexMixin",
    "PendingRequest",
    "PowerOfTwoChoicesRequestRouter",
    "PrefixTreeActor",
    "ReplicaID",
    "ReplicaResult",
    "RequestMetadata",
    "RequestRouter",
    "RunningReplica",
    "SuspendedError",
    "get",
    "get_actor",
]
