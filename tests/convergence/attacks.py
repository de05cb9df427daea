"""A fleet under attack: messages of every kind are mutated and replayed, replay requests answered falsely.

The attacker receives all that is published, and publishes anything on any subject. Its answers race with the
real ones: the first to arrive counts, as with NATS.
"""

from __future__ import annotations

import random
from collections import deque

from tests.convergence.bus import Line, Process
from tests.convergence.truth import check_tables, differences
from tests.convergence.world import Setup, World
from tests.fuzz.mutate import Mutator

HEAL_BEATS = 60
"""Heartbeats, a second each, within which all copies must equal their owners' state after an attack."""
LEASES_BEATS = 60
"""A forged heartbeat may state the longest interval, and then its pool has a lease, too."""
_KEPT = 60
"""Messages of each kind that the attacker keeps."""


class AttackedWorld(World):
    """The fleet, and the attacker."""

    is_watched = False  # a forged frame makes a live copy inexact until the next Check

    def __init__(self, setup: Setup) -> None:
        self.is_attacked = False
        self.sent = 0
        self._heard: dict[str, deque[tuple[str, bytes]]] = {}
        super().__init__(setup)
        self._mutator = Mutator(random.Random(setup.seed))
        self._attacker = Line(self.net, Process(self.agenda, 0.0), -1)
        self._attacker.connect()
        self.net.publish = self._overhear  # type: ignore[method-assign]

    def attack(self, messages: int, seconds: float) -> None:
        """Publish this many mutants within this time, under load; replay requests are answered falsely."""
        self.is_attacked = True
        for _ in range(messages):
            self.agenda.at(self.agenda.now + self.rng.random() * seconds, self._strike_once)
        for _ in range(int(seconds * 5)):
            self.load(2)
            self.agenda.run(0.2)
            self.check()
        self.is_attacked = False

    def heal(self) -> int:
        """End the attack; returns after how many heartbeats all agreed. Raises AssertionError."""
        self.mend()
        for place, process in enumerate(self._places):
            if process is not None and not process.is_alive:  # two heartbeats of a namesake end an agent
                self._bury(place)
                self.start(place)
        for beat in range(1, HEAL_BEATS + 1):
            self.load(2)
            self._beat()
            if not self._differences():
                return beat
        raise AssertionError(f"after {HEAL_BEATS} heartbeats: {differences(self)}")

    def leftovers(self) -> list[str]:
        """Memory that the attack has left, after all requests and leases of invented members have ended."""
        for sim in self.replicas():
            sim.run(sim.drain_requests)
        for _ in range(LEASES_BEATS):
            self._beat()
        pools = {agent.pool_id for agent in self.agents()}
        members = len(self._places) - 1
        found = []
        for sim in self.replicas():
            replica = sim.replica
            if set(replica.routers) != pools:
                found.append(f"{replica.router_id} has pools {set(replica.routers)}")
            if len(replica.readers) > sum(self.setup.ranks for _ in self.agents()) + members:
                found.append(f"{replica.router_id} follows {list(replica.readers)}")
            if replica.held.used_bytes:
                found.append(f"{replica.router_id} holds {replica.held.used_bytes} bytes of frames")
        return found

    def failures(self) -> list[str]:
        """Steps of feeds that raised."""
        return [
            f"{sim.replica.router_id}: {source}: {error!r}"
            for sim in self.replicas()
            for source, error in sim.replica.feeds.take_failures()
        ]

    def check(self) -> None:
        """The tables' invariants hold, and nothing has raised."""
        for sim in self.replicas():
            check_tables(sim.replica)
        assert not (failures := self.failures()), failures

    def _overhear(self, sender: Line, subject: str, payload: bytes, reply: str = "") -> None:
        if sender is not self._attacker:
            self._remember(subject, payload)
            if self.is_attacked and reply and self.rng.random() < 0.5:
                self._answer_falsely(reply)
        type(self.net).publish(self.net, sender, subject, payload, reply)

    def _remember(self, subject: str, payload: bytes) -> None:
        kind = "answer" if subject.startswith("_INBOX") else ".".join(subject.split(".")[:4])
        self._heard.setdefault(kind, deque(maxlen=_KEPT)).append((subject, payload))

    def _answer_falsely(self, reply: str) -> None:
        if answers := self._heard.get("answer"):
            _, answer = self.rng.choice(answers)
            forged = answer if self.rng.random() < 0.1 else self._mutator.mutate(answer)
            self._send(reply, forged)

    def _strike_once(self) -> None:
        """A mutant of a received message, on its subject or on another."""
        kind = self.rng.choice(sorted(self._heard.keys() - {"answer"}) or ["hello"])
        if not (heard := self._heard.get(kind)):
            return
        subject, payload = self.rng.choice(heard)
        if self.rng.random() < 0.1:
            subject, _ = self.rng.choice(heard)
        if self.rng.random() < 0.05:
            subject = f"{subject}{self.rng.choice(('x', '.0', '9', '.é', '-'))}"
        self._send(subject, payload if self.rng.random() < 0.1 else self._mutator.mutate(payload))

    def _send(self, subject: str, payload: bytes) -> None:
        self.sent += 1
        self._attacker.publish(subject, payload)
