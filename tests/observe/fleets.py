"""What replicas answer at /fleet, made up."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvrouter.core.wire.heartbeats import Times, Traffic
from kvrouter.observe.document import Fleet, PoolRow, ReplicaRow, TargetRow


def target(worker: str, **facts: Any) -> TargetRow:
    row = TargetRow(
        pool="m-1", worker=worker, rank=0, url="http://w", engine="mocker", state="up", eligible=True,
        problems=[], requests=1, running=1, waiting=0, kv_usage=0.5, active_blocks=3, total_blocks=9,
        charged_prefill_tokens=64, blocks=8, answers=10, errors=0, ttft_sum_s=1.0, ttft_count=10,
        predicted_tokens=5, reported_tokens=5, seq=7, digest="d", lag_frames=0, stale_s=0.1, live=True,
        digest_mismatches=0,
    )  # fmt: skip
    return replace(row, **facts)


def fleet(*targets: TargetRow, router_id: str = "a", hears: str = "a", **facts: Any) -> Fleet:
    replicas = [ReplicaRow(one, f"http://{one}", one == router_id, 0, 0, 0) for one in hears]
    pool = PoolRow(
        pool="m-1", model="m", workers=1, targets=1, eligible=1, block_size=16, queue=0, problems=[],
        reusable_tokens=100, uncached_tokens={"chosen": 50, "best": 40, "pooled": 20}, later_s=1.0,
        ttft_decisions=10, prefill_tokens_per_s=1.0, mode="kv", weight="auto", doubt="",
    )  # fmt: skip
    traffic = Traffic(
        10, 1, 100, 50, 200, Times((0.1, 1.0), [8, 2, 0]), Times((0.1,), [1, 0]), reusable_tokens=100,
        uncached_tokens={"chosen": 50, "best": 40, "pooled": 20}, later_s=1.0, ttft_decisions=10,
    )  # fmt: skip
    made = Fleet(
        time=1.0, router_id=router_id, version="1", mode="kv", weight="auto", revision=0, started_s=0.5,
        status="ready", reasons=[], pools=[pool], targets=[*targets], replicas=replicas, traffic=traffic,
        fleet_traffic=traffic,
    )  # fmt: skip
    return replace(made, **facts)
