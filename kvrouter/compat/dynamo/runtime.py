"""Where things are: runtime ──> namespace ──> component ──> endpoint ──> client.

A namespace is kvrouter's. Components and endpoints only name things: workers of a namespace are found by
their model. What Dynamo opens in a plain constructor is opened here at the first await (`HeldEndpoint`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from kvrouter import Client
from kvrouter.bus import Bus
from kvrouter.bus.embedded import DEFAULT_URL
from kvrouter.errors import ConfigError
from kvrouter.worker.announce import Announcement, announce, connect
from kvrouter.worker.publisher import KvPublisher

T = TypeVar("T")
Opens = Callable[[], contextlib.AbstractAsyncContextManager[T]]


class HeldEndpoint(Generic[T]):
    """An async context that a task of its own keeps open, for objects that no `async with` surrounds.

    The task leaves the context at `close`, or when the event loop ends and cancels its tasks.
    """

    def __init__(self, opens: Opens[T]) -> None:
        self._opens = opens
        self._value: asyncio.Future[T] | None = None
        self._task: asyncio.Task[None] | None = None

    async def get(self) -> T:
        """What the context gave; opens it at the first call. Raises what opening raises, and then retries."""
        if self._value is None or (self._value.done() and self._value.exception() is not None):
            self._value = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._value), name="compat.held")
        return await asyncio.shield(self._value)  # a caller that is cancelled must not end it for others

    def close(self) -> set[asyncio.Task[None]]:
        """Begin to leave the context; returns the task that does. The next `get` opens another one."""
        task, self._task, self._value = self._task, None, None
        if task is None:
            return set()
        task.cancel()
        return {task}

    async def _hold(self, value: asyncio.Future[T]) -> None:
        try:
            async with self._opens() as opened:
                value.set_result(opened)
                await asyncio.Event().wait()
        except Exception as error:
            if value.done():  # it was open: no `get` waits for this error
                raise
            value.set_exception(error)
        except asyncio.CancelledError:
            value.cancel()


class Ended:
    """What `shutdown` returns: awaited, it waits until all has ended."""

    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        self._tasks = tasks

    def __await__(self) -> Generator[Any, None, None]:
        if self._tasks:
            yield from asyncio.wait(self._tasks).__await__()


class DistributedRuntime:
    """The address of NATS, and what was opened through it.

    `NATS_SERVER`, as in Dynamo, or `NATS_URL`, else nats://127.0.0.1:4222. There is no etcd: the backends for
    discovery and requests have no meaning here.
    """

    def __init__(
        self,
        event_loop: object = None,
        discovery_backend: str = "",
        request_plane: str = "",
        enable_nats: bool | None = None,
    ) -> None:
        self.nats = os.environ.get("NATS_SERVER") or os.environ.get("NATS_URL") or DEFAULT_URL
        self._held: list[HeldEndpoint[Any]] = []

    @classmethod
    def detached(cls) -> Self:
        """A runtime of this process."""
        return cls()

    def namespace(self, name: str) -> Namespace:
        """The namespace with this name."""
        return Namespace(self, name)

    def endpoint(self, path: str) -> Endpoint:
        """`namespace.component.endpoint`, also with dyn:// before it. Raises ValueError."""
        parts = path.removeprefix("dyn://").split(".")
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"endpoint {path!r}: write namespace.component.endpoint")
        return self.namespace(parts[0]).component(parts[1]).endpoint(parts[2])

    def holds(self, opens: Opens[T]) -> HeldEndpoint[T]:
        """A context that `shutdown` leaves."""
        held = HeldEndpoint(opens)
        self._held.append(held)
        return held

    def shutdown(self) -> Ended:
        """Leave NATS: routers, clients and workers of this runtime end. Await the result to wait for it."""
        return Ended({task for held in self._held for task in held.close()})


class Namespace:
    def __init__(self, runtime: DistributedRuntime, name: str) -> None:
        self.runtime = runtime
        self.name = name

    def component(self, name: str) -> Component:
        """The component with this name."""
        return Component(self, name)


class EndpointOutlet:
    """What publishers write to: NATS, once the component is announced. Replicas ask for what was before."""

    def __init__(self) -> None:
        self.bus: Bus | None = None

    def publish(self, subject: str, payload: bytes) -> bool:
        return self.bus is not None and self.bus.publish(subject, payload)


class Component:
    """A group of endpoints. As a worker, it has publishers, and announces itself with `announce`."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace = namespace
        self.name = name
        self.worker_id = f"{name}-{secrets.token_hex(4)}"
        self.outlet = EndpointOutlet()
        self.publishers: dict[int, KvPublisher] = {}
        self.loads: dict[int, dict[str, Any]] = {}
        self.kv_total_blocks = 0
        self._announcement: Announcement | None = None

    @property
    def runtime(self) -> DistributedRuntime:
        return self.namespace.runtime

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint with this name."""
        return Endpoint(self, name)

    async def create_service(self) -> None:
        """Nothing to create: services are found by their heartbeats."""

    async def announce(self, *, url: str, model: str, kv_total_blocks: int = 0, **card: Any) -> None:
        """Become a worker that gets requests: in place of `register_llm` and `serve_endpoint`.

        `url`: the engine's OpenAI-compatible server. `kv_total_blocks`: what one rank can hold; 0: not known.
        `card`: other arguments of `kvrouter.announce`. Create the publishers first. Raises ConfigError.
        """
        self.kv_total_blocks = kv_total_blocks
        ranks = [self.publishers[rank] for rank in sorted(self.publishers)]

        @contextlib.asynccontextmanager
        async def announced() -> AsyncIterator[Announcement]:
            tiers = {"device": kv_total_blocks}
            async with connect(self.runtime.nats) as self.outlet.bus:
                place = {"namespace": self.namespace.name, "tiers": tiers, **card}
                async with announce(self.outlet.bus, ranks, url=url, model=model, **place) as worker:
                    yield worker

        self._announcement = await self.runtime.holds(announced).get()
        for rank in self.loads:  # reported before there was an announcement
            self.report_load(rank)

    def report_load(self, rank: int) -> None:
        """Send a rank's last load with the next heartbeat."""
        if self._announcement is not None:
            self._announcement.load(rank, **self.loads[rank])


class Endpoint:
    def __init__(self, component: Component, name: str) -> None:
        self._component = component
        self.name = name

    def component(self) -> Component:
        """The component that it belongs to."""
        return self._component

    @property
    def runtime(self) -> DistributedRuntime:
        return self._component.runtime

    @property
    def namespace(self) -> str:
        return self._component.namespace.name

    def client(self, router_mode: object = None) -> EndpointClient:
        """A client of the workers. It may be awaited, as in later versions."""
        if router_mode is not None:
            raise ConfigError("router_mode: call a method of the client, as in round_robin(request)")
        return EndpointClient(self)


class EndpointClient:
    """Sends requests to the workers of an endpoint's namespace: `kvrouter.Client`, opened when needed.

    A request is an OpenAI body. Without `model`, the namespace must serve one only.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._clients: dict[str | None, HeldEndpoint[Client]] = {}

    def __await__(self) -> Generator[Any, None, Self]:
        return self._opened().__await__()

    async def wait_for_instances(self) -> list[str]:
        """The workers that take requests, once there is one."""
        return (await self.of_model(None)).worker_ids()

    async def instance_ids(self) -> list[str]:
        """The workers that take requests now."""
        return await self.wait_for_instances()

    async def generate(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Random routing, the default strategy."""
        return await self.random(request)

    async def random(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Any worker, all equally likely."""
        return (await self.of_model(request.get("model"))).random(request)

    async def round_robin(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Each worker in turn."""
        return (await self.of_model(request.get("model"))).round_robin(request)

    async def direct(
        self, request: Mapping[str, Any], instance: str, rank: int = 0
    ) -> AsyncIterator[dict[str, Any]]:
        """The worker with this id."""
        return (await self.of_model(request.get("model"))).direct(request, str(instance), rank)

    async def of_model(self, model: str | None) -> Client:
        """The open client of a model; None: of the only one that is served."""
        held = self._clients.get(model)
        if held is None:
            runtime, namespace = self._endpoint.runtime, self._endpoint.namespace
            held = runtime.holds(lambda: Client(namespace, model, nats=runtime.nats))
            self._clients[model] = held
        return await held.get()

    async def _opened(self) -> Self:
        await self.of_model(None)
        return self


def namespace(name: str) -> Namespace:
    """A namespace of a runtime of its own, as in the document's `namespace('dynamo')`."""
    return DistributedRuntime.detached().namespace(name)


def names_of(engine_hashes: Sequence[int]) -> list[int]:
    """Engines' names of blocks: signed and unsigned forms of the same 64 bits are one name."""
    return [engine_hash & (1 << 64) - 1 for engine_hash in engine_hashes]
