"""What the measured routers need: NATS, fake workers, an announcer, a tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from scripts.kit import deployment
from scripts.kit.bench.wire import routers
from scripts.kit.bench.wire.rounds import Contender, other
from scripts.kit.bench.wire.routers import Router, Workers
from scripts.kit.bench.wire.targets import DIRECT, OURS, OURS_KV, OURS_PAIR, OURS_ROOM

FLAGS = {
    OURS: ("--router-mode=round-robin",),
    OURS_KV: ("--router-mode=kv",),
    OURS_PAIR: ("--router-mode=kv", "--pd-min-uncached-tokens=0"),
    OURS_ROOM: ("--router-mode=kv", "--pd-min-uncached-tokens=0"),
}
WORKERS = 4


class Stage(deployment.Stage):
    """The processes of a measurement, and how to start more."""

    async def workers(
        self, pace_ms: float, count: int = WORKERS, *, connector: str = "", vllm: str = ""
    ) -> Workers:
        """Start fake workers with this pace, announced in their own namespace, as of a version of `vllm`."""
        workers = await routers.start_workers(self.fleet, self.client, pace_ms=pace_ms, count=count)
        names = workers, self.nats_url, namespace(workers)
        await routers.start_announcer(self.fleet, *names, connector=connector, vllm=vllm)
        return workers

    async def ours(
        self,
        name: str,
        workers: Workers,
        checkout: Path | None = None,
        more: Sequence[str] = (),
        *,
        under: Sequence[str] = (),
        timeout_s: float = routers.READY_TIMEOUT_S,
    ) -> Contender:
        """Start a frontend in a mode of FLAGS: of this checkout with `more` flags, or another one.

        `workers`: for PAIRS, half of them compute prompts. `under` and `timeout_s`: see start_kvrouter.
        """
        flags = [*FLAGS[name], f"--nats={self.nats_url}", f"--namespace={namespace(workers)}"]
        if checkout is None:
            flags += more
        if name != OURS:
            flags.append(f"--model-path={self.model_path}")
        shown = other(name) if checkout else name
        return contender(
            await routers.start_kvrouter(
                self.fleet,
                self.client,
                shown,
                flags,
                count=len(workers.ports),
                checkout=checkout,
                under=under,
                timeout_s=timeout_s,
            )
        )

    async def both_modes(
        self, workers: Workers, checkout: Path | None, more: Sequence[str] = ()
    ) -> list[Contender]:
        """Start the frontends of this checkout with `more` flags, and of `checkout` if given."""
        checkouts = [None] if checkout is None else [None, checkout]
        return [await self.ours(name, workers, each, more) for name in (OURS, OURS_KV) for each in checkouts]

    async def nginx(self, workers: Workers, program: Path) -> Contender:
        """Start an nginx in front of these workers."""
        return contender(await routers.start_nginx(self.fleet, program, workers))

    async def haproxy(self, workers: Workers, program: Path) -> Contender:
        """Start HAProxy, which relays, and a router in mode kv, which it asks."""
        flags = [f"--nats={self.nats_url}", f"--namespace={namespace(workers)}"]
        return contender(
            await routers.start_haproxy(self.fleet, program, [*flags, f"--model-path={self.model_path}"])
        )

    async def stop_group(self, group: int) -> None:
        """End the process that leads this group."""
        (name,) = [name for name, process in self.fleet.processes.items() if process.pid == group]
        await self.fleet.stop(name)


def namespace(workers: Workers) -> str:
    """The namespace in which these workers are announced."""
    return f"wire-{workers.ports[0]}"


def direct(workers: Workers) -> Contender:
    """The first fake worker without a router. Its CPU time counts all of them."""
    return Contender(DIRECT, workers.ports[0], workers.process.pid)


def contender(router: Router) -> Contender:
    return Contender(router.name, router.port, router.process.pid)


@contextlib.asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    """Start NATS and make the tokenizer. All processes started on the stage end with it."""
    async with deployment.open_stage("bench") as common:
        yield Stage(common.fleet, common.client, common.nats_url)
