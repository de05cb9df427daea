"""Records what vLLM's KVCacheManager reuses with and without look-ahead hashes, and the events that it sends.

    DIR/venv/bin/python scripts/kit/engine_tests/lookahead.py tests/data/vllm_0.33_lookahead.json

with the Python of an environment that has vLLM 0.33, which needs no engine and no GPU for this. The file's
prompts part from an earlier one at, before and behind the ends of blocks; they stay.
"""

from __future__ import annotations

import base64
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

BLOCK = 16


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
        given = {name: value for name, value in prompt.items() if value is not None}
        steps.append({**given, "cached": cached, "events": events})
    return steps


if __name__ == "__main__":
    file = Path(sys.argv[1])
    recorded = json.loads(file.read_text("utf-8"))
    histories = {
        lookahead: record(
            int(lookahead), [{"tokens": step["tokens"], "salt": step.get("salt")} for step in steps]
        )
        for lookahead, steps in recorded["histories"].items()
    }
    recorded |= {"source": f"vllm {version('vllm')}", "histories": histories}
    file.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", "utf-8")
