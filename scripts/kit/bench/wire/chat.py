"""Chat with real tokenization, kv mode and KV events: our frontend and Dynamo's, each with its own mockers.

Both get the same bodies and use the same tokenizer and chat template. The CPU time of the frontend's process
is compared: in both systems it contains the HTTP server, tokenizer and router.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import random
from pathlib import Path

import tokenizers

from scripts.kit import deployment
from scripts.kit.bench.wire.rounds import Contender
from scripts.kit.bench.wire.routers import answering
from scripts.kit.bench.wire.stage import Stage
from scripts.kit.bench.wire.targets import DYNAMO, OURS_KV
from scripts.kit.bench.wire.works import MODEL, Work
from scripts.kit.ports import free_ports

PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 4000, 3600, 64
GROUPS, CONCURRENCY, ENGINES = 8, 16, 2
BLOCK_SIZE, NUM_BLOCKS = 16, 16_384
# With these both mockers send a token about every 6 ms. Tokens that arrive together cost a frontend less.
OUR_SPEEDUP, DYNAMO_SPEEDUP = 1.0, 2.0
PATH = "/v1/chat/completions"


class Prompts:
    """Chats that share a few system messages; each question is used once."""

    def __init__(self, model_path: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._words = " ".join(pydoc_data.topics.topics.values()).split()
        self._rng = random.Random(1)
        self._systems = itertools.cycle([self._text(SHARED_TOKENS) for _ in range(GROUPS)])

    def bodies(self, count: int) -> list[bytes]:
        """The next `count` bodies, all new."""
        return [self._body(next(self._systems)) for _ in range(count)]

    def _body(self, system: str) -> bytes:
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": self._text(PROMPT_TOKENS - SHARED_TOKENS)},
        ]
        body = {
            "model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "min_tokens": OUTPUT_TOKENS,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        return json.dumps(body).encode()

    def _text(self, tokens: int) -> str:
        start = self._rng.randrange(len(self._words) - 2 * tokens)
        ids = self._tokenizer.encode(" ".join(self._words[start : start + 2 * tokens])).ids
        return str(self._tokenizer.decode(ids[:tokens]))


def chat_work(prompts: Prompts, requests: int) -> Work:
    """One run, with new prompts."""
    return Work(
        "chat", f"chat of {PROMPT_TOKENS:,} tokens, {SHARED_TOKENS:,} shared, {OUTPUT_TOKENS} streamed",
        prompts.bodies(requests), CONCURRENCY, requests, True, 300.0, PATH,
    )  # fmt: skip


async def start_ours(stage: Stage) -> Contender:
    """A frontend in kv mode, mockers with agents that send KV events."""
    plan = deployment.Plan(
        "kv", stage.model_path, engines=ENGINES, replicas=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
        speedup=OUR_SPEEDUP, namespace="chat", frontend_flags=("--no-router-replica-sync",),
        mocker_flags=dict.fromkeys(range(ENGINES), (f"--served-model-name={MODEL}",)),
    )  # fmt: skip
    deployed = await deployment.deploy(stage.fleet, stage.client, plan, stage.nats_url)
    (frontend,), (replica,) = deployed.frontends, deployed.replicas
    return Contender(OURS_KV, int(replica.url.rpartition(":")[2]), frontend.pid)


async def start_dynamo(stage: Stage, python: Path, prompts: Prompts) -> Contender:
    """Dynamo's frontend in kv mode and its mockers, with discovery by files and events over ZMQ."""
    (port,) = free_ports(1)
    planes = ["--discovery-backend", "file", "--event-plane", "zmq", "--request-plane", "tcp"]
    env = {"DYN_FILE_KV": str(stage.directory / "dynamo"), "DYN_LOG": "warn"}
    engines = [
        str(python), "-m", "dynamo.mocker", "--model-path", str(stage.model_path), "--model-name", MODEL,
        "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS),
        "--num-workers", str(ENGINES), "--speedup-ratio", str(DYNAMO_SPEEDUP), *planes,
    ]  # fmt: skip
    await stage.fleet.start("dynamo-mockers", engines, env)
    frontend = [
        str(python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
        "--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_SIZE), *planes,
    ]  # fmt: skip
    process = await stage.fleet.start("dynamo-frontend", frontend, env)
    contender = Contender(DYNAMO, port, process.pid)
    await answering(stage.fleet, DYNAMO, process, chat_work(prompts, 1).load(port))
    return contender
