"""Files that one request, one KV event and one booking run through; --plots DIR writes them into a page.

Two mockers, their agents and two replicas on one loop with a real nats-server. `sys.setprofile` records which
files of kvrouter/ are called, in order of the first call; the context of each task tells which part calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import kvrouter
from kvrouter.bus import Bus
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.server import running_mocker
from kvrouter.replica.publishing import Publishing
from kvrouter.telemetry.logs import set_up_logs
from kvrouter.worker.agent import serve as serve_agent
from kvrouter.worker.options import AgentOptions, worker_id_of
from kvrouter.worker.zmq.sockets import EventEndpoints
from scripts.kit.deployment import open_stage
from scripts.kit.http_client import Client

# Files of each walk, with the hot tables in C. A change may raise one, with its reason here.
# chat: 29 was the aim. 2 more are parts of core/fleet/router.py (own_bookings.py, sync_feed.py); `auto`, the
# default, counts arrivals; ghosts.py compares what was cached with caches that do not exist; relay/events.py
# reads the events of a stream; exchanges.py, a part of completions.py, serves both halves of a request;
# tokens/fast_ids.py encodes in place of the reference library, and tokens/job_queue.py orders prompts;
# readers.py counts the placement and the first byte, which were counted where they happened.
# add request: 11 was the aim; bus/messages.py reports all messages of a read at once.
LIMITS = {"chat": 38, "kv event": 13, "add request": 12}
_ROUNDS, _ENGINES, _PATIENCE_S = 5, 2, 20.0
_PACKAGE = f"{Path(kvrouter.__file__).parent}/"
# Without what is on by default and decides nothing.
_FLAGS = (
    *("--host=127.0.0.1", "--port=0", "--router-mode=kv", "--router-replica-sync", "--drain-grace=0"),
    *("--no-index-metrics", "--no-token-comparison", "--prefix-store-blocks=0", "--decisions=0"),
)
# Private, but the one place where bytes leave a loop of asyncio; uvloop has none.
_WRITE = asyncio.selector_events._SelectorSocketTransport.write.__code__  # type: ignore[attr-defined]
_FLUSH = Publishing.flush.__code__
_part: ContextVar[str] = ContextVar("_part", default="")
_FOR_CLIENT = ", for a client"
# Of a part: its first function (None: any), and whether a call, given the one before, is past its end.
Span: TypeAlias = tuple[CodeType | None, Callable[[CodeType | None, FrameType], bool]]


class Step(NamedTuple):
    part: str
    file: str
    function: str
    """The longest function that a walk calls: the first is often only a question."""


class _Loop(asyncio.SelectorEventLoop):
    """Marks what runs for a client: the context of a server's protocol factory is its connection's."""

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> asyncio.Server:
        def marked() -> Any:
            _part.set(_part.get() + _FOR_CLIENT)
            return protocol_factory()

        return await super().create_server(marked, *args, **options)


@contextlib.contextmanager
def _recording(running: dict[str, Span]) -> Iterator[dict[str, Step]]:
    """The steps while inside, by file. Timers of agents and replicas wait: no heartbeat, no scrape."""
    steps: dict[str, Step] = {}
    lengths: dict[str, int] = {}
    before: dict[str, CodeType] = {}

    def hook(frame: FrameType, event: str, _: object) -> None:
        part, code = _part.get(), frame.f_code
        if event != "call" or part not in running:
            return
        begins, ends = running[part]
        if part not in before and begins not in (None, code):
            return
        if ends(before.get(part), frame):
            del running[part]
            return
        before[part], file = code, code.co_filename.removeprefix(_PACKAGE)
        length = max(line or 0 for _, _, line in code.co_lines()) - code.co_firstlineno
        if file != code.co_filename and length > lengths.get(file, -1):
            steps[file], lengths[file] = Step(part.removesuffix(_FOR_CLIENT), file, code.co_qualname), length

    loop: Any = asyncio.get_running_loop()
    timers = [timer for timer in loop._scheduled if timer._context.get(_part)]
    loop._scheduled[:] = sorted(set(loop._scheduled).difference(timers))
    sys.setprofile(hook)
    try:
        yield steps
    finally:
        sys.setprofile(None)
        loop._scheduled[:] = sorted([*loop._scheduled, *timers])


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event of its own
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def _open(nats: str, namespace: str, model: Path) -> AsyncIterator[tuple[str, list[RunningFrontend]]]:
    """Start all; yields the URL of an engine and the replicas, when both see all engines and each other."""
    async with contextlib.AsyncExitStack() as stack:
        config, stop = MockerConfig(model_name="tiny", model_path=model, speedup=20.0), asyncio.Event()
        engines = [await stack.enter_async_context(running_mocker(config)) for _ in range(_ENGINES)]
        _part.set("agent")
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(stop.set)
        for one in engines:
            wires = [EventEndpoints(one.kv_events, one.kv_replay)]
            agent = AgentOptions(one.url, worker_id_of(one.url), nats, namespace, wires, flush_s=0.0)
            tasks.create_task(serve_agent(agent, stop))
        bus = (f"--nats={nats}", f"--namespace={namespace}")
        options = parse_options([*_FLAGS, *bus, f"--model-path={model}"])
        replicas = []
        for name in ("replica a", "replica b"):
            _part.set(name)
            replicas.append(await stack.enter_async_context(running_frontend(options)))
        _part.set("")
        await _until(lambda: all(map(_sees_all, replicas)))
        yield engines[0].url, replicas


def _sees_all(frontend: RunningFrontend) -> bool:
    replica, now = frontend.replica, asyncio.get_running_loop().time()
    seen = sum(len(router.pool.targets) for router in replica.routers.values())
    fast = frontend.tokens.encoders.default.fast  # until its ids are compared, another library encodes
    is_compared = fast is None or fast.compared.done()
    return (
        seen == _ENGINES and len(replica.peers) == 1 and not replica.readiness.not_ready(now) and is_compared
    )


async def _walks(nats_url: str, namespace: str, model: Path) -> dict[str, list[Step]]:
    async with Client() as client, _open(nats_url, namespace, model) as (engine_url, (a, b)):

        def blocks() -> int:
            return sum(len(router.pool.index) for router in b.replica.routers.values())

        def is_booked(*_: object) -> bool:
            owners = [router.pool.active.owners() for router in b.replica.routers.values()]
            return any(counts.get(a.replica.router_id) for counts in owners)

        def is_published(before: CodeType | None, _: FrameType) -> bool:
            return before is Bus.publish.__code__

        def is_last_chunk(_: object, frame: FrameType) -> bool:
            return frame.f_code is _WRITE and bytes(frame.f_locals["data"]).endswith(b"0\r\n\r\n")

        async def make(name: str) -> dict[str, Step]:
            known, at_a, is_event = blocks(), "replica a" + _FOR_CLIENT, name == "kv event"
            spans: dict[str, dict[str, Span]] = {
                "chat": {at_a: (None, is_last_chunk)},
                "kv event": {"agent": (None, is_published), "replica b": (None, lambda *_: blocks() > known)},
                # the decision before it is a part of the chat
                "add request": {at_a: (_FLUSH, is_published), "replica b": (None, is_booked)},
            }
            # A chat of the same question makes no KV event, as its worker has these blocks.
            url, text = (engine_url, f"{known} blocks and ") if is_event else (a.url, "once upon a time ")
            # As many as a conversation has: it is tokenized in a thread, where calls are not recorded.
            messages = [{"role": "user", "content": text * 5}] * 5
            body = {"model": "tiny", "messages": messages, "stream": True, "max_tokens": 1 if is_event else 4}
            with _recording(spans[name]) as steps:
                target, data = f"{url}/v1/chat/completions", json.dumps(body).encode()
                await client.send("POST", target, bytearray().extend, data)
                await _until(lambda: "replica b" not in spans[name])  # on a busy machine it hears of it later
            await _until(lambda: not is_booked())
            return steps

        for name in LIMITS:  # opens connections, fills caches
            await make(name)
        return {name: _common([await make(name) for _ in range(_ROUNDS)]) for name in LIMITS}


def _common(rounds: Sequence[dict[str, Step]]) -> list[Step]:
    """The steps of every round, by part: what comes by chance does not count."""
    return sorted((s for f, s in rounds[-1].items() if all(f in one for one in rounds)), key=lambda s: s.part)


def make_walks(nats_url: str, namespace: str, model: Path) -> dict[str, list[Step]]:
    """Start everything, and make each walk. Not on a loop: it runs one of its own, without uvloop."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(_walks(nats_url, namespace, model))


def lines(steps: Sequence[Step]) -> Iterator[str]:
    """Each file with its function, below the part of the fleet where it is called."""
    for part, its in itertools.groupby(steps, key=lambda step: step.part):
        yield f"{part}:"
        yield from (f"  {step.file:36}  {step.function.replace('<locals>.', '')}" for step in its)


def written(page: str, walks: Mapping[str, Sequence[Step]]) -> str:
    """The page with these files instead of those below the title of each walk."""
    for name, steps in walks.items():
        title = name.replace(" ", " ?")
        old = re.compile(rf"(\*\*An? {title}: )\d+( files\..*?\n```\n).*?(?=```)", re.DOTALL | re.IGNORECASE)
        new = "\n".join([*lines(steps), ""])
        page, found = old.subn(lambda part: f"{part[1]}{len(steps)}{part[2]}{new}", page)  # noqa: B023
        assert found == 1, name
    return page


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the files into DIR/design.md")


async def run(flags: argparse.Namespace) -> int:
    """Make the walks; 1 if one is longer than its limit."""
    set_up_logs("error")
    async with open_stage("bench") as stage:
        walks = await asyncio.to_thread(make_walks, stage.nats_url, "walks", stage.model_path)
    for name, steps in walks.items():
        print(f"{name}: {len(steps)} files", *lines(steps), sep="\n")
    if flags.plots is not None:
        page = flags.plots / "design.md"
        page.write_text(written(page.read_text(), walks))
    return int(any(len(steps) > LIMITS[name] for name, steps in walks.items()))
