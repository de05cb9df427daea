"""Cost of tokenizing: by the reference library, with the prefix cache, by fastokens; and in a frontend.

In one process, in turn, each text by all three; the ids are compared. Then bursts of 64 new chats of 4,000
tokens at frontends in front of fake workers: with each library, and in mode round-robin, which needs no ids.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pydoc_data.topics
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
from rich.table import Table

from kvrouter.tokens.fast_ids import FastIds
from kvrouter.tokens.prefix_tokens import PrefixStore, PrefixTokens, trial_texts
from kvrouter.tokens.splits import find_splits
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.wire.rounds import Contender, run_rounds, warm
from scripts.kit.bench.wire.stage import Stage, open_stage
from scripts.kit.bench.wire.targets import OURS, OURS_KV
from scripts.kit.bench.wire.works import MODEL, Run, Work
from scripts.kit.script import table_of

SIZES = (1_000, 4_000, 16_000, 32_000, 128_000)
# What a chat grows by, in tokens.
TURN = 300
CHATS, CHAT_TOKENS, CHAT_EVENTS = 64, 4_000, 16
# The row of the frontend without fastokens, by its flag.
REFERENCE = "--tokenizer-backend=huggingface"


@dataclass(frozen=True, slots=True)
class Times:
    """Medians for texts of one size, in milliseconds; `grown`: all but the last TURN tokens were seen."""

    tokens: int
    reference: float
    cache: float
    cache_grown: float
    fast: float
    fast_grown: float


class Texts:
    """Texts of a given length in tokens, each another one."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = " ".join(pydoc_data.topics.topics.values()).split(" ")
        self._rng = random.Random(1)

    def new(self, tokens: int) -> str:
        """In an order of words that was not there before."""
        text = " ".join(self._rng.choices(self._words, k=tokens))
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return str(self._tokenizer.decode(ids[:tokens]))


async def run(flags: argparse.Namespace) -> int:
    """Measure; 1 if any ids differ."""
    async with open_stage() as stage:
        directory = flags.model_path or stage.model_path
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        fast = FastIds(tokenizer)
        fast.compared.result()
        if not fast.is_on:
            print(f"bench: fastokens is off for {directory}: {fast.off_because}", file=sys.stderr)
            return 1
        times = [measure(tokenizer, fast, size, flags.runs) for size in flags.sizes]
        different = compare(tokenizer, fast, flags.texts)
        bursts = await _bursts(stage, directory, tokenizer, flags)
    about = machine() | {"runs": flags.runs, "bursts": flags.bursts, "tokenizers": tokenizers.__version__}
    rows = [[f"{one.tokens:,}", *(f"{ms:.2f}" for ms in list(asdict(one).values())[1:])] for one in times]
    names = ("tokens", "reference", "cache, new", "cache, grown", "fastokens, new", "fastokens, grown")
    shown = [table_of("ms to tokenize a text, medians", names, rows)]
    shown += [_burst_table(bursts)] if bursts else []
    figures = {name: asdict(run) for name, run in bursts.items()}
    conclude(flags, shown, about, times=[asdict(one) for one in times], bursts=figures)
    print(f"{flags.texts:,} varied texts, {different} with other ids than the reference library's")
    fast.close()
    return 1 if different else 0


def measure(tokenizer: tokenizers.Tokenizer, fast: FastIds, size: int, runs: int) -> Times:
    """Each text by all. Raises AssertionError if the ids differ."""
    texts, splits = Texts(tokenizer), find_splits(tokenizer)
    cache = PrefixTokens(tokenizer, splits, PrefixStore(), model="bench") if splits.pattern else None

    def reference(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def cached(text: str) -> list[int]:
        return [] if cache is None else list(cache.encode(text, add_special_tokens=False).ids)

    def by_fast(text: str) -> list[int]:
        found = fast.encode([text], add_special_tokens=False)
        assert found is not None, fast.off_because
        return found[0].tolist()

    times: list[tuple[float, ...]] = []
    for _ in range(runs):
        text = texts.new(size)
        grown = text + " " + texts.new(TURN)
        found = [_timed(way, given) for given in (text, grown) for way in (reference, cached, by_fast)]
        for ids in (found[:3], found[3:]):
            assert ids[0][1] == ids[2][1], "ids of fastokens differ"
            assert ids[1][1] in ([], ids[0][1]), "ids of the cache differ"
        times.append(tuple(1e3 * found[at][0] for at in (0, 1, 4, 2, 5)))
    return Times(size, *map(statistics.median, zip(*times, strict=True)))


def _timed(encode: Callable[[str], list[int]], text: str) -> tuple[float, list[int]]:
    start = time.perf_counter()
    ids = encode(text)
    return time.perf_counter() - start, ids


def compare(tokenizer: tokenizers.Tokenizer, fast: FastIds, count: int) -> int:
    """How many of so many varied texts have other ids; others than at start, where 1,500 are compared."""
    different = 0
    for text in itertools.islice(trial_texts(tokenizer, random.Random(count)), count):
        found = fast.encode([text], add_special_tokens=True)
        expected = tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids
        different += found is not None and found[0].tolist() != expected
    return different


async def _bursts(
    stage: Stage, directory: Path, tokenizer: tokenizers.Tokenizer, flags: argparse.Namespace
) -> dict[str, Run]:
    if not flags.bursts:
        return {}
    workers, texts = await stage.workers(pace_ms=5), Texts(tokenizer)
    contenders = [await stage.ours(OURS, workers)]
    for name, more in (("kv, fastokens", ()), ("kv, reference", (REFERENCE,))):
        one = await stage.ours(OURS_KV, workers, None, (f"--model-path={directory}", *more))
        contenders.append(Contender(name, one.port, one.group))

    def works() -> Sequence[Work]:
        return [_burst([texts.new(CHAT_TOKENS) for _ in range(CHATS)])]

    await warm(contenders, works(), stage.directory)
    results = await run_rounds(contenders, works, flags.bursts, stage.directory)
    return {name: run for (_, name), run in results.medians.items()}


def _burst(texts: Sequence[str]) -> Work:
    common = {"model": MODEL, "max_tokens": CHAT_EVENTS, "stream": True}
    bodies = [{**common, "messages": [{"role": "user", "content": text}]} for text in texts]
    encoded, title = [json.dumps(body).encode() for body in bodies], f"{CHATS} chats at once"
    return Work("burst", title, encoded, CHATS, CHATS, True, path="/v1/chat/completions")


def _burst_table(bursts: dict[str, Run]) -> Table:
    rows = [
        [name, *(f"{ms:.1f}" for ms in (run.ttft_p50_ms, run.ttft_p99_ms)), f"{run.cpu_us_per_request:,.0f}"]
        for name, run in bursts.items()
    ]
    title = f"{CHATS} new chats of {CHAT_TOKENS:,} tokens at once, medians"
    return table_of(title, ("frontend", "TTFT p50, ms", "p99, ms", "CPU a chat, µs"), rows)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[*SIZES], metavar="N", help="tokens of a text (1k to 128k)")
    add("--runs", type=int, default=20, metavar="N", help="texts of each size (%(default)s)")
    add("--texts", type=int, default=2000, metavar="N", help="varied short texts to compare (%(default)s)")
    add("--bursts", type=int, default=5, metavar="N", help="bursts at each frontend; 0: none (%(default)s)")
    add("--model-path", type=Path, metavar="DIR", help="model directory; default: the tiny model")
