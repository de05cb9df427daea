"""The flags of `kvrouter serve`: its own, the shared ones of all processes, and all of the frontends'."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrouter.bus import NatsOptions
from kvrouter.config import FlagHelp, add_common_flags, nats_options, positive_int
from kvrouter.errors import ConfigError
from kvrouter.frontend.flags import options as frontend
from kvrouter.frontend.flags.options import FrontendOptions
from kvrouter.serve.engines import EngineSpec, read_engines
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.settings import agent_options

_EPILOG = (
    "Flags of `kvrouter frontend`, included in this list, are passed to each replica, except --processes: "
    "use --replicas."
)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """A whole deployment.

    `common`: flags for all child processes. `frontend_flags`: flags for the frontends. `engine_access`: the
    flags among these that the agents need as well.
    """

    engines: tuple[EngineSpec, ...]
    replicas: int
    nats: NatsOptions
    nats_port: int
    state_dir: Path | None
    engine_access: tuple[str, ...]
    metrics: tuple[str, ...]
    common: tuple[str, ...]
    frontend_flags: tuple[str, ...]
    frontend: FrontendOptions

    def ports(self) -> list[tuple[int, int]]:
        """The clients' port and the admin port of each replica; 0, a port chosen by the system, stays 0."""
        first, admin = self.frontend.port, self.frontend.process.admin_port
        return [(first and first + number, admin and admin + number) for number in range(self.replicas)]

    def agent_flags(self, engine: EngineSpec) -> list[str]:
        """The flags of an engine's agent except --nats."""
        # the agents end after the frontends have drained: no request is left to wait for
        flags = [*engine.flags(), *self.common, "--drain-timeout=0"]
        flags += [f"--metric={metric}" for metric in self.metrics]
        if self.state_dir is not None:
            flags.append(f"--state-file={self.state_dir / engine.worker_id}.state")
        return [*flags, *self.engine_access]

    def agent(self, engine: EngineSpec) -> AgentOptions:
        """The options that its agent will read from these flags. Raises ConfigError."""
        return agent_options(self.agent_flags(engine))

    def chooses_events(self) -> bool:
        """Whether the command line chooses between events and the approximate index."""
        return any("use-kv-events" in flag or "no-kv-events" in flag for flag in self.frontend_flags)

    def no_events(self) -> str:
        """The flag that keeps the frontends from using events; empty if there is none."""
        if self.frontend.tokens.way == "none":
            return "--tokenizer none"
        return "" if self.frontend.replica.pool.use_kv_events else "--no-kv-events"


def parse_options(arguments: Sequence[str]) -> ServeOptions:
    """Read the command line. For a wrong one, argparse exits with a message, or ConfigError is raised."""
    # first with all flags, so that --help lists all and an unknown flag is an error
    _whole_parser().parse_args(arguments)
    own, rest = _own_parser().parse_known_args(arguments)
    shared, frontend_flags = _common_parser().parse_known_args(rest)
    nats = nats_options(shared)
    common = _as_flags(shared)
    options = ServeOptions(
        engines=read_engines(own.engine),
        replicas=own.replicas,
        nats=nats,
        nats_port=own.nats_port,
        state_dir=own.state_dir,
        engine_access=_as_flags(_access_parser().parse_known_args(frontend_flags)[0]),
        metrics=tuple(own.metric),
        common=common,
        frontend_flags=tuple(frontend_flags),
        frontend=replace(frontend.parse_options([*common, *frontend_flags]), nats=nats),
    )
    for engine in options.engines:
        options.agent(engine)  # raises for wrong values now, not when the agent starts
    for flag, port in zip(("--port", "--admin-port"), options.ports()[-1], strict=True):
        if port > 65535:
            first = port - own.replicas + 1
            raise ConfigError(f"{flag} {first}: {own.replicas} replicas would need ports above 65535")
    return options


def _as_flags(shared: argparse.Namespace) -> tuple[str, ...]:
    """The flags again, as text. Without --nats, which is known only when the server runs."""
    return tuple(
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(shared).items()
        if value is not None and name != "nats"
    )


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serve")
    group.add_argument(
        "--engine",
        action="append",
        required=True,
        metavar="URL[,key=value…]",
        help="an engine; repeatable. Keys: kv, replay (ZMQ endpoints), id, topic, model, label.NAME; "
        "by default the engine is queried for them",
    )
    group.add_argument(
        "--replicas", type=positive_int, default=1, help="number of frontends, on --port, --port + 1, …"
    )
    group.add_argument(
        "--nats-port", type=positive_int, default=4222, help="port of the embedded NATS server"
    )
    group.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="directory in which agents save their tables for a restart",
    )
    group.add_argument(
        "--metric", action="append", default=[], metavar="NAME=SERIES", help="of the agents; repeatable"
    )


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrouter serve", add_help=False, allow_abbrev=False)
    _add_own_flags(parser)
    return parser


def _access_parser() -> argparse.ArgumentParser:
    """Flags of the frontends for access to engines; the agents get a copy of them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine-api-key-file", type=Path)
    parser.add_argument("--worker-tls-ca", type=Path)
    return parser


def _common_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrouter serve", add_help=False, allow_abbrev=False)
    add_common_flags(parser)
    parser.set_defaults(nats=os.environ.get("NATS_URL", "embedded"))
    return parser


def _whole_parser() -> argparse.ArgumentParser:
    """Knows all flags, for --help and to reject unknown ones."""
    parser = argparse.ArgumentParser(
        prog="kvrouter serve",
        usage="kvrouter serve --engine URL[,key=value…] [--engine …] [flag …]; --help lists the flags",
        description="NATS, an agent for each engine and the frontends: a whole deployment in one command.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=FlagHelp,
    )
    _add_own_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(nats=os.environ.get("NATS_URL", "embedded"))
    frontend.add_flags(parser)
    return parser
