"""Mutations of MessagePack messages, as from a broken, newer or hostile sender.

A message is mutated in its structure (a value replaced, inserted, dropped, repeated, moved by one or far)
or in its bytes (bits flipped, the end cut off or added to). Chance is passed in: a seed repeats a run.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack

# Numbers at the limits of their types; texts and bytes from names, subjects and ops.
EDGES: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**48, 2**48 + 1, 2**53, 2**62,
    2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), None, True, False, 1.5, 1e300, float("nan"),
    float("inf"), float("-inf"), "", "x" * 5000, "\x00", "two\nlines", "\x1b[31m", "é", "../..", b"",
    b"\x00" * 8, b"\xff" * 7, b"\xff" * 4096, [], {}, [[]], [[[[[[]]]]]], {"a": 1}, {1: 2}, [1] * 500,
    [1, 0, None, b"\x05" + bytes(7)], [2, 0, b"\x05" + bytes(7)], [3], [4, 1, 1], [99, "new"],
    [16, 1, "r", "w0", 0, b"", 1, 0, 1], [18, 1],
)  # fmt: skip


class Mutator:
    """Makes mutants."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def mutate(self, data: bytes) -> bytes:
        """A mutant of a message. If this is not MessagePack, its bytes are mutated."""
        rng = self._rng
        if rng.random() < 0.75:
            try:
                value = msgpack.unpackb(data, strict_map_key=False, raw=False)
                for _ in range(rng.choice((1, 1, 1, 2, 4))):
                    value = self.mutant_of(value)
                packed: bytes = msgpack.packb(value)
                return packed
            except (ValueError, OverflowError, TypeError):
                pass
        return self.damaged(data)

    def mutant_of(self, value: Any) -> Any:
        """The value with one change somewhere in it."""
        rng = self._rng
        if rng.random() < 0.12:
            return rng.choice(EDGES)
        if isinstance(value, list) and value:
            return self._of_list(list(value))
        if isinstance(value, dict) and value:
            return self._of_dict(dict(value))
        if isinstance(value, bytes):
            return self.damaged(value)
        if isinstance(value, int) and not isinstance(value, bool):
            moved: int = value + rng.choice((-1, 1, 2, -8, 1000, -1000, 10**6, 1 << rng.randrange(63)))
            return max(-(2**63), min(2**64 - 1, moved))
        return rng.choice(EDGES)

    def _of_list(self, values: list[Any]) -> list[Any]:
        rng = self._rng
        at = rng.randrange(len(values))
        match rng.choice(
            ("inside", "inside", "inside", "inside", "insert", "drop", "append", "repeat", "swap")
        ):
            case "insert":
                values.insert(at, rng.choice(EDGES))
            case "drop":
                del values[at]
            case "append":
                values.append(rng.choice(EDGES))
            case "repeat":
                values.insert(at, values[at])
            case "swap":
                other = rng.randrange(len(values))
                values[at], values[other] = values[other], values[at]
            case _:
                values[at] = self.mutant_of(values[at])
        return values

    def _of_dict(self, values: dict[Any, Any]) -> dict[Any, Any]:
        rng = self._rng
        key = rng.choice(list(values))
        match rng.choice(("inside", "inside", "inside", "drop", "add")):
            case "drop":
                del values[key]
            case "add":
                values[f"unknown{rng.randrange(9)}"] = rng.choice(EDGES)
            case _:
                values[key] = self.mutant_of(values[key])
        return values

    def damaged(self, data: bytes) -> bytes:
        """The bytes with a few bits flipped, cut short, or longer."""
        rng = self._rng
        damaged = bytearray(data or rng.randbytes(rng.randrange(1, 40)))
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.25:
            del damaged[rng.randrange(len(damaged)) :]
        if rng.random() < 0.1:
            damaged += rng.randbytes(rng.randrange(1, 50))
        return bytes(damaged)
