"""The search of `kvrouter tune`: settings of the router are tried in the simulator.

    requests ──first 70 %──> every trial (one seed) ──> finalists (more seeds) ──> winner
             └──last 30 %──────────────────────────────────────────────> winner and default, other seeds

The first trials are the defaults of every mode; the others are drawn by Optuna's tree-structured Parzen
estimator (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011). All trials have the same
arrivals. The finalists are run again with others, as the best of many is partly so by chance, and the one
whose worst run gains most on the default wins. The test has requests that no trial had, on caches that the
first 70 % have filled.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import optuna

from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.compare import SEED_STEP, Task, run_tasks
from kvrouter.lab.simulate.measures import Measures, mean
from kvrouter.lab.simulate.placement import Frontend
from kvrouter.lab.simulate.workloads import BLOCK, Workload, cache_of
from kvrouter.policies import PolicySettings, scorers
from kvrouter.policies.scored import HEIMDALL, Scored, Weighted
from kvrouter.settings.declare import declared

SEARCHED = 0.7
"""The share of the requests that trials see."""
FINALISTS = 5
_FINAL_SEEDS = 3
# Of two settings with equal goodput the one with the lower TTFT p90 is better: an SLO is worth this much.
_TTFT_SHARE = 1e-3

Goal = Literal["goodput", "ttft"]


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """Settings to try. `policy`: fields of PolicySettings; `weights`: by plugin, those of mode scored."""

    mode: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    frontend: Frontend = field(default_factory=Frontend)
    weights: Mapping[str, float] = field(default_factory=dict)

    def settings(self) -> PolicySettings:
        """For the simulator's policies."""
        scored = Scored(tuple(Weighted(name, _SCORERS[name], w) for name, w in self.weights.items()))
        return replace(PolicySettings(), **self.policy, scored=scored if self.weights else None)

    def flags(self) -> list[str]:
        """As the flags of a frontend, without the EndpointPickerConfig of mode scored."""
        flags = [f"--router-mode={self.mode}"]
        for one in declared(PolicySettings):
            if one.path[-1] in self.policy:
                flags += one.flags(self.policy[one.path[-1]])
        if self.frontend.queue_threshold:
            flags.append(f"--router-queue-threshold={self.frontend.queue_threshold:g}")
        if self.frontend.session_affinity != "off":
            flags.append(f"--session-affinity={self.frontend.session_affinity}")
        return flags

    def endpoint_picker_config(self) -> str:
        """The file for --router-config; empty for other modes than scored."""
        if not self.weights:
            return ""
        plugins = "".join(f"  - type: {name}\n" for name in self.weights)
        profile = "".join(
            f"      - pluginRef: {name}\n        weight: {weight:g}\n"
            for name, weight in self.weights.items()
        )
        return (
            "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\n"
            f"plugins:\n{plugins}schedulingProfiles:\n  - name: default\n    plugins:\n{profile}"
        )


_SCORERS = {one.name: one.scorer for one in HEIMDALL} | {"active-request-scorer": scorers.active_request}

DEFAULT = TunedSettings("kv")
PUBLISHED = TunedSettings("kv", {"overlap_weight": 1.0})
MODES = ("kv", "scored", "kv-score", "prefix-affinity", "sticky", "p2c", "least-loaded", "round-robin")


def drawn(trial: optuna.trial.BaseTrial, *, with_sessions: bool) -> TunedSettings:
    """The settings of a trial."""
    mode = trial.suggest_categorical("mode", MODES)

    def number(name: str, low: float, high: float, *, log: bool = False) -> float:
        # three digits: what people can copy, and more than the simulator can tell apart
        return float(f"{trial.suggest_float(f'{mode} {name}', low, high, log=log):.3g}")

    def switch(name: str) -> bool:
        return bool(trial.suggest_categorical(f"{mode} {name}", [False, True]))

    policy: dict[str, Any] = {}
    weights: dict[str, float] = {}
    if mode == "kv":
        if not switch("auto"):
            policy["overlap_weight"] = number("w", 0.1, 100, log=True)
    elif mode == "kv-score":
        policy["overlap_weight"] = number("w", 0.1, 20, log=True)
        policy["gpu_cache_usage_weight"] = number("usage", 0, 5)
        policy["waiting_requests_weight"] = number("waiting", 0, 5)
    elif mode == "prefix-affinity":
        policy["imbalanced_threshold"] = number("imbalance", 1, 100, log=True)
        policy["match_rate_threshold"] = number("match", 0, 0.9)
    elif mode == "sticky":
        policy["sticky_hit_rate"] = number("hits", 0.1, 1)
        policy["sticky_penalty_s"] = number("penalty", 0.01, 10, log=True)
    elif mode == "scored":
        weights = {name: number(name, 0, 10) for name in _SCORERS}
    if mode in {"kv", "kv-score"} and switch("softmax"):
        policy["temperature"] = number("temperature", 0.01, 1, log=True)
    queue = number("queue", 0.5, 8, log=True) if switch("queues") else 0.0
    sessions = "soft" if with_sessions and switch("sessions") else "off"
    return TunedSettings(mode, policy, Frontend(queue, sessions), weights if any(weights.values()) else {})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Tried:
    """A choice, with its figures."""

    choice: TunedSettings
    figures: Measures


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A choice on the requests that were held out: a run for each seed."""

    choice: TunedSettings
    runs: Sequence[Measures]

    @property
    def mean(self) -> Measures:
        return mean(self.runs)


@dataclass(frozen=True, slots=True)
class Gain:
    """The winner's TTFT p90 and goodput against the default's, seed by seed: mean, least, greatest."""

    ttft: tuple[float, float, float]
    """As a share of the default's; below 0: the winner is faster."""
    goodput: tuple[float, float, float]
    """In shares of the requests; above 0: more are within the SLO."""
    is_better: bool
    """Whether the goal was better in every seed."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search. `tested`: default, published default, winner."""

    tried: Sequence[Tried]
    tested: Sequence[HeldOut]
    gain: Gain

    @property
    def winner(self) -> TunedSettings:
        return self.tested[-1].choice

    def pareto(self) -> list[Tried]:
        """The trials that none is better than in TTFT p90 and ITL p90 at once, by TTFT."""
        best, kept = math.inf, []
        for one in sorted(self.tried, key=lambda one: (one.figures.ttft_p90_s, one.figures.itl_p90_s)):
            if one.figures.itl_p90_s < best:
                best = one.figures.itl_p90_s
                kept.append(one)
        return kept


@dataclass(frozen=True, slots=True)
class Search:
    """What to search: a cell with all requests, and how long."""

    cell: Cell
    goal: Goal
    trials: int
    seeds: int
    jobs: int
    seed: int

    def run(self, on_done: Callable[[int, int], None] = lambda _done, _all: None) -> SearchResult:
        """Search and test. `on_done(done, all)` is called after each run."""
        first, whole = self._cells()
        total = self.trials + (FINALISTS + 1) * _FINAL_SEEDS + 3 * self.seeds  # + 1: the default
        done = 0

        def measured(cell: Cell, pairs: Sequence[tuple[TunedSettings, int]]) -> list[Measures]:
            nonlocal done
            tasks = [
                Task(replace(cell, frontend=choice.frontend), choice.mode, choice.settings(), seed)
                for choice, seed in pairs
            ]
            figures = []
            for one in run_tasks(tasks, self.jobs):
                figures.append(one)
                done += 1
                on_done(done, total)
            return figures

        tried = self._try(lambda choices: measured(first, [(choice, self.seed) for choice in choices]))
        finalists = [one.choice for one in sorted(tried, key=lambda one: -self.value(one.figures))]
        finalists = list({str(one): one for one in finalists}.values())[:FINALISTS]  # trials repeat: 3 digits
        again = [self.seed + SEED_STEP * (number + 1) for number in range(_FINAL_SEEDS)]

        def values(choice: TunedSettings) -> list[float]:
            return [self.value(one) for one in measured(first, [(choice, seed) for seed in again])]

        plain = values(DEFAULT)
        # by its worst seed: a setting that is often better and sometimes ruinous is not one to serve with
        least = [min(map(operator.sub, values(one), plain)) for one in finalists]
        winner = finalists[least.index(max(least))]
        others = [self.seed + SEED_STEP * (number + 1 + _FINAL_SEEDS) for number in range(self.seeds)]
        tested = [
            HeldOut(choice, measured(whole, [(choice, seed) for seed in others]))
            for choice in (DEFAULT, PUBLISHED, winner)
        ]
        return SearchResult(tried, tested, self._gain(tested[0].runs, tested[-1].runs))

    def value(self, figures: Measures) -> float:
        """What the search maximizes."""
        if self.goal == "ttft":
            return -figures.ttft_p90_s
        return figures.goodput - _TTFT_SHARE * figures.ttft_p90_s / self.cell.slo.ttft_s

    def _cells(self) -> tuple[Cell, Cell]:
        """The cell of the first requests; and that of all, which has these as its warm-up. Equal engines."""
        cell, count = self.cell, int(SEARCHED * len(self.cell.workload.draw(0)))
        part = Workload(cell.workload.name, lambda seed: cell.workload.draw(seed)[:count])
        share = cache_of(part, cell.capacity_blocks * BLOCK, cell.workers)
        first = replace(cell, workload=part, cache=share)
        whole = Workload(cell.workload.name, cell.workload.draw, warm_up=count)
        return first, replace(cell, workload=whole, load=None, pace=first.offered_pace)

    def _try(self, measured: Callable[[Sequence[TunedSettings]], list[Measures]]) -> list[Tried]:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # constant_liar: else the trials that are asked for at once are much alike
        sampler = optuna.samplers.TPESampler(seed=self.seed, constant_liar=self.jobs > 1)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for known in _known():
            study.enqueue_trial(known)
        with_sessions = any(one.session for one in self.cell.workload.draw(0))
        tried: list[Tried] = []
        while len(tried) < self.trials:
            trials = [study.ask() for _ in range(min(self.jobs, self.trials - len(tried)))]
            choices = [drawn(trial, with_sessions=with_sessions) for trial in trials]
            for trial, choice, figures in zip(trials, choices, measured(choices), strict=True):
                study.tell(trial, self.value(figures))
                tried.append(Tried(choice, figures))
        return tried

    def _gain(self, before: Sequence[Measures], after: Sequence[Measures]) -> Gain:
        pairs = list(zip(before, after, strict=True))
        return Gain(
            _range([late.ttft_p90_s / early.ttft_p90_s - 1 for early, late in pairs]),
            _range([late.goodput - early.goodput for early, late in pairs]),
            is_better=all(self.value(late) > self.value(early) for early, late in pairs),
        )


def _known() -> list[dict[str, Any]]:
    """The settings that are tried first: those of every mode as published, and kv with other weights."""
    plain = {"auto": False, "softmax": False, "queues": False, "sessions": False}
    own: dict[str, dict[str, Any]] = {
        "kv-score": {"w": 2.0, "usage": 1.0, "waiting": 1.0},
        "prefix-affinity": {"imbalance": 10.0, "match": 0.1},
        "sticky": {"hits": 0.8, "penalty": 1.0},
        "scored": {one.name: float(one.weight) for one in HEIMDALL} | {"active-request-scorer": 0.0},
    }
    rows: list[tuple[str, dict[str, Any]]] = [
        ("kv", {"auto": True}),
        ("kv", {"w": 1.0}),
        ("kv", {"w": 8.0}),
        *((mode, own.get(mode, {})) for mode in MODES[1:]),
    ]
    return [{"mode": mode} | {f"{mode} {k}": v for k, v in (plain | given).items()} for mode, given in rows]


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return sum(values) / len(values), min(values), max(values)
