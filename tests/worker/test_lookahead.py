"""What vLLM 0.33's own KVCacheManager reused with EAGLE, and its events, through agent, wire and pool."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.wire.hashes import block_seed, media_prompt_hashes
from kvrouter.worker.blocks.state import decode_state
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import EngineStream
from tests.core.worlds import T1, card, new_pool, prompt, request
from tests.worker.test_group_capture import TARGET, World

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm_0.33_lookahead.json").read_text("utf-8"))
BLOCK = RECORDED["block_size"]
HISTORIES: dict[str, list[dict[str, Any]]] = RECORDED["histories"]


class Speculating(World):
    """An agent whose engine says that it speculates, and what a replica makes of its card."""

    def agent(self, former: bytes | None) -> EngineRank:
        """A rank of a new agent, with the bytes of a saved state."""
        state = decode_state(former, "w").ranks[0] if former else None
        publisher = KvPublisher(self.bus, "w", BLOCK, model="m", incarnation=1)
        rank = EngineRank(publisher, EngineStream(can_replay=True), former=state, adapter=VllmAdapter())
        rank.set_speculates(speculates=True)
        return rank

    def predicted_blocks(self, step: dict[str, Any]) -> int:
        """The blocks that a router expects to be reused."""
        tokens, salt, ahead = step["tokens"], step.get("salt"), self.rank.lookahead
        pool = new_pool(card("w1", block_size=BLOCK, speculates=not ahead, lookahead=ahead))
        hashes = media_prompt_hashes(tokens, BLOCK, block_seed(None, salt), (), pool.lookahead)
        pool.index.store(T1, hashes[: self.index.overlap(hashes, len(hashes)).get(TARGET, 0)])
        (found,) = pool.candidates(request(prompt(hashes, len(tokens))))
        return found.widest_blocks


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("lookahead", list(HISTORIES))
def test_every_prediction(lookahead: str, restarts: bool) -> None:
    """Each is exact: with look-ahead hashes, and without them, where the last block is dropped."""
    world, steps, found = Speculating(), HISTORIES[lookahead], []
    for seq, step in enumerate(steps):
        found.append(world.predicted_blocks(step))
        world.apply(seq, base64.b64decode(step["events"]), seq * 10.0)
        if restarts and seq % 9 == 8:
            world.restart_agent()

    assert [step["cached"] // BLOCK for step in steps] == found
    assert any(found)
    assert int(lookahead) == world.rank.lookahead


def test_five_rows() -> None:
    """The same prompt, cut at a block's end, one token behind it, parting in a block, behind a block."""
    rows = {ahead: [step["cached"] // BLOCK for step in steps[1:6]] for ahead, steps in HISTORIES.items()}

    assert [6, 5, 6, 3, 2] == rows["1"]
    assert [5, 4, 5, 2, 2] == rows["0"]
