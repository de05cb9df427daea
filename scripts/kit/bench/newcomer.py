"""What an engine without a cache gets while the others hold nearly everything: chats, in virtual time.

    chats once ──> turns: all cached but 16 to 100 tokens ──> an engine joins, or one comes back, empty
                            └─ the learnt speed is read here    └─ requests to it, times to first token

The new engine is worth its first long prefill as soon as the others have no room. Shown: the speed that was
learnt by then next to the engines' own, the seconds until it gets its first request, its share, and TTFT.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from rich.table import Table

from kvrouter.core.tables.prefill_speeds import Speed
from kvrouter.lab.simulate.agenda import Agenda
from kvrouter.lab.simulate.cells import policy_of
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import Fleet, Run, reference_kind
from kvrouter.lab.simulate.percentiles import percentiles
from kvrouter.lab.simulate.placement import Replicas
from kvrouter.lab.simulate.step_model import StepModel
from kvrouter.policies import PolicySettings
from scripts.kit.script import new_console

NEW = "new"
ENGINES, BLOCK, HISTORY, ANSWER = 4, 16, 6000, 100
# An engine that comes back was away so long.
AWAY_S = 15.0
FAST = StepModel(6e-3, 50e-6, 20e-6, 40e-9, step_tokens=1024, block_size=BLOCK, max_num_seqs=64)
SLOW = StepModel(12e-3, 160e-6, 20e-6, 40e-9, step_tokens=1024, block_size=BLOCK, max_num_seqs=64)


@dataclass(frozen=True, slots=True)
class Story:
    """Turns per second before and after the load grows; `tail`: uncached tokens of a turn.

    Seconds are those of turns: until the load grows, until the engine comes, and in all.
    """

    name: str
    model: StepModel
    rate: float
    grown: float
    comes_back: bool = False
    tail: tuple[int, int] = (16, 100)
    chats: int = 150
    grows_at_s: float = 80.0
    comes_at_s: float = 100.0
    turns_s: float = 190.0


STORIES = (
    Story("fast engines, one is added", FAST, 76, 104),
    Story("fast engines, one comes back, tails of 48", FAST, 76, 76, comes_back=True, tail=(48, 48)),
    Story("slow engines, one is added", SLOW, 36, 80),
    Story("slow engines, one comes back", SLOW, 44, 44, comes_back=True),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One run. Times to first token are of the requests since the engine came."""

    tokens_per_s: float
    until_first_s: float
    share: float
    p50_s: float
    p90_s: float
    p99_s: float


def true_tokens_per_s(model: StepModel) -> float:
    """Of full steps."""
    return 1 / (model.prefill_token_s + model.base_s / model.step_tokens)


def chats(story: Story, seed: int) -> tuple[list[Arrival], float]:
    """Each chat once, two thirds of what the engines can compute; then turns of any. And when turns begin."""
    chance = random.Random(f"{story.name} {seed}")
    names = itertools.count(1)
    histories = [tuple(next(names) for _ in range(HISTORY // BLOCK)) for _ in range(story.chats)]
    gap = 1.5 * HISTORY / true_tokens_per_s(story.model) / ENGINES
    arrivals = [
        Arrival(gap * place, history, HISTORY, 20) for place, history in enumerate(histories, start=1)
    ]
    at = start = arrivals[-1].at + 2
    while at < start + story.turns_s:
        at += chance.expovariate(story.rate if at < start + story.grows_at_s else story.grown)
        tail = chance.randint(*story.tail)
        own = tuple(next(names) for _ in range(tail // BLOCK))
        arrivals.append(Arrival(at, (*chance.choice(histories), *own), HISTORY + tail, ANSWER))
    return arrivals, start


def measure(story: Story, seed: int) -> Seen:
    """Run it once."""
    arrivals, start = chats(story, seed)
    comes_at = start + story.comes_at_s
    learnt: list[Speed] = []
    fails = {"w1": comes_at - AWAY_S} if story.comes_back else {}

    def placer(agenda: Agenda) -> Replicas:
        replicas = Replicas(agenda, [policy_of("kv", PolicySettings())], random.Random(seed))
        agenda.at(comes_at, lambda _now: learnt.append(replicas.routers[0].tables.speeds.speed))
        return replicas

    kind = reference_kind(story.model, (story.chats + 4) * HISTORY // BLOCK)
    fleet = Fleet(placer, kind, [1.0] * ENGINES, joins={NEW: comes_at}, fails=fails)
    return _seen(fleet.run(arrivals), comes_at, learnt[0])


def _seen(run: Run, comes_at: float, learnt: Speed) -> Seen:
    since = [number for number in run.completed if run.sent_s[number] >= comes_at]
    to_new = [number for number in since if run.targets[number].worker_id == NEW]
    ttft = percentiles([run.first_s[number] - run.sent_s[number] for number in since])
    return Seen(
        tokens_per_s=1 / learnt.seconds_per_token,
        until_first_s=min((run.sent_s[number] - comes_at for number in to_new), default=math.inf),
        share=len(to_new) / len(since),
        p50_s=ttft.p50,
        p90_s=ttft.p90,
        p99_s=ttft.p99,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stories; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench newcomer", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each story (default: 3)")
    flags = parser.parse_args(arguments)
    new_console().print(table_of(STORIES, flags.seeds))
    return 0


def table_of(stories: Sequence[Story], seeds: int) -> Table:
    """One row a story: what differs much between seeds for each of them, else the mean."""
    table = Table(
        "story", "tokens/s", "learnt", "first request after", "its share", "TTFT p50 / p90 / p99, ms"
    )
    for story in stories:
        runs = [measure(story, seed) for seed in range(seeds)]
        waits = [one.until_first_s for one in runs]
        ttft = [
            mean(times) for times in zip(*[(one.p50_s, one.p90_s, one.p99_s) for one in runs], strict=True)
        ]
        table.add_row(
            story.name,
            f"{true_tokens_per_s(story.model):,.0f}",
            " ".join(f"{one.tokens_per_s:,.0f}" for one in runs),
            " ".join("never" if math.isinf(one) else f"{one:.1f} s" for one in waits),
            f"{mean(one.share for one in runs):.1%}",
            " / ".join(f"{1000 * one:,.0f}" for one in ttft),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
