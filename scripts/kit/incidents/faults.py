"""What breaks, and how it is mended: each fault lasts while its context is open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrouter.bus.accounts import SERVER_FILE
from kvrouter.worker.options import worker_id_of
from scripts.kit.chaos.cluster import LEAF, SERVERS, Link
from scripts.kit.deployment import Deployment, Engine
from scripts.kit.fleet import Fleet, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.incidents.traffic import Documents, chat, of_team
from scripts.kit.steady import SteadyLoad

SLOWED, WRONG, SILENT = 1, 1, 2
"""The engine that is slowed, the replica with the wrong template, the agent that is silent."""
SLOWER = 5.0
MANY_PER_S = 40.0
CHANGED_PER_S = 8.0
LONG_PER_S, LONG_TOKENS = 8.0, 500
SMALL_BLOCKS = 200
STOOD_STILL_S = 0.6
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


@dataclass(frozen=True, slots=True)
class Scene:
    """The running fleet, and its load."""

    fleet: Fleet
    client: Client
    deployed: Deployment
    link: Link
    load: SteadyLoad
    speedup: float


@contextlib.asynccontextmanager
async def slow_worker(scene: Scene) -> AsyncIterator[None]:
    """One engine runs five times slower, as a throttled GPU does."""
    url = f"{scene.deployed.engines[SLOWED].url}/speed"
    await _post(scene, url, {"speedup": scene.speedup / SLOWER})
    try:
        yield
    finally:
        await _post(scene, url, {"speedup": scene.speedup})


@contextlib.asynccontextmanager
async def wrong_template(scene: Scene) -> AsyncIterator[None]:
    """One replica is started again with the chat template of another model."""
    name, url = f"frontend-{WRONG}", scene.deployed.replicas[WRONG].url
    right = list(scene.fleet.processes[name].command)
    file = scene.fleet.directory / "wrong_template.jinja"
    file.write_text(_WRONG_TEMPLATE)
    await _restart(scene, name, [*right, f"--chat-template={file}"], url)
    try:
        yield
    finally:
        await _restart(scene, name, right, url)


async def _restart(scene: Scene, name: str, command: list[str], url: str) -> None:
    """Stop a replica and start another one on its ports, while the others take its requests."""
    scene.load.left_out.add(url)
    await scene.fleet.stop(name)
    process = await scene.fleet.start(name, command)
    await wait_until_ok(scene.client, process, f"{url}/ready")
    scene.load.left_out.discard(url)


@contextlib.asynccontextmanager
async def cut_nats_node(scene: Scene) -> AsyncIterator[None]:
    """The NATS leaf node, with one replica and one agent, loses the cluster."""
    with scene.link.cut():
        yield


@contextlib.asynccontextmanager
async def hot_prefix(scene: Scene) -> AsyncIterator[None]:
    """Everybody asks long questions about one long document that nobody has asked about before."""
    (document,) = Documents(count=1, tokens=12_000, seed=99).texts()
    questions = Documents(count=1_000, tokens=600, seed=98).texts()
    requests = [chat(document, question) for question in questions]
    async with SteadyLoad(requests, _urls(scene), rate=MANY_PER_S):
        yield


@contextlib.asynccontextmanager
async def too_many(scene: Scene) -> AsyncIterator[None]:
    """More requests than the fleet can serve, each about another document."""
    requests = Documents(count=400, seed=5).chats(4_000)
    async with SteadyLoad(requests, _urls(scene), rate=MANY_PER_S, timeout_s=20.0):
        yield


@contextlib.asynccontextmanager
async def changed_prompts(scene: Scene) -> AsyncIterator[None]:
    """A new version of an application puts the time in front of its prompts."""
    requests = Documents(count=12, seed=31).chats(2_000, stamped=True)
    async with SteadyLoad(of_team(2, requests), _urls(scene), rate=CHANGED_PER_S):
        yield


@contextlib.asynccontextmanager
async def long_answers(scene: Scene) -> AsyncIterator[None]:
    """One application asks for answers twenty times as long, about the documents that all ask about."""
    texts = Documents().texts()
    requests = [
        chat(texts[n % len(texts)], f"Write a report ({n}).", LONG_TOKENS) for n in range(20 * len(texts))
    ]
    async with SteadyLoad(of_team(2, requests), _urls(scene), rate=LONG_PER_S):
        yield


@contextlib.asynccontextmanager
async def swapped_events(scene: Scene) -> AsyncIterator[None]:
    """Two agents are started again, each with the KV-event endpoints of the other one's engine.

    More documents are asked about, so that the caches change.
    """
    names = [engine.agent.name for engine in scene.deployed.engines[1:3]]
    right = [list(scene.fleet.processes[name].command) for name in names]
    own, others = ([word for word in one if word.startswith(_KV_ENDPOINTS)] for one in right)
    swap = dict(zip(own + others, others + own, strict=True))
    for name, command in zip(names, right, strict=True):
        await _restart_agent(scene, name, [swap.get(word, word) for word in command])
    requests = of_team(2, Documents(count=48, seed=31).chats(2_000))
    try:
        async with SteadyLoad(requests, _urls(scene), rate=CHANGED_PER_S):
            yield
    finally:
        for name, command in zip(names, right, strict=True):
            await _restart_agent(scene, name, command)


async def _restart_agent(scene: Scene, name: str, command: list[str]) -> None:
    await scene.fleet.stop(name)
    await scene.fleet.start(name, command)


@contextlib.asynccontextmanager
async def small_cache(scene: Scene) -> AsyncIterator[None]:
    """An engine is started again with a tenth of its KV blocks, and its agent notices."""
    engine = scene.deployed.engines[SLOWED]
    whole = list(scene.fleet.processes[engine.mocker.name].command)
    small = [f"--num-blocks={SMALL_BLOCKS}" if one.startswith("--num-blocks=") else one for one in whole]
    assert small != whole, whole
    await _restart_engine(scene, engine, small)
    try:
        yield
    finally:
        await _restart_engine(scene, engine, whole)


async def _restart_engine(scene: Scene, engine: Engine, command: list[str]) -> None:
    await scene.fleet.stop(engine.mocker.name)
    process = await scene.fleet.start(engine.mocker.name, command)
    await wait_until_ok(scene.client, process, f"{engine.url}/health")


@contextlib.asynccontextmanager
async def no_engines(scene: Scene) -> AsyncIterator[None]:
    """All engines crash."""
    names = [engine.mocker.name for engine in scene.deployed.engines]
    for name in names:
        await scene.fleet.processes[name].kill()
    try:
        yield
    finally:
        for name, engine in zip(names, scene.deployed.engines, strict=True):
            process = await scene.fleet.start_again(name)
            await wait_until_ok(scene.client, process, f"{engine.url}/health")


@contextlib.asynccontextmanager
async def no_agents(scene: Scene) -> AsyncIterator[None]:
    """All agents are stopped, as with a deployment that is scaled to zero."""
    names = [engine.agent.name for engine in scene.deployed.engines]
    await asyncio.gather(*(scene.fleet.processes[name].stop() for name in names))
    try:
        yield
    finally:
        for name in names:
            await scene.fleet.start_again(name)


@contextlib.asynccontextmanager
async def silent_agent(scene: Scene) -> AsyncIterator[None]:
    """An agent hangs."""
    with scene.fleet.processes[f"agent-{SILENT}"].paused():
        yield


@contextlib.asynccontextmanager
async def dead_replica(scene: Scene) -> AsyncIterator[None]:
    """A replica is killed."""
    name, url = f"frontend-{WRONG}", scene.deployed.replicas[WRONG].url
    scene.load.left_out.add(url)
    await scene.fleet.processes[name].kill()
    try:
        yield
    finally:
        process = await scene.fleet.start_again(name)
        await wait_until_ok(scene.client, process, f"{url}/ready")
        scene.load.left_out.discard(url)


@contextlib.asynccontextmanager
async def dead_nats_node(scene: Scene) -> AsyncIterator[None]:
    """The NATS leaf node of one replica dies."""
    await scene.fleet.processes[LEAF].kill()
    try:
        yield
    finally:
        await scene.fleet.start_again(LEAF)


@contextlib.asynccontextmanager
async def hot_temperature(scene: Scene) -> AsyncIterator[None]:
    """Somebody tries a temperature by POST /routing, and forgets it."""
    url = f"{scene.deployed.replicas[0].admin_url}/routing"
    await _post(scene, url, {"settings": {"router-temperature": 20}, "who": "ada", "why": "a try"})
    try:
        yield
    finally:
        await _post(scene, url, {"undo": True})


@contextlib.asynccontextmanager
async def stopped_process(scene: Scene) -> AsyncIterator[None]:
    """A replica stands still again and again, as on a machine that swaps."""
    async with _standing_still(scene.fleet.processes["frontend-0"]):
        yield


@contextlib.asynccontextmanager
async def small_inbox(scene: Scene) -> AsyncIterator[None]:
    """A replica stands still again and again, and has room for few of the messages that arrive meanwhile."""
    name, url = "frontend-0", scene.deployed.replicas[0].url
    whole = list(scene.fleet.processes[name].command)
    python, _, _, *flags = whole
    await _restart(scene, name, [python, "-c", _SMALL_INBOX, *flags], url)
    try:
        async with _standing_still(scene.fleet.processes[name]):
            yield
    finally:
        await _restart(scene, name, whole, url)


@contextlib.asynccontextmanager
async def no_answers(scene: Scene) -> AsyncIterator[None]:
    """An agent's NATS user loses the right to answer replay requests, and a replica is started again."""
    file = scene.fleet.directory / "nats" / SERVER_FILE
    right = file.read_text()
    wrong = right.replace(f".answer.kv.{worker_id_of(scene.deployed.engines[0].url)}.", ".answer.kv.nobody.")
    assert wrong != right, file
    name, url = f"frontend-{WRONG}", scene.deployed.replicas[WRONG].url
    scene.load.left_out.add(url)  # it is not ready without the agent's blocks
    _reload_nats(scene, wrong)
    await scene.fleet.processes[name].stop()
    process = await scene.fleet.start_again(name)
    try:
        yield
    finally:
        _reload_nats(scene, right)
        await wait_until_ok(scene.client, process, f"{url}/ready")
        scene.load.left_out.discard(url)


def _reload_nats(scene: Scene, accounts: str) -> None:
    """Give all NATS servers these users."""
    (scene.fleet.directory / "nats" / SERVER_FILE).write_text(accounts)
    for name in (*SERVERS, LEAF):
        scene.fleet.processes[name].send(signal.SIGHUP)


@contextlib.asynccontextmanager
async def _standing_still(process: Process) -> AsyncIterator[None]:

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


async def _post(scene: Scene, url: str, body: Mapping[str, Any]) -> None:
    await scene.client.post_json(url, json.dumps(body).encode())


def _urls(scene: Scene) -> list[str]:
    return [replica.url for replica in scene.deployed.replicas]


@dataclass(frozen=True, slots=True)
class Incident:
    """A fault, and the alerts that it has to raise."""

    name: str
    fault: Callable[[Scene], contextlib.AbstractAsyncContextManager[None]]
    alerts: tuple[str, ...]

    @property
    def about(self) -> str:
        return (self.fault.__doc__ or "").strip()


INCIDENTS = (
    Incident("slow-worker", slow_worker, ("KvrouterSlowWorker",)),
    Incident(
        "wrong-template",
        wrong_template,
        ("KvrouterProblem", "KvrouterWrongPredictions", "KvrouterSettingsDiffer"),
    ),
    Incident("nats-node", cut_nats_node, ("KvrouterReplicasDisagree", "KvrouterWorkerSilent")),
    Incident("hot-prefix", hot_prefix, ("KvrouterTimeToFirstToken",)),
    Incident("too-many", too_many, ("KvrouterQueue", "KvrouterTimeToFirstToken")),
    Incident("changed-prompts", changed_prompts, ("KvrouterPromptsChanged",)),
    Incident("long-answers", long_answers, ("KvrouterTimeBetweenTokens",)),
    Incident("swapped-events", swapped_events, ("KvrouterWrongPredictions",)),
    Incident("small-cache", small_cache, ("KvrouterCapacityFell",)),
    Incident(
        "no-engines", no_engines, ("KvrouterErrorBudgetFast", "KvrouterErrorBudgetSlow", "KvrouterNoWorker")
    ),
    Incident("no-agents", no_agents, ("KvrouterNoWorker",)),
    Incident("silent-agent", silent_agent, ("KvrouterWorkerSilent",)),
    Incident("dead-replica", dead_replica, ("KvrouterReplicaDown",)),
    Incident("dead-nats-node", dead_nats_node, ("KvrouterNatsAway",)),
    Incident("temperature", hot_temperature, ("KvrouterRegret",)),
    Incident("stopped", stopped_process, ("KvrouterLoopLag",)),
    Incident("small-inbox", small_inbox, ("KvrouterMessagesDropped", "KvrouterLoopLag")),
    Incident("no-answers", no_answers, ("KvrouterFeedBehind",)),
)
