"""The settings of `kvrouter index`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Literal, Self

from kvrouter.config import DAY_S
from kvrouter.errors import ConfigError
from kvrouter.observe.settings import ReplicaAccess, replicas
from kvrouter.settings.declare import Command, Settings, setting

Action = Literal["dump", "diff"]


@dataclass(frozen=True, slots=True)
class IndexSettings(Settings):
    heading = "Index"

    action: Action = setting(MISSING, "what to do with the index", is_positional=True, is_top=True)
    replica: tuple[str, ...] = replicas("admin listener of a frontend: one to dump, two to compare")
    worker: tuple[str, ...] = setting((), "only this worker", metavar="ID", is_top=True)
    timeout_s: float = setting(
        15.0, "diff: seconds to look again at what differs", least=0, most=DAY_S, is_top=True
    )
    access: ReplicaAccess = field(default_factory=ReplicaAccess)

    def checked(self) -> Self:
        wanted = 1 if self.action == "dump" else 2
        if len(set(self.replica)) != wanted or len(self.replica) != wanted:
            replicas = "one replica" if wanted == 1 else "two different replicas"
            raise ConfigError(f"{self.action} needs {replicas}: {' '.join(['--replica URL'] * wanted)}")
        return self


COMMAND = Command(
    "index",
    IndexSettings,
    "List the blocks that a replica's index holds of each worker, or compare two replicas block by block.\n"
    "dump: lines of worker/rank, tier and sequence hash. diff: the blocks that differ in every look.\n"
    "Exit code 0: done, or equal; 1: different; 2: a replica cannot be reached, or wrong settings.",
)
