"""What a prompt finds on a target: the blocks that the engine can skip, and the tokens that are left."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

# The worth of a block in host memory or on disk, relative to one on the device. Source: Dynamo's defaults.
HOST_CREDIT = 0.75
DISK_CREDIT = 0.25


class Overlap(Struct, frozen=True, gc=False):
    """What one prompt finds on one target.

    `overlap_blocks`: the blocks that the engine can skip. `credit_blocks`: the same with the blocks of slower
    tiers, at their worth. `widest_blocks`: the depth over all tiers, which the engine's cached_tokens should
    match.
    """

    overlap_blocks: int
    credit_blocks: float
    widest_blocks: int


def find_overlap(isl: int, block_size: int, tier_depths: Sequence[int], in_flight_depth: int) -> Overlap:
    """The overlap from the index's depth per tier set, and from the depth that requests in flight hold."""
    # an engine always computes the last token, so the overlap never includes it
    most = max(0, isl - 1) // block_size
    device = min(max(tier_depths[0] if tier_depths else 0, in_flight_depth), most)
    if len(tier_depths) < 2:
        return Overlap(device, device, device)
    host = min(max(tier_depths[1], device), most)
    disk = min(max(tier_depths[2], host), most) if len(tier_depths) > 2 else host
    credit = device + HOST_CREDIT * (host - device) + DISK_CREDIT * (disk - host)
    return Overlap(device, credit, disk)


def uncached_tokens(isl: int, block_size: int, overlap: Overlap) -> int:
    """The prompt tokens that the target would have to compute, rounded to whole tokens."""
    return max(0, round(isl - overlap.credit_blocks * block_size))
