"""The figures of a run, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from scripts.kit.engine_tests.answers import Sample
from scripts.kit.script import table_of


@dataclass(frozen=True, slots=True)
class Report:
    samples: Sequence[Sample]
    evicted_blocks: int
    chats_with_ids: int
    versions: dict[str, str]
    took_s: float

    @property
    def exact_share(self) -> float:
        """Share of requests whose prediction equals the engine's report."""
        return sum(sample.is_exact for sample in self.samples) / len(self.samples)

    @property
    def differences(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.is_exact]

    def as_json(self) -> dict[str, Any]:
        return {
            "versions": self.versions,
            "took_s": round(self.took_s, 1),
            "requests": len(self.samples),
            "evicted_blocks": self.evicted_blocks,
            "chats_with_ids": self.chats_with_ids,
            "exact_share": self.exact_share,
            "differences": [asdict(sample) for sample in self.differences],
            "samples": [asdict(sample) for sample in self.samples],
        }


def table(report: Report) -> list[Table | str]:
    lines: list[Table | str] = [_by(report.samples, "phase"), _by(report.samples, "kind")]
    lines += [
        f"difference: request {sample.number} ({sample.kind}, {sample.phase}, {sample.worker}): predicted"
        f" {sample.predicted_tokens} cached tokens of {sample.prompt_tokens}, reported {sample.cached_tokens}"
        for sample in report.differences
    ]
    versions = ", ".join(map(" ".join, report.versions.items()))
    exact = len(report.samples) - len(report.differences)
    lines.append(
        f"{exact} of {len(report.samples)} predictions exact ({report.exact_share:.1%}),"
        f" {report.evicted_blocks} blocks evicted, {report.chats_with_ids} chats sent with their token ids,"
        f" {versions}, {report.took_s:.0f} s"
    )
    return lines


def _by(samples: Sequence[Sample], attribute: str) -> Table:
    rows = []
    for value in dict.fromkeys(getattr(sample, attribute) for sample in samples):
        some = [sample for sample in samples if getattr(sample, attribute) == value]
        sums = (
            sum(sample.cached_tokens > 0 for sample in some),
            sum(sample.cached_tokens for sample in some),
            sum(sample.prompt_tokens for sample in some),
            sum(sample.is_exact for sample in some),
            sum(sample.predicted_tokens > sample.cached_tokens for sample in some),
            sum(sample.predicted_tokens < sample.cached_tokens for sample in some),
        )
        rows.append([value, len(some), *sums])
    columns = ("requests", "with a hit", "cached tokens", "of prompt tokens", "exact", "over", "under")
    return table_of("", (attribute, *columns), rows)
