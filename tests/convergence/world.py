"""A fleet under a plan of faults: replicas, engines with their agents, and the net between them.

`follow` a plan of faults while load goes on; `mend` what is broken (what is dead stays dead);
`settle`: heartbeats until every copy is its owner's truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from unittest import mock

from kvrouter.core.feeds import source as feed_source
from kvrouter.core.fleet import replica as replica_module
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import PoolId, Target
from tests.convergence.bus import FINE, Agenda, Line, Net, Process, Weather
from tests.convergence.engines import BLOCK_SIZE, HEARTBEAT_S, LIBRARY, LIBRARY_SIZE, Engine, SimAgent
from tests.convergence.poison import POISONS, poison
from tests.convergence.replicas import SimReplica
from tests.convergence.truth import Histories, check_tables, differences

# Heartbeats within which all must agree: three leases of 6 (more than 5 rounds), one heartbeat for the phase
# and one for repair. A worker whose older life had the greater incarnation is followed after that life's
# lease. The last worker of a pool, kept although silent, is dropped a lease after another has appeared. The
# block size follows after one more. Cards (every 10 s, or on hello) and back-off (up to 7.5 s) overlap these.
BOUND = 20
# For this many heartbeats late copies of earlier messages may arrive.
IN_THE_AIR = 4
# After this time nats-py notices that its server is gone: ping_interval 1 s, 2 outstanding.
PINGS_S = 3.0

TIERS_OF_ENGINES = ("device", "host", "disk")
WEATHERS = (FINE, Weather(loss=0.05, repeat=0.05, slow=0.1), Weather(loss=0.3, repeat=0.2, slow=0.3))


@dataclass(frozen=True, slots=True)
class Setup:
    """The kind of fleet."""

    seed: int = 0
    replicas: int = 2
    agents: int = 2
    ranks: int = 1
    pools: int = 1
    block_sizes: int = 1
    """With 2 every other engine has blocks of twice the size; the first one started has the smaller."""
    tiers: int = 1
    ring_frames: int = 4096
    max_payload: int = 1 << 20
    snapshot_kept_s: float = 10.0
    is_busy: bool = False
    """Whether load continues while all settle."""


class Step(NamedTuple):
    """A fault of a process for some seconds; then `wait` passes, with some load."""

    kind: str
    who: int = 0
    seconds: float = 1.0
    load: int = 2
    wait: float = 0.5


class World:
    """The fleet. Replicas and agents live in places, which are empty after a crash."""

    is_watched = True
    """Whether every live copy must be exact at every moment."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.agenda = Agenda()
        self.rng = random.Random(setup.seed)
        self.net = Net(self.agenda, self.rng, setup.max_payload)
        self.histories = Histories()
        self.universe = LIBRARY.sequences
        self.chains = [LIBRARY.hashes(node) for node in range(0, LIBRARY_SIZE, 3)]
        self.engines = [[Engine(setup.tiers) for _ in range(setup.ranks)] for _ in range(setup.agents)]
        self._stranger = Line(self.net, Process(self.agenda, 0.0), 0)
        self._stranger.connect()
        self._places: list[Process | None] = [None] * (setup.replicas + setup.agents)
        self.strays: list[SimAgent] = []
        self._ends: dict[int, Callable[[], None]] = {}
        self._troubles = 0
        self._born = 0
        self.beats_needed = 1
        """Heartbeats after the faults until all agreed."""
        for place in range(len(self._places)):
            self.agenda.at(self.agenda.now + self.rng.random(), partial(self.start, place))

    # Members

    def replicas(self) -> list[SimReplica]:
        """Replicas that are alive."""
        return [one for one in self._places if isinstance(one, SimReplica) and one.is_alive]

    def agents(self) -> list[SimAgent]:
        """Agents that are alive. One whose name a newer agent took counts if that one is gone again."""
        living = [one for one in (*self.strays, *self._places) if isinstance(one, SimAgent) and one.is_alive]
        return list({agent.card.worker_id: agent for agent in living}.values())

    def pool_of(self, target: Target) -> PoolId:
        """The pool of a live agent's target."""
        return next(agent.pool_id for agent in self.agents() if agent.card.worker_id == target.worker_id)

    def start(self, place: int, *, started_at: float | None = None) -> None:
        """A process starts in an empty place; `started_at` is the time of its clock, if that is wrong."""
        if self._places[place] is None:
            clock = self.agenda.now if started_at is None else started_at
            self._places[place] = process = self._new_process(place, clock)
            process.start()
            if isinstance(process, SimAgent):
                self._tell_history(process, place - self.setup.replicas)

    def _new_process(self, place: int, started_at: float) -> SimReplica | SimAgent:
        self._born += 1
        incarnation = int(started_at * 1e6) + self._born
        if place < self.setup.replicas:
            return SimReplica(
                self.agenda, self.net, self.rng, self._born,
                incarnation=incarnation, histories=self.histories, ring=self.setup.ring_frames,
                is_watched=self.is_watched,
            )  # fmt: skip
        return SimAgent(
            self.agenda, self.net, self.rng, self._born, self._card(place - self.setup.replicas),
            incarnation=incarnation, histories=self.histories, ring=self.setup.ring_frames,
        )  # fmt: skip

    def _card(self, number: int) -> Card:
        """Tiers on the engine's card; wider tiers may appear in its events only."""
        known = self.rng.randrange(1, self.setup.tiers + 1)
        return Card(
            worker_id=f"w{number}",
            url=f"http://w{number}:8000",
            model=f"m{number % self.setup.pools}",
            block_size=BLOCK_SIZE * (1 + number % self.setup.block_sizes),
            started_at_us=number,
            ranks=self.setup.ranks,
            tiers=dict.fromkeys(TIERS_OF_ENGINES[:known], 0),
        )

    def _tell_history(self, agent: SimAgent, number: int) -> None:
        """The engine's replay; sometimes it no longer has the events."""
        for rank, engine in enumerate(self.engines[number]):
            if self.rng.random() < 0.7:
                for event in engine.replay():
                    agent.hear(rank, event)

    # Steps

    def follow(self, plan: Sequence[Step]) -> None:
        """Take the steps; check the tables' invariants after each."""
        self.agenda.run(1.5)
        for step in plan:
            self._happen(step)
            self.load(step.load)
            self.agenda.run(step.wait)
            self.check()

    def check(self) -> None:
        """Raise if a table's invariant is broken anywhere."""
        for sim in self.replicas():
            check_tables(sim.replica)

    def load(self, amount: int) -> None:
        """Some load at this moment: `amount` actions of engines and clients."""
        for _ in range(amount):
            if self.rng.random() < 0.5:
                self._engine_acts()
            elif replicas := self.replicas():
                sim = self.rng.choice(replicas)
                sim.run(partial(sim.act, self.rng))

    def _engine_acts(self) -> None:
        number = self.rng.randrange(self.setup.agents)
        rank = self.rng.randrange(self.setup.ranks)
        event = self.engines[number][rank].act(self.rng)
        agent = self._places[self.setup.replicas + number]
        if event is not None and isinstance(agent, SimAgent):
            agent.run(lambda: agent.hear(rank, event))

    def _happen(self, step: Step) -> None:
        if step.kind == "weather":
            self.net.weather = WEATHERS[step.who % len(WEATHERS)]
            return
        if step.kind == "server":
            self._stop_server(step)
            return
        place = step.who % len(self._places)
        process = self._places[place]
        if process is None:
            self.start(place)
        elif isinstance(process, SimReplica | SimAgent):
            self._strike(step, place, process)

    def _stop_server(self, step: Step) -> None:
        """Clients wait for two pings of a second each, then they are disconnected."""
        if step.seconds <= PINGS_S:
            self.net.stop(step.seconds)
            return
        for process in self._processes():
            process.line.disconnect()
            self._later(step, process.line.connect)

    def _processes(self) -> list[SimReplica | SimAgent]:
        everybody = [*self._places, *self.strays]
        return [process for process in everybody if isinstance(process, SimReplica | SimAgent)]

    def _strike(self, step: Step, place: int, process: SimReplica | SimAgent) -> None:
        if step.kind in POISONS:
            self._poison(step.kind, process)
            return
        line = process.line
        match step.kind:
            case "mute":
                line.is_mute = True
                self._later(step, line.mend)
            case "deaf":
                line.is_deaf = True
                self._later(step, line.mend)
            case "cut":
                line.is_mute = line.is_deaf = True
                self._later(step, line.mend)
            case "split":
                line.side = 1
                self._later(step, line.mend)
            case "disconnect":
                line.disconnect()
                self._later(step, line.connect)
            case "pause":
                process.pause()
                self._later(step, process.resume)
            case _:
                self._end(step, place, process)

    def _poison(self, kind: str, victim: SimReplica | SimAgent) -> None:
        """A forged message is published."""
        self._born += 1
        for subject, payload in poison(kind, victim, self._born):
            self._stranger.publish(subject, payload)

    def _end(self, step: Step, place: int, process: SimReplica | SimAgent) -> None:
        """Steps of a whole process: crashes, leaving, and faults of engines and agents."""
        match step.kind:
            case "crash":
                self._bury(place)
                self._later(step, partial(self.start, place))
            case "die":
                self._bury(place)
            case "clock back":
                self._bury(place)
                self._later(step, partial(self.start, place, started_at=500.0))
            case "leave":
                process.run(process.leave)
                self._bury(place)
                self._later(step, partial(self.start, place))
            case _ if isinstance(process, SimAgent):
                self._strike_agent(step, place, process)

    def _strike_agent(self, step: Step, place: int, agent: SimAgent) -> None:
        number = place - self.setup.replicas
        rank = step.who % self.setup.ranks
        match step.kind:
            case "engine restart":
                event = self.engines[number][rank].clear()
                agent.run(lambda: agent.hear(rank, event))
            case "engine down":
                for engine in self.engines[number]:
                    engine.clear()
                agent.run(lambda: agent.go("down"))
                self._later(step, lambda: agent.run(lambda: agent.go("up")))
            case "lost history":
                agent.run(lambda: agent.lose_history(rank, int(self.agenda.now * 1e6)))
            case "usurp":
                self.strays.append(agent)  # it still runs, until it finds its successor
                self._places[place] = None
                self.start(place)

    def _bury(self, place: int) -> None:
        process, self._places[place] = self._places[place], None
        if process is not None:
            process.kill()

    def _later(self, step: Step, end: Callable[[], None]) -> None:
        """End the step's fault after its time, or when all faults end."""
        self._troubles += 1
        number = self._troubles
        self._ends[number] = end
        self.agenda.at(self.agenda.now + step.seconds, partial(self._end_trouble, number))

    def _end_trouble(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None:
            end()

    # After the faults

    def mend(self) -> None:
        """End the faults. Processes that were to restart have restarted; dead ones stay dead."""
        self.net.weather = FINE
        while self._ends:
            self._end_trouble(min(self._ends))
        for process in self._processes():
            process.resume()
            process.line.mend()

    def settle(self) -> None:
        """Raise if not all agree within BOUND heartbeats and from then on."""
        found: list[str] = ["no check was made"]
        for beat in range(1, BOUND + 1):
            self._beat()
            had_agreed, found = not found, self._differences()
            if had_agreed and not found and beat > IN_THE_AIR:
                return
            assert not (had_agreed and beat > IN_THE_AIR), f"they agreed for a moment only: {found}"
            self.beats_needed = beat + 1 if found else self.beats_needed
        raise AssertionError(f"after {BOUND} heartbeats: {found}")

    def _differences(self) -> list[str]:
        """Copies that differ, also after the messages on their way have arrived."""
        if not differences(self):
            return []
        self.agenda.run(0.01)
        return differences(self)

    def _beat(self) -> None:
        """Let one heartbeat pass, with load in its first half if the fleet is busy."""
        for _ in range(5):
            self.load(2 if self.setup.is_busy else 0)
            self.agenda.run(HEARTBEAT_S / 10)
        self.agenda.run(HEARTBEAT_S / 2)
        self.check()


def live_through(setup: Setup, plan: Sequence[Step]) -> World:
    """A whole history: faults, then calm. Raises if a property fails."""
    with (
        mock.patch.object(replica_module, "SLICE_HASHES", 5),
        mock.patch.object(feed_source, "SNAPSHOT_KEPT_S", setup.snapshot_kept_s),
    ):
        world = World(setup)
        world.follow(plan)
        world.mend()
        world.settle()
        return world
