"""One of Ray's ingress replicas, without Ray: its KVTokenTracker, from its wheel, in a process of its own.

`python -m tests.compat.ray_ingress WHEEL RANK` reads a call per line, as JSON, and prints its result. One
import of the module is changed; of Ray there are stubs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
import zipfile
from typing import Any

import structlog

PACKAGE = "ray.llm._internal.serve.routing_policies.kv_aware"
CONSTANTS = {
    "DEFAULT_KV_INDEXER_THREADS": 4,
    "KV_INDEXER_THREADS_KEY": "KV_INDEXER_THREADS",
    "LIFECYCLE_EVENT_BROADCAST_TIMEOUT_S": 3,
    "REQUEST_TRACKING_TTL_S": 3600,
}


class LongPollClient:
    """Ray's controller pushes the replicas of a deployment; here the test does."""

    def __init__(self, _controller: object, listeners: dict[Any, Any], **_options: object) -> None:
        (self.push,) = listeners.values()

    def stop(self) -> None: ...


class RayServeException(Exception):  # noqa: N818  # Ray's name
    pass


def stub(name: str, **attributes: object) -> None:
    """A module of Ray."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(attributes)


def load_tracker(wheel: str) -> Any:
    """Ray's module with one import changed."""
    names = types.SimpleNamespace(DEPLOYMENT_TARGETS="targets")
    constants = ("SERVE_CONTROLLER_NAME", "SERVE_LOGGER_NAME", "SERVE_NAMESPACE")
    stub("ray", get_actor=lambda *_, **__: None, serve=types.SimpleNamespace())
    stub(f"{PACKAGE}.constants", **CONSTANTS)
    stub("ray.serve._private.common", DeploymentTargetInfo=object)
    stub("ray.serve._private.constants", **dict(zip(constants, constants, strict=True)))
    stub("ray.serve._private.long_poll", LongPollClient=LongPollClient, LongPollNamespace=names)
    stub("ray.serve.exceptions", RayServeException=RayServeException)
    path = f"{PACKAGE.replace('.', '/')}/kv_token_tracker.py"
    text = zipfile.ZipFile(wheel).read(path).decode()
    assert 1 == text.count("from dynamo.llm import SelectionService")
    text = text.replace("from dynamo.llm import", "from kvrouter.compat.dynamo import")
    module = types.ModuleType("kv_token_tracker")
    sys.modules[module.__name__] = module
    exec(compile(text, path, "exec"), vars(module))
    return module


class Handle:
    """Of the ingress deployment: what is broadcast is printed, and the test delivers it."""

    is_initialized = True

    def broadcast(self, method: str, batch: list[Any]) -> Handle:
        print(json.dumps({"broadcast": method, "batch": batch}), flush=True)  # noqa: T201
        return self

    async def results_async(self, **_: object) -> list[Any]:
        return []


def targets_of(engines: list[dict[str, Any]]) -> types.SimpleNamespace:
    """As the controller has them."""
    replicas = [
        types.SimpleNamespace(
            replica_id=types.SimpleNamespace(
                unique_id=one["id"], to_full_id_str=lambda name=one["id"]: f"LLMServer#{name}"
            ),
            routing_stats={"kv_event_metadata": one},
        )
        for one in engines
    ]
    return types.SimpleNamespace(running_replicas=replicas)


async def state(tracker: Any) -> dict[str, Any]:
    """What the replica in this process knows."""
    service = tracker._svc._service
    if service is None:
        return {}
    pools = [router.pool for router in service.replica.routers.values()]
    return {
        "workers": sorted(target.worker_id for pool in pools for target in pool.targets),
        "blocks": sum(pool.index.blocks(target) for pool in pools for target in pool.targets),
        "booked": sum(sum(pool.active.owners().values()) for pool in pools),
        "acting": sorted(service.engines.acting),
        "tracked": len(tracker._requests),
    }


async def main(wheel: str, rank: int) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    module = load_tracker(wheel)
    tracker = module.KVTokenTracker(ingress_replica_rank=rank)
    tracker.start_reservation_broadcast(Handle())
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        call, *arguments = json.loads(line)
        try:
            if call == "targets":
                result = tracker._long_poll_client.push(targets_of(*arguments))
            elif call == "state":
                result = await state(tracker)
            elif call == "worker_id":
                result = module.get_worker_id(*arguments)
            else:
                result = await getattr(tracker, call)(*arguments)
        except Exception as error:
            result = {"error": repr(error)}
        print(json.dumps({"result": result}), flush=True)  # noqa: T201
    tracker.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
