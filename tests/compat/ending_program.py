"""A program with a worker and a router of kvrouter.compat that never calls `shutdown`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import uvloop

from kvrouter.compat.dynamo import DistributedRuntime, KvEventPublisher, KvPushRouter, KvRouterConfig

NAMESPACE, END = sys.argv[1:]
held: list[object] = []


async def use() -> None:
    """Announce a worker, book a request on it, and forget both."""
    if END == "signalled, with a handler":
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    runtime = DistributedRuntime.detached()
    component = runtime.namespace(NAMESPACE).component("engine")
    KvEventPublisher(component, "w-1", 16)
    await component.announce(url="http://127.0.0.1:9", model="m", kv_total_blocks=100)
    config = KvRouterConfig(router_replica_sync=True)
    router = KvPushRouter(runtime.endpoint(f"{NAMESPACE}.backend.generate"), 16, config)
    await router.best_worker([*range(64)], request_id="never freed")
    held.extend((runtime, component, router))
    if END == "forked":
        _fork()
    print("ready", flush=True)  # noqa: T201
    if END.startswith("signalled"):
        await asyncio.Event().wait()


def _fork() -> None:
    """A child that ends in order, and by the same signal: neither says anything in this program's name."""
    for by_signal in (False, True):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM) if by_signal else sys.exit(0)
        os.waitpid(child, 0)
    print("forked", flush=True)  # noqa: T201
    sys.stdin.readline()


def _on_a_loop(new_loop: Callable[[], asyncio.AbstractEventLoop], *, is_closed: bool) -> None:
    loop = new_loop()
    loop.run_until_complete(use())
    if is_closed:
        loop.close()


if END in {"left open", "forked"}:
    _on_a_loop(asyncio.new_event_loop, is_closed=False)
elif END == "closed":
    _on_a_loop(asyncio.new_event_loop, is_closed=True)
elif END == "closed, on uvloop":
    _on_a_loop(uvloop.new_event_loop, is_closed=True)
elif END == "signalled, on uvloop":
    uvloop.run(use())
else:
    try:
        asyncio.run(use())
    except asyncio.CancelledError:  # by its handler
        sys.exit(3)
