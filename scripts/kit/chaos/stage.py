"""The fleet under test, and the checks after each fault."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrouter.bus import NatsOptions, Subjects
from kvrouter.bus.rights import VERIFY
from kvrouter.config import open_bus
from kvrouter.observe.verify import VerifyError, compare
from kvrouter.observe.verify.agents import Requests
from kvrouter.worker.options import worker_id_of
from scripts.kit import deployment
from scripts.kit.chaos.cluster import Link, start_cluster
from scripts.kit.chaos.judge import CLEAN_LIMIT_S, Damage, Leftovers
from scripts.kit.chaos.truth import IN_TRANSIT_BLOCKS, EngineWatch, agent_blocks, phantom_blocks, watching
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.fleet import Fleet, Process, wait_until_ok
from scripts.kit.http_client import Client, HttpError
from scripts.kit.prometheus import Prometheus
from scripts.kit.replicas import disagreements, settled

# Replicas must stay equal for this time, two heartbeats: by then a lost last frame is noticed.
CONFIRMED_S = 2.5
REPAIRS = ("gaps", "replayed", "snapshots", "contradictions", "digest_mismatches", "malformed")
_LOOK_S = 1.0
# State that is left after this time, five heartbeats with their digests, will stay.
LEFT_S = 5.0


@dataclass(frozen=True, slots=True)
class Stage:
    """The processes of a run, and what watches them."""

    fleet: Fleet
    client: Client
    plan: Plan
    deployed: Deployment
    requests: Requests
    # Engine URL -> the blocks that it really holds.
    watches: Mapping[str, EngineWatch]
    # Between the leaf node and the cluster, where there are these.
    link: Link | None = None
    prometheus: Prometheus | None = None

    @property
    def urls(self) -> list[str]:
        """The replicas, for clients."""
        return [replica.url for replica in self.deployed.replicas]

    @property
    def admin_urls(self) -> list[str]:
        """The replicas, for operators."""
        return [replica.admin_url for replica in self.deployed.replicas]

    def frontend(self, number: int) -> Process:
        """The current process of a replica."""
        return self.fleet.processes[f"frontend-{number}"]

    async def start(self, name: str, command: Sequence[str] | None = None) -> None:
        """Start a process that has ended; returns when it serves."""
        again = self.fleet.start_again(name) if command is None else self.fleet.start(name, command)
        process, (kind, _, number) = await again, name.partition("-")
        if kind == "mocker":
            await wait_until_ok(self.client, process, f"{self.deployed.engines[int(number)].url}/health")
        elif kind == "frontend":
            await wait_until_ok(self.client, process, f"{self.urls[int(number)]}/ready")

    def knows_restarted(self, *engines: int) -> Callable[[dict[str, Any]], bool]:
        """Whether a row of a replica's /workers has no blocks that these engines held before."""
        urls = {self.deployed.engines[number].url for number in engines}

        def is_noticed(target: dict[str, Any]) -> bool:
            held = len(self.watches[target["url"]].held())
            return bool(target["url"] not in urls or target["device_blocks"] <= held + IN_TRANSIT_BLOCKS)

        return is_noticed

    async def until_clean(
        self, damage: Damage, within_s: float = CLEAN_LIMIT_S
    ) -> tuple[float | None, list[str]]:
        """Seconds from the fault's end until the replicas agree and stay so; else None and reasons."""
        clean_at_s, since_s = None, damage.ended_at_s
        while True:
            reasons = await self._unnoticed(damage) or await self._differences()
            now = time.perf_counter()
            if reasons:
                clean_at_s = None
            elif clean_at_s is None:
                clean_at_s = now
            elif now - clean_at_s > CONFIRMED_S:
                return max(0.0, clean_at_s - since_s), []
            if now - since_s > within_s:
                return None, reasons or ["differences kept coming back"]
            await asyncio.sleep(0.05)

    async def _unnoticed(self, damage: Damage) -> list[str]:
        """Replicas that have not noticed the fault: they may agree, but on the state before it."""
        found = []
        for url in self.admin_urls:
            try:
                targets = (await self.client.get_json(f"{url}/workers"))["targets"]
            except HttpError as error:
                return [str(error)]
            live = [target for target in targets if target["eligible"] and target["events"] == "live"]
            if len(live) < self.plan.engines:
                found.append(f"{url} sees {len(live)} live targets of {self.plan.engines}")
            if not all(map(damage.is_noticed, targets)):
                found.append(f"{url} has not noticed yet")
        return found

    async def _differences(self) -> list[str]:
        try:
            return (await compare(self.admin_urls, timeout_s=_LOOK_S)).differences
        except VerifyError as error:
            return [str(error)]

    async def leftovers(self) -> Leftovers:
        """State left when no request is in flight; polled for LEFT_S at most.

        The engines' last events may still be on their way to agents, replicas and this process.
        """
        until_s = time.perf_counter() + LEFT_S
        while (left := await self._leftovers()).total and time.perf_counter() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return left

    async def _leftovers(self) -> Leftovers:
        views = await settled(self.deployed.replicas, timeout_s=LEFT_S)
        left = Leftovers(
            bookings=max(view.bookings_left for view in views),
            active_blocks=max(view.active_blocks for view in views),
            index_blocks=await self._phantom_index_blocks(),
        )
        if not left.total and disagreements(views):
            return Leftovers(index_blocks=1)
        return left

    async def _phantom_index_blocks(self) -> int:
        rows = [await self.client.get_json(f"{url}/workers") for url in self.admin_urls]
        count = 0
        for target in (target for row in rows for target in row["targets"]):
            agent = await agent_blocks(self.requests, target["worker_id"])
            count += phantom_blocks(target, agent, self.watches[target["url"]])
        return count

    async def repairs(self) -> Counter[str]:
        """Repairs of the replicas' feeds so far, summed over all replicas."""
        total: Counter[str] = Counter()
        for url in self.admin_urls:
            for feed in (await self.client.get_json(f"{url}/workers"))["feeds"]:
                total.update({name: feed["counters"][name] for name in REPAIRS})
        return total

    async def missing_blocks(self, engine: int) -> int:
        """Number of blocks that an engine holds and its agent does not publish."""
        url = self.deployed.engines[engine].url
        agent = await agent_blocks(self.requests, worker_id_of(url))
        return len(self.watches[url].held() - agent)

    async def index_share(self, engine: int) -> str:
        """The share of an engine's blocks in the index, as text."""
        url = self.deployed.engines[engine].url
        row = await self.client.get_json(f"{self.admin_urls[0]}/workers")
        target = next(target for target in row["targets"] if target["url"] == url)
        held = len(self.watches[url].held())
        partial = ", partial" if target["partial"] else ""
        return f"the index names {target['blocks']} of the engine's {held} blocks{partial}"


@contextlib.asynccontextmanager
async def open_stage(
    where: str | Path, plan_of: Callable[[Path], Plan], *, on_cluster: bool = False
) -> AsyncIterator[Stage]:
    """Start NATS and everything that is planned for its directory, and watch each engine's KV events.

    `on_cluster`: three servers and a leaf node, with accounts, instead of one server.
    """
    async with AsyncExitStack() as stack:
        common = await stack.enter_async_context(deployment.open_stage(where, starts_nats=not on_cluster))
        plan, link, options = plan_of(common.directory), None, NatsOptions((common.nats_url,))
        if on_cluster:
            link = await stack.enter_async_context(Link.open())
            plan, options = await start_cluster(common.fleet, common.client, plan, link)
        deployed = await deployment.deploy(common.fleet, common.client, plan, options.servers[0])
        watches = {
            engine.url: await stack.enter_async_context(watching(engine.kv_events))
            for engine in deployed.engines
        }
        bus = await stack.enter_async_context(open_bus(options, name=plan.namespace, user=VERIFY))
        requests = Requests(bus, Subjects(plan.namespace))
        await requests.begin()
        yield Stage(common.fleet, common.client, plan, deployed, requests, watches, link)
