"""The settings of `python -m kvrouter.lab.mocker`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.events import LOOKAHEAD
from kvrouter.settings.declare import Command, Settings, setting

# 65,536 tokens at block size 16: small enough that blocks are evicted in a demo.
DEFAULT_NUM_BLOCKS = 4096
LARGEST_DEFAULT_MODEL_LEN = 32_768

_ENGINE = EngineConfig()


@dataclass(frozen=True, slots=True)
class MockEngineSettings(Settings):
    heading = "Engine"

    block_size: int = setting(_ENGINE.block_size, "tokens in a block", least=1, is_top=True)
    num_blocks: int = setting(DEFAULT_NUM_BLOCKS, "device blocks", least=1, is_top=True)
    host_blocks: int = setting(0, "blocks of a host tier for evicted blocks", least=0)
    eviction: Literal["lru", "lfu"] = setting("lru", "order of eviction")
    max_num_seqs: int = setting(_ENGINE.max_num_seqs, "requests in a step", least=1)
    max_num_batched_tokens: int = setting(_ENGINE.max_num_batched_tokens, "tokens in a step", least=1)
    max_model_len: int | None = setting(
        None,
        "most tokens of a request",
        least=1,
        default_text=f"{LARGEST_DEFAULT_MODEL_LEN}, or the capacity of the blocks",
    )


@dataclass(frozen=True, slots=True)
class MockerSettings(Settings):
    heading = "Server"

    server: MockerConfig = field(default_factory=MockerConfig)
    engine: MockEngineSettings = field(default_factory=MockEngineSettings)

    def config(self) -> MockerConfig:
        """Raises ConfigError."""
        given = self.engine
        capacity_tokens = given.num_blocks * given.block_size
        engine = EngineConfig(
            num_blocks=given.num_blocks,
            block_size=given.block_size,
            host_blocks=given.host_blocks,
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            max_model_len=given.max_model_len or min(LARGEST_DEFAULT_MODEL_LEN, capacity_tokens),
            eviction=given.eviction,
            lookahead=LOOKAHEAD.get(self.server.event_shape, 0),
        )
        return replace(self.server, engine=engine)


COMMAND = Command("mocker", MockerSettings, "A simulated vLLM engine. No GPU needed.")
