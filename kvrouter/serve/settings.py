"""The settings of `kvrouter serve`: its own, and those of its frontends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from kvrouter.bus import NatsOptions
from kvrouter.bus.options import EMBEDDED
from kvrouter.config import CommonOptions
from kvrouter.errors import ConfigError
from kvrouter.frontend.settings import REMOVED, FrontendOptions
from kvrouter.serve.engines import EngineSpec, check_different, read_engine
from kvrouter.settings.declare import Command, Settings, declared, setting
from kvrouter.settings.read import Loaded, load
from kvrouter.worker import settings as worker
from kvrouter.worker.options import AgentOptions

_REPLICAS = "kvrouter serve starts several replicas with --replicas"


@dataclass(frozen=True, slots=True)
class ServeOptions(Settings):
    """A whole deployment."""

    heading = "Deployment"

    engines: tuple[EngineSpec, ...] = setting(
        (),
        "an engine. Keys: kv, replay (ZMQ endpoints), id, topic, model, block-size, label.NAME, role, "
        "connector, bootstrap-port, kv-address, kv-hash; else queried",
        name="engine",
        metavar="URL[,key=value…]",
        read=read_engine,
        text=EngineSpec.text,
        is_repeated=True,
        is_top=True,
    )
    replicas: int = setting(1, "number of frontends, on --port, --port + 1, …", least=1, is_top=True)
    nats_port: int = setting(4222, "port of the embedded NATS server", metavar="PORT", least=1, most=65535)
    state_dir: Path | None = setting(
        None, "directory in which agents save their tables for a restart", metavar="DIR", is_top=True
    )
    metrics: tuple[str, ...] = setting((), "of the agents", name="metric", metavar="NAME=SERIES")
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    agent_settings: tuple[str, ...] = ()
    """The flags that all agents get."""
    frontend_flags: tuple[str, ...] = ()
    agents: Mapping[str, AgentOptions] = field(default_factory=dict)
    """Of each engine, by worker id."""
    given: frozenset[str] = frozenset()
    """The names of the settings that are not the default."""

    def checked(self) -> Self:
        if not self.engines:
            raise ConfigError(
                "--engine is missing: give the URL of each engine, as in --engine http://127.0.0.1:9000, "
                "or all in KVROUTER_ENGINE"
            )
        if self.state_dir is not None and not self.state_dir.is_dir():
            raise ConfigError(f"--state-dir {self.state_dir}: give a directory that exists")
        check_different(self.engines)
        last = (*self.ports()[-1], self.metrics_ports()[-1])
        for flag, port in zip(("--port", "--admin-port", "--metrics-port"), last, strict=True):
            if port > 65535:
                first = port - self.replicas + 1
                raise ConfigError(f"{flag} {first}: {self.replicas} replicas would need ports above 65535")
        return self

    @property
    def nats(self) -> NatsOptions:
        return self.frontend.nats

    def ports(self) -> list[tuple[int, int]]:
        """The clients' port and the admin port of each replica; 0, a port chosen by the system, stays 0."""
        first, admin = self.frontend.port, self.frontend.process.admin_port
        return [(first and first + number, admin and admin + number) for number in range(self.replicas)]

    def metrics_ports(self) -> list[int]:
        """The port of --metrics-port of each replica; 0: it has none."""
        first = self.frontend.metrics.port
        return [first and first + number for number in range(self.replicas)]

    def agent_flags(self, engine: EngineSpec) -> list[str]:
        """The flags of an engine's agent except --nats."""
        # the agents end after the frontends have drained: no request is left to wait for
        flags = [*engine.flags(), *self.agent_settings, "--drain-timeout-s=0"]
        flags += [f"--metric={metric}" for metric in self.metrics]
        if self.state_dir is not None:
            flags.append(f"--state-file={self.state_dir / engine.worker_id}.state")
        return flags

    def agent(self, engine: EngineSpec) -> AgentOptions:
        """The options that its agent reads from these flags, its environment and its tables."""
        return self.agents[engine.worker_id]

    def chooses_events(self) -> bool:
        """Whether the operator chose between events and the approximate index."""
        return "use-kv-events" in self.given

    def no_events(self) -> str:
        """The flag that keeps the frontends from using events; empty if there is none."""
        if self.frontend.tokens.way == "none":
            return "--tokenizer none"
        return "" if self.frontend.pool.use_kv_events else "--no-use-kv-events"


# The agents need these flags of the frontends for access to engines.
_ACCESS = {"engine-api-key-file", "worker-tls-ca", "worker-tls-cert", "worker-tls-key"}
COMMAND = Command(
    "serve",
    ServeOptions,
    "NATS, an agent for each engine and the frontends: a whole deployment in one command. Settings of "
    "`kvrouter frontend` are passed to each replica.",
    tables=("frontend",),
    left_out={
        "processes": _REPLICAS,
        **dict.fromkeys(("process-number", "listen-fd", "siblings-fd", "waits-until-ready"), _REPLICAS),
    },
    defaults={"nats": (EMBEDDED,)},
    removed=REMOVED,
)


def parse_options(arguments: Sequence[str] | None = None) -> ServeOptions:
    """The settings of flags, environment and file. Raises ConfigError."""
    return with_flags(load(COMMAND, arguments))


def with_flags(loaded: Loaded[ServeOptions]) -> ServeOptions:
    """The settings, with the flags of the child processes. Raises ConfigError."""
    options = loaded.settings
    of_frontends = {one.name for one in declared(FrontendOptions)}
    of_agents = {one.name for one in declared(CommonOptions)} | _ACCESS
    # 1: the replicas read KVROUTER_PROCESSES and the table [frontend], too
    frontend_flags = ["--processes=1", *loaded.passed_on("frontend", of_frontends - {"nats"})]
    # serve starts several replicas with --router-replica-sync: a choice, wherever it was made, comes later
    if (synced := options.frontend.router_replica_sync) is not None:
        frontend_flags.append(f"--{'' if synced else 'no-'}router-replica-sync")
    options = replace(
        options,
        agent_settings=tuple(loaded.passed_on("worker", of_agents - {"nats"})),
        frontend_flags=tuple(frontend_flags),
        given=frozenset(loaded.sources),
    )
    # read now: wrong values end the start of the deployment, not that of the agent
    agents = {
        engine.worker_id: load(worker.COMMAND, options.agent_flags(engine), loaded.environ).settings.agent()
        for engine in options.engines
    }
    return replace(options, agents=agents)
