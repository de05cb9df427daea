"""The settings of one mocker's server; each of its flags is a field."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.events import EVENT_SHAPES
from kvrouter.lab.mocker.eviction import ORDERS
from kvrouter.settings.declare import Settings, setting


@dataclass(frozen=True, slots=True)
class MockerConfig(Settings):
    heading = "Server"

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = setting("127.0.0.1", "address to listen on", metavar="HOST")
    port: int = setting(
        0, "0: a free port, which is logged", metavar="PORT", least=0, most=65535, is_top=True
    )
    kv_events: str = setting(
        "tcp://127.0.0.1:0",
        "ZMQ endpoint of the KV events, always bound; rank N binds port + N",
        metavar="ENDPOINT",
        is_top=True,
    )
    kv_replay: str | None = setting(
        "tcp://127.0.0.1:0",
        "ZMQ endpoint of replays, bound; none: no replays",
        metavar="ENDPOINT|none",
        read=lambda text: None if text == "none" else text,
        is_top=True,
    )
    replay_buffer: int | None = setting(
        None, "batches kept for replay", least=1, default_text="10000, as vLLM"
    )
    topic: str = setting("", "ZMQ topic of the events")
    event_shape: str = setting(
        "map",
        "shape of the events: map as in vLLM 0.32, array up to 0.23, map-0.33 with EAGLE",
        choices=EVENT_SHAPES,
    )
    model_name: str = setting(
        "mock", "the model's name", name="served-model-name", metavar="NAME", is_top=True
    )
    model_path: Path | None = setting(
        None,
        "directory with tokenizer and chat template; without it: token ids only",
        metavar="DIR",
        is_top=True,
    )
    loras: tuple[str, ...] = setting((), "also serve a LoRA adapter", name="lora", metavar="NAME")
    max_num_queued_reqs: int | None = setting(
        None, "answer 503 beyond N unfinished requests", least=1, default_text="no limit"
    )
    data_parallel_size: int = setting(1, "ranks, each with a separate cache", least=1)
    role: str = setting("both", "prefill or decode: half of a pair", choices=("both", "prefill", "decode"))
    kv_connector: str | None = setting(
        None,
        "how it hands KV blocks over",
        choices=("nixl", "mooncake", "example", "sglang", "p2p"),
        default_text="not",
    )
    kv_hash: str = setting("", "compatibility hash of hand-overs", metavar="TEXT")
    kv_lease_s: float = setting(30.0, "seconds that blocks wait for their reader", above=0)
    # 16 tokens of 128 KiB over 400 Gbit/s of RDMA.
    kv_transfer_ms_per_block: float = setting(0.04, "milliseconds to read a block", least=0)
    kv_store: Path | None = setting(None, "directory that example shares", metavar="DIR")
    speedup: float = setting(
        1.0, "speed relative to an H100 with an 8B model", above=0, heading="Engine", is_top=True
    )

    def __post_init__(self) -> None:
        if self.speedup <= 0:
            raise ConfigError(f"speedup {self.speedup}: give a number above 0")
        if self.event_shape not in EVENT_SHAPES:
            raise ConfigError(f"event shape {self.event_shape!r}: use one of {', '.join(EVENT_SHAPES)}")
        if self.engine.eviction not in ORDERS:
            raise ConfigError(f"eviction {self.engine.eviction!r}: use one of {', '.join(ORDERS)}")
        if self.role != "both" and self.kv_connector is None:
            raise ConfigError(f"--role {self.role} without a connector: give --kv-connector")
        if (self.kv_connector == "example") != (self.kv_store is not None):
            raise ConfigError("--kv-connector example and --kv-store DIR belong together: give both or none")
        if self.kv_connector == "p2p" and (self.role != "both" or self.data_parallel_size > 1):
            raise ConfigError("--kv-connector p2p: a mocker of whole requests with one rank has it")
        if self.model_name in self.loras:
            raise ConfigError(f"{self.model_name!r} names both the model and a LoRA: rename one of them")
