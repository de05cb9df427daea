"""Records what vLLM's KVCacheManager reuses with and without look-ahead hashes, and the events that it sends.

    DIR/venv/bin/python scripts/kit/engine_tests/lookahead.py tests/data/vllm_0.33_lookahead.json

with the Python of an environment that has vLLM 0.33, which needs no engine and no GPU for this.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

BLOCK = 16
LOOKAHEADS = (0, 1, 3)
PROMPTS = 40


def record(lookahead: int, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each prompt with the tokens that are reused for it, and the batch of events that follows."""
    import msgspec
    import torch
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec, is_eagle_group=True)]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=4096,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        use_eagle=not lookahead,
        num_hash_lookahead_tokens=lookahead,
        num_prefill_lookahead=max(1, lookahead),
        enable_kv_cache_events=True,
    )
    hasher = get_request_block_hasher(BLOCK, sha256_cbor, lookahead)
    steps = []
    for number, prompt in enumerate(prompts):
        tokens, salt = prompt["tokens"], prompt.get("salt")
        asked = Request(
            str(number), tokens, SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=hasher
        )
        blocks, cached, _ = manager.get_computed_blocks(asked)
        manager.allocate_slots(asked, len(tokens) - cached, cached, blocks)
        asked.num_computed_tokens = len(tokens)
        manager.free(asked)
        batch = KVEventBatch(ts=float(number), events=manager.take_events(), data_parallel_rank=0)
        events = base64.b64encode(msgspec.msgpack.encode(batch)).decode()
        steps.append({**prompt, "cached": cached, "events": events})
    return steps


def made(seed: int) -> list[dict[str, Any]]:
    """Prompts that part from an earlier one at, before and behind the ends of blocks."""
    dice = random.Random(seed)

    def words(count: int) -> list[int]:
        return [dice.randrange(5, 9999) for _ in range(count)]

    first = words(101)
    found: list[dict[str, Any]] = [
        {"tokens": tokens}
        for tokens in (first, first, first[:96], first[:97], first[:56] + words(30), first[:48] + words(30))
    ]
    while len(found) < PROMPTS:
        before: list[int] = dice.choice(found)["tokens"]
        end = len(before) // BLOCK * BLOCK
        cuts = [
            dice.randrange(len(before) + 1),
            end,
            end + dice.randrange(5),
            dice.randrange(end + 1) // BLOCK * BLOCK,
        ]
        tokens = before[: dice.choice(cuts)] + words(dice.choice([0, 1, 2, 3, 17, 40]))
        if tokens:
            found.append({"tokens": tokens, **({"salt": "s"} if dice.random() < 0.1 else {})})
    return found


if __name__ == "__main__":
    histories = {str(one): record(one, made(one)) for one in LOOKAHEADS}
    recorded = {"source": f"vllm {version('vllm')}", "block_size": BLOCK, "histories": histories}
    Path(sys.argv[1]).write_text(json.dumps(recorded, separators=(",", ":")) + "\n", "utf-8")
