"""The settings of one mocker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.events import EVENT_SHAPES
from kvrouter.lab.mocker.eviction import ORDERS


@dataclass(frozen=True, slots=True)
class MockerConfig:
    """One field for each flag."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 0
    kv_events: str = "tcp://127.0.0.1:0"
    kv_replay: str | None = "tcp://127.0.0.1:0"
    # Batches kept for replay; None: as many as vLLM keeps.
    replay_buffer: int | None = None
    topic: str = ""
    event_shape: str = "map"
    model_name: str = "mock"
    model_path: Path | None = None
    loras: tuple[str, ...] = ()
    speedup: float = 1.0
    data_parallel_size: int = 1
    # Beyond this many unfinished requests, waiting or running, vLLM answers 503.
    max_num_queued_reqs: int | None = None

    def __post_init__(self) -> None:
        if self.speedup <= 0:
            raise ConfigError(f"speedup {self.speedup}: give a number above 0")
        if self.event_shape not in EVENT_SHAPES:
            raise ConfigError(f"event shape {self.event_shape!r}: use one of {', '.join(EVENT_SHAPES)}")
        if self.engine.eviction not in ORDERS:
            raise ConfigError(f"eviction {self.engine.eviction!r}: use one of {', '.join(ORDERS)}")
        if self.model_name in self.loras:
            raise ConfigError(f"{self.model_name!r} names both the model and a LoRA: rename one of them")
