"""The settings of `kvrouter doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvrouter.config import NamespaceOptions
from kvrouter.errors import ConfigError
from kvrouter.observe.doctor.kinds import KINDS
from kvrouter.observe.settings import ReplicaAccess, check_given_once, replicas
from kvrouter.settings.declare import Command, did_you_mean, setting


def _read_kind(text: str) -> str:
    if text not in KINDS:
        raise ValueError(f"no such finding{did_you_mean(text, KINDS) or '; docs/doctor.md lists them'}")
    return text


@dataclass(frozen=True, slots=True)
class DoctorSettings(ReplicaAccess):
    heading = "Doctor"

    replica: tuple[str, ...] = replicas(
        "admin listeners of frontends, in addition to those that heartbeats name", is_positional=True
    )
    listen_s: float = setting(
        5.0, "seconds to listen to heartbeats and events", least=1, most=3600, is_top=True
    )
    timeout_s: float = setting(
        30.0,
        "seconds for everything; what is not examined by then is reported",
        least=5,
        most=7200,
        is_top=True,
    )
    json: bool = setting(False, "print the result as JSON", is_top=True)
    owners: bool = setting(
        False,
        "also compare agents with what their engines replay, and all agents of large fleets with replicas",
        is_top=True,
    )
    ignore: tuple[str, ...] = setting(
        (),
        "leave out a finding that you accept",
        metavar="FINDING",
        read=_read_kind,
        is_repeated=True,
        is_top=True,
    )
    frontend_port: int = setting(
        8000,
        "clients' port of a frontend that is to run on this machine: if no replica is there, is it free?",
        least=1,
        most=65435,
        is_top=True,
    )
    engine_api_key_file: Path | None = setting(
        None, "bearer token for engines", heading="Engines", is_top=True
    )
    worker_tls_ca: Path | None = setting(None, "authorities of the engines' certificates", heading="Engines")
    bus: NamespaceOptions = field(default_factory=NamespaceOptions)

    def checked(self) -> Self:
        if self.listen_s + 3 > self.timeout_s:
            raise ConfigError(
                f"--timeout-s {self.timeout_s:g} leaves no time after --listen-s {self.listen_s:g}: "
                f"give at least {self.listen_s + 3:g}"
            )
        check_given_once(self.replica)
        return self


COMMAND = Command(
    "doctor",
    DoctorSettings,
    "Look at NATS, agents, engines and replicas from this machine, and report what is wrong and what to do.\n"
    "Exit code 0: nothing to do; 1: warnings; 2: errors, or wrong settings.",
)
