"""The parts of a kvrouter deployment as processes of a fleet: NATS, mockers, agents, frontends.

open_stage ──> logs, client, NATS, tiny model ──Stage.deploy(Plan)──> engines with agents, replicas
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrouter.bus.embedded import server_binary
from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit.fleet import Fleet, FleetError, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.replicas import Replica
from scripts.kit.script import log_directory

SETTLE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    router_mode: str
    model_path: Path
    engines: int = 4
    replicas: int = 2
    num_blocks: int = 8192
    block_size: int = 16
    speedup: float = 1.0
    namespace: str = "demo"
    frontend_flags: tuple[str, ...] = ()
    gives_model: bool = True
    """Whether the frontends get --model-path."""
    # Additional flags of single mockers, by number.
    mocker_flags: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # Additional flags of their agents, by number; {port} is the engine's.
    agent_flags: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # The port of each engine, followed by two more that are free; empty: drawn when it starts.
    engine_ports: Sequence[int] = ()
    # By the name of a process, instead of --nats for all: its server and its user.
    nats_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def bus_of(self, name: str, nats_url: str) -> list[str]:
        """The flags with which a process reaches NATS."""
        return [*self.nats_flags.get(name, [f"--nats={nats_url}"]), f"--namespace={self.namespace}"]


@dataclass(frozen=True, slots=True)
class Engine:
    """A mocker and its agent."""

    url: str
    kv_events: str
    mocker: Process
    agent: Process


@dataclass(frozen=True, slots=True)
class Deployment:
    nats_url: str
    engines: list[Engine]
    frontends: list[Process]
    replicas: list[Replica]


@dataclass(frozen=True, slots=True)
class Stage:
    """What the fleets of one script share: a directory with logs and the tiny model, a client, NATS."""

    fleet: Fleet
    client: Client
    nats_url: str

    @property
    def directory(self) -> Path:
        """Of the logs."""
        return self.fleet.directory

    @property
    def model_path(self) -> Path:
        """The tiny model's tokenizer and chat template."""
        return self.directory / "model"

    async def deploy(self, plan: Plan) -> Deployment:
        """Start all that is planned; returns when every replica has every engine."""
        return await deploy(self.fleet, self.client, plan, self.nats_url)

    async def stop(self, deployed: Deployment) -> None:
        """Stop it; NATS keeps running."""
        await stop(self.fleet, deployed)


@contextlib.asynccontextmanager
async def open_stage(where: str | Path, *, starts_nats: bool = True) -> AsyncIterator[Stage]:
    """NATS and the tiny model, in a directory or in a new one for the script of this name."""
    async with contextlib.AsyncExitStack() as stack:
        directory = where if isinstance(where, Path) else stack.enter_context(log_directory(where))
        client = await stack.enter_async_context(Client())
        fleet = await stack.enter_async_context(Fleet(directory))
        build_tiny_model(directory / "model")
        yield Stage(fleet, client, await start_nats(fleet, client) if starts_nats else "")


async def start_nats(fleet: Fleet, client: Client) -> str:
    """Start a NATS server; returns its URL when it answers."""
    port, monitor_port = free_ports(2)
    command = [str(server_binary()), "--addr", "127.0.0.1", "--port", str(port), "-m", str(monitor_port)]
    process = await fleet.start("nats", command)
    await wait_until_ok(client, process, f"http://127.0.0.1:{monitor_port}/healthz")
    return f"nats://127.0.0.1:{port}"


async def deploy(fleet: Fleet, client: Client, plan: Plan, nats_url: str) -> Deployment:
    """Start all processes concurrently; returns when every replica has every engine."""
    engines = [await start_engine(fleet, plan, nats_url, number) for number in range(plan.engines)]
    frontends, replicas = [], []
    for number in range(plan.replicas):
        process, replica = await start_frontend(fleet, client, plan, nats_url, number)
        frontends.append(process)
        replicas.append(replica)
    for engine in engines:
        await wait_until_ok(client, engine.mocker, f"{engine.url}/health")
    for process, replica in zip(frontends, replicas, strict=True):
        await wait_until_ok(client, process, f"{replica.url}/ready")
    await _see_all(fleet, plan, replicas)
    return Deployment(nats_url, engines, frontends, replicas)


async def start_engine(fleet: Fleet, plan: Plan, nats_url: str, number: int) -> Engine:
    port = plan.engine_ports[number] if plan.engine_ports else free_ports(3)[0]
    events, replay = port + 1, port + 2
    url = f"http://127.0.0.1:{port}"
    wires = [f"--kv-events=tcp://127.0.0.1:{events}", f"--kv-replay=tcp://127.0.0.1:{replay}"]
    mocker = await fleet.start(
        f"mocker-{number}",
        [
            *python("kvrouter.lab.mocker"), f"--port={port}", *wires,
            f"--block-size={plan.block_size}", f"--num-blocks={plan.num_blocks}",
            f"--speedup={plan.speedup}", f"--model-path={plan.model_path}",
            *plan.mocker_flags.get(number, ()),
        ],
    )  # fmt: skip
    bus = plan.bus_of(f"agent-{number}", nats_url)
    more = [flag.replace("{port}", str(port)) for flag in plan.agent_flags.get(number, ())]
    agent = await fleet.start(
        f"agent-{number}", [*python("kvrouter.worker"), f"--engine-url={url}", *wires, *bus, *more]
    )
    return Engine(url, f"tcp://127.0.0.1:{events}", mocker, agent)


async def start_frontend(
    fleet: Fleet, client: Client, plan: Plan, nats_url: str, number: int
) -> tuple[Process, Replica]:
    port, admin_port = free_ports(2)
    process = await fleet.start(
        f"frontend-{number}",
        [
            *python("kvrouter.frontend"), "--host=127.0.0.1", f"--port={port}", f"--admin-port={admin_port}",
            f"--router-mode={plan.router_mode}", "--router-replica-sync",
            *plan.bus_of(f"frontend-{number}", nats_url),
            *([f"--model-path={plan.model_path}"] if plan.gives_model else []),
            "--drain-grace=0", *plan.frontend_flags,
        ],
    )  # fmt: skip
    return process, Replica(port, admin_port, client)


async def stop(fleet: Fleet, deployment: Deployment) -> None:
    """Stop first replicas, then agents, then mockers; NATS keeps running."""
    agents = [engine.agent for engine in deployment.engines]
    mockers = [engine.mocker for engine in deployment.engines]
    for kind in (deployment.frontends, agents, mockers):
        await asyncio.gather(*(fleet.stop(process.name) for process in kind))


async def _see_all(fleet: Fleet, plan: Plan, replicas: list[Replica]) -> None:
    """Wait until every replica has a live target for every engine and knows its peers."""
    seen = [0]
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while True:
                fleet.check()
                views = [await replica.view() for replica in replicas]
                seen = [view.live_targets for view in views]
                if all(count == plan.engines for count in seen) and all(
                    len(view.peers) == plan.replicas - 1 for view in views
                ):
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        logs = "\n".join(f"{process.name}: {process.tail(3)}" for process in fleet.processes.values())
        raise FleetError(
            f"the replicas see {seen} live targets of {plan.engines} after {SETTLE_TIMEOUT_S:g} s\n{logs}"
        ) from None


def python(module: str) -> list[str]:
    """The command of a part of kvrouter."""
    return [sys.executable, "-m", module]
