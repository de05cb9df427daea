"""How many files one request, one KV event and one booking run through.

Two mockers, their agents and two replicas over a real nats-server, each kind in a thread of its own, so that
`sys.setprofile` records which files of kvrouter/ are called, in order of the first call, and by which part:

    chat         at replica a: client socket ──> decision ──> worker ──> client socket
    kv event     agents: ZMQ socket ──> NATS ──> replica b: its block index
    add request  replica a: booking made ──> NATS ──> replica b: its booking table

A file counts if one of its Python functions is called between the two ends. What does not belong to the
walk is left out by its cause:

- The clock of agents and replicas stands still during a walk, so no timer fires: no heartbeat, no scrape.
- Garbage collection waits, because it calls back into kvrouter/.
- A chat counts what runs in the context of its client's connection, which asyncio hands on to all tasks and
  callbacks that follow from it. So KV events that arrive meanwhile do not count, nor do the replica's own
  messages that NATS returns. It ends with the last byte written to the client.
- A KV event ends when the index has its blocks, an AddRequest when the booking table has the booking. The
  decision before the AddRequest is a part of the chat and does not count again.
- Each walk is made once to warm up and then several times. A file counts if it is called every time.

The parts run on asyncio's own loop, because uvloop's clock cannot be held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import kvrouter
from kvrouter.bus import Bus
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.telemetry.logs import set_up_logs
from kvrouter.tokens.tiny import build_tiny_model
from kvrouter.worker.agent import serve as serve_agent
from kvrouter.worker.options import AgentOptions, worker_id_of
from kvrouter.worker.zmq.sockets import EventEndpoints
from scripts.kit import deployment
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client, HttpError, request_bytes
from scripts.kit.script import log_directory, new_console, until_signalled

# Files of each walk, with the hot tables in C. A change may raise one, with its reason here.
# chat: 29 was the aim. 2 more are parts of core/fleet/router.py, which nobody held in mind any longer:
# own_bookings.py and sync_feed.py. `auto`, the default, counts arrivals (arrivals.py of core/tables); what
# was cached is compared with caches that do not exist (ghosts.py); the chat is a stream, whose events
# relay/events.py reads. Each is one idea, and to put two into one file would only lower the number.
LIMITS = {"chat": 34, "kv event": 16, "add request": 11}
# Of the section of the page that `--plots` writes.
HEADING = "## Walks"
# Recorded, of each walk.
ROUNDS = 3
# With one there would be nothing to choose from.
ENGINES = 2
PATIENCE_S = 20.0
_PACKAGE = Path(kvrouter.__file__).parent
_MODEL = "tiny"
# What is on by default and decides nothing.
_OPTIONAL_OFF = ("--no-index-metrics", "--no-token-comparison", "--prefix-store-blocks=0", "--decisions=0")
# After the warm-up its worker has these blocks, so no KV event follows from it.
_CACHED = "the same question each time " * 16

_LAST_CHUNK = b"0\r\n\r\n"
# Private, but the one place where bytes leave a loop of asyncio.
_WRITE: CodeType = asyncio.selector_events._SelectorSocketTransport.write.__code__  # type: ignore[attr-defined]

T = TypeVar("T")
Test = Callable[[FrameType], bool]

_is_for_client: ContextVar[bool] = ContextVar("is_for_client", default=False)


@dataclass(frozen=True, slots=True)
class Step:
    """A file, and the longest of its functions that a walk calls: the first is often only a question."""

    part: str
    file: str
    function: str


@dataclass(frozen=True, slots=True)
class Walk:
    """The files of one walk in order of their first call."""

    name: str
    steps: Sequence[Step]


class Clock:
    """A clock of event loops that can be held: while it is, timers do not fire."""

    def __init__(self) -> None:
        self._held_at_and_lost: tuple[float | None, float] = (None, 0.0)
        """One value, because other threads read it while it changes."""

    def time(self) -> float:
        """Seconds."""
        held_at, lost_s = self._held_at_and_lost
        return (time.monotonic() if held_at is None else held_at) - lost_s

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """It stands still while inside, and goes on from there afterwards."""
        lost_s, held_at = self._held_at_and_lost[1], time.monotonic()
        self._held_at_and_lost = (held_at, lost_s)
        try:
            yield
        finally:
            self._held_at_and_lost = (None, lost_s + time.monotonic() - held_at)


class PartLoop(asyncio.SelectorEventLoop):
    """The loop of one part: its clock can be held, and its servers mark what runs for their clients."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__()

    def time(self) -> float:
        """See Clock."""
        return self._clock.time()

    async def create_server(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *args: Any, **options: Any
    ) -> asyncio.Server:
        """Note that asyncio calls the factory in a context that the connection's callbacks inherit."""

        def marked() -> asyncio.BaseProtocol:
            _is_for_client.set(True)
            return protocol_factory()

        return await super().create_server(marked, *args, **options)


class Part:
    """A thread with an event loop, and what runs there."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._loop: Future[asyncio.AbstractEventLoop] = Future()

    @contextlib.asynccontextmanager
    async def running(self, open_part: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
        """Open in the thread, yield what was opened, close there."""
        opened: Future[T] = Future()
        leave = asyncio.Event()

        async def live() -> None:
            self._loop.set_result(asyncio.get_running_loop())
            try:
                async with open_part() as part:
                    opened.set_result(part)
                    await leave.wait()
            except BaseException as error:
                if opened.done():
                    raise
                opened.set_exception(error)

        thread = threading.Thread(target=self._run, args=(live(),), name=self.name)
        thread.start()
        try:
            yield await asyncio.wrap_future(opened)
        finally:
            self._loop.result().call_soon_threadsafe(leave.set)
            await asyncio.to_thread(thread.join)

    def _run(self, life: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=lambda: PartLoop(self._clock)) as runner:
            runner.run(life)

    async def call(self, call: Callable[..., object], *args: object) -> None:
        """Call in the thread."""

        async def act() -> None:
            call(*args)

        await self._await(act())

    async def _await(self, act: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(act, self._loop.result()))


@dataclass(frozen=True, slots=True)
class Stretch:
    """What of a part's calls belongs to a walk: `counts` per call, until `ends` holds for one (exclusive)."""

    counts: Test
    ends: Test


class Recorder:
    """Files in order of their first call, over the parts for which it is `on`."""

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self._lengths: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def on(self, parts: Mapping[Part, Stretch]) -> AsyncIterator[None]:
        """Record while inside."""
        for part, stretch in parts.items():
            await part.call(sys.setprofile, self._hook(part.name, stretch))
        try:
            yield
        finally:
            for part in parts:
                await part.call(sys.setprofile, None)

    def _hook(self, part: str, stretch: Stretch) -> Callable[[FrameType, str, object], None]:
        files = {str(path): str(path.relative_to(_PACKAGE)) for path in _PACKAGE.rglob("*.py")}
        counts, ends = stretch.counts, stretch.ends
        is_over = False

        def hook(frame: FrameType, event: str, _: object) -> None:
            nonlocal is_over
            if event != "call" or is_over:
                return
            is_over = ends(frame)
            file = files.get(frame.f_code.co_filename)
            if not is_over and file is not None and counts(frame):
                length = _lines(frame.f_code)
                if length > self._lengths.get(file, 0):
                    self._lengths[file] = length
                    self.steps[file] = Step(part, file, frame.f_code.co_qualname)

        return hook


@cache
def _lines(code: CodeType) -> int:
    """The length of a function."""
    return max(line or 0 for _, _, line in code.co_lines()) - code.co_firstlineno + 1


def everything(_: FrameType) -> bool:
    """Counts all frames."""
    return True


def for_client(_: FrameType) -> bool:
    """Counts what follows from a client's connection."""
    return _is_for_client.get()


def writes_last_chunk(frame: FrameType) -> bool:
    """Ends when the end of a streamed answer goes to its client."""
    is_write = frame.f_code is _WRITE and _is_for_client.get()
    return is_write and bytes(frame.f_locals["data"]).endswith(_LAST_CHUNK)


def after_call_of(function: Callable[..., object]) -> Test:
    """Ends with the first call after one of this function."""
    code, was_called = _code_of(function), False

    def ends(frame: FrameType) -> bool:
        nonlocal was_called
        is_over = was_called
        was_called = was_called or frame.f_code is code
        return is_over

    return ends


def below(function: Callable[..., object]) -> Test:
    """Counts what a function calls, itself included."""
    code = _code_of(function)

    def counts(frame: FrameType) -> bool:
        caller: FrameType | None = frame
        while caller is not None and caller.f_code is not code:
            caller = caller.f_back
        return caller is not None

    return counts


def _code_of(function: Callable[..., object]) -> CodeType:
    code: CodeType = function.__code__
    return code


class Stage:
    """All parts, running."""

    def __init__(self, client: Client) -> None:
        self.clock, self.engine_clock = Clock(), Clock()
        self.agents = Part("agent", self.clock)
        self.part_a, self.part_b = (Part(name, self.clock) for name in ("replica a", "replica b"))
        self.a: RunningFrontend
        self.b: RunningFrontend
        self.engines: Sequence[Mocker]
        self._client = client
        self._prompts = 0

    async def open(self, stack: AsyncExitStack, nats_url: str, namespace: str, model: Path) -> None:
        """Start all; returns when both replicas see all engines and each other."""
        config = MockerConfig(model_name=_MODEL, model_path=model, speedup=20.0)
        part = Part("engines", self.engine_clock)
        engines = await stack.enter_async_context(part.running(lambda: _mockers(config)))
        self.engines = engines
        agents = [_agent_options(mocker, nats_url, namespace) for mocker in engines]
        await stack.enter_async_context(self.agents.running(lambda: _agents(agents)))
        options = parse_options(
            ["--host=127.0.0.1", "--port=0", f"--nats={nats_url}", f"--namespace={namespace}",
             "--router-mode=kv", "--router-replica-sync", f"--model-path={model}", "--drain-grace=0",
             *_OPTIONAL_OFF]
        )  # fmt: skip
        self.a, self.b = [
            await stack.enter_async_context(part.running(lambda: running_frontend(options)))
            for part in (self.part_a, self.part_b)
        ]
        await until(lambda: all(map(self._is_complete, (self.a, self.b))))

    def _is_complete(self, frontend: RunningFrontend) -> bool:
        replica = frontend.replica
        seen = sum(len(router.pool.targets) for router in replica.routers.values())
        return (
            not replica.readiness.not_ready(self.clock.time()) and seen == ENGINES and len(replica.peers) == 1
        )

    async def chat(self, url: str, text: str, max_tokens: int = 4) -> None:
        """Stream a chat until its answer is complete. Raises HttpError."""
        body = {
            "model": _MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": True,
        }
        answer = bytearray()
        target = f"{url}/v1/chat/completions"
        request = request_bytes("POST", target, json.dumps(body).encode())
        head = await self._client.send(url, request, answer.extend)
        if head.status != 200 or not answer.rstrip().endswith(b"[DONE]"):
            raise HttpError(f"{target} answers {head.status}: {bytes(answer[-200:])!r}")

    def new_text(self) -> str:
        """One that no engine has seen, of several blocks."""
        self._prompts += 1
        return f"{self._prompts} times " + "once upon a time there was a router " * 8

    def blocks_at_b(self) -> int:
        """How many blocks replica b knows of."""
        return sum(len(router.pool.index) for router in self.b.replica.routers.values())

    def a_is_booked_at_b(self, _: object = None) -> bool:
        """Whether replica b has a booking of replica a."""
        return any(
            router.pool.active.owners().get(self.a.replica.router_id)
            for router in self.b.replica.routers.values()
        )


@contextlib.asynccontextmanager
async def _mockers(config: MockerConfig) -> AsyncIterator[Sequence[Mocker]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_mocker(config)) for _ in range(ENGINES)]


@contextlib.asynccontextmanager
async def _agents(agents: Sequence[AgentOptions]) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for options in agents:
            tasks.create_task(serve_agent(options, stop))
        try:
            yield
        finally:
            stop.set()


def _agent_options(mocker: Mocker, nats_url: str, namespace: str) -> AgentOptions:
    return AgentOptions(
        engine_url=mocker.url,
        worker_id=worker_id_of(mocker.url),
        nats=nats_url,
        namespace=namespace,
        endpoints=[EventEndpoints(mocker.kv_events, mocker.kv_replay)],
        flush_s=0.0,  # it would wait for a clock that stands still
    )


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so in another thread. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event of its own
            await asyncio.sleep(0.002)


async def _walk_chat(stage: Stage, recorder: Recorder) -> None:
    with stage.clock.held():
        async with recorder.on({stage.part_a: Stretch(for_client, writes_last_chunk)}):
            await stage.chat(stage.a.url, _CACHED)


async def _walk_kv_event(stage: Stage, recorder: Recorder) -> None:
    with stage.clock.held():
        known = stage.blocks_at_b()

        def is_known(_: object = None) -> bool:
            return stage.blocks_at_b() > known

        async with recorder.on(
            {
                stage.agents: Stretch(everything, after_call_of(Bus.publish)),
                stage.part_b: Stretch(everything, is_known),
            }
        ):
            await stage.chat(
                stage.engines[0].url, stage.new_text(), max_tokens=1
            )  # one event, for the prompt
            await until(is_known)


async def _walk_add_request(stage: Stage, recorder: Recorder) -> None:
    with stage.clock.held():
        with stage.engine_clock.held():  # no answer: nothing follows the AddRequest
            async with recorder.on(
                {
                    stage.part_a: Stretch(
                        below(type(stage.a.replica_loop.publishing).flush), after_call_of(Bus.publish)
                    ),
                    stage.part_b: Stretch(everything, stage.a_is_booked_at_b),
                }
            ):
                asking = asyncio.create_task(stage.chat(stage.a.url, _CACHED))
                await until(stage.a_is_booked_at_b)
        await asking
    await until(lambda: not stage.a_is_booked_at_b())


_WALKS: Mapping[str, Callable[[Stage, Recorder], Awaitable[None]]] = {
    "chat": _walk_chat,
    "kv event": _walk_kv_event,
    "add request": _walk_add_request,
}


async def make_walks(nats_url: str, namespace: str, model: Path) -> list[Walk]:
    """Start everything, and make each walk."""
    client = Client()
    async with AsyncExitStack() as stack:
        stack.callback(client.close)
        stage = Stage(client)
        await stage.open(stack, nats_url, namespace, model)
        with _no_garbage_collection():
            return [Walk(name, await _steps(stage, walk)) for name, walk in _WALKS.items()]


async def _steps(stage: Stage, walk: Callable[[Stage, Recorder], Awaitable[None]]) -> list[Step]:
    """The steps that every round has."""
    await walk(stage, Recorder())
    rounds = [Recorder() for _ in range(ROUNDS)]
    for recorder in rounds:
        await walk(stage, recorder)
    return [step for file, step in rounds[-1].steps.items() if all(file in one.steps for one in rounds)]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """It calls back into kvrouter/, wherever it happens."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def lines(walk: Walk) -> Iterator[str]:
    """Each file with its function, below the part of the fleet where it is called."""
    part = ""
    for number, step in enumerate(walk.steps, 1):
        if step.part != part:
            part = step.part
            yield f"{part}:"
        function = step.function.replace("<locals>.", "")
        yield f"  {number:2}  {step.file:36}  {function}"


_TITLES = {
    "chat": ("A chat", "At one replica, from the client's socket to the worker and back."),
    "kv event": ("A KV event", "From the agent's ZMQ socket to the block index of a replica."),
    "add request": ("An AddRequest", "From the replica that books to the booking table of its peer."),
}


def section(walks: Sequence[Walk]) -> str:
    """The end of docs/concepts/design.md, from HEADING on."""
    parts = [
        HEADING,
        "The files that one request, one KV event and one booking run through, in the order of the first\n"
        "call, each with the longest of its functions that are called.\n"
        "`scripts/bench walks --plots docs/concepts` writes this section; `tests/scripts/test_walks.py`\n"
        "limits the number of files.",
    ]
    for walk in walks:
        title, text = _TITLES[walk.name]
        body = "\n".join(lines(walk))
        parts.append(f"**{title}: {len(walk.steps)} files.** {text}\n\n```\n{body}\n```")
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    plots: Path | None
    json: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the walks; returns the exit code: 1 if one is longer than its limit."""
    options = _options(arguments)
    set_up_logs("error")
    try:
        return asyncio.run(until_signalled("bench", _run(options)))
    except (FleetError, HttpError, TimeoutError) as error:
        print(f"bench: failed: {error!r}", file=sys.stderr)
        return 1


async def _run(options: Options) -> int:
    client = Client()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(log_directory("bench"))
        stack.callback(client.close)
        fleet = await stack.enter_async_context(Fleet(directory))
        nats_url = await deployment.start_nats(fleet, client)
        model = directory / "model"
        build_tiny_model(model)
        walks = await make_walks(nats_url, "walks", model)
    console = new_console()
    for walk in walks:
        console.print(f"{walk.name}: {len(walk.steps)} files (limit {LIMITS[walk.name]})", highlight=False)
        for line in lines(walk):
            console.print(line, highlight=False, markup=False)
    if options.plots is not None:
        page = options.plots / "design.md"
        before, _, _ = page.read_text().partition(HEADING)
        page.write_text(before + section(walks))
    if options.json is not None:
        body = [asdict(walk) | {"count": len(walk.steps), "limit": LIMITS[walk.name]} for walk in walks]
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return int(any(len(walk.steps) > LIMITS[walk.name] for walk in walks))


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/bench walks", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the files into DIR/design.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the files there, too")
    flags = parser.parse_args(arguments)
    return Options(flags.plots, flags.json)
