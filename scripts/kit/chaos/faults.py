"""The faults, each as one function: cause it, undo it, return the failures that it may have caused.

A killed process is restarted with the same command line, as by a supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvrouter.tokens.tiny import VOCABULARY_SIZE
from kvrouter.worker.options import worker_id_of
from scripts.kit.chaos.cluster import busiest
from scripts.kit.chaos.halves import (
    DECODES,
    LEASE_S,
    PREFILLS,
    between_halves,
    end_in_turn,
    end_leases,
    kill_halves,
    kill_peer,
    until,
    upgrade,
)
from scripts.kit.chaos.incidents import INCIDENTS, play
from scripts.kit.chaos.judge import Damage, Excuse
from scripts.kit.chaos.stage import Stage
from scripts.kit.deployment import python
from scripts.kit.fleet import wait_until_ok
from scripts.kit.http_client import HttpError
from scripts.kit.load import LoadRequest, Outcome, SteadyLoad
from scripts.kit.ports import free_ports
from scripts.kit.workload import MODEL

STOPPED_S = 10.0
NATS_AWAY_S = 15.0
# Longer than a lease of five heartbeats.
CUT_S = 8.0
# Its agent reports it as down after three probes, and requests move to other workers one per second.
WORKER_STOPPED_S = 20.0
DOWN_S = 2.0
DRAIN_LIMIT_S = 60.0
# A prompt cached only on the worker to be killed: a quarter of its cache, 0.7 s to compute elsewhere.
HELD_TOKENS = 16_384
# Of callers of a router that dies: little work, as the engines see none of it.
RESERVED, RESERVED_TOKENS = 50, 64
# Weight of the overlap, so large that no load on the worker outweighs it.
HELD_WEIGHT = 1000.0
# First token ids of the held prompts, another one for each row: a retried prompt is also cached elsewhere.
KILLED, STOPPED = 0, 7
# Engines by number: full replay buffer, agent with a state file, short replay buffer.
FIRST, KEPT, LATE = 0, 2, 3
ONE_OF_EACH = (PREFILLS[0], DECODES[0])
# In batches. An engine fills it within seconds, so the beginning is lost for a restarted agent.
SHORT_REPLAY_BUFFER = 25
# In batches: more than an engine sends between two saved states of its agent, less than it has sent so far.
KEPT_REPLAY_BUFFER = 1000
MOVES = "moves"
_STATE_PATIENCE_S = 120.0
_PATIENCE_S = 20.0
_PROOF = "engine.history_continued"

Fault = Callable[[Stage, SteadyLoad], Awaitable[Damage]]


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, with its name on the command line and its text in the table."""

    name: str
    what: str
    fault: Fault
    behind_haproxy: bool = False
    # Three NATS servers and a leaf node, with accounts, instead of one server.
    on_cluster: bool = False
    # The connector by which half of the engines (PREFILLS) hand prompts to the others; empty: none do; MOVES.
    split: str = ""
    # The engine whose share in the index is reported.
    engine: int | None = None
    # Whether the engine's agent must publish all of its blocks afterwards.
    loses_nothing: bool = False
    # A fault of incidents.py: a real Prometheus must raise these while it lasts.
    alerts: Sequence[str] = ()


async def kill_replica(stage: Stage, load: SteadyLoad) -> Damage:
    """Kill a replica in the middle of a stream."""
    await until(lambda: load.is_streaming(stage.urls[1]))
    return await kill_frontend(stage, load)


async def kill_frontend(stage: Stage, load: SteadyLoad) -> Damage:
    url = stage.urls[1]
    at_s = time.perf_counter()
    await stage.frontend(1).kill()
    await asyncio.sleep(DOWN_S)
    load.left_out.add(url)  # no requests until it is ready, as with a load balancer
    ended_at_s = time.perf_counter()
    await stage.start("frontend-1")
    load.left_out.discard(url)
    ready_s = time.perf_counter() - ended_at_s
    return Damage(
        ended_at_s,
        [Excuse("were in flight on the killed replica", at_s, url)],
        [f"ready {ready_s:.1f} s after its start"],
    )


async def kill_router(stage: Stage, load: SteadyLoad) -> Damage:
    """Kill a router next to the frontends, with reservations that nobody is left to free."""
    port, admin_port = free_ports(2)
    words = [word for word in stage.frontend(1).command if word.startswith(("--nats", "--namespace"))]
    places = [f"--port={port}", f"--admin-port={admin_port}", "--drain-grace-s=0"]
    router = await stage.fleet.start("router", [*python("kvrouter.router"), *words, *places])
    url = f"http://127.0.0.1:{port}"
    await wait_until_ok(stage.client, router, f"{url}/ready")
    for number in range(RESERVED):
        body = json.dumps({"token_ids": [number, *range(RESERVED_TOKENS)]}).encode()
        await stage.client.post_json(f"{url}/select_and_reserve", body, {"content-type": "application/json"})
    await router.kill()
    del stage.fleet.processes["router"]
    return Damage(time.perf_counter(), notes=[f"{RESERVED} reservations at a router"])


async def stop_replica(stage: Stage, load: SteadyLoad) -> Damage:
    """SIGSTOP a replica in the middle of streams; its clients wait."""
    await until(lambda: load.is_streaming(stage.urls[1]))
    with stage.frontend(1).paused():
        await asyncio.sleep(STOPPED_S)
    return Damage(time.perf_counter())


async def kill_nats(stage: Stage, load: SteadyLoad, down_s: float = DOWN_S) -> Damage:
    """Kill the NATS server; after some seconds it restarts without state."""
    await stage.fleet.processes["nats"].kill()
    await asyncio.sleep(down_s)
    await stage.fleet.start_again("nats")
    return Damage(time.perf_counter())


async def stop_nats(stage: Stage, load: SteadyLoad) -> Damage:
    """SIGSTOP the NATS server: connections stay open, but no message passes."""
    with stage.fleet.processes["nats"].paused():
        await asyncio.sleep(STOPPED_S)
    return Damage(time.perf_counter())


async def kill_nats_node(stage: Stage, load: SteadyLoad) -> Damage:
    """Kill the server of the cluster with the most clients; after some seconds it restarts."""
    name = await busiest(stage.client, stage.fleet.directory / "nats")
    await stage.fleet.processes[name].kill()
    await asyncio.sleep(STOPPED_S)
    await stage.fleet.start_again(name)
    return Damage(time.perf_counter(), notes=[f"{name} was down for {STOPPED_S:g} s"])


async def cut_leaf(stage: Stage, load: SteadyLoad) -> Damage:
    """End the leaf node's connection to the cluster, and refuse new ones for a while."""
    assert stage.link is not None
    views = [f"{url}/workers" for url in stage.admin_urls]
    with stage.link.cut():
        await asyncio.sleep(CUT_S)
        seen = [len((await stage.client.get_json(url))["namespace_peers"]) for url in views]
    note = f"peers that the replicas saw at its end: {', '.join(map(str, seen))}"
    return Damage(
        time.perf_counter(),
        notes=[note],
        problems=[] if seen[-1] == 0 else ["the replica at the leaf still saw its peers: nothing was cut"],
    )


async def kill_agent_with_state(stage: Stage, load: SteadyLoad) -> Damage:
    """Kill an agent. The replay buffer lacks the beginning, but reaches back to the agent's saved state."""
    watch, log = stage.watches[stage.deployed.engines[KEPT].url], stage.fleet.processes[f"agent-{KEPT}"].log
    state = state_file(stage.fleet.directory)
    await until(lambda: watch.batches > KEPT_REPLAY_BUFFER and state.exists(), _STATE_PATIENCE_S)
    proofs = log.read_text().count(_PROOF)
    begun_s = time.time()
    age_s = begun_s - state.stat().st_mtime
    damage = await _kill_agent(stage, load, KEPT)
    with contextlib.suppress(TimeoutError):
        await until(lambda: log.read_text().count(_PROOF) > proofs)
    is_proven = log.read_text().count(_PROOF) > proofs
    note = f"the state was {age_s:.1f} s old; {watch.batches} batches sent, {KEPT_REPLAY_BUFFER} replayed"
    return replace(
        damage,
        notes=[*damage.notes, note],
        problems=[] if is_proven else ["the agent did not verify its saved state"],
    )


def state_file(directory: Path) -> Path:
    return directory / "agent.state"


async def _kill_agent(stage: Stage, load: SteadyLoad, number: int) -> Damage:
    """Kill an agent, which reads everything again.

    The replay buffer of the engine LATE lacks the beginning: blocks below it cannot be identified.
    """
    before = await stage.index_share(number)
    url, begun_us = stage.deployed.engines[number].url, time.time_ns() // 1000
    await stage.fleet.processes[f"agent-{number}"].kill()
    await asyncio.sleep(DOWN_S)
    await stage.fleet.start_again(f"agent-{number}")
    return Damage(
        time.perf_counter(),
        notes=[f"before: {before}"],
        is_noticed=lambda target: target["url"] != url or target["incarnation"] > begun_us,
    )


async def kill_worker(stage: Stage, load: SteadyLoad) -> Damage:
    """Kill a worker that was stopped, while requests of every replica wait there for their first byte."""
    engine = stage.deployed.engines[0]
    mocker = stage.fleet.processes["mocker-0"]
    await make_known(stage, load, worker_id_of(engine.url), KILLED)
    with mocker.paused():
        waiting = await waiting_at(stage, load, worker_id_of(engine.url), KILLED)
        # only now: what the worker sent before it was stopped takes its time
        begun = frozenset(outcome.number for outcome in load.in_flight if outcome.ttft_s is not None)
        at_s = time.perf_counter()
        await mocker.kill()
    await asyncio.sleep(DOWN_S)
    await stage.start("mocker-0")
    notes = [f"{len(waiting)} requests were waiting for their first byte when it was killed"]
    problems = [] if waiting else ["no request was waiting for its first byte: the fault proves nothing"]
    excuse = Excuse("were streaming from the killed worker", at_s, request_numbers=begun)
    return Damage(time.perf_counter(), [excuse], notes, problems, stage.knows_restarted(0))


async def stop_worker(stage: Stage, load: SteadyLoad) -> Damage:
    """SIGSTOP a worker: requests without a first byte move to others; streams wait, then continue."""
    worker_id = worker_id_of(stage.deployed.engines[0].url)
    await make_known(stage, load, worker_id, STOPPED)
    with stage.fleet.processes["mocker-0"].paused():
        waiting = await waiting_at(stage, load, worker_id, STOPPED)
        await asyncio.sleep(WORKER_STOPPED_S)
        moved = [one.ttft_s for one in waiting if one.ended_at_s is not None and one.error is None]
    note = f"{len(moved)} of {len(waiting)} requests that waited for it were answered by others meanwhile"
    ttft = f"{note}, TTFT {max(filter(None, moved), default=0.0):.1f} s at most"
    return Damage(
        time.perf_counter(),
        notes=[ttft],
        problems=[] if waiting and len(moved) == len(waiting) else [note],
    )


async def make_known(stage: Stage, load: SteadyLoad, worker_id: str, begins_with: int) -> None:
    """Let one worker compute the held prompt; returns when every replica would choose this worker for it."""
    computed = load.send(_held_request(begins_with, mode="direct", target=worker_id), stage.urls[0])
    await until(lambda: computed.ended_at_s is not None)
    body = _held_request(begins_with, overlap_weight=HELD_WEIGHT).body
    async with asyncio.timeout(_PATIENCE_S):
        for url in stage.admin_urls:
            route = f"{url}/v1/route"
            while (await stage.client.post_json(route, body))["winner"] != f"{worker_id}/0":  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def waiting_at(stage: Stage, load: SteadyLoad, worker_id: str, begins_with: int) -> list[Outcome]:
    """Send the held prompt through every replica; returns the requests that wait for the worker."""
    request, waiting = _held_request(begins_with, overlap_weight=HELD_WEIGHT), []
    for url, admin_url in zip(stage.urls, stage.admin_urls, strict=True):
        request_id = uuid.uuid4().hex
        outcome = load.send(replace(request, headers={"x-request-id": request_id}), url)
        decision = await _decision(stage, f"{admin_url}/decisions/{request_id}")
        if decision["winner"] == f"{worker_id}/0" and outcome.ttft_s is None:
            waiting.append(outcome)
    return waiting


async def _decision(stage: Stage, url: str) -> dict[str, Any]:
    """The last decision about a request, once there is one."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            with contextlib.suppress(HttpError):
                last: dict[str, Any] = (await stage.client.get_json(url))["decisions"][-1]
                return last
            await asyncio.sleep(0.002)


def _held_request(begins_with: int, **kvrouter: object) -> LoadRequest:
    """A prompt that shares no prefix with the other requests of the load."""
    numbers = range(begins_with, begins_with + HELD_TOKENS)
    prompt = [1 + number % (VOCABULARY_SIZE - 1) for number in numbers]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "stream": True, "kvrouter": kvrouter}
    return LoadRequest(0.0, json.dumps(body, separators=(",", ":")).encode())


async def restart_all(stage: Stage, load: SteadyLoad) -> Damage:
    """One replica after the other: SIGTERM, an orderly end, a restart, /ready."""
    problems, took_s = [], []
    for number in range(len(stage.urls)):
        begun_s = time.perf_counter()
        code = await stage.frontend(number).stop(DRAIN_LIMIT_S)
        if code != 0:
            problems.append(f"replica {number} ended with exit code {code} on SIGTERM")
        await stage.start(f"frontend-{number}")
        took_s.append(time.perf_counter() - begun_s)
        await asyncio.sleep(1.0)  # HAProxy checks it every 0.5 s; a real deployment waits longer
    notes = [f"each took {min(took_s):.1f}–{max(took_s):.1f} s from SIGTERM to /ready"]
    return Damage(time.perf_counter(), notes=notes, problems=problems)


def _split(name: str, what: str, fault: Fault, connector: str = "nixl") -> Row:
    return Row(name, what, fault, split=connector)


ROWS = (
    Row("replica-kill", "kill -9 a replica mid-stream, restart it", kill_replica),
    Row("router-kill", "kill -9 a router with 50 reservations, next to frontends", kill_router),
    Row("replica-stop", f"SIGSTOP a replica for {STOPPED_S:g} s", stop_replica),
    Row("nats-kill", "kill -9 nats-server, restart it", kill_nats),
    Row("nats-stop", f"SIGSTOP nats-server for {STOPPED_S:g} s", stop_nats),
    Row("agent-kill", "kill -9 an agent, restart it", partial(_kill_agent, number=FIRST), engine=FIRST),
    Row("agent-kill-late", "kill -9 an agent whose engine no longer replays its beginning",
        partial(_kill_agent, number=LATE), engine=LATE),
    Row("agent-kill-state", "the same with --state-file at the agent", kill_agent_with_state,
        engine=KEPT, loses_nothing=True),
    Row("worker-kill", "kill -9 a worker before first bytes, restart it", kill_worker),
    Row("worker-stop", f"SIGSTOP a worker before first bytes for {WORKER_STOPPED_S:g} s", stop_worker),
    Row("rolling-restart", "rolling restart of all replicas behind HAProxy", restart_all,
        behind_haproxy=True),
    Row("nats-node-kill", f"kill -9 one of three NATS servers for {STOPPED_S:g} s", kill_nats_node,
        on_cluster=True),
    _split("split-prefill-kill", "prefill and decode apart: kill -9 a prefill worker, restart it",
           partial(kill_halves, numbers=PREFILLS[:1])),
    _split("split-decode-kill", "the same with a decode worker", partial(kill_halves, numbers=DECODES[:1])),
    _split("split-both-kill", "the same with one of each", partial(kill_halves, numbers=ONE_OF_EACH)),
    _split("split-prefills-kill", "the same with all prefill workers",
           partial(kill_halves, numbers=PREFILLS)),
    _split("split-lease-over", f"a decode worker stands still for longer than the lease of {LEASE_S:g} s",
           end_leases),
    _split("split-replica-kill", "kill -9 a replica between the halves, restart it",
           partial(between_halves, kill=kill_frontend)),
    _split("split-nats-kill", f"the same with nats-server, which is away for {NATS_AWAY_S:g} s",
           partial(between_halves, kill=partial(kill_nats, down_s=NATS_AWAY_S))),
    _split("split-decode-joins", "a decode worker of the next version joins in place of one",
           partial(upgrade, numbers=DECODES[:1])),
    _split("split-upgrade", "a rolling upgrade of the other three",
           partial(upgrade, numbers=(*PREFILLS, DECODES[1]))),
    _split("mooncake-kill", "the same with Mooncake: kill -9 a prefill and a decode worker, restart them",
           partial(kill_halves, numbers=ONE_OF_EACH), "mooncake"),
    _split("mooncake-upgrade", "with Mooncake, a rolling upgrade of one of each",
           partial(upgrade, numbers=ONE_OF_EACH), "mooncake"),
    _split("sglang-prefill-kill", "with SGLang, both halves at once: kill -9 a prefill worker, restart it",
           partial(kill_halves, numbers=PREFILLS[:1]), "sglang"),
    _split("sglang-decode-kill", "the same with a decode worker",
           partial(kill_halves, numbers=DECODES[:1]), "sglang"),
    _split("sglang-upgrade", "with SGLang, a rolling upgrade of one of each",
           partial(upgrade, numbers=ONE_OF_EACH), "sglang"),
    _split("peer-kill", "whole workers that read blocks from each other: kill -9 one, restart it",
           kill_peer, "p2p"),
    _split("streams-move", "kill -9 each worker mid-stream in turn, restart it; no stream breaks",
           partial(end_in_turn, drains=False), MOVES),
    _split("streams-drain", "a rolling restart of all workers, which end at once; no stream breaks",
           partial(end_in_turn, drains=True), MOVES),
    Row("leaf-cut", f"a NATS leaf node without its cluster for {CUT_S:g} s", cut_leaf, on_cluster=True),
    *(
        Row(name, what, partial(play, lasting, alerts), on_cluster=True, alerts=alerts)
        for name, what, lasting, alerts in INCIDENTS
    ),
)  # fmt: skip
