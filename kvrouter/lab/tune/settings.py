"""The settings of `kvrouter tune`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from kvrouter.errors import ConfigError
from kvrouter.lab.simulate.measures import Slo
from kvrouter.lab.simulate.step_model import STEP_MODELS
from kvrouter.settings.declare import Command, Settings, setting


@dataclass(frozen=True, slots=True)
class TuneSettings(Settings):
    heading = "Search"

    trace: Path = setting(
        MISSING,
        "requests in JSON lines as Mooncake's or Qwen-Bailian's, also .gz",
        is_positional=True,
        is_top=True,
    )
    workers: int = setting(8, "number of engines", least=1, is_top=True)
    slo_ttft_s: float | None = setting(
        None, "most seconds to the first token; with an SLO, goodput is maximized", above=0, is_top=True
    )
    slo_itl_ms: float | None = setting(
        None,
        "most ms between tokens, mean of a request; with an SLO, goodput is maximized",
        above=0,
        is_top=True,
    )
    timing: str = setting(
        "reference", "the engines' step model (docs/simulate.md)", choices=tuple(STEP_MODELS), is_top=True
    )
    kv_tokens: int | None = setting(
        None, "tokens in the KV cache of each engine", least=1, default_text="--cache", is_top=True
    )
    cache: float = setting(
        1.0, "instead: all engines' blocks / distinct blocks of the trace", above=0, is_top=True
    )
    pace: float = setting(1.0, "times the trace's own pace", above=0, is_top=True)
    load: float | None = setting(
        None, "instead: share of the measured saturation", above=0, default_text="--pace", is_top=True
    )
    requests: int | None = setting(
        None, "read only the first ones", least=20, default_text="all", is_top=True
    )
    replicas: int = setting(1, "routers; a request comes through one at random", least=1)
    sync_ms: float = setting(5.0, "until a booking reaches the other routers", least=0)
    trials: int = setting(60, "settings to try", least=1, most=10_000, is_top=True)
    seeds: int = setting(5, "runs of the test, each with other arrivals", least=2, most=100, is_top=True)
    seed: int = setting(1, "seed of the search", least=0)
    jobs: int = setting(1, "processes", least=1, most=1024, is_top=True)
    json: Path | None = setting(None, "also write all trials and figures to this file", is_top=True)
    write_config: Path | None = setting(
        None, "where to write the EndpointPickerConfig if mode scored wins", default_text="it is printed"
    )

    @property
    def has_slo(self) -> bool:
        return self.slo_ttft_s is not None or self.slo_itl_ms is not None

    @property
    def slo(self) -> Slo:
        """What is not given has the simulator's default."""
        other = Slo()
        return Slo(
            self.slo_ttft_s or other.ttft_s,
            self.slo_itl_ms / 1000 if self.slo_itl_ms is not None else other.itl_s,
        )

    def checked(self) -> TuneSettings:
        if self.load is not None and self.pace != 1.0:
            raise ConfigError("--load and --pace both say how fast requests come: use one of them")
        if self.kv_tokens is not None and self.cache != 1.0:
            raise ConfigError("--kv-tokens and --cache both say how large the caches are: use one of them")
        return self


COMMAND = Command(
    "tune",
    TuneSettings,
    "Search mode, weights, temperature, queue and sessions for a trace in the simulator, and test the best\n"
    "ones on requests that the search has not seen. Prints the winner's flags, or that none is better",
)
