"""One cell of a comparison: a workload, engines, a cache, a load. All modes and the oracle run in it.

    saturation ──> pace ──> arrivals of a seed ──> Fleet, per mode ──> Measures
    working set ──> blocks of each engine ──────────┘

Saturation is measured: all requests at once, placed by the oracle; half of them divided by the time until
these have their first tokens, while the other half keeps all engines busy. That throughput is load 0.8.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.policy import AUTO
from kvrouter.errors import ConfigError
from kvrouter.lab.simulate.agenda import Agenda
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import NewPlacer, Run, SimulatedFleet
from kvrouter.lab.simulate.measures import Measures, Slo, measure
from kvrouter.lab.simulate.placement import Frontend, Oracle, Placer, SimulatedReplicas, Sync
from kvrouter.lab.simulate.split import AUTO_RULE, RULE, Roles
from kvrouter.lab.simulate.step_model import FIRST_COME, REFERENCE, StepModel
from kvrouter.lab.simulate.workloads import Workload, achievable, largest_blocks, working_set_blocks
from kvrouter.policies import CUSTOM, PolicySettings, new_policy

ORACLE = "oracle"

# Of the requests offered at once, those that measure saturation: later on, some engines have none left.
_COUNTED = 0.5

# The load of that throughput: so the loads and their figures are those of an earlier, independent comparison.
_SATURATED = 0.8


@dataclass(frozen=True)
class Cell:
    """One comparison. `cache`: a share of the working set, over all workers. `pace`: see `Workload`."""

    workload: Workload
    cache: float
    load: float | None = None
    """A share of saturation; None: `pace`."""
    pace: float = 1.0
    workers: int = 16
    model: StepModel = REFERENCE
    speeds: tuple[float, ...] = (1.0,)
    """Relative speeds of the engines; repeated."""
    replicas: int = 1
    sync: Sync | None = field(default_factory=Sync)
    frontend: Frontend = field(default_factory=Frontend)
    kv_delay_s: float = 0.0
    """Until a KV event reaches the routers' index."""
    fails: tuple[tuple[str, float], ...] = ()
    """Engines that fail, by name, and when: in seconds of virtual time."""
    joins: tuple[float, ...] = ()
    """When further engines join, empty."""
    leaving: float = 0.0
    """The share of the requests whose clients leave within 5 s."""
    slo: Slo = field(default_factory=Slo)
    roles: Roles | None = None
    """Those of the engines in modes with a rule for handing prompts over, `kv@auto`; whole in the others."""

    @cached_property
    def capacity_blocks(self) -> int:
        """The blocks of each engine: at least those that the largest request needs."""
        drawn = self.workload.draw(0)
        return max(int(working_set_blocks(drawn) * self.cache / self.workers), largest_blocks(drawn))

    @cached_property
    def offered_pace(self) -> float:
        """How many times faster than their own pace requests come. Raises ConfigError."""
        if self.load is not None and any(one.after for one in self.workload.draw(0)):
            name = self.workload.name
            raise ConfigError(f"--load: requests of {name} wait for answers, so it has no load: use --pace")
        return self.pace if self.load is None else self.load * self.saturation

    @property
    def saturation(self) -> float:
        """The pace that is load 1.0."""
        return _saturation(
            replace(
                self,
                load=None,
                pace=1.0,
                # shortest first, the first half of the requests would be the lesser half of the work
                model=self.model.served(FIRST_COME, 1),
                replicas=1,
                sync=None,
                frontend=Frontend(),
                kv_delay_s=0.0,
                fails=(),
                joins=(),
                leaving=0.0,
                slo=Slo(),
                roles=None,
            )
        )

    def measured_saturation(self) -> float:
        """Measure what `saturation` keeps."""
        drawn = self.workload.draw(0)
        at_once = [replace(one, at=0.0, after=()) for one in drawn]
        run = self._fleet(lambda _agenda: Oracle(random.Random(0).random)).run(at_once)
        counted = int(_COUNTED * len(drawn))
        span_s = drawn[-1].at - drawn[0].at
        return span_s * _COUNTED / sorted(run.first_s)[counted - 1] / _SATURATED

    def run(self, mode: str, settings: PolicySettings, seed: int) -> Run:
        """Serve the arrivals of a seed, starting with empty caches."""
        chance = random.Random(f"{mode} {seed}")
        mode, _, rule = mode.partition(RULE)
        return self._fleet(
            lambda agenda: self._placer(agenda, mode, settings, chance, rule or AUTO_RULE),
            self.roles if rule else None,
        ).run(self.arrivals(seed))

    def arrivals(self, seed: int) -> list[Arrival]:
        """The requests of a seed."""
        return self.workload.arrivals(seed, self.offered_pace, self.leaving)

    def measure(self, mode: str, settings: PolicySettings, seed: int) -> Measures:
        """Run a mode, and measure."""
        run, warm_up = self.run(mode, settings, seed), self.workload.warm_up
        possible = achievable(run.arrivals, self.workers * self.capacity_blocks, warm_up=warm_up)
        return measure(run.after(warm_up), self.slo, possible)

    def _placer(
        self, agenda: Agenda, mode: str, settings: PolicySettings, chance: random.Random, rule: str
    ) -> Placer:
        if mode == ORACLE:
            return Oracle(chance.random)
        if mode == CUSTOM and settings.custom is not None:
            settings.custom.begin()
        # each replica begins its turns elsewhere, as in a frontend
        first = [0] + [chance.randrange(1 << 16) for _ in range(self.replicas - 1)]
        policies = [policy_of(mode, settings, turn) for turn in first]
        return SimulatedReplicas(
            agenda,
            policies,
            chance,
            self.sync,
            kv_delay_s=self.kv_delay_s,
            frontend=self.frontend,
            rule=rule,
        )

    def _fleet(self, new_placer: NewPlacer, roles: Roles | None = None) -> SimulatedFleet:
        speeds = [self.speeds[number % len(self.speeds)] for number in range(self.workers)]
        joins = {f"w{self.workers + number}": at for number, at in enumerate(self.joins, start=1)}
        fails = dict(self.fails)
        return SimulatedFleet(
            new_placer, self.model, self.capacity_blocks, speeds, joins=joins, fails=fails, roles=roles
        )


@cache
def _saturation(cell: Cell) -> float:
    return cell.measured_saturation()


def policy_of(mode: str, settings: PolicySettings, turn: int = 0) -> BuiltInPolicy:
    """The policy of `mode`, or of `mode:weight` with that overlap weight."""
    name, _, weight = mode.partition(":")
    if weight:
        settings = replace(settings, overlap_weight=AUTO if weight == AUTO else float(weight))
    return new_policy(name, settings, turn)
