"""`scripts/test-vllm DIR --layouts [NAME ...]`: predictions for real vLLM engines of every KV cache layout.

    requests, one after another ──> engine ──> cached_tokens ──┐
                                      └── KV events ──> agent's parts ──> index ──> prediction ──> compared

Prompts grow from a few roots, from former prompts with their answers, and from their beginnings: they end in
every place relative to a block, and a small cache evicts. `one group` is what the blocks of the first group
with full attention would predict alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import block_seed, media_prompt_hashes
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import Cleared, NotResumable, Op, Removed, Resumable, Stored
from kvrouter.tokens.tiny import build_tiny_model
from kvrouter.worker.engines.metrics import read_metrics
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher
from scripts.kit.deployment import Stage, open_stage
from scripts.kit.engine_tests.adapters import write_adapter
from scripts.kit.engine_tests.engines import Engine, EngineTest, find_program, start_engine, wait_until_up
from scripts.kit.script import ScriptError, run

TARGET = Target(WorkerId("engine"), 0)
ROOTS, MOST_TOKENS, VOCABULARY = 5, 700, (5, 300)
QUIET_MS = 60
SUBSCRIBED_S = 1.0
ADAPTERS = ("lora-a", "lora-b")


@dataclass(frozen=True, slots=True)
class Layout:
    """An engine, and what is asked of it. `flags`: more of vLLM's."""

    model: str = "plain"
    block_size: int = 32
    num_blocks: int = 160
    flags: Sequence[str] = ()
    ranks: int = 1
    int_hashes: bool = False
    loras: Sequence[str] = ("",)
    """The adapters that requests name in turn; empty: the base model."""
    salts: Sequence[str] = ("",)
    is_killed: bool = False
    """Whether the engine is killed after half of the requests, and started again."""


_DRAFT = "eagle-draft"
LAYOUTS = {
    "plain": Layout(),
    "block 64": Layout(block_size=64, num_blocks=80),
    "block 128": Layout(block_size=128, num_blocks=48),
    "integer hashes": Layout(int_hashes=True),
    "xxhash": Layout(flags=("--prefix-caching-hash-algo", "xxhash")),
    "chunked prefill": Layout(flags=("--max-num-batched-tokens", "128")),
    "LoRA": Layout(loras=("", *ADAPTERS)),
    "salts": Layout(salts=("", "a", "b")),
    "data parallel 2": Layout(ranks=2),
    "a kill": Layout(is_killed=True),
    "window": Layout("hybrid"),
    "window, block 64": Layout("hybrid", block_size=64, num_blocks=100),
    "EAGLE": Layout("llama", flags=("--speculative-config", _DRAFT)),
    "EAGLE and a window": Layout("hybrid", flags=("--speculative-config", _DRAFT)),
}


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

    def compare(self, tokens: Sequence[int], cached_tokens: int, lora: str, salt: str) -> None:
        """Count the predictions of a request that the engine has answered, before its events are applied."""
        most = max(0, len(tokens) - 1) // self.block_size
        ahead = self._adapter.lookahead
        chain = media_prompt_hashes(tokens, self.block_size, block_seed(lora, salt), (), ahead)
        for name, index in self._indexes.items():
            is_less = self._one_less and not ahead and name == "all groups"
            # with EAGLE several groups are looked up to the end of the prompt, see core/routing/candidates.py
            last = len(chain) if is_less and index.limited else most
            depth = min(last, index.overlap(chain, last).get(TARGET, 0))
            if is_less:
                depth = max(0, depth - 1)
            self.count(name, depth, cached_tokens)
        self.tally["requests"] += 1
        self.tally["hits"] += cached_tokens > 0

    def count(self, name: str, depth: int, cached_tokens: int) -> None:
        """Count one prediction in blocks."""
        taken = depth * self.block_size
        result = "exact" if taken == cached_tokens else "over" if taken > cached_tokens else "under"
        self.tally[f"{name}: {result}"] += 1

    def forget(self) -> None:
        """The engine has been started again."""
        self._publisher.cleared()
        self._adapter.forget()
        self._load(self._publisher.blocks.state_ops())

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


async def start(stage: Stage, program: Path, models: Path, layout: Layout) -> Engine:
    """An engine of this layout."""
    adapters = {name: models / name for name in ADAPTERS} if any(layout.loras) else {}
    test = EngineTest("vllm", program, models / layout.model, adapters, layout.num_blocks)
    flags = [word.replace(_DRAFT, json.dumps(_draft(models / "draft"))) for word in layout.flags]
    if layout.ranks > 1:
        flags += ["--data-parallel-size", str(layout.ranks)]
    of_size = ["--block-size", str(layout.block_size), "--max-model-len", "1024"]
    environment = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(layout.int_hashes))}
    engine = await start_engine(stage.fleet, test, 0, [*of_size, *flags], environment)
    await wait_until_up(stage.client, stage.fleet, [engine])
    return engine


def _draft(model: Path) -> dict[str, Any]:
    return {"method": "eagle", "model": str(model), "num_speculative_tokens": 2}


def build_models(directory: Path) -> None:
    """The models of all layouts, with random weights: only their caches matter."""
    build_tiny_model(directory / "plain")
    plain = json.loads((directory / "plain" / "config.json").read_text("utf-8"))
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "vocab_size": plain["vocab_size"], "torch_dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    layers = ["full_attention", "sliding_attention"] * 2
    window = {"num_hidden_layers": 4, "layer_types": layers, "sliding_window": 64}
    for name, more in (("llama", {}), ("hybrid", window), ("draft", {"num_hidden_layers": 1})):
        build_tiny_model(directory / name)
        (directory / name / "config.json").write_text(json.dumps(llama | more), "utf-8")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(directory / name, directory / "plain", seed)


async def ask(stage: Stage, url: str, body: Mapping[str, Any], rank: int) -> tuple[int, list[int]]:
    """The cached tokens and the answer's token ids."""
    whole = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    headers = {"x-data-parallel-rank": str(rank)}
    answer = await stage.client.post_json(f"{url}/v1/completions", json.dumps(whole).encode(), headers)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0, answer["choices"][0].get("token_ids") or []


class Events:
    """The KV events of every rank of an engine."""

    def __init__(self, first: str, ranks: int) -> None:
        host, _, port = first.rpartition(":")
        endpoints = [f"{host}:{int(port) + rank}" for rank in range(ranks)]  # as vLLM has them
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.SUB) for _ in endpoints]
        self._next = [0] * len(endpoints)
        for socket, endpoint in zip(self._sockets, endpoints, strict=True):
            socket.subscribe(b"")
            socket.connect(endpoint)
        time.sleep(SUBSCRIBED_S)

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Rank and batch, until no more come. Raises RuntimeError if one was lost."""
        for rank, socket in enumerate(self._sockets):
            while socket.poll(QUIET_MS):
                _, seq, payload = socket.recv_multipart()
                if int.from_bytes(seq, "big") != self._next[rank]:
                    raise RuntimeError(f"batch {self._next[rank]} of rank {rank} was lost: try again")
                self._next[rank] += 1
                yield rank, payload

    def close(self) -> None:
        self._context.destroy(linger=0)


async def measure(stage: Stage, engine: Engine, layout: Layout, requests: int, seed: int) -> Counter[str]:
    """Ask one engine, and count. Raises RuntimeError."""
    rng, process = random.Random(seed), stage.fleet.processes[engine.name]
    _, metrics = await stage.client.get(f"{engine.url}/metrics")
    one_less = read_metrics(metrics.decode()).speculates
    found = [Prediction(layout.block_size, one_less=one_less) for _ in range(layout.ranks)]
    past: list[list[int]] = []
    wanted = prompts(rng, past, layout.block_size)
    events = Events(engine.events, layout.ranks)
    for number in range(requests):
        if layout.is_killed and number == requests // 2:
            events.close()
            await process.kill()
            await stage.fleet.start_again(engine.name)
            await wait_until_up(stage.client, stage.fleet, [engine])
            events = Events(engine.events, layout.ranks)
            for one in found:
                one.forget()
        rank = number % layout.ranks
        lora, salt = layout.loras[number % len(layout.loras)], layout.salts[number % len(layout.salts)]
        tokens = next(wanted)
        body: dict[str, Any] = {"prompt": tokens, "max_tokens": rng.choice([1, 2, 8, 40, 70])}
        body |= {"model": lora or "tiny"} | ({"cache_salt": salt} if salt else {})
        cached_tokens, output = await ask(stage, engine.url, body, rank)
        found[rank].compare(tokens, cached_tokens, lora, salt)
        past.append([*tokens, *output][:MOST_TOKENS])
        for place, payload in events.read():
            found[place].apply(payload)
    events.close()
    return sum((one.tally for one in found), Counter())


def row(name: str, tally: Mapping[str, int]) -> str:
    """A row of the table in docs/results.md."""
    cells = [
        " / ".join(str(tally.get(f"{who}: {how}", 0)) for how in ("exact", "over", "under"))
        for who in ("all groups", "one group")
    ]
    return f"| {name} | {tally['requests']} ({tally['hits']}) | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit code 1 if fewer than 99 % of a layout's predictions were exact."""
    parser = argparse.ArgumentParser(prog="scripts/test-vllm DIR --layouts", description=__doc__)
    parser.add_argument("directory", type=Path, help="DIR/venv has vLLM")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(LAYOUTS)}")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=16)
    flags = parser.parse_args(arguments)
    if unknown := sorted({*flags.names} - {*LAYOUTS}):
        parser.error(f"no layout {unknown[0]!r}: use {', '.join(LAYOUTS)}")
    return run("test-vllm", _run(flags))


async def _run(flags: argparse.Namespace) -> int:
    program, exact = find_program("vllm", flags.directory), True
    print("| layout | requests (with hits) | kvrouter: exact / over / under | one group |")
    print("|---|---|---|---|", flush=True)
    async with open_stage("test-vllm", starts_nats=False) as stage:
        build_models(stage.directory)
        for name in flags.names or LAYOUTS:
            try:
                engine = await start(stage, program, stage.directory, LAYOUTS[name])
                tally = await measure(stage, engine, LAYOUTS[name], flags.requests, flags.seed)
            except (RuntimeError, ScriptError) as error:
                print(f"| {name} | failed: {error} | | |", flush=True)
                exact = False
            else:
                print(row(name, tally), flush=True)
                exact &= tally["all groups: exact"] >= 0.99 * tally["requests"]
            await stage.fleet.stop_all()
    return 0 if exact else 1
