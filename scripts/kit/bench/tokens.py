"""Cost of tokenizing a prompt whose beginning is known, next to `encode_batch_fast` on the whole.

In one process, in turn: the whole prompt with `encode_batch_fast`, with an empty cache, and with a cache
that has its beginning. Every prompt ends differently. The ids are compared.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import tokenizers
from rich.table import Table

from kvrouter.tokens.prefix_tokens import PrefixStore, PrefixTokens
from kvrouter.tokens.splits import find_splits
from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.script import log_directory, table_of

# Limit of the cost of a prompt with 8,000 of 9,000 tokens known, as a share of the whole.
MOST = 1 / 5
TURNS = 16


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one kind of prompt, in milliseconds."""

    prompt: str
    tokens: int
    known_tokens: int
    whole_ms: float
    cold_ms: float
    warm_ms: float

    @property
    def ratio(self) -> float:
        """The cost with a warm cache, as a share of the whole."""
        return self.warm_ms / self.whole_ms


class Bench:
    """One tokenizer and the texts to measure it with."""

    def __init__(self, model_path: Path) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self.splits = find_splits(self.tokenizer)
        self._rng = random.Random(1)
        self._words = " ".join(pydoc_data.topics.topics.values()).split(" ")

    def text(self, tokens: int) -> str:
        """A text of about this many tokens, another one for each call."""
        start = self._rng.randrange(len(self._words) - 4 * tokens)
        ids = self.tokenizer.encode_batch_fast([" ".join(self._words[start : start + 2 * tokens])])[0].ids
        return str(self.tokenizer.decode(ids[:tokens]))

    def measure(self, name: str, prefix: str, endings: Sequence[str]) -> Result:
        """Tokenize each prompt in the three ways: whole, cold and warm."""
        store = PrefixStore()
        warm = self._cache(store)
        warm.encode(prefix + endings[0], add_special_tokens=False)
        times: list[tuple[float, float, float]] = []
        sizes = []
        for ending in endings[1:]:
            text, cold = prefix + ending, self._cache(PrefixStore())
            whole_s, whole = _timed(self.whole, text)
            cold_s, first = _timed(partial(_encode, cold), text)
            warm_s, ids = _timed(partial(_encode, warm), text)
            if not whole == first == ids:
                raise AssertionError(f"{name}: the ids of a cut text differ")
            times.append((whole_s, cold_s, warm_s))
            sizes.append(len(ids))
        known = len(self.whole(prefix))
        medians = [1000 * statistics.median(column) for column in zip(*times, strict=True)]
        return Result(name, round(statistics.median(sizes)), known, *medians)

    def whole(self, text: str) -> list[int]:
        """The ids without the cache."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _cache(self, store: PrefixStore) -> PrefixTokens:
        return PrefixTokens(self.tokenizer, self.splits, store, model="bench")


def _encode(cache: PrefixTokens, text: str) -> list[int]:
    return list(cache.encode(text, add_special_tokens=False).ids)


def _timed(encode: Callable[[str], list[int]], text: str) -> tuple[float, list[int]]:
    start = time.perf_counter()
    ids = encode(text)
    return time.perf_counter() - start, ids


def measure_all(bench: Bench, runs: int) -> Iterator[Result]:
    """The kinds of prompt that share a beginning."""
    system = f"<|im_start|>system\n{bench.text(8000)}<|im_end|>\n"
    endings = [_turn(bench.text(1000)) for _ in range(runs + 1)]
    yield bench.measure("chat, shared system message", system, endings)
    turns = "".join(_turn(bench.text(250)) + bench.text(250) + "<|im_end|>\n" for _ in range(TURNS))
    yield bench.measure(f"chat, {TURNS} turns and a new one", turns, endings)
    document = bench.text(8000)
    yield bench.measure("text without special tokens", document, [bench.text(1000) for _ in endings])


def _turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def run(flags: argparse.Namespace) -> int:
    """Measure; 1 if a prompt costs more than MOST."""
    with log_directory("bench") as made:
        directory = flags.model_path or made / "model"
        if flags.model_path is None:
            build_tiny_model(directory)
        bench = Bench(directory)
        if bench.splits.pattern is None:
            print(f"bench: the cache is off for {directory}: {bench.splits.reason}", file=sys.stderr)
            return 1
        results = list(measure_all(bench, flags.runs))
    about = machine() | {"runs": flags.runs, "tokenizers": tokenizers.__version__}
    rows = [{**asdict(result), "ratio": result.ratio} for result in results]
    conclude(flags, [_table(results)], about, results=rows)
    slow = [result.prompt for result in results if result.ratio > MOST]
    if slow:
        print(f"bench: more than {MOST:g} of the whole: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


def _table(results: Sequence[Result]) -> Table:
    rows = []
    for each in results:
        times = [f"{ms:.2f}" for ms in (each.whole_ms, each.cold_ms, each.warm_ms)]
        rows.append([each.prompt, f"{each.tokens:,}", f"{each.known_tokens:,}", *times, f"{each.ratio:.3f}"])
    columns = ("prompt", "tokens", "known", "whole, ms", "cache cold, ms", "cache warm, ms", "warm / whole")
    return table_of("tokenizing a prompt whose beginning is known, medians", columns, rows)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=int, default=100, metavar="N", help="prompts of each kind (%(default)s)")
    add("--model-path", type=Path, metavar="DIR", help="model directory; default: the tiny model")
