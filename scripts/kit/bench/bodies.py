"""Time to read a large body, and its longest step, in which no other request is served.

Of each kind and size: what mode round-robin needs (parsed), and what mode kv needs (whole, with the prompt).
The coroutine is driven by hand, so a step is what it does between two turns of the loop. Minima of the runs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kvrouter.bodies.openai import CompletionRequest, parse_chat, parse_completion
from kvrouter.bodies.reader import LargeBody
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.wire.works import long_prompt
from scripts.kit.script import table_of

SIZES_KIB = (256, 1024, 16 * 1024)
MESSAGE_BYTES = 2048
Parse = Callable[[bytes], CompletionRequest]


@dataclass(frozen=True, slots=True)
class Took:
    """Milliseconds for a body, and of its longest step."""

    all_ms: float
    step_ms: float


def text(size: int) -> bytes:
    return json.dumps({"model": "m", "prompt": long_prompt(size)}).encode()


def ids(size: int) -> bytes:
    rng = random.Random(1)
    return json.dumps({"model": "m", "prompt": [rng.randrange(100_000) for _ in range(size // 7)]}).encode()


def messages(size: int) -> bytes:
    one = {"role": "user", "content": long_prompt(MESSAGE_BYTES)}
    return json.dumps({"model": "m", "messages": [one] * (size // MESSAGE_BYTES)}).encode()


KINDS: dict[str, tuple[Callable[[int], bytes], Parse]] = {
    "text": (text, parse_completion),
    "token ids": (ids, parse_completion),
    "chat of 2 KB messages": (messages, parse_chat),
}


async def read(body: bytes, parse: Parse, *, whole: bool) -> CompletionRequest:
    large = await LargeBody.read(body)
    if large is None:
        return parse(body)
    request = await large.parse(parse)
    return await large.whole(request, parse, len(body), is_native=True) if whole else request


def drive(work: Coroutine[Any, Any, CompletionRequest]) -> Took:
    """Run it to its end, as the loop would, and time each step."""
    steps = []
    while True:
        began = time.perf_counter()
        try:
            work.send(None)
        except StopIteration:
            steps.append(time.perf_counter() - began)
            return Took(1e3 * sum(steps), 1e3 * max(steps))
        steps.append(time.perf_counter() - began)


def run(flags: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for kind, (make, parse) in KINDS.items():
        for size in flags.sizes:
            body = make(size * 1024)
            by_need = {}
            for name, whole in (("parsed", False), ("whole", True)):
                took = [drive(read(body, parse, whole=whole)) for _ in range(flags.runs)]
                by_need[name] = Took(min(one.all_ms for one in took), min(one.step_ms for one in took))
            found.append({"kind": kind, "kib": size} | {name: asdict(one) for name, one in by_need.items()})
    shown = partial("{0[all_ms]:.2f} ({0[step_ms]:.2f})".format)
    rows = [[one["kind"], f"{one['kib']:,}", shown(one["parsed"]), shown(one["whole"])] for one in found]
    table = table_of("ms to read a body (longest step), minima", ("body", "KiB", "parsed", "whole"), rows)
    conclude(flags, [table], machine() | {"runs": flags.runs}, bodies=found)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--sizes",
        type=int,
        nargs="+",
        default=[*SIZES_KIB],
        metavar="KIB",
        help="KiB of a body (256 to 16384)",
    )
    add("--runs", type=int, default=7, metavar="N", help="runs of each (%(default)s)")
