"""Faults that last until they are mended, and the alerts that each has to raise.

    healthy ──fault──> alerts fire ──mended──> alerts end

A real Prometheus scrapes the fleet of chaos on its cluster, with the rules of deploy/prometheus in a
thirtieth of their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from kvrouter.bus.accounts import SERVER_FILE
from kvrouter.worker.options import worker_id_of
from scripts.kit.chaos.cluster import LEAF, SERVERS
from scripts.kit.chaos.judge import Damage
from scripts.kit.chaos.stage import Stage
from scripts.kit.deployment import Plan
from scripts.kit.fleet import wait_until_ok
from scripts.kit.load import LoadRequest, SteadyLoad
from scripts.kit.ports import free_ports
from scripts.kit.prometheus import (
    RULES,
    Prometheus,
    dashboard_expressions,
    expressions_of,
    in_less_time,
    start_prometheus,
    with_objectives,
)
from scripts.kit.workload import Documents, chat, of_team, of_two_teams

Lasting: TypeAlias = Callable[[Stage, SteadyLoad], contextlib.AbstractAsyncContextManager[None]]

ENGINES, REPLICAS = 5, 3
REQUESTS_PER_SECOND = 12.0
# A third of an H100's speed: the engines' times are far above this machine's.
SPEEDUP = 0.3
RULES_SPEEDUP = 30.0
# In the healthy fleet nine of ten first tokens come within half of this. The p90 of the time between tokens
# is 0.0195 s there, 0.0244 s with `swapped-events` (more prompts to compute), 0.0289 s with `long-answers`.
OBJECTIVES = {"ttft_p90_seconds": 0.6, "inter_token_p90_seconds": 0.026, "queue_seconds": 1.0}
HEALTHY_S = 20.0
FIRES_WITHIN_S = 60.0
QUIET_WITHIN_S = 90.0
# For minutes after a fault they report what was: lost workers, and a month's errors.
_LINGERS = (
    *("KvrouterErrorBudgetSlow", "KvrouterErrorBudgetFast", "KvrouterMessagesDropped"),
    *("KvrouterWorkerSilent", "KvrouterWrongPredictions"),
)
_FLAGS = (
    *("--router-queue-threshold=1", "--circuit-breaker", "--circuit-breaker-failures=2"),
    *("--circuit-breaker-open-s=5", "--access-log=all", "--log-format=json"),
    "--trusted-proxies=127.0.0.1/32",
)
SLOWER, SMALL_BLOCKS, STOOD_STILL_S = 5.0, 200, 0.6
MANY_PER_S, MORE_PER_S, LONG_TOKENS = 40.0, 8.0, 500
_KV_ENDPOINTS = ("--kv-events=", "--kv-replay=")
# A frontend whose inbox holds 8 messages instead of 524,288: more arrive in this fleet while it stands still.
_SMALL_INBOX = (
    "import runpy; from kvrouter.replica import inbox; inbox.INBOX_MESSAGES = 8;"
    "runpy.run_module('kvrouter.frontend', run_name='__main__')"
)
# A template of another model: the same messages become other tokens.
_WRONG_TEMPLATE = """\
{%- for message in messages %}{{ '### ' + message.role + ':\\n' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}
"""


def plan_of(directory: Path) -> Plan:
    """The fleet that is watched; its agents have metrics, too."""
    # the largest step for the queue, which fills targets up to it
    agents = ("--max-num-batched-tokens=8192", "--log-format=json")
    return Plan(
        "kv", directory / "model", engines=ENGINES, replicas=REPLICAS, num_blocks=2_048, speedup=SPEEDUP,
        namespace="incidents", frontend_flags=_FLAGS,
        agent_flags={n: (f"--metrics-port={port}", *agents) for n, port in enumerate(free_ports(ENGINES))},
    )  # fmt: skip


async def watched(stage: Stage) -> Stage:
    """With a Prometheus that scrapes the fleet. Raises FleetError."""
    ports = [flags[0].partition("=")[2] for flags in stage.plan.agent_flags.values()]
    targets = {
        "kvrouter": [urlsplit(url).netloc for url in stage.admin_urls],
        "agents": [f"127.0.0.1:{port}" for port in ports],
    }
    rules = with_objectives(in_less_time(RULES.read_text(), RULES_SPEEDUP), OBJECTIVES)
    return replace(stage, prometheus=await start_prometheus(stage.fleet, stage.client, targets, rules))


def requests() -> list[LoadRequest]:
    """The load of the healthy fleet: two teams' chats about the same documents."""
    return of_two_teams(Documents().chats(4_000))


async def play(lasting: Lasting, alerts: Sequence[str], stage: Stage, load: SteadyLoad) -> Damage:
    """Break it, wait for the alerts, mend it, and wait until they have ended."""
    prometheus = stage.prometheus
    assert prometheus is not None
    before, began = set(await prometheus.firing()), time.perf_counter()
    async with lasting(stage, load):
        fired = await prometheus.until_firing(alerts, FIRES_WITHIN_S)
    ended = time.perf_counter()
    left = await prometheus.until_quiet(QUIET_WITHIN_S, _LINGERS)
    others = await prometheus.fired(time.perf_counter() - began) - {*alerts, *before}
    found = {
        "fired before the fault": sorted(before.intersection(alerts)),
        "did not fire": [name for name in alerts if name not in fired],
        "still fire": sorted(left),
    }
    notes = [f"{name} after {seconds:.0f} s" for name, seconds in fired.items()]
    notes += [f"also: {', '.join(sorted(others))}"] if others else []
    problems = [f"{what}: {', '.join(names)}" for what, names in found.items() if names]
    return Damage(ended, notes=notes, problems=problems)


async def healthy(prometheus: Prometheus) -> dict[str, str]:
    """What fires in the healthy fleet, with caches that have been filled."""
    await asyncio.sleep(HEALTHY_S)
    return await prometheus.until_quiet(QUIET_WITHIN_S)


async def without_series(prometheus: Prometheus) -> list[str]:
    """What the dashboard and the rules' measures ask for, and never had a number."""
    rules = expressions_of(in_less_time(RULES.read_text(), RULES_SPEEDUP))
    asked = dashboard_expressions() + [one for one in rules if ">" not in one and "==" not in one]
    return [one for one in asked if not await prometheus.had_series(one)]


# What several faults do


@contextlib.contextmanager
def _left_out(stage: Stage, load: SteadyLoad, name: str) -> Iterator[None]:
    """A replica gets no request of the load while inside."""
    urls = {stage.urls[int(name.partition("-")[2])]} if name.startswith("frontend") else set()
    load.left_out |= urls
    yield
    load.left_out -= urls


@contextlib.asynccontextmanager
async def down(*names: str, stage: Stage, load: SteadyLoad, is_killed: bool = True) -> AsyncIterator[None]:
    """Processes are killed, or stopped as by an operator."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_left_out(stage, load, name))
            process = stage.fleet.processes[name]
            await (process.kill() if is_killed else process.stop())
        try:
            yield
        finally:
            for name in names:
                await stage.start(name)


@contextlib.asynccontextmanager
async def changed(commands: Mapping[str, list[str]], stage: Stage, load: SteadyLoad) -> AsyncIterator[None]:
    """Processes run with other command lines."""
    right = {name: list(stage.fleet.processes[name].command) for name in commands}
    assert all(command != right[name] for name, command in commands.items()), commands
    await _restart(stage, load, commands)
    try:
        yield
    finally:
        await _restart(stage, load, right)


async def _restart(stage: Stage, load: SteadyLoad, commands: Mapping[str, list[str]]) -> None:
    for name, command in commands.items():
        with _left_out(stage, load, name):
            await stage.fleet.stop(name)
            await stage.start(name, command)


def _more(rate: float, make: Callable[[], Sequence[LoadRequest]], timeout_s: float = 60.0) -> Lasting:
    @contextlib.asynccontextmanager
    async def lasting(stage: Stage, _load: SteadyLoad) -> AsyncIterator[None]:
        async with SteadyLoad(make(), stage.urls, rate=rate, timeout_s=timeout_s):
            yield

    return lasting


def _all(kind: str, *, is_killed: bool) -> Lasting:
    names = [f"{kind}-{number}" for number in range(ENGINES)]
    return lambda stage, load: down(*names, stage=stage, load=load, is_killed=is_killed)


async def _post(stage: Stage, url: str, body: Mapping[str, Any]) -> None:
    await stage.client.post_json(url, json.dumps(body).encode())


# The faults


@contextlib.asynccontextmanager
async def slow_worker(stage: Stage, _load: SteadyLoad) -> AsyncIterator[None]:
    url = f"{stage.deployed.engines[1].url}/speed"
    await _post(stage, url, {"speedup": SPEEDUP / SLOWER})
    try:
        yield
    finally:
        await _post(stage, url, {"speedup": SPEEDUP})


@contextlib.asynccontextmanager
async def wrong_template(stage: Stage, load: SteadyLoad) -> AsyncIterator[None]:
    file = stage.fleet.directory / "wrong_template.jinja"
    file.write_text(_WRONG_TEMPLATE)
    command = [*stage.fleet.processes["frontend-1"].command, f"--chat-template={file}"]
    async with changed({"frontend-1": command}, stage, load):
        yield


@contextlib.asynccontextmanager
async def cut_leaf(stage: Stage, _load: SteadyLoad) -> AsyncIterator[None]:
    assert stage.link is not None
    with stage.link.cut():
        yield


def _hot_requests() -> list[LoadRequest]:
    (document,) = Documents(count=1, tokens=12_000, seed=99).texts()
    return [chat(document, question) for question in Documents(count=1_000, tokens=600, seed=98).texts()]


def _long_requests() -> list[LoadRequest]:
    texts = Documents().texts()
    reports = [f"Write a report ({n})." for n in range(20 * len(texts))]
    return of_team(2, [chat(texts[n % len(texts)], one, LONG_TOKENS) for n, one in enumerate(reports)])


@contextlib.asynccontextmanager
async def swapped_events(stage: Stage, load: SteadyLoad) -> AsyncIterator[None]:
    """More documents are asked about, so that the caches change."""
    commands = {name: list(stage.fleet.processes[name].command) for name in ("agent-1", "agent-2")}
    own, others = ([word for word in one if word.startswith(_KV_ENDPOINTS)] for one in commands.values())
    swap = dict(zip(own + others, others + own, strict=True))
    swapped = {name: [swap.get(word, word) for word in one] for name, one in commands.items()}
    more = _more(MORE_PER_S, lambda: of_team(2, Documents(count=48, seed=31).chats(2_000)))
    async with changed(swapped, stage, load), more(stage, load):
        yield


@contextlib.asynccontextmanager
async def small_cache(stage: Stage, load: SteadyLoad) -> AsyncIterator[None]:
    whole, few = stage.fleet.processes["mocker-1"].command, f"--num-blocks={SMALL_BLOCKS}"
    small = [few if word.startswith("--num-blocks=") else word for word in whole]
    async with changed({"mocker-1": small}, stage, load):
        yield


@contextlib.asynccontextmanager
async def silent_agent(stage: Stage, _load: SteadyLoad) -> AsyncIterator[None]:
    with stage.fleet.processes["agent-2"].paused():
        yield


@contextlib.asynccontextmanager
async def hot_temperature(stage: Stage, _load: SteadyLoad) -> AsyncIterator[None]:
    url = f"{stage.admin_urls[0]}/routing"
    await _post(stage, url, {"settings": {"router-temperature": 20}, "who": "ada", "why": "a try"})
    try:
        yield
    finally:
        await _post(stage, url, {"undo": True})


@contextlib.asynccontextmanager
async def stands_still(stage: Stage, _load: SteadyLoad) -> AsyncIterator[None]:
    process = stage.frontend(0)

    async def stand_still() -> None:
        while True:
            with process.paused():
                await asyncio.sleep(STOOD_STILL_S)
            await asyncio.sleep(3.0)

    task = asyncio.create_task(stand_still())
    try:
        yield
    finally:
        task.cancel()
        process.send(signal.SIGCONT)


@contextlib.asynccontextmanager
async def small_inbox(stage: Stage, load: SteadyLoad) -> AsyncIterator[None]:
    python, _, _, *flags = stage.frontend(0).command
    async with (
        changed({"frontend-0": [python, "-c", _SMALL_INBOX, *flags]}, stage, load),
        stands_still(stage, load),
    ):
        yield


@contextlib.asynccontextmanager
async def no_answers(stage: Stage, load: SteadyLoad) -> AsyncIterator[None]:
    file = stage.fleet.directory / "nats" / SERVER_FILE
    right = file.read_text()
    own = f".answer.kv.{worker_id_of(stage.deployed.engines[0].url)}."
    wrong = right.replace(own, ".answer.kv.nobody.")
    assert wrong != right, file
    with _left_out(stage, load, "frontend-1"):  # it is not ready without the agent's blocks
        _reload_nats(stage, wrong)
        await stage.frontend(1).stop()
        process = await stage.fleet.start_again("frontend-1")
        try:
            yield
        finally:
            _reload_nats(stage, right)
            await wait_until_ok(stage.client, process, f"{stage.urls[1]}/ready")


def _reload_nats(stage: Stage, accounts: str) -> None:
    """Give all NATS servers these users."""
    (stage.fleet.directory / "nats" / SERVER_FILE).write_text(accounts)
    for name in (*SERVERS, LEAF):
        stage.fleet.processes[name].send(signal.SIGHUP)


def _down(name: str) -> Lasting:
    return lambda stage, load: down(name, stage=stage, load=load)


# name, what breaks, the fault, its alerts
INCIDENTS: tuple[tuple[str, str, Lasting, tuple[str, ...]], ...] = (
    ("slow-worker", "one engine runs five times slower, as a throttled GPU does", slow_worker,
     ("KvrouterSlowWorker",)),
    ("wrong-template", "one replica is started again with another model's chat template", wrong_template,
     ("KvrouterProblem", "KvrouterWrongPredictions", "KvrouterSettingsDiffer")),
    ("nats-node", "the NATS leaf node, with one replica and one agent, loses the cluster", cut_leaf,
     ("KvrouterReplicasDisagree", "KvrouterWorkerSilent")),
    ("hot-prefix", "long questions about one long document that no engine has",
     _more(MANY_PER_S, _hot_requests), ("KvrouterTimeToFirstToken",)),
    ("too-many", "more requests than the fleet can serve, each about another document",
     _more(MANY_PER_S, lambda: Documents(count=400, seed=5).chats(4_000), 20.0),
     ("KvrouterQueue", "KvrouterTimeToFirstToken")),
    ("changed-prompts", "a new version of an application puts the time in front of its prompts",
     _more(MORE_PER_S, lambda: of_team(2, Documents(count=12, seed=31).chats(2_000, stamped=True))),
     ("KvrouterPromptsChanged",)),
    ("long-answers", "one application asks for answers twenty times as long",
     _more(MORE_PER_S, _long_requests), ("KvrouterTimeBetweenTokens",)),
    ("swapped-events", "two agents read the KV events of each other's engine", swapped_events,
     ("KvrouterWrongPredictions",)),
    ("small-cache", "an engine is started again with a tenth of its KV blocks", small_cache,
     ("KvrouterCapacityFell",)),
    ("no-engines", "all engines crash", _all("mocker", is_killed=True),
     ("KvrouterErrorBudgetFast", "KvrouterErrorBudgetSlow", "KvrouterNoWorker")),
    ("no-agents", "all agents are stopped, as with a deployment that is scaled to zero",
     _all("agent", is_killed=False), ("KvrouterNoWorker",)),
    ("silent-agent", "an agent hangs", silent_agent, ("KvrouterWorkerSilent",)),
    ("dead-replica", "a replica is killed", _down("frontend-1"), ("KvrouterReplicaDown",)),
    ("dead-nats-node", "the NATS leaf node of one replica dies", _down(LEAF), ("KvrouterNatsAway",)),
    ("temperature", "a temperature is tried by POST /routing, and forgotten", hot_temperature,
     ("KvrouterRegret",)),
    ("stopped", "a replica stands still again and again, as on a machine that swaps", stands_still,
     ("KvrouterLoopLag",)),
    ("small-inbox", "a replica that stands still has room for few messages", small_inbox,
     ("KvrouterMessagesDropped", "KvrouterLoopLag")),
    ("no-answers", "an agent may not answer replay requests, and a replica is started again", no_answers,
     ("KvrouterFeedBehind",)),
)  # fmt: skip
