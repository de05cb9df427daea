"""The faults of a fleet whose workers hand KV over: two compute prompts, two generate; or all are peers.

PREFILLS ──blocks, kept for LEASE_S──> DECODES
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from scripts.kit.chaos.judge import Damage, Excuse
from scripts.kit.chaos.stage import Stage
from scripts.kit.load import SteadyLoad

PREFILLS, DECODES = (0, 1), (2, 3)
# What a prefill worker keeps is gone after this; vLLM's lease is 30 s.
LEASE_S = 3.0
# The flag by which workers of the next version differ: they hand nothing over to workers of this version.
NEXT_VERSION = "--kv-hash=next"
_DOWN_S = 2.0
_BETWEEN_S = 1.0
_DRAIN_S = 30.0
_PATIENCE_S = 20.0
_FEW_PULLS = 5
_PATHS = re.compile(r'^kvrouter_pd_(?:requests_total\{path="(\w+)"\}|pair_(failures)_total) (\S+)', re.M)
_MOVED = re.compile(r'^kvrouter_migrations_total\{cause="\w+",result="moved"\} (\S+)', re.M)
_EXPIRED = re.compile(r"^vllm:nixl_num_kv_expired_reqs_total\S* (\S+)", re.M)


async def kill_halves(stage: Stage, load: SteadyLoad, numbers: Sequence[int]) -> Damage:
    """Kill workers; only streams of a decode worker that have begun may fail."""
    await until(lambda: any(load.is_streaming(url) for url in stage.urls))
    mockers = [stage.fleet.processes[f"mocker-{number}"] for number in numbers]
    with contextlib.ExitStack() as stack:
        for mocker in mockers:
            stack.enter_context(mocker.paused())
        await asyncio.sleep(0.2)  # what they have sent arrives
        at_s = time.perf_counter()
        begun = frozenset(outcome.number for outcome in load.in_flight if outcome.ttft_s is not None)
        await asyncio.gather(*[mocker.kill() for mocker in mockers])
    await asyncio.sleep(_DOWN_S)
    for number in numbers:
        await stage.start(f"mocker-{number}")
    excuses = [Excuse("were streaming from the killed worker", at_s, request_numbers=begun)]
    return await _damage(stage, numbers, excuses if set(numbers) & set(DECODES) else [])


async def kill_peer(stage: Stage, load: SteadyLoad) -> Damage:
    """Kill a worker from which others read blocks, and which reads from others."""
    async with asyncio.timeout(_PATIENCE_S):
        while (before := (await _counts(stage))["pull"]) < _FEW_PULLS:  # noqa: ASYNC110
            await asyncio.sleep(_BETWEEN_S)
    damage = await kill_halves(stage, load, DECODES[:1])
    pulls = (await _counts(stage))["pull"] - before
    return replace(damage, notes=[*damage.notes, f"{pulls} of them after the kill"])


async def end_in_turn(stage: Stage, load: SteadyLoad, *, drains: bool) -> Damage:
    """End each worker amid its streams, one after the other: all go on elsewhere.

    `drains`: in order, with its agent, as Kubernetes ends the containers of a pod.
    """
    before = await stage.client.total(_MOVED, stage.urls)
    for number in range(len(stage.deployed.engines)):
        await until(lambda: any(load.is_streaming(url) for url in stage.urls))
        names = [f"agent-{number}", f"mocker-{number}"] if drains else [f"mocker-{number}"]
        ending = [stage.fleet.processes[name] for name in names]
        await asyncio.gather(*[one.stop(_DRAIN_S) if drains else one.kill() for one in ending])
        await asyncio.sleep(_DOWN_S)
        for name in reversed(names):
            await stage.start(name)
        await asyncio.sleep(_DOWN_S)
    moved = round(await stage.client.total(_MOVED, stage.urls) - before)
    problems = [] if moved else ["no stream has moved: the fault proves nothing"]
    noticed = stage.knows_restarted(*range(len(stage.deployed.engines)))
    return Damage(time.perf_counter(), [], [f"{moved} streams moved"], problems, noticed)


async def end_leases(stage: Stage, load: SteadyLoad) -> Damage:
    """Stop a decode worker for longer than the blocks are kept for it."""
    urls = [stage.deployed.engines[number].url for number in PREFILLS]
    before = await stage.client.total(_EXPIRED, urls)
    with stage.fleet.processes[f"mocker-{DECODES[0]}"].paused():
        await asyncio.sleep(LEASE_S + _DOWN_S)
    ended = await stage.client.total(_EXPIRED, urls) - before
    damage = await _damage(stage, [])
    problems = [] if ended else ["no lease has ended: the fault proves nothing"]
    return replace(damage, notes=[*damage.notes, f"{ended:g} leases ended"], problems=problems)


async def between_halves(
    stage: Stage, load: SteadyLoad, kill: Callable[[Stage, SteadyLoad], Awaitable[Damage]]
) -> Damage:
    """Kill something while requests of every replica wait for their prefill worker, which goes on then."""

    def waiting(url: str) -> bool:
        return any(outcome.url == url and outcome.ttft_s is None for outcome in load.in_flight)

    with contextlib.ExitStack() as stack:
        for number in PREFILLS:
            stack.enter_context(stage.fleet.processes[f"mocker-{number}"].paused())
        await asyncio.sleep(_BETWEEN_S)
        await until(lambda: all(map(waiting, stage.urls)))
        killing = asyncio.ensure_future(kill(stage, load))
        await asyncio.sleep(_BETWEEN_S)
    damage = await killing
    return replace(damage, notes=[*damage.notes, *await _notes(stage)])


async def upgrade(stage: Stage, load: SteadyLoad, numbers: Sequence[int]) -> Damage:
    """Workers of the next version replace these in turn, drained; none hands over to another version."""
    fleet, before = stage.fleet, await _counts(stage)
    for number in numbers:
        agent, mocker = (fleet.processes[f"{name}-{number}"] for name in ("agent", "mocker"))
        await agent.stop(_DRAIN_S)
        await mocker.stop(_DRAIN_S)
        await asyncio.sleep(_DOWN_S)
        for one in (mocker, agent):
            await stage.start(one.name, [*one.command, NEXT_VERSION])
        await asyncio.sleep(_DOWN_S)
    failures = (await _counts(stage))["failures"] - before["failures"]
    problems = [f"{failures} hand-overs failed"] if failures else []
    return replace(await _damage(stage, numbers), problems=problems)


async def until(is_so: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
    """Return when it is so. Raises TimeoutError."""
    async with asyncio.timeout(patience_s):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event of its own
            await asyncio.sleep(0.002)


async def _damage(stage: Stage, numbers: Sequence[int], excuses: Sequence[Excuse] = ()) -> Damage:
    """`numbers`: of the workers that were started again."""
    notes = await _notes(stage)
    return Damage(time.perf_counter(), excuses, notes, is_noticed=stage.knows_restarted(*numbers))


async def _notes(stage: Stage) -> list[str]:
    said = {"failures": "hand-overs that failed"}
    counts = sorted((await _counts(stage)).items())
    return ["; ".join(f"{count:,} {said.get(path, f'by path {path}')}" for path, count in counts if count)]


async def _counts(stage: Stage) -> Counter[str]:
    """How the requests were served so far, by path, and the hand-overs that failed."""
    counts: Counter[str] = Counter()
    for url in stage.urls:
        _, text = await stage.client.get(f"{url}/metrics")
        for path, failure, count in _PATHS.findall(text.decode()):
            counts[path or failure] += int(float(count))
    return counts
