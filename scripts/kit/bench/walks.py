"""Files that one request, one KV event and one booking run through; --plots DIR writes them into a page.

Two mockers, their agents and two replicas on one loop with a real nats-server. `sys.setprofile` records which
files of kvrouter/ are called, in order of the first call; the context tells which part calls:

    chat         replica a: client socket ──> decision ──> worker ──> last byte to the client
    kv event     agents: ZMQ socket ──> NATS ──> replica b: its block index has the blocks
    add request  replica a: booking made ──> NATS ──> replica b: its booking table has the booking

A chat counts what follows from its client's connection: asyncio hands the context on to tasks and callbacks.
Timers of agents and replicas wait meanwhile. Each walk is made several times; a file counts if each calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import Context, ContextVar
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

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
from scripts.kit.http_client import Client, HttpError
from scripts.kit.script import ScriptError

# Files of each walk, with the hot tables in C. A change may raise one, with its reason here.
# chat: 29 was the aim. 2 more are parts of core/fleet/router.py, which nobody held in mind any longer:
# own_bookings.py and sync_feed.py. `auto`, the default, counts arrivals (arrivals.py of core/tables); what
# was cached is compared with caches that do not exist (ghosts.py); the chat is a stream, whose events
# relay/events.py reads. Each is one idea, and to put two into one file would only lower the number.
# prefill_speeds.py did not count while the walk's clock stood still: nothing is learnt from no time.
LIMITS = {"chat": 35, "kv event": 16, "add request": 11}
# Of the section of the page that `--plots` writes.
HEADING = "## Walks"
ROUNDS = 5
ENGINES = 2
PATIENCE_S = 20.0
_PACKAGE = Path(kvrouter.__file__).parent
# Without what is on by default and decides nothing.
_FLAGS = (
    *("--router-mode=kv", "--router-replica-sync", "--drain-grace=0", "--no-index-metrics"),
    *("--no-token-comparison", "--prefix-store-blocks=0", "--decisions=0"),
)
# After the first round its worker has these blocks, so no KV event follows from it.
_CACHED = "the same question each time " * 16
# Private, but the one place where bytes leave a loop of asyncio; uvloop has none.
_WRITE: CodeType = asyncio.selector_events._SelectorSocketTransport.write.__code__  # type: ignore[attr-defined]
# In the order in which messages pass them.
_PARTS = ("agent", "replica a", "replica b")
_TITLES = {
    "chat": ("A chat", "At one replica, from the client's socket to the worker and back."),
    "kv event": ("A KV event", "From the agent's ZMQ socket to the block index of a replica."),
    "add request": ("An AddRequest", "From the replica that books to the booking table of its peer."),
}

Test = Callable[[FrameType], bool]
_part: ContextVar[str] = ContextVar("_part", default="")
_is_for_client: ContextVar[bool] = ContextVar("_is_for_client", default=False)


@dataclass(frozen=True, slots=True)
class Step:
    """A file, and the longest of its functions that a walk calls: the first is often only a question."""

    part: str
    file: str
    function: str


class _Loop(asyncio.SelectorEventLoop):
    """Its servers mark what runs for their clients: the factory's context is the connection's.

    While it is held, timers of agents and replicas wait: no heartbeat, no scrape.
    """

    is_held = False

    def call_at(  # type: ignore[override]  # typeshed: by a TypeVarTuple
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        def fire() -> None:
            if self.is_held and _part.get() in _PARTS and not handle.cancelled():
                super(_Loop, self).call_at(self.time() + 0.01, fire)
            elif not handle.cancelled():
                callback(*args)

        handle = super().call_at(when, fire, context=context)
        return handle

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> asyncio.Server:
        def marked() -> asyncio.BaseProtocol:
            _is_for_client.set(True)
            protocol: asyncio.BaseProtocol = protocol_factory()
            return protocol

        return await super().create_server(marked, *args, **options)


@contextlib.contextmanager
def recording(parts: Mapping[str, tuple[Test, Test]]) -> Iterator[dict[str, Step]]:
    """The steps while inside, by file. For each part: which calls count, and which one ends it."""
    steps: dict[str, Step] = {}
    lengths: Counter[str] = Counter()
    over: set[str] = set()

    def hook(frame: FrameType, event: str, _: object) -> None:
        part, code = _part.get(), frame.f_code
        if event != "call" or part not in parts or part in over:
            return
        counts, ends = parts[part]
        if ends(frame):
            over.add(part)
        elif (file := _file(code.co_filename)) and counts(frame) and _lines(code) > lengths[file]:
            lengths[file] = _lines(code)
            steps[file] = Step(part, file, code.co_qualname)

    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    gc.disable()  # it calls back into kvrouter
    loop.is_held = True
    sys.setprofile(hook)
    try:
        yield steps
    finally:
        sys.setprofile(None)
        loop.is_held = False
        gc.enable()


@cache
def _file(path: str) -> str | None:
    return str(Path(path).relative_to(_PACKAGE)) if Path(path).is_relative_to(_PACKAGE) else None


@cache
def _lines(code: CodeType) -> int:
    return max(line or 0 for _, _, line in code.co_lines()) - code.co_firstlineno + 1


def _below(function: Callable[..., object]) -> Test:
    """Counts what a function calls, itself included."""

    def counts(frame: FrameType) -> bool:
        caller: FrameType | None = frame
        while caller is not None and caller.f_code is not function.__code__:
            caller = caller.f_back
        return caller is not None

    return counts


def _after_publish() -> Test:
    """Ends with the first call after one of Bus.publish."""
    seen: list[CodeType] = []

    def ends(frame: FrameType) -> bool:
        seen.append(frame.f_code)
        return Bus.publish.__code__ in seen[:-1]

    return ends


def _writes_last_chunk(frame: FrameType) -> bool:
    is_write = frame.f_code is _WRITE and _is_for_client.get()
    return is_write and bytes(frame.f_locals["data"]).endswith(b"0\r\n\r\n")


class Scene:
    """All parts, running."""

    def __init__(self, a: RunningFrontend, b: RunningFrontend, engine_url: str, client: Client) -> None:
        self.a, self.b, self._engine_url, self._client = a, b, engine_url, client
        self._prompts = 0

    async def _chat(self, url: str, text: str, max_tokens: int) -> None:
        """Stream a chat until its answer is complete. Raises HttpError."""
        messages = [{"role": "user", "content": text}]
        body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "stream": True}
        target, answer = f"{url}/v1/chat/completions", bytearray()
        head = await self._client.send("POST", target, answer.extend, json.dumps(body).encode())
        if head.status != 200 or not answer.rstrip().endswith(b"[DONE]"):
            raise HttpError(f"{target} answers {head.status}: {bytes(answer[-200:])!r}")

    def _blocks_at_b(self) -> int:
        return sum(len(router.pool.index) for router in self.b.replica.routers.values())

    def _is_booked_at_b(self, _: object = None) -> bool:
        owner = self.a.replica.router_id
        return any(router.pool.active.owners().get(owner) for router in self.b.replica.routers.values())

    async def chat(self) -> dict[str, Step]:
        with recording({"replica a": (lambda _: _is_for_client.get(), _writes_last_chunk)}) as steps:
            await self._chat(self.a.url, _CACHED, 4)
        return steps

    async def kv_event(self) -> dict[str, Step]:
        """One event, for a prompt of several blocks that no engine has seen."""
        known, self._prompts = self._blocks_at_b(), self._prompts + 1
        text = f"{self._prompts} times " + "once upon a time there was a router " * 8
        agent = (lambda _: True, _after_publish())
        b = (lambda _: True, lambda _: self._blocks_at_b() > known)
        with recording({"agent": agent, "replica b": b}) as steps:
            await self._chat(self._engine_url, text, 1)
            await _until(lambda: self._blocks_at_b() > known)
        return steps

    async def add_request(self) -> dict[str, Step]:
        """The decision before it is a part of the chat and does not count again."""
        a, b = (_below(Publishing.flush), _after_publish()), (lambda _: True, self._is_booked_at_b)
        with recording({"replica a": a, "replica b": b}) as steps:
            await self._chat(self.a.url, _CACHED, 4)
        await _until(lambda: not self._is_booked_at_b())
        return steps


@contextlib.asynccontextmanager
async def _open(nats_url: str, namespace: str, model: Path) -> AsyncIterator[Scene]:
    """Start all; yields when both replicas see all engines and each other."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        _part.set("engine")
        config = MockerConfig(model_name="tiny", model_path=model, speedup=20.0)
        engines = [await stack.enter_async_context(running_mocker(config)) for _ in range(ENGINES)]
        _part.set("agent")
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(stop.set)
        for one in engines:
            events = [EventEndpoints(one.kv_events, one.kv_replay)]
            known = {"nats": nats_url, "namespace": namespace, "endpoints": events, "flush_s": 0.0}
            tasks.create_task(serve_agent(AgentOptions(one.url, worker_id_of(one.url), **known), stop))  # type: ignore[arg-type]
        flags = ["--host=127.0.0.1", "--port=0", f"--nats={nats_url}", f"--namespace={namespace}", *_FLAGS]
        flags += [f"--model-path={model}"]
        frontends: list[RunningFrontend] = []
        for name in ("replica a", "replica b"):
            _part.set(name)
            running = running_frontend(parse_options(flags))
            frontends.append(await stack.enter_async_context(running))
        _part.set("")
        await _until(lambda: all(map(_is_complete, frontends)))
        yield Scene(frontends[0], frontends[1], engines[0].url, client)


def _is_complete(frontend: RunningFrontend) -> bool:
    replica, now = frontend.replica, asyncio.get_running_loop().time()
    seen = sum(len(router.pool.targets) for router in replica.routers.values())
    return not replica.readiness.not_ready(now) and seen == ENGINES and len(replica.peers) == 1


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event of its own
            await asyncio.sleep(0.002)


def make_walks(nats_url: str, namespace: str, model: Path) -> dict[str, list[Step]]:
    """Start everything, and make each walk. Not on a loop: it runs one of its own."""

    async def walk() -> dict[str, list[Step]]:
        async with _open(nats_url, namespace, model) as scene:
            walks = dict(zip(LIMITS, (scene.chat, scene.kv_event, scene.add_request), strict=True))
            for make in walks.values():  # opens connections, fills caches
                await make()
            return {name: await _steps(make) for name, make in walks.items()}

    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(walk())


async def _steps(walk: Callable[[], Awaitable[dict[str, Step]]]) -> list[Step]:
    """The steps that every round has; a part's first message may come before it is the part's turn."""
    *rounds, last = [await walk() for _ in range(ROUNDS)]
    common = [step for file, step in last.items() if all(file in steps for steps in rounds)]
    return sorted(common, key=lambda step: _PARTS.index(step.part))


def lines(steps: Sequence[Step]) -> Iterator[str]:
    """Each file with its function, below the part of the fleet where it is called."""
    part = ""
    for number, step in enumerate(steps, 1):
        if step.part != part:
            part = step.part
            yield f"{part}:"
        function = step.function.replace("<locals>.", "")
        yield f"  {number:2}  {step.file:36}  {function}"


def section(walks: Mapping[str, Sequence[Step]]) -> str:
    """The end of docs/concepts/design.md, from HEADING on."""
    parts = [
        HEADING,
        "The files that one request, one KV event and one booking run through, in the order of the first\n"
        "call, each with the longest of its functions that are called.\n"
        "`scripts/bench walks --plots docs/concepts` writes this section; `tests/scripts/test_walks.py`\n"
        "limits the number of files.",
    ]
    for name, steps in walks.items():
        title, text = _TITLES[name]
        body = "\n".join(lines(steps))
        parts.append(f"**{title}: {len(steps)} files.** {text}\n\n```\n{body}\n```")
    return "\n\n".join(parts) + "\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the files into DIR/design.md")


async def run(flags: argparse.Namespace) -> int:
    """Make the walks; 1 if one is longer than its limit."""
    set_up_logs("error")
    async with open_stage("bench") as stage:
        walks = await asyncio.to_thread(make_walks, stage.nats_url, "walks", stage.model_path)
    for name, steps in walks.items():
        print(f"{name}: {len(steps)} files (limit {LIMITS[name]})")
        for line in lines(steps):
            print(line)
    if flags.plots is not None:
        page = flags.plots / "design.md"
        if not page.is_file():
            raise ScriptError(f"{page}: no such page; use --plots docs/concepts")
        before, _, _ = page.read_text().partition(HEADING)
        page.write_text(before + section(walks))
    if flags.json is not None:
        flags.json.write_text(json.dumps({name: list(map(asdict, each)) for name, each in walks.items()}))
    return int(any(len(steps) > LIMITS[name] for name, steps in walks.items()))
