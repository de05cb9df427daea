"""The longest step of a frontend's event loop, in instructions, for requests of each kind up to the limits.

While one step lasts, every stream of the replica waits. Exit code 1 if one takes more than MOST. Needs
valgrind, whose callgrind counts what a step executes, with libraries, on any load of the machine. Each
request goes to the counted frontend, and to another one, which tells the first of its booking.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.kit.bench.instructions import START_S
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.wire.routers import Workers
from scripts.kit.bench.wire.stage import Stage, open_stage
from scripts.kit.bench.wire.targets import OURS, OURS_KV
from scripts.kit.bench.wire.works import MODEL
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import FleetError
from scripts.kit.script import table_of

MOST = 6_000_000
PACE_MS, SETTLE_S = 5.0, 1.5
_TOKENS, _MOST_BYTES = 128_000, 15_900_000
_LIBRARY = """
#include <valgrind/callgrind.h>
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Case(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]


class Step(NamedTuple):
    """A callback of the loop."""

    instructions: int
    name: str
    profile: Path | None
    """Of callgrind."""

    @classmethod
    def read(cls, profile: Path) -> Step:
        """From callgrind's dump after it; one that is not complete has nothing."""
        text = profile.read_text(errors="replace")
        found = re.search(r"^summary: (\d+)$", text, re.MULTILINE)
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        return cls(int(found[1]) if found else 0, name[1] if name else "", profile)


def cases(rng: random.Random) -> Iterator[Case]:
    """Requests near the limits: of bytes, tokens, messages, prompts, parts, tools."""
    vocabulary = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(1, 9))) for _ in range(5000)]

    def text(words: int) -> str:
        return " ".join(rng.choices(vocabulary, k=words))

    def ids(count: int) -> list[int]:
        return rng.choices(range(20_000), k=count)

    def turns(count: int, words: int) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[n % 2], "content": text(words)} for n in range(count)]

    half = _TOKENS // 2
    one, many = turns(1, half), turns(1001, half // 1000)
    parts = [{"type": "text", "text": text(10)} for _ in range(2000)]
    picture = "data:image/png;base64," + base64.b64encode(rng.randbytes(9_000_000)).decode()
    image = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": picture}}]
    properties = {f"p{n}": {"type": "string", "description": text(3)} for n in range(10)}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(300)]
    yield Case("short", COMPLETIONS, {"prompt": "hello"})
    yield Case("text, 128k tokens", COMPLETIONS, {"prompt": text(half)})
    yield Case("ids, 128k tokens", COMPLETIONS, {"prompt": ids(_TOKENS)})
    yield Case("ids, 128k tokens, streamed", COMPLETIONS, {"prompt": ids(_TOKENS), "stream": True})
    yield Case("4 prompts of ids", COMPLETIONS, {"prompt": [ids(_TOKENS // 4) for _ in range(4)]})
    yield Case("256 prompts of text", COMPLETIONS, {"prompt": [text(250) for _ in range(256)]})
    yield Case("chat, one message", CHATS, {"messages": one})
    yield Case("chat, 1,001 messages", CHATS, {"messages": many})
    yield Case("chat, 20,001 messages", CHATS, {"messages": turns(20_001, 1)})
    yield Case("chat, 2,000 parts", CHATS, {"messages": [{"role": "user", "content": parts}]})
    yield Case("chat, 300 tools", CHATS, {"messages": turns(1, 3), "tools": tools})
    yield Case("chat, image of 9 MB", CHATS, {"messages": [{"role": "user", "content": image}]})
    yield Case("messages, one", "/v1/messages", {"messages": one})
    yield Case("messages, 1,001", "/v1/messages", {"messages": many})
    yield Case("responses, text", "/v1/responses", {"input": one[0]["content"]})
    yield Case("responses, 1,001 items", "/v1/responses", {"input": many})
    yield Case("text, 16 MB", COMPLETIONS, {"prompt": text(3_000_000)[:_MOST_BYTES]})
    yield Case("ids, 16 MB", COMPLETIONS, {"prompt": ids(2_000_000)})
    yield Case("2,048 embeddings", "/v1/embeddings", {"input": [text(50) for _ in range(2048)]})
    yield Case("2,048 documents", "/v1/rerank", {"query": "a", "documents": [text(50) for _ in range(2048)]})
    yield Case("tokenize, 128k tokens", "/tokenize", {"prompt": text(half)})
    unknown = [{"a": n, "b": [1, 2, 3]} for n in range(200_000)]
    yield Case("an unknown field, 8 MB", COMPLETIONS, {"prompt": "hello", "x": unknown})


class Steps:
    """The long steps of a frontend that runs under callgrind."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        library = directory / "callgrind.so"
        source = directory / "callgrind.c"
        source.write_text(_LIBRARY)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        # --separate-threads: other threads do not hold the loop
        self.command = (
            "env", "PYTHONHASHSEED=0", "valgrind", "--tool=callgrind", "--separate-threads=yes",
            f"--callgrind-out-file={directory}/out", sys.executable, "-m", "scripts.kit.bench.wire.stepped",
            str(library), str(directory),
        )  # fmt: skip

    def begin(self) -> None:
        """Count from now on."""
        for path in self._directory.glob("out.*"):
            path.unlink()
        (self._directory / "on").touch()

    def end(self) -> Step:
        """The longest one since `begin`."""
        (self._directory / "on").unlink()
        found = [Step.read(path) for path in self._directory.glob("out.*-01")]
        return max(found, key=lambda step: step.instructions, default=Step(0, "", None))


async def run(flags: argparse.Namespace) -> int:
    if shutil.which("valgrind") is None:
        raise FleetError("valgrind is not on PATH: install it")
    before, rows, figures = MachineTime.now(), list[tuple[str, ...]](), list[dict[str, Any]]()
    async with open_stage() as stage:
        workers = await stage.workers(PACE_MS)
        for mode in (OURS_KV, OURS):
            async for case, way, step in _longest(stage, workers, mode, flags):
                rows.append((mode, case, way, f"{step.instructions:,}", step.name))
                print(*rows[-1], flush=True)
                figures.append({"mode": mode, "case": case, "way": way, "instructions": step.instructions})
                if step.profile is not None and flags.profiles is not None:
                    shutil.move(step.profile, flags.profiles / f"{mode} {case} {way}".replace(" ", "-"))
    columns = ("", "request", "", "instructions", "the longest step")
    conclude(flags, [table_of("longest steps", columns, rows)], machine(before), steps=figures)
    return int(any(one["instructions"] > MOST for one in figures))


async def _longest(stage: Stage, workers: Workers, mode: str, flags: argparse.Namespace) -> Any:
    """Of each case and way: its name, the way, the step."""
    steps = Steps(stage.directory / f"steps-{mode.replace(' ', '-')}")
    more = ["--router-replica-sync"]
    counted = await stage.ours(mode, workers, more=more, under=steps.command, timeout_s=3 * START_S)
    peer = await stage.ours(mode, workers, more=more, timeout_s=3 * START_S)
    ways = (("its own", counted.port), ("a peer's", peer.port))
    for case in cases(random.Random(1)):
        if flags.only and flags.only not in case.name:
            continue
        body = json.dumps({"model": MODEL, "max_tokens": 4, **case.body}).encode()
        for way, port in ways:
            steps.begin()
            await stage.client.send("POST", f"http://127.0.0.1:{port}{case.path}", lambda _: None, body)
            await asyncio.sleep(SETTLE_S)
            yield case.name, way, steps.end()
    await stage.stop_group(counted.group)
    await stage.stop_group(peer.group)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="requests whose names have this text")
    add("--profiles", type=Path, metavar="DIR", help="keep callgrind's profile of each longest step there")
