"""Streams of real vLLM engines that are cut and go on at the other one: token ids and text as without a cut.

    scripts/test-vllm DIR --moves [--cuts N] [--kills N] [--connector nixl]

A proxy before each engine resets the connection after some bytes of a stream; --kills: by kill -9. With a
connector, a third engine computes the prompts, and those that are cut have their blocks from it.
An answer that differs counts unless the same request, repeated without a cut, differs as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.kit.deployment import Stage as Common
from scripts.kit.deployment import open_stage
from scripts.kit.engine_tests.adapters import write_weights
from scripts.kit.engine_tests.engines import Engine, EngineTest, find_program, start_engine, wait_until_up
from scripts.kit.engine_tests.pairs import start_half
from scripts.kit.engine_tests.stage import Stage, serve_engines
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.script import ScriptError, new_console, run, table_of

NUM_BLOCKS, OUTPUT_TOKENS = 640, 40
PATHS = ("/v1/completions", "/v1/chat/completions")
TEXTS = ("Tell me of 漢字 and 🎉", "naïve café, straße", "def f(x):", "Привет", "🎉🎉🎉", "once upon a time")
# Shares of an answer: by then it has its first output, and not its last.
_CUT = 0.25, 0.7


@dataclass(slots=True)
class Cuts:
    """`left`: bytes of the next stream, at any engine, until its connections are reset; None: all."""

    left: int | None = None
    made: int = 0
    is_made: asyncio.Event = field(default_factory=asyncio.Event)
    last_at: str = ""
    """The URL of the engine that was cut last."""


class Cutter:
    """A proxy before one engine."""

    def __init__(self, engine_url: str, cuts: Cuts) -> None:
        self._engine_url = engine_url
        host, _, port = engine_url.removeprefix("http://").partition(":")
        self._host, self._port = host, int(port)
        self.url = ""
        self._cuts = cuts

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Cutter]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_stream, cuts = False, self._cuts

        async def to_engine() -> None:
            nonlocal is_stream
            while data := await reader.read(65536):
                is_stream = data.startswith(b"POST /v1/") or (is_stream and not data.startswith(b"GET "))
                engine.write(data)

        async def to_router() -> None:
            while data := await answers.read(65536):
                if not is_stream or cuts.left is None:
                    writer.write(data)
                    continue
                writer.write(data[: cuts.left])
                cuts.left -= len(data)
                if cuts.left <= 0:
                    cuts.left, cuts.made, cuts.last_at = None, cuts.made + 1, self._engine_url
                    cuts.is_made.set()
                    await writer.drain()
                    return

        try:
            answers, engine = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        tasks = [asyncio.create_task(each()) for each in (to_engine, to_router)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in (writer, engine):
            one.transport.abort()


class Reply(NamedTuple):
    """What a client reads of a stream, and how long it was."""

    text: str
    ids: list[int]
    reasons: list[str]
    tokens: int | None
    about: int
    error: str
    bytes: int


async def ask(client: Client, url: str, path: str, text: str) -> Reply:
    """A greedy stream."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True}
    body |= {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    received = bytearray()
    await client.send("POST", f"{url}{path}", received.extend, json.dumps(body).encode())
    events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event.get("choices") or ()]
    usage = [event["usage"] for event in events if event.get("usage")]
    return Reply(
        "".join([choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]),
        [token for choice in choices for token in choice.get("token_ids") or ()],
        [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        usage[-1]["completion_tokens"] if usage else None,
        len({(event.get("id"), event.get("model")) for event in events}),
        next((str(event["error"]) for event in events if "error" in event), ""),
        len(received),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; exit code 0 only if every moved answer was as without a cut."""
    parser = argparse.ArgumentParser(prog="scripts/test-vllm DIR --moves", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--cuts", type=int, default=45, metavar="N", help="streams to cut (%(default)s)")
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="engines to kill (%(default)s)")
    parser.add_argument("--connector", choices=("nixl", "example"), help="of pairs")
    return run("test-vllm", _run(parser.parse_args(arguments)))


async def _run(options: argparse.Namespace) -> int:
    console, rows = new_console(), list[tuple[str, str, str]]()
    program = find_program("vllm", options.directory)
    async with open_stage("test-vllm", starts_nats=False) as common, contextlib.AsyncExitStack() as stack:
        write_weights(common.model_path, 3)
        test = EngineTest("vllm", program, common.model_path, {}, NUM_BLOCKS, load_format="auto")
        engines, flags = await _start(common, test, options)
        await wait_until_up(common.client, common.fleet, engines)
        cuts = Cuts()
        named = []
        for number, engine in enumerate(engines):
            cutter = await stack.enter_async_context(Cutter(engine.url, cuts).serving())
            role = "decode" if number else "prefill"
            pair = {"role": role, "connector": options.connector} if options.connector else {}
            named.append(engine.named(cutter.url if number or not pair else "", **pair))
        # The same few prompts lose their workers again and again here.
        flags += ["--migration-limit=1", "--deadly-prompt-ttl-s=0"]
        flags.append(f"--model-path={common.model_path}")  # with its tokenizer a character may be cut in two
        served = await serve_engines(common.fleet, common.client, engines, named, flags)
        for name, count, kills in (("cut", options.cuts, False), ("kill -9", options.kills, True)):
            rows.append((name, *await _check(served, cuts, count, kills=kills)))
    console.print(table_of("streams of vLLM engines", ("end of the first", "streams", "seen"), rows))
    return 0 if all(row[2].startswith("all equal") for row in rows) else 1


async def _start(
    common: Common, test: EngineTest, options: argparse.Namespace
) -> tuple[list[Engine], list[str]]:
    """The engines, and the flags of frontends for them."""
    if not options.connector:
        engines = [await start_engine(common.fleet, test, number) for number in range(2)]
        return engines, ["--router-mode=round-robin"]
    (port,) = free_ports(1)
    roles = ("producer", "consumer", "consumer")
    engines = [await start_half(common, test, options, n, role, port) for n, role in enumerate(roles)]
    return engines, ["--router-mode=kv", "--router-replica-sync", "--pd-min-uncached-tokens=0"]


async def _kill(stage: Stage, cuts: Cuts) -> None:
    """Kill the engine whose stream is cut, and start it again."""
    await cuts.is_made.wait()
    (engine,) = [one for one in stage.engines if one.url == cuts.last_at]
    await stage.fleet.processes[engine.name].kill()
    await stage.start_again(engine)


async def _check(stage: Stage, cuts: Cuts, count: int, *, kills: bool) -> tuple[str, str]:
    """Compare so many moved answers with those without a cut."""
    rng, client, equal, differ, known = random.Random(4), stage.client, 0, list[str](), 0
    for number in itertools.count():
        if equal + len(differ) == count:
            break
        path, text = PATHS[number % 2], f"{rng.choice(TEXTS)} {rng.randrange(10**6)}"
        url, made = stage.replicas[number % 2].url, cuts.made
        cuts.is_made.clear()
        want = await ask(client, url, path, text)
        again = (await ask(client, url, path, text))._replace(bytes=want.bytes)
        if want.error:
            raise ScriptError(f"an answer without a cut has an error: {want.error}")
        killing = asyncio.create_task(_kill(stage, cuts)) if kills else None
        cuts.left = round(want.bytes * rng.uniform(*_CUT))
        got = (await ask(client, url, path, text))._replace(bytes=want.bytes)
        if cuts.made == made:  # the engine has sent it in fewer and longer events
            if killing is not None:
                killing.cancel()
            continue
        if killing is not None:
            await killing
        equal += got == want
        if got != want:
            known += want != again
            differ.append(f"{path} {text!r}: {got} instead of {want}")
    seen = "all equal" if equal == count else f"{equal} equal, {known} differ also without a cut"
    return f"{count} streams", "; ".join([seen, *differ[:2]])
