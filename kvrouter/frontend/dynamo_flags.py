"""Flags of NVIDIA Dynamo's frontend that need nothing here: accepted, and a line of the log says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvrouter.settings.declare import Settings, setting


@dataclass(frozen=True)
class DynamoOptions(Settings):
    heading = "Dynamo's, without effect"

    snapshot_threshold: int | None = setting(
        None,
        "not needed: agents and peers send a snapshot of their own state; no stream grows",
        name="router-snapshot-threshold",
        least=0,
        since="0.2",
    )
    reset_states: bool = setting(
        False,
        "not needed: a router starts empty and asks agents and peers; nothing is stored",
        name="router-reset-states",
        since="0.2",
    )
    durable_kv_events: bool = setting(
        False,
        "not needed: agents number and repeat their own events, without JetStream",
        name="router-durable-kv-events",
        old=("--durable-kv-events", "--no-durable-kv-events"),
        since="0.2",
    )

    def notes(self) -> Iterator[str]:
        """A line for each flag that asks for something."""
        if self.snapshot_threshold is not None:
            yield "--router-snapshot-threshold is not needed: agents and peers send their own snapshots"
        if self.reset_states:
            yield "--router-reset-states is not needed: a router starts empty and asks agents and peers"
        if self.durable_kv_events:
            yield "--router-durable-kv-events is not needed: agents number and repeat their own events"
