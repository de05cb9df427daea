"""Generated requests: what `--workload NAME[:key=value,...]` of the simulator asks, beside a trace.

| name | requests |
|---|---|
| docs | questions about long shared documents |
| hot | a few shared prefixes (`prefixes`), each request with its own end |
| shared-prefix | groups of prompts behind one system prompt, at the rates of `--stages` |
| heimdall, llm-d | shared-prefix with the numbers of two published experiments |
| groups | heimdall with short answers |
| multi-turn | conversations: each prompt is the one before, its answer and a question, after a think time |
| agents | agents that call tools, and begin subagents for which they wait |
| siblings | bursts of eight requests with one new prefix, within 20 ms |
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvrouter.errors import ConfigError
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.traces import TraceRequest
from kvrouter.lab.simulate.workloads import BLOCK, Workload, prompt_of, trace, zero
from kvrouter.settings.declare import did_you_mean, number

# Long documents, as in tools that answer questions about papers and books: 10k to 60k tokens, log-uniform.
_DOCUMENT_TOKENS = (10_000, 60_000)
_QUESTION_TOKENS = (50, 500)
_DOCUMENT_ANSWER_TOKENS = (16, 160)
_ZIPF = 0.8

_HOT_PREFIX_TOKENS, _HOT_OWN_TOKENS, _HOT_ANSWER_TOKENS, _HOT_RATE = 4096, 600, 128, 60.0
_SIBLINGS, _BURST_S = 8, 0.020
_SIBLING_PREFIX_TOKENS, _SIBLING_OWN_TOKENS, _SIBLING_ANSWER_TOKENS = 16 * BLOCK, 500, 200
_ITS_OWN_S = 1e-3
"""Between an answer and the request that its receipt causes."""

MOST_REQUESTS = 1_000_000
"""Of a generated workload: more is an error in the numbers."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests at one rate per second, as a Poisson process; 0: a pause. A warm-up is not counted."""

    rate: float
    seconds: float
    is_warm_up: bool = False

    def __str__(self) -> str:
        return f"{self.rate:g}x{self.seconds:g}{'!' * self.is_warm_up}"

    @property
    def count(self) -> int:
        return round(self.rate * self.seconds)


def stages_of(text: str) -> tuple[Stage, ...]:
    """`46x25!,3x20`: 46 requests/s for 25 s, not counted, then 3 for 20 s. Raises ValueError."""
    found = []
    for part in text.split(","):
        rate, _, seconds = part.removesuffix("!").partition("x")
        values = number(rate), number(seconds)
        if values[0] is None or values[1] is None or values[0] < 0 or values[1] <= 0:
            raise ValueError(f"{part!r} must be RATExSECONDS, as 3x20; 0x20 is a pause, 3x20! a warm-up")
        found.append(Stage(values[0], values[1], part.endswith("!")))
    warm_ups = [stage.is_warm_up for stage in found if stage.count]
    if warm_ups != sorted(warm_ups, reverse=True) or all(warm_ups):
        raise ValueError("warm-ups (!) come first, and something must be counted")
    if sum(stage.count for stage in found) > MOST_REQUESTS:
        raise ValueError(f"at most {MOST_REQUESTS:,} requests")
    return tuple(found)


# Each stage of the published experiments begins when the one before is answered; here, after a pause.
_PAUSE = Stage(0, 60)
# 46/s for 25 s is every prompt once. The rates between 3 and 100/s, and their times, are not published.
_HEIMDALL_STAGES = (
    Stage(46, 25, is_warm_up=True),
    *itertools.chain.from_iterable(
        (_PAUSE, Stage(rate, 150 / rate)) for rate in (3, 10, 15, 20, 25, 30, 35, 40, 46, 60, 80, 100)
    ),
)
_LLM_D_STAGES = (
    Stage(15, 50, is_warm_up=True),
    *itertools.chain.from_iterable(
        (_PAUSE, Stage(rate, 20)) for rate in (3, 10, 15, 20, 22, 25, 30, 35, 40, 43, 46, 49, 52, 55, 57, 60)
    ),
)


def docs(count: int = 3000, documents: int = 2000) -> Workload:
    """Questions about documents, whose popularity is Zipf's with exponent 0.8; ten a second at first."""

    def draw(seed: int) -> list[Arrival]:
        # the documents are the same for all seeds; the seed draws the questions' order and times
        made, chance = random.Random("documents"), random.Random(f"docs {seed}")
        low, high = map(math.log, _DOCUMENT_TOKENS)
        lengths = [int(math.exp(made.uniform(low, high))) for _ in range(documents)]
        weights = list(itertools.accumulate((rank + 1) ** -_ZIPF for rank in range(documents)))
        asked = made.choices(range(documents), cum_weights=weights, k=count)
        questions = [
            (one, made.randint(*_QUESTION_TOKENS), made.randint(*_DOCUMENT_ANSWER_TOKENS)) for one in asked
        ]
        at = 0.0
        arrivals = []
        for number_, (document, question, answer) in enumerate(questions):
            at += chance.expovariate(10.0)
            shared, own = (document, lengths[document]), (documents + number_, question)
            arrivals.append(prompt_of(at, [shared, own], answer))
        return arrivals

    return Workload("docs", draw)


def hot(prefixes: int = 1, count: int = 2000) -> Workload:
    """Prefixes of 4,096 tokens, each request with 600 tokens of its own; 60 requests a second."""

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"hot {seed}")
        at = 0.0
        arrivals = []
        for number_ in range(count):
            at += chance.expovariate(_HOT_RATE)
            shared = (chance.randrange(prefixes), _HOT_PREFIX_TOKENS)
            own = (prefixes + number_, _HOT_OWN_TOKENS)
            arrivals.append(prompt_of(at, [shared, own], _HOT_ANSWER_TOKENS))
        return arrivals

    return Workload("hot" if prefixes == 1 else f"hot-{prefixes}", draw)


def shared_prefix(
    name: str = "shared-prefix",
    stages: Sequence[Stage] = (Stage(10, 60),),
    *,
    groups: int = 150,
    prompts: int = 5,
    system: int = 6000,
    question: int = 1200,
    answer: int = 1000,
) -> Workload:
    """Groups of prompts: a system prompt, and behind it questions; all lengths in tokens.

    A warm-up asks every prompt in turn; then they are drawn.
    """
    asked = [(group, prompt) for group in range(groups) for prompt in range(prompts)]
    warm_up = sum(stage.count for stage in stages if stage.is_warm_up)

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"{name} {seed}")
        in_turn = itertools.cycle(chance.sample(asked, len(asked)))
        at = 0.0
        arrivals: list[Arrival] = []
        for stage in stages:
            if not stage.rate:
                at += stage.seconds
            for _ in range(stage.count):
                at += chance.expovariate(stage.rate)
                group, prompt = next(in_turn) if stage.is_warm_up else chance.choice(asked)
                own = (groups + group * prompts + prompt, question)
                arrivals.append(prompt_of(at, [(group, system), own], answer))
        return arrivals

    return Workload(name, draw, warm_up=warm_up)


def heimdall(stages: Sequence[Stage] = _HEIMDALL_STAGES) -> Workload:
    """230 groups of five prompts; 8,000 + 1,000 tokens, 1,000 of answer; 3 to 100 requests/s.

    Source: Moreh, "Prefix cache-aware routing" (Heimdall), experimental result.
    """
    return shared_prefix("heimdall", stages, groups=230, system=8000, question=1000)


def llm_d(stages: Sequence[Stage] = _LLM_D_STAGES) -> Workload:
    """150 groups of five prompts; 6,000 + 1,200 tokens, 1,000 of answer; 3 to 60 requests/s.

    Source: llm-d, "KV-cache wins you can see" (2025), its benchmark of precise prefix caching.
    """
    return shared_prefix("llm-d", stages)


def short_groups() -> Workload:
    """Heimdall's with whole blocks and 100 tokens of answer; 150 requests, measured, at each of its rates."""
    return shared_prefix("groups", _HEIMDALL_STAGES, groups=230, system=8192, question=808, answer=100)


def multi_turn(
    sessions: int = 300,
    turns: int = 8,
    *,
    system: int = 1000,
    question: int = 300,
    answer: int = 400,
    think: float = 20.0,
    rate: float = 3.0,
) -> Workload:
    """Conversations with one system prompt: `rate` begin per second, of 1 to 2 * `turns` - 1 turns.

    Lengths in tokens, and think times in seconds, are means of exponential distributions; a think time
    begins with the end of an answer.
    """

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"multi-turn {seed}")
        made: list[_Draft] = []
        begins, names = 0.0, itertools.count(1)
        for session in range(sessions):
            begins += chance.expovariate(rate)
            segments, at = [(0, system)], begins
            previous: _Draft | None = None
            for _ in range(chance.randint(1, 2 * turns - 1)):
                segments.append((next(names), _length(chance, question)))
                wait = chance.expovariate(1 / think) if previous else 0.0
                at += wait
                output = _length(chance, answer)
                waits_for = (previous,) if previous else ()
                previous = _Draft(at, wait, tuple(segments), output, waits_for, f"chat-{session}")
                made.append(previous)
                segments.append((next(names), output))
        return _in_order(made)

    return Workload("multi-turn", draw)


def agents(
    tasks: int = 60,
    steps: int = 8,
    children: int = 3,
    *,
    system: int = 6000,
    result: int = 1500,
    answer: int = 150,
    tool: float = 3.0,
    rate: float = 0.5,
) -> Workload:
    """Agents: `rate` tasks begin per second, each of `steps` calls on average.

    After a call runs a tool of `tool` seconds, whose result lengthens the prompt; or, every third time,
    subagents begin at once with the prompt so far, work for three calls, and the agent waits for all.
    """

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"agents {seed}")
        made: list[_Draft] = []
        begins, names = 0.0, itertools.count(1)

        def call(
            segments: list[tuple[int, int]], at: float, wait: float, after: Sequence[_Draft], session: str
        ) -> _Draft:
            segments.append((next(names), _length(chance, result)))
            one = _Draft(at + wait, wait, tuple(segments), _length(chance, answer), tuple(after), session)
            segments.append((next(names), one.output_tokens))
            made.append(one)
            return one

        for task in range(tasks):
            begins += chance.expovariate(rate)
            segments = [(0, system)]
            last = [call(segments, begins, 0.0, (), f"agent-{task}")]
            for step in range(1, chance.randint(1, 2 * steps - 1)):
                if step % 3 or not children:
                    wait = chance.expovariate(1 / tool)
                    last = [call(segments, last[-1].at, wait, last, f"agent-{task}")]
                    continue
                ends = []
                for child in range(children):
                    own = list(segments)
                    name = f"agent-{task}/{step}-{child}"
                    one = call(own, last[-1].at, _ITS_OWN_S, last, name)
                    for _ in range(2):
                        one = call(own, one.at, chance.expovariate(1 / tool), [one], name)
                    ends.append(one)
                at = max(one.at for one in ends)
                last = [call(segments, at, _ITS_OWN_S, ends, f"agent-{task}")]
        return _in_order(made)

    return Workload("agents", draw)


def siblings(bursts: int = 300) -> Workload:
    """Bursts of eight requests that share a new prefix of 8,192 tokens; two bursts a second at first."""

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"siblings {seed}")
        at = 0.0
        arrivals = []
        for burst in range(bursts):
            at += chance.expovariate(2.0)
            for place in range(_SIBLINGS):
                own = bursts + burst * _SIBLINGS + place
                segments = [(burst, _SIBLING_PREFIX_TOKENS), (own, _SIBLING_OWN_TOKENS)]
                arrivals.append(prompt_of(at + chance.uniform(0, _BURST_S), segments, _SIBLING_ANSWER_TOKENS))
        return sorted(arrivals, key=lambda one: one.at)

    return Workload("siblings", draw)


def named(text: str, requests: Sequence[TraceRequest], stages: Sequence[Stage] = ()) -> Workload:
    """The workload of a name with its numbers, `hot:prefixes=3`; `requests` are the trace.

    `stages` are for the workloads that have rates of their own. Raises ValueError, ConfigError.
    """
    name, numbers = workload_name(text)
    if stages and name not in STAGED:
        raise ConfigError(f"--stages is for {', '.join(STAGED)}; leave it out for {name}")
    if name in {"trace", "zero"}:
        return trace(requests) if name == "trace" else zero(requests)
    if stages:
        return _MADE[name](stages=stages, **numbers)
    return _MADE[name](**numbers)


def workload_name(text: str) -> tuple[str, dict[str, float]]:
    """A workload's name and numbers. Raises ValueError with the names that there are."""
    if text.startswith("hot-"):  # as in tables: hot-3
        text = text.replace("hot-", "hot:prefixes=", 1)
    name, _, rest = text.partition(":")
    if name not in WORKLOADS:
        raise ValueError(f"must be one of {', '.join(WORKLOADS)}{did_you_mean(name, WORKLOADS)}")
    known = _numbers_of(name)
    numbers: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key not in known:
            raise ValueError(f"{name} has no number {key!r}: use {', '.join(known) or 'none'}")
        read = number(value)
        is_float = known[key] is float
        if read is None or not 0 < read <= MOST_REQUESTS or (not is_float and read != int(read)):
            kind = "number" if is_float else "whole number"
            raise ValueError(f"{key}={value} must be a {kind} above 0 and up to {MOST_REQUESTS:,}")
        numbers[key] = read if is_float else int(read)
    return name, numbers


def _numbers_of(name: str) -> Mapping[str, type]:
    """The numbers of a workload, in order, by name."""
    made = _MADE.get(name)
    if made is None:
        return {}
    kinds = {"int": int, "float": float}
    parameters = inspect.signature(made).parameters.values()
    return {one.name: kinds[one.annotation] for one in parameters if one.annotation in kinds}


_MADE: dict[str, Callable[..., Workload]] = {
    "docs": docs,
    "hot": hot,
    "shared-prefix": shared_prefix,
    "heimdall": heimdall,
    "llm-d": llm_d,
    "groups": short_groups,
    "multi-turn": multi_turn,
    "agents": agents,
    "siblings": siblings,
}
WORKLOADS = ("trace", "zero", *_MADE)
STAGED = ("shared-prefix", "heimdall", "llm-d")


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A request before it has a number. `at`: when it would come if answers took no time."""

    at: float
    wait_s: float
    segments: tuple[tuple[int, int], ...]
    output_tokens: int
    waits_for: Sequence[_Draft]
    session: str


def _in_order(drafts: Sequence[_Draft]) -> list[Arrival]:
    """By time; those that wait for others after these."""
    ordered = sorted(drafts, key=lambda one: one.at)
    numbers = {id(one): place for place, one in enumerate(ordered)}
    return [_numbered(one, numbers) for one in ordered]


def _numbered(draft: _Draft, numbers: Mapping[int, int]) -> Arrival:
    made = prompt_of(draft.at, draft.segments, draft.output_tokens)
    after = tuple(numbers[id(one)] for one in draft.waits_for)
    return replace(made, at=draft.wait_s if after else draft.at, after=after, session=draft.session)


def _length(chance: random.Random, mean: float) -> int:
    """Tokens with an exponential distribution, from 1 to 10 times the mean."""
    return max(1, min(int(10 * mean), round(chance.expovariate(1 / mean))))
