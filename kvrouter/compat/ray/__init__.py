"""Ray Serve's names for request routers: only the import changes (docs/coming-from-ray.md).

Names and signatures are those of `ray.serve.request_router`, and what PrefixCacheAffinityRouter uses of Ray.
A subclass of `RequestRouter` is a policy: `--router-policy package.module:Class` takes it.
"""

from kvrouter.compat.ray.mixins import FIFOMixin, LocalityMixin, MultiplexMixin
from kvrouter.compat.ray.prefix_tree import PrefixTreeActor, get
from kvrouter.compat.ray.replicas import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestMetadata,
    RunningReplica,
)
from kvrouter.compat.ray.router import PowerOfTwoChoicesRequestRouter, RequestRouter, SuspendedError

__all__ = [
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
]
