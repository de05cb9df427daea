"""The settings of `python -m kvrouter.lab.mocker`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.events import LOOKAHEAD
from kvrouter.settings.declare import Command, Settings, setting

# 65,536 tokens at block size 16: small enough that blocks are evicted in a demo.
DEFAULT_NUM_BLOCKS = 4096
LARGEST_DEFAULT_MODEL_LEN = 32_768

_SERVER, _ENGINE = MockerConfig(), EngineConfig()


@dataclass(frozen=True, slots=True)
class EngineSettings(Settings):
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
    speedup: float = setting(
        _SERVER.speedup, "speed relative to an H100 with an 8B model", above=0, is_top=True
    )


@dataclass(frozen=True, slots=True)
class MockerSettings(Settings):
    heading = "Server"

    host: str = setting(_SERVER.host, "address to listen on", metavar="HOST")
    port: int = setting(
        _SERVER.port, "0: a free port, which is logged", metavar="PORT", least=0, most=65535, is_top=True
    )
    kv_events: str = setting(
        _SERVER.kv_events,
        "ZMQ endpoint of the KV events, always bound; rank N binds port + N",
        metavar="ENDPOINT",
        is_top=True,
    )
    kv_replay: str = setting(
        _SERVER.kv_replay or "none",
        "ZMQ endpoint of replays, bound; none: no replays",
        metavar="ENDPOINT|none",
        is_top=True,
    )
    replay_buffer: int | None = setting(
        _SERVER.replay_buffer, "batches kept for replay", least=1, default_text="10000, as vLLM"
    )
    topic: str = setting(_SERVER.topic, "ZMQ topic of the events")
    event_shape: Literal["map", "array", "map-0.33"] = setting(
        "map",
        "shape of the events: map as in vLLM 0.32, array as in vLLM up to 0.23, map-0.33 as in 0.33 with "
        "EAGLE, whose blocks are named by the token behind them, too",
    )
    served_model_name: str = setting(_SERVER.model_name, "the model's name", metavar="NAME", is_top=True)
    model_path: Path | None = setting(
        None,
        "directory with tokenizer and chat template; without it: token ids only",
        metavar="DIR",
        is_top=True,
    )
    lora: tuple[str, ...] = setting((), "also serve a LoRA adapter", metavar="NAME")
    max_num_queued_reqs: int | None = setting(
        None, "answer 503 beyond N unfinished requests", least=1, default_text="no limit"
    )
    data_parallel_size: int = setting(
        _SERVER.data_parallel_size, "ranks, each with a separate cache", least=1
    )
    engine: EngineSettings = field(default_factory=EngineSettings)

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
            lookahead=LOOKAHEAD.get(self.event_shape, 0),
        )
        return MockerConfig(
            engine=engine,
            host=self.host,
            port=self.port,
            kv_events=self.kv_events,
            kv_replay=None if self.kv_replay == "none" else self.kv_replay,
            replay_buffer=self.replay_buffer,
            topic=self.topic,
            event_shape=self.event_shape,
            model_name=self.served_model_name,
            model_path=self.model_path,
            loras=self.lora,
            speedup=given.speedup,
            data_parallel_size=self.data_parallel_size,
            max_num_queued_reqs=self.max_num_queued_reqs,
        )


COMMAND = Command("mocker", MockerSettings, "A simulated vLLM engine. No GPU needed.")
