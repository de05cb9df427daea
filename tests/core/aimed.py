"""Hashes that a client could choose if it knew a native table's placement secret."""

from __future__ import annotations

import functools
import importlib
import random
from array import array
from typing import Any

SECRET = 0x0123456789ABCDEF
AT_ONE_END = 64


@functools.cache
def aimed(secret: int) -> list[int]:
    """Hashes of one shard: half have their home in its first bucket, half in its last, up to 8 buckets."""
    table: Any = native_table().FlatTable(secret)
    first: list[int] = []
    last: list[int] = []
    rng = random.Random(secret)
    while min(len(first), len(last)) < AT_ONE_END:
        hashes = array("Q", rng.randbytes(1 << 19))
        for hash_, (shard, home) in zip(hashes, table.homes(hashes), strict=True):
            if shard == 77 and (home >> 29) in {0, 7}:
                (last if home >> 29 else first).append(hash_)
    return first[:AT_ONE_END] + last[:AT_ONE_END]


@functools.cache
def counted_together(secret: int) -> list[int]:
    """Hashes whose place in a CountedSet of up to 64 places is the first or the last."""
    hashes = array("Q", random.Random(secret).randbytes(1 << 14))
    homes = native_table().FlatTable(secret).homes(hashes)
    return [hash_ for hash_, (_, home) in zip(hashes, homes, strict=True) if home >> 3 & 63 in {0, 63}]


def native_table() -> Any:
    """The C module, also while the Python version is in use."""
    return importlib.import_module("kvrouter.core.native.table")
