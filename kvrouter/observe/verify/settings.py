"""The settings of `kvrouter verify`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvrouter.config import DAY_S, NamespaceOptions
from kvrouter.errors import ConfigError
from kvrouter.observe.settings import ReplicaAccess, check_given_once, replicas
from kvrouter.settings.declare import Command, setting


def _replay(text: str) -> tuple[str, list[str]]:
    worker_id, _, endpoints = text.partition("=")
    if not (worker_id and endpoints):
        raise ValueError("must be WORKER=tcp://HOST:PORT, with commas between ranks")
    return worker_id, endpoints.split(",")


@dataclass(frozen=True, slots=True)
class VerifySettings(ReplicaAccess):
    heading = "Replicas"

    replica: tuple[str, ...] = replicas("admin listener of a frontend: at least two, or one with --owners")
    timeout_s: float = setting(
        15.0, "seconds to compare", least=0, most=DAY_S, old=("--timeout",), is_top=True
    )
    json: Path | None = setting(None, "also write the result to this file", is_top=True)
    owners: bool = setting(
        False,
        "also compare with the frames of the agents, and the agents with the events of their engines",
        heading="Owners",
        is_top=True,
    )
    kv_replay: tuple[tuple[str, list[str]], ...] = setting(
        (),
        "ZMQ endpoint of an engine's replay, one per rank, if the engine reports none",
        metavar="WORKER=ENDPOINT[,…]",
        read=_replay,
        text=lambda pair: f"{pair[0]}={','.join(pair[1])}",
        is_repeated=True,
        heading="Owners",
        is_top=True,
    )
    engine_api_key_file: Path | None = setting(None, "bearer token for engines", heading="Owners")
    worker_tls_ca: Path | None = setting(None, "authorities of the engines' certificates", heading="Owners")
    bus: NamespaceOptions = field(default_factory=NamespaceOptions)

    def checked(self) -> Self:
        check_given_once(self.replica, ": give different replicas")
        if self.owners and not self.replica:
            raise ConfigError("give a replica: --replica URL")
        if not self.owners and len(self.replica) < 2:
            raise ConfigError(
                "give at least two different replicas: --replica URL --replica URL; "
                "or one with --owners, which compares it with the agents over --nats"
            )
        return self


COMMAND = Command(
    "verify",
    VerifySettings,
    "Compare the blocks and bookings of live replicas, also under traffic.\n"
    "Exit code 0: equal; 1: different; 2: a replica or NATS cannot be reached, or wrong settings.",
)
