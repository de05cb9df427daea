"""/metrics as text. State that grows with the fleet is written in slices: 1,000 workers have 25,000 lines.

    plain collectors  ──> prometheus_client, at once: a few dozen series
    StateCollectors   ──> a line for each sample, 1 ms at a time; the event loop runs between slices

The samples of a StateCollector are therefore from slightly different moments.
"""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Collection, Iterable
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvrouter.telemetry.catalog import METRIC_OF, METRICS
from kvrouter.telemetry.metrics import Sample, StateCollector

# How long a scrape may hold up the event loop at once. In one piece, even a scrape of single metrics held it
# up for 20 to 40 ms in a large fleet.
SLICE_S = 0.001
# Samples between two readings of the clock, as a mask: reading it for each would cost more than some samples.
_LOOK_EVERY = 63
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Registry(CollectorRegistry):
    """prometheus_client's registry, with the StateCollectors kept separately."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[StateCollector] = []

    def register(self, collector: Collector) -> None:
        if isinstance(collector, StateCollector):
            self.states.append(collector)
        else:
            super().register(collector)

    def collect(self) -> Iterable[Metric]:
        """All families at once, as prometheus_client asks for them."""
        yield from super().collect()
        for state in self.states:
            yield from state.collect()


class _Plain:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return super(Registry, self._registry).collect()


async def exposition(registry: Registry, slice_s: float = SLICE_S, *, names: Collection[str] = ()) -> bytes:
    """All samples, or only those with these names, in Prometheus's text format."""
    plain = generate_latest(_Plain(registry))
    parts = [_only(plain, names) if names else plain]
    for state in registry.states:
        try:
            parts.append(await _written(state.samples, names, slice_s))
        except RuntimeError:
            # A dictionary changed its size between two slices. Once more, in one piece: that cannot happen.
            parts.append(await _written(state.samples, names, math.inf))
    return b"".join(parts)


def _only(text: bytes, names: Collection[str]) -> bytes:
    """The samples with these names, after the HELP and TYPE lines of their families."""
    kept: list[str] = []
    head: list[str] = []
    # not splitlines(): it also cuts at characters such as U+2028, which a label may contain
    for line in io.StringIO(text.decode(), newline="\n"):
        if line.startswith("#"):
            head = [*head, line] if line.startswith("# TYPE") else [line]
        elif line.partition(" ")[0].partition("{")[0] in names:
            kept += [*head, line]
            head = []
    return "".join(kept).encode()


async def _written(samples: Callable[[], Iterable[Sample]], names: Collection[str], slice_s: float) -> bytes:
    families: dict[str, list[str]] = {}
    end = perf_counter() + slice_s
    for number, (name, labels, value) in enumerate(samples()):
        if not number & _LOOK_EVERY and perf_counter() > end:
            await asyncio.sleep(0)
            end = perf_counter() + slice_s
        if names and name not in names:
            continue
        metric = METRIC_OF[name]
        lines = families.get(metric)
        if lines is None:
            lines = families[metric] = [head(metric)]
        number_text = floatToGoString(value)  # type: ignore[no-untyped-call]
        lines.append(f"{name}{_labels(labels)} {number_text}\n")
    parts = []
    for lines in families.values():
        parts.append("".join(lines).encode())
        if perf_counter() > end:
            await asyncio.sleep(0)
            end = perf_counter() + slice_s
    return b"".join(parts)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    pairs = [f'{name}="{value.translate(_ESCAPED)}"' for name, value in sorted(labels.items())]
    return f"{{{','.join(pairs)}}}"


def head(metric: str) -> str:
    """The lines before its samples."""
    kind, _, text, _ = METRICS[metric]
    return f"# HELP {metric} {text}\n# TYPE {metric} {kind}\n"
