"""`python -m scripts.kit.vllm.layouts`: predictions for one real engine of any KV cache layout.

    requests, one after another ──> engine ──> cached_tokens ──┐
                                      └── KV events ──> agent's parts ──> index ──> prediction ──> compared

Prompts grow from a few roots, from former prompts with their answers, and from their beginnings: they end in
every place relative to a block, and a small cache evicts. `one group` is what the blocks of the first group
with full attention alone would predict.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import zmq

from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import Cleared, NotResumable, Op, Removed, Resumable, Stored
from kvrouter.worker.engines.metrics import read_metrics
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher

TARGET = Target(WorkerId("engine"), 0)
ROOTS, MOST_TOKENS, VOCABULARY = 5, 700, (5, 4000)
QUIET_MS = 60


class Prediction:
    """What kvrouter knows of an engine's cache, and of its full attention alone."""

    def __init__(self, block_size: int, *, one_less: bool = False) -> None:
        self.block_size = block_size
        self.tally: Counter[str] = Counter()
        self._one_less = one_less
        self._adapter = VllmAdapter()
        self._adapter.speculates = one_less
        self._publisher = KvPublisher(self, "engine", block_size, model="m", incarnation=1)
        self._indexes = {"all groups": BlockIndex(), "one group": BlockIndex()}

    def publish(self, subject: str, payload: bytes) -> bool:
        """Frames are not needed: the ops are taken from the table."""
        return True

    def apply(self, payload: bytes) -> None:
        """Events of the engine."""
        before = self._publisher.blocks.state_ops()
        self._adapter.publish(self._adapter.decode(payload), self._publisher)
        if before != (after := self._publisher.blocks.state_ops()):
            self._load(after)

    def compare(self, tokens: Sequence[int], cached_tokens: int) -> None:
        """Count the predictions of a request that the engine has answered, before its events are applied."""
        most = max(0, len(tokens) - 1) // self.block_size
        chain = sequence_hashes(block_hashes(tokens, self.block_size))
        for name, index in self._indexes.items():
            is_less = self._one_less and name == "all groups"
            # with EAGLE several groups are looked up to the end of the prompt, see core/routing/candidates.py
            last = len(chain) if is_less and index.limited else most
            depth = min(last, index.overlap(chain, last).get(TARGET, 0))
            if is_less:
                depth = max(0, depth - 1)
            taken = depth * self.block_size
            result = "exact" if taken == cached_tokens else "over" if taken > cached_tokens else "under"
            self.tally[f"{name}: {result}"] += 1
        self.tally["hits"] += cached_tokens > 0

    def _load(self, ops: Iterable[Op]) -> None:
        for index in self._indexes.values():
            index.clear(TARGET)
        for op in ops:
            if isinstance(op, Stored):
                for index in self._indexes.values():
                    index.store(TARGET, op.hashes)
            elif isinstance(op, Resumable):
                self._indexes["all groups"].resume(TARGET, op.hashes)
            else:
                assert not isinstance(op, Removed | NotResumable | Cleared), "not in a state"


def prompts(rng: random.Random, past: Sequence[Sequence[int]], block_size: int) -> Iterator[list[int]]:
    """Token ids without end; `past` has the former prompts with their answers."""

    def new(count: int) -> list[int]:
        return [rng.randrange(*VOCABULARY) for _ in range(count)]

    roots = [new(block_size * rng.randrange(3, 10)) for _ in range(ROOTS)]
    tails = [1, 5, block_size - 1, block_size, block_size + 1, 2 * block_size, 100, 200]
    while True:
        base = list(rng.choice(past[-14:])) if past and rng.random() < 0.55 else list(rng.choice(roots))
        if rng.random() < 0.3:
            base = base[: rng.randrange(1, len(base) + 1)]
        if rng.random() < 0.7:
            base += new(rng.choice(tails))
        yield base[:MOST_TOKENS]


def ask(url: str, model: str, tokens: Sequence[int], most_tokens: int) -> tuple[int, list[int]]:
    """The cached tokens and the answer's token ids."""
    body = {"model": model, "prompt": tokens, "max_tokens": most_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = _fetch(f"{url}/v1/completions", json.dumps(body).encode())
    details = answer["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0, answer["choices"][0].get("token_ids") or []


def _fetch(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, and print the tally. The engine must be idle and its cache empty."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kit.vllm.layouts", description=__doc__)
    parser.add_argument("url", help="of a vLLM with --enable-prompt-tokens-details and KV events")
    parser.add_argument("events", help="its KV events, such as tcp://127.0.0.1:5557")
    parser.add_argument("--requests", type=int, default=70)
    parser.add_argument("--seed", type=int, default=16)
    flags = parser.parse_args(arguments)
    with urllib.request.urlopen(f"{flags.url}/metrics", timeout=30) as answer:
        scrape = read_metrics(answer.read().decode())
    model = _fetch(f"{flags.url}/v1/models")["data"][0]["id"]
    found, past = Prediction(scrape.block_size, one_less=scrape.speculates), list[list[int]]()
    rng = random.Random(flags.seed)
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.subscribe(b"")
        events.connect(flags.events)
        for _, tokens in zip(range(flags.requests), prompts(rng, past, scrape.block_size), strict=False):
            cached_tokens, output = ask(flags.url, model, tokens, rng.choice([1, 2, 8, 40, 70]))
            found.compare(tokens, cached_tokens)
            past.append([*tokens, *output][:MOST_TOKENS])
            while events.poll(QUIET_MS):
                found.apply(events.recv_multipart()[-1])
    print(f"{flags.requests} requests, block size {scrape.block_size}:", dict(sorted(found.tally.items())))


if __name__ == "__main__":
    main()
