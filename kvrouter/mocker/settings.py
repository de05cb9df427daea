"""The settings of `python -m kvrouter.mocker`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from kvrouter.mocker.config import MockerConfig
from kvrouter.mocker.engine import EngineConfig
from kvrouter.settings.declare import Command, Setting, Settings

# 65,536 tokens at block size 16: small enough that blocks are evicted in a demo.
DEFAULT_NUM_BLOCKS = 4096
LARGEST_DEFAULT_MODEL_LEN = 32_768

_SERVER, _ENGINE = MockerConfig(), EngineConfig()


@dataclass(frozen=True, slots=True)
class EngineSettings(Settings):
    heading = "Engine"

    block_size: Annotated[int, Setting("tokens in a block", least=1, is_top=True)] = _ENGINE.block_size
    num_blocks: Annotated[int, Setting("device blocks", least=1, is_top=True)] = DEFAULT_NUM_BLOCKS
    host_blocks: Annotated[int, Setting("blocks of a host tier for evicted blocks", least=0)] = 0
    eviction: Annotated[Literal["lru", "lfu"], Setting("order of eviction")] = "lru"
    max_num_seqs: Annotated[int, Setting("requests in a step", least=1)] = _ENGINE.max_num_seqs
    max_num_batched_tokens: Annotated[int, Setting("tokens in a step", least=1)] = (
        _ENGINE.max_num_batched_tokens
    )
    max_model_len: Annotated[
        int | None,
        Setting(
            "most tokens of a request",
            least=1,
            default_text=f"{LARGEST_DEFAULT_MODEL_LEN}, or the capacity of the blocks",
        ),
    ] = None
    speedup: Annotated[float, Setting("speed relative to an H100 with an 8B model", above=0, is_top=True)] = (
        _SERVER.speedup
    )


@dataclass(frozen=True, slots=True)
class MockerSettings(Settings):
    heading = "Server"

    host: Annotated[str, Setting("address to listen on", metavar="HOST")] = _SERVER.host
    port: Annotated[
        int,
        Setting("0: a free port, which is logged", metavar="PORT", least=0, most=65535, is_top=True),
    ] = _SERVER.port
    kv_events: Annotated[
        str,
        Setting(
            "ZMQ endpoint of the KV events, always bound; rank N binds port + N",
            metavar="ENDPOINT",
            is_top=True,
        ),
    ] = _SERVER.kv_events
    kv_replay: Annotated[
        str, Setting("ZMQ endpoint of replays, bound; none: no replays", metavar="ENDPOINT|none", is_top=True)
    ] = _SERVER.kv_replay or "none"
    replay_buffer: Annotated[
        int | None, Setting("batches kept for replay", least=1, default_text="10000, as vLLM")
    ] = _SERVER.replay_buffer
    topic: Annotated[str, Setting("ZMQ topic of the events")] = _SERVER.topic
    event_shape: Annotated[
        Literal["map", "array"],
        Setting("shape of the events: map as in vLLM 0.32, array as in vLLM up to 0.23"),
    ] = "map"
    served_model_name: Annotated[str, Setting("the model's name", metavar="NAME", is_top=True)] = (
        _SERVER.model_name
    )
    model_path: Annotated[
        Path | None,
        Setting(
            "directory with tokenizer and chat template; without it: token ids only",
            metavar="DIR",
            is_top=True,
        ),
    ] = None
    lora: Annotated[tuple[str, ...], Setting("also serve a LoRA adapter", metavar="NAME")] = ()
    max_num_queued_reqs: Annotated[
        int | None,
        Setting("answer 503 beyond N unfinished requests", least=1, default_text="no limit"),
    ] = None
    data_parallel_size: Annotated[int, Setting("ranks, each with a separate cache", least=1)] = (
        _SERVER.data_parallel_size
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
