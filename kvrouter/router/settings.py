"""The settings of a router: those of a frontend that mean something here, and those of reservations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvrouter.errors import ConfigError
from kvrouter.frontend.settings import REMOVED, FrontendOptions
from kvrouter.router.reservations import MOST, MOST_LEASE_S, PER_CALLER
from kvrouter.settings.declare import Command, setting

_PROCESSES = ("processes", "process-number", "listen-fd", "siblings-fd", "waits-until-ready")
_ONE = "calls for a reservation go to the process that made it: run several routers, each on its own port"
_RELAYS = (
    "retries", "retries-after-death", "first-byte-timeout-s", "idle-timeout-s", "sse-keep-alive-s",
    "access-log", "trusted-proxies", "drain-timeout-s", "router-track-output-blocks", "root-path",
    "keys-file", "api-key", "tenant-cache-salt", "expose", "client-overrides",
)  # fmt: skip
_NO_RELAY = "a router relays nothing"


@dataclass(frozen=True, slots=True)
class RouterOptions(FrontendOptions):
    """All settings of a router."""

    heading = "Reservations"

    lease_s: float = setting(
        60.0,
        "seconds without a call after which a reservation ends; a request may give another time",
        above=0,
        most=MOST_LEASE_S,
        is_top=True,
    )
    member_lease_s: float = setting(
        5.0,
        "--lease-s of a frontend: seconds without a heartbeat before a worker or replica is considered lost",
        above=0,
    )
    router_replica_sync: bool | None = setting(
        True, "share bookings with the other replicas", heading="Routing", is_top=True
    )
    per_caller: int = setting(
        PER_CALLER,
        "reservations of one caller at a time: of an address, or of the name in its x-kvrouter-caller",
        name="reservations-per-caller",
        least=1,
        most=MOST,
    )

    def checked(self) -> Self:
        if self.member_lease_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"--member-lease-s {self.member_lease_s:g} is less than two heartbeats of "
                f"{self.heartbeat_s:g} s: give at least {2 * self.heartbeat_s:g}, or a shorter --heartbeat-s"
            )
        return FrontendOptions.checked(self)  # super() does not find a class with slots

    @property
    def silence_s(self) -> float:
        return self.member_lease_s


COMMAND = Command(
    "router",
    RouterOptions,
    "Placement as a service: others ask where a request should go, and send it there themselves.",
    left_out=dict.fromkeys(_PROCESSES, _ONE) | dict.fromkeys(_RELAYS, _NO_RELAY),
    defaults={"host": "127.0.0.1", "port": 8092},
    removed=REMOVED,
)
