"""The settings of `kvrouter top`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

from kvrouter.observe.settings import ReplicaAccess, check_given_once, replicas
from kvrouter.settings.declare import Command, setting

Column = Literal[
    "target", "state", "requests", "waiting", "charged", "usage", "blocks", "ttft", "rate", "errors"
]
COLUMNS: tuple[Column, ...] = get_args(Column)


@dataclass(frozen=True, slots=True)
class TopSettings(ReplicaAccess):
    heading = "Top"

    replica: tuple[str, ...] = replicas(
        "admin listeners of frontends: one shows the fleet, several are compared",
        ("http://127.0.0.1:8100",),
        is_positional=True,
    )
    interval_s: float = setting(1.0, "seconds between two looks", least=0.2, most=3600, is_top=True)
    sort: Column = setting("requests", "order of the targets", is_top=True)
    filter: str = setting("", "only targets with this text in name, pool, state or problems", is_top=True)
    once: bool = setting(False, "print two looks' worth as a plain table, and end", is_top=True)
    json: bool = setting(False, "print what --once shows as JSON", is_top=True)

    def checked(self) -> Self:
        check_given_once(self.replica)
        return self


COMMAND = Command(
    "top",
    TopSettings,
    "Show the fleet in this terminal: targets, traffic, and whether the replicas agree. Keys: ? shows them.\n"
    "Exit code 0; 1 if no replica answers (--once, --json); 2: wrong settings.",
)
