"""The settings of `kvrouter analyze`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvrouter.errors import ConfigError
from kvrouter.lab.simulate.step_model import STEP_MODELS
from kvrouter.observe.settings import ReplicaAccess, read_url
from kvrouter.settings.declare import Command, Settings, setting


@dataclass(frozen=True, slots=True)
class AnalyzeSettings(Settings):
    heading = "Analysis"

    trace: Path | None = setting(
        None,
        "requests in JSON lines as Mooncake's or Qwen-Bailian's, also .gz",
        metavar="TRACE",
        is_positional=True,
        is_top=True,
    )
    live: str | None = setting(
        None,
        "instead of a trace: the decisions that a frontend keeps, from its admin listener",
        metavar="ADMIN_URL",
        read=read_url,
        is_top=True,
    )
    model: str | None = setting(None, "with --live: the model, if there are several", metavar="NAME")
    requests: int | None = setting(None, "read only the first ones", least=1, default_text="all", is_top=True)
    workers: int | None = setting(
        None, "engines of the fleet", least=1, most=4096, default_text="8, or those of --live", is_top=True
    )
    num_blocks: int | None = setting(
        None, "KV blocks of each engine", least=1, default_text="27000, or those of --live", is_top=True
    )
    block_size: int | None = setting(
        None, "tokens of a block", least=1, default_text="16, or that of --live", is_top=True
    )
    save_trace: Path | None = setting(
        None,
        "with --live: also write the requests to this file, a trace for kvrouter simulate and tune",
        is_top=True,
    )
    output_tokens: int | None = setting(
        None, "with --live: the length of every answer, which decisions do not have", least=1
    )
    timing: str = setting(
        "h100", "prefill and decode apart: the engines' step model", choices=tuple(STEP_MODELS)
    )
    pace: float = setting(1.0, "prefill and decode apart: times the rate of the requests", above=0)
    json: Path | None = setting(None, "also write the figures to this file", is_top=True)
    html: Path | None = setting(
        None, "also write a page with plots to this file (needs kvrouter[report])", is_top=True
    )
    access: ReplicaAccess = field(default_factory=ReplicaAccess)

    def checked(self) -> Self:
        if (self.trace is None) == (self.live is None):
            raise ConfigError("give a trace, or --live ADMIN_URL: one of the two")
        if self.save_trace is not None and self.live is None:
            raise ConfigError("--save-trace needs --live")
        if self.output_tokens is not None and self.live is None:
            raise ConfigError("--output-tokens needs --live: a trace has the lengths of its answers")
        if self.save_trace is not None and self.output_tokens is None:
            raise ConfigError("--save-trace needs --output-tokens")
        return self


COMMAND = Command(
    "analyze",
    AnalyzeSettings,
    "What a trace, or live traffic, holds for a router: lengths, hit rates, prefixes, working set.\n"
    "Then what the published tuning guide makes of it, with the flags.",
)
