"""SGLang's KV events: the wire and the array shape of vLLM up to 0.23, with less in them.

Read in SGLang's source (`disaggregation/kv_events.py`, `mem_cache/events.py`), not observed on an engine:
one BlockStored per page of its radix tree, page hashes are signed 64-bit integers, a node's removals come
parent first, a batch may lack its rank and a replay its topic. There are no extra keys and no LoRA names:
what SGLang keeps apart by salt or adapter looks alike here. With EAGLE the token ids are pairs, and
nothing can be named.
"""

from __future__ import annotations

from kvrouter.worker.engines.adapter import Sink
from kvrouter.worker.engines.vllm import BlockStored, VllmAdapter

PAGE_OF_ONE = "page size 1 is not indexed: start SGLang with --page-size 16 (or 32, 64)"


class SglangAdapter(VllmAdapter):
    """Tells a publisher what SGLang's events mean: vLLM's, but for its default page size of one token."""

    def _stored(self, event: BlockStored, sink: Sink) -> None:
        if event.block_size == 1:
            self.skipped.note(PAGE_OF_ONE)
        else:
            super()._stored(event, sink)
