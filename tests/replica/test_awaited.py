"""What a replica without workers says, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from kvrouter.bus import Bus
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.wire.heartbeats import State
from kvrouter.core.wire.ids import RouterId
from kvrouter.policies import POLICIES
from kvrouter.replica.awaited import NO_TARGET, NO_WORKER, AwaitedWorkers
from tests.core.worlds import W1, card, fixed, worker_beat


def a_bus(*, connected: bool = True, outage_reason: str = "") -> Bus:
    """A connection that is there, or not."""
    return cast(Bus, SimpleNamespace(connected=connected, outage_reason=outage_reason))


def new_replica() -> Replica:
    """A replica whose hello was answered long ago."""
    chance = fixed(0.5)
    rules = RouterRules(POLICIES["random"](), chance)
    replica = Replica(ReplicaSettings(), RouterId("r"), 1, lambda _: rules, chance=chance)
    replica.hello_sent(-100.0)
    return replica


def said(replica: Replica, bus: Bus, until_s: int = 30) -> list[tuple[float, str, str]]:
    """Waited seconds, reason and remedy of each line of a wait that begins now."""
    workers = AwaitedWorkers(replica, bus, "ns")
    with capture_logs() as logs:
        for at in range(until_s):
            workers.look(float(at))
    assert all(("workers.awaited", "ns") == (line["event"], line["namespace"]) for line in logs)
    return [(line["waited_s"], line["reason"], line["remedy"]) for line in logs]


def test_no_worker() -> None:
    """A replica that has seen no worker says how to start an agent, and where to look."""
    lines = said(new_replica(), a_bus())

    assert [(10, NO_WORKER), (20, NO_WORKER)] == [(waited, remedy) for waited, _, remedy in lines]
    assert "no worker" in lines[0][1]


@pytest.mark.parametrize("state", ["down", "draining", "up"])
def test_known_worker(state: State) -> None:
    """A worker that takes no requests is named with its state; one that takes them is not awaited."""
    replica = new_replica()
    replica.take_worker_beat(W1, worker_beat(card(W1), state=state), 0.0)
    lines = said(replica, a_bus(), 15)

    if state == "up":
        assert not lines
    else:
        ((waited, reason, remedy),) = lines
        assert (10, NO_TARGET) == (waited, remedy)
        assert f"{W1} {state}" in reason


def test_without_nats() -> None:
    """Without NATS the bus says what it waits for: nothing is known of workers."""
    bus = a_bus(connected=False, outage_reason="refused: start NATS")
    assert not said(new_replica(), bus)
    assert "refused: start NATS" in AwaitedWorkers(new_replica(), bus, "ns").remedy()


def test_a_wait_that_was_over_begins_again() -> None:
    """Each outage has its own ten seconds."""
    bus = SimpleNamespace(connected=True, outage_reason="")
    workers = AwaitedWorkers(new_replica(), cast(Bus, bus), "ns")
    with capture_logs() as logs:
        for at in range(30):
            bus.connected = at % 9 != 0
            workers.look(float(at))

    assert not logs
