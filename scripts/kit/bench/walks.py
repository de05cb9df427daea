"""Files that one request, one KV event and one booking run through; --plots DIR writes them into a page.

Two mockers, their agents and two replicas on one loop with a real nats-server. `sys.setprofile` records which
files of kvrouter/ are called, in order of the first call; the context of each task tells which part calls.
Each walk is made several times, and a file counts if each calls it: a heartbeat or a scrape in one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

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
from scripts.kit.script import ScriptError

# Files of each walk, with the hot tables in C. A change may raise one, with its reason here.
# chat: 29 was the aim. 2 more are parts of core/fleet/router.py (own_bookings.py, sync_feed.py); `auto`, the
# default, counts arrivals; ghosts.py compares what was cached with caches that do not exist; relay/events.py
# reads the events of a stream; rates.py and prefill_speeds.py learn the speed of prefills;
# exchanges.py, a part of completions.py, serves both halves of a request.
LIMITS = {"chat": 36, "kv event": 16, "add request": 11}
HEADING = "## Walks"
_TITLES = {
    "chat": "A chat: {} files.** At one replica, from the client's socket to the worker and back.",
    "kv event": "A KV event: {} files.** From the agent's ZMQ socket to the block index of a replica.",
    "add request": "An AddRequest: {} files.** From the replica that books to the booking table of its peer.",
}
_INTRODUCTION = """\
The files that one request, one KV event and one booking run through, in the order of the first
call, each with the longest of its functions that are called.
`scripts/bench walks --plots docs/concepts` writes this section; `tests/scripts/test_walks.py`
limits the number of files."""
_ROUNDS = 5
_ENGINES = 2
_PATIENCE_S = 20.0
_PACKAGE = f"{Path(kvrouter.__file__).parent}/"
# Without what is on by default and decides nothing.
_FLAGS = (
    *("--host=127.0.0.1", "--port=0", "--router-mode=kv", "--router-replica-sync", "--drain-grace=0"),
    *("--no-index-metrics", "--no-token-comparison", "--prefix-store-blocks=0", "--decisions=0"),
)
# After the first round its worker has these blocks, so no KV event follows from it.
_CACHED = "the same question each time " * 16
# Private, but the one place where bytes leave a loop of asyncio; uvloop has none.
_WRITE = asyncio.selector_events._SelectorSocketTransport.write.__code__  # type: ignore[attr-defined]
_part: ContextVar[str] = ContextVar("_part", default="")
_is_for_client: ContextVar[bool] = ContextVar("_is_for_client", default=False)
Ends: TypeAlias = Callable[[FrameType], bool]


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

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        def fire() -> None:
            if self.is_held and _part.get() and not handle.cancelled():
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


def _is_of_a_client(_: FrameType) -> bool:
    return _is_for_client.get()


def _is_in_a_flush(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not Publishing.flush.__code__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def _recording(parts: Mapping[str, Ends], counts: Ends) -> Iterator[dict[str, Step]]:
    """The steps while inside, by file. For each part: what ends it. `counts`: which calls of the first do."""
    steps: dict[str, Step] = {}
    lengths: dict[str, int] = {}
    over: set[str] = set()
    first = next(iter(parts))

    def hook(frame: FrameType, event: str, _: object) -> None:
        part, code = _part.get(), frame.f_code
        if event != "call" or part not in parts or part in over:
            return
        if parts[part](frame):
            over.add(part)
        elif code.co_filename.startswith(_PACKAGE) and (part != first or counts(frame)):
            file = code.co_filename.removeprefix(_PACKAGE)
            length = max(line or 0 for _, _, line in code.co_lines()) - code.co_firstlineno
            if length > lengths.get(file, -1):
                steps[file], lengths[file] = Step(part, file, code.co_qualname), length

    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.is_held = True
    sys.setprofile(hook)
    try:
        yield steps
    finally:
        sys.setprofile(None)
        loop.is_held = False


def _after_publish() -> Ends:
    """Ends with the first call after one of Bus.publish."""
    seen: list[object] = []

    def ends(frame: FrameType) -> bool:
        seen.append(frame.f_code)
        return Bus.publish.__code__ in seen[:-1]

    return ends


def _writes_last_chunk(frame: FrameType) -> bool:
    return (
        frame.f_code is _WRITE
        and _is_for_client.get()
        and bytes(frame.f_locals["data"]).endswith(b"0\r\n\r\n")
    )


class _Scene:
    """All parts, running. Each walk is a method."""

    def __init__(self, a: RunningFrontend, b: RunningFrontend, engine_url: str, client: Client) -> None:
        self.a, self.b, self._engine_url, self._client = a, b, engine_url, client
        self._prompts = 0

    async def _ask(self, url: str, text: str, max_tokens: int) -> None:
        messages = [{"role": "user", "content": text}]
        body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "stream": True}
        target = f"{url}/v1/chat/completions"
        await self._client.send("POST", target, bytearray().extend, json.dumps(body).encode())

    def _blocks_at_b(self) -> int:
        return sum(len(router.pool.index) for router in self.b.replica.routers.values())

    def _is_booked_at_b(self, _: object = None) -> bool:
        owner = self.a.replica.router_id
        return any(router.pool.active.owners().get(owner) for router in self.b.replica.routers.values())

    async def chat(self) -> dict[str, Step]:
        with _recording({"replica a": _writes_last_chunk}, _is_of_a_client) as steps:
            await self._ask(self.a.url, _CACHED, 4)
        return steps

    async def kv_event(self) -> dict[str, Step]:
        """One event, for a prompt of several blocks that no engine has seen."""
        known, self._prompts = self._blocks_at_b(), self._prompts + 1
        text = f"{self._prompts} times " + "once upon a time there was a router " * 8
        ends = {"agent": _after_publish(), "replica b": lambda _: self._blocks_at_b() > known}
        with _recording(ends, bool) as steps:
            await self._ask(self._engine_url, text, 1)
            await _until(lambda: self._blocks_at_b() > known)
        return steps

    async def add_request(self) -> dict[str, Step]:
        """The decision before it is a part of the chat and does not count again."""
        ends = {"replica a": _after_publish(), "replica b": self._is_booked_at_b}
        with _recording(ends, _is_in_a_flush) as steps:
            await self._ask(self.a.url, _CACHED, 4)
        await _until(lambda: not self._is_booked_at_b())
        return steps


@contextlib.asynccontextmanager
async def _open(nats_url: str, namespace: str, model: Path) -> AsyncIterator[_Scene]:
    """Start all; yields when both replicas see all engines and each other."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        config = MockerConfig(model_name="tiny", model_path=model, speedup=20.0)
        engines = [await stack.enter_async_context(running_mocker(config)) for _ in range(_ENGINES)]
        _part.set("agent")
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(stop.set)
        for one in engines:
            known: dict[str, Any] = {"nats": nats_url, "namespace": namespace, "flush_s": 0.0}
            known["endpoints"] = [EventEndpoints(one.kv_events, one.kv_replay)]
            tasks.create_task(serve_agent(AgentOptions(one.url, worker_id_of(one.url), **known), stop))
        where = (f"--nats={nats_url}", f"--namespace={namespace}", f"--model-path={model}")
        frontends: list[RunningFrontend] = []
        for name in ("replica a", "replica b"):
            _part.set(name)
            running = running_frontend(parse_options([*_FLAGS, *where]))
            frontends.append(await stack.enter_async_context(running))
        _part.set("")
        await _until(lambda: all(map(_is_complete, frontends)))
        yield _Scene(frontends[0], frontends[1], engines[0].url, client)


def _is_complete(frontend: RunningFrontend) -> bool:
    replica, now = frontend.replica, asyncio.get_running_loop().time()
    seen = sum(len(router.pool.targets) for router in replica.routers.values())
    return not replica.readiness.not_ready(now) and seen == _ENGINES and len(replica.peers) == 1


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event of its own
            await asyncio.sleep(0.002)


def make_walks(nats_url: str, namespace: str, model: Path) -> dict[str, list[Step]]:
    """Start everything, and make each walk. Not on a loop: it runs one of its own, without uvloop."""

    async def walk() -> dict[str, list[Step]]:
        async with _open(nats_url, namespace, model) as scene:
            walks = dict(zip(LIMITS, (scene.chat, scene.kv_event, scene.add_request), strict=True))
            for make in walks.values():  # opens connections, fills caches
                await make()
            return {name: _common([await make() for _ in range(_ROUNDS)]) for name, make in walks.items()}

    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(walk())


def _common(rounds: Sequence[dict[str, Step]]) -> list[Step]:
    """The steps that every round has; a part's first message may come before it is the part's turn."""
    return sorted((s for f, s in rounds[-1].items() if all(f in one for one in rounds)), key=lambda s: s.part)


def lines(steps: Sequence[Step]) -> Iterator[str]:
    """Each file with its function, below the part of the fleet where it is called."""
    for number, step in enumerate(steps, 1):
        if number == 1 or step.part != steps[number - 2].part:
            yield f"{step.part}:"
        yield f"  {number:2}  {step.file:36}  {step.function.replace('<locals>.', '')}"


def section(walks: Mapping[str, Sequence[Step]]) -> str:
    """The end of docs/concepts/design.md, from HEADING on."""
    pictures = ("\n".join(["```", *lines(steps), "```"]) for steps in walks.values())
    titles = (f"**{_TITLES[name].format(len(steps))}" for name, steps in walks.items())
    parts = (part for pair in zip(titles, pictures, strict=True) for part in pair)
    return "\n\n".join([HEADING, _INTRODUCTION, *parts]) + "\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the files into DIR/design.md")


async def run(flags: argparse.Namespace) -> int:
    """Make the walks; 1 if one is longer than its limit."""
    set_up_logs("error")
    async with open_stage("bench") as stage:
        walks = await asyncio.to_thread(make_walks, stage.nats_url, "walks", stage.model_path)
    print(section(walks))
    if flags.plots is not None:
        page = flags.plots / "design.md"
        if not page.is_file():
            raise ScriptError(f"{page}: no such page; use --plots docs/concepts")
        page.write_text(page.read_text().partition(HEADING)[0] + section(walks))
    if flags.json is not None:
        flags.json.write_text(json.dumps({name: list(map(asdict, each)) for name, each in walks.items()}))
    return int(any(len(steps) > LIMITS[name] for name, steps in walks.items()))
