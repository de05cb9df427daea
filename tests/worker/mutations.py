"""Damage to an engine's messages: to their bytes, their meaning, their numbers and their order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack

# Topic, sequence number, payload; after a mutation also fewer or more frames.
Message = list[bytes]

_STRANGE: list[Callable[[random.Random], Any]] = [
    lambda chance: None,
    lambda chance: True,
    lambda chance: chance.choice([-1, 0, 1, 2**31, 2**63, 2**64 - 1, -(2**63)]),
    lambda chance: chance.choice([0.5, float("inf"), float("nan")]),
    lambda chance: chance.choice(["", "GPU", "CPU", "STORAGE", "REMOTE", "full_attention", "é" * 200]),
    lambda chance: chance.randbytes(chance.choice([0, 8, 32])),
    lambda chance: [],
    lambda chance: {},
    lambda chance: [[1, 2], None, "x"],
]


def mutate(message: Message, chance: random.Random) -> list[Message]:
    """The messages that arrive instead of one: none, one or two."""
    return chance.choice([_bytes, _content, _content, _number, _frames, _delivery])(message, chance)


def pervert(message: Message, chance: random.Random, hashes: list[int]) -> list[Message]:
    """A well-formed batch that no engine would send. `hashes`: of the whole capture."""
    ts, events, rank = msgpack.unpackb(message[2])
    for _ in range(chance.randint(1, 3)):
        event: dict[str, Any] | list[Any] = chance.choice([*events, *_orders(chance, hashes)])
        events.insert(chance.randrange(len(events) + 1), _turned(event, chance, hashes))
    return [[*message[:2], msgpack.packb([ts, events, rank])]]


def _orders(chance: random.Random, hashes: list[int]) -> list[dict[str, Any]]:
    """Events that come too early, too late, or twice."""
    medium = chance.choice(["GPU", "GPU", "CPU", "STORAGE"])
    known = chance.choices(hashes, k=chance.randint(1, 6))
    removed = {"type": "BlockRemoved", "block_hashes": known, "medium": medium}
    again = {"block_hashes": known, "parent_block_hash": None, "token_ids": [], "block_size": 0}
    return [removed, {"type": "BlockStored", **again, "lora_id": None, "medium": medium, "lora_name": None}]


def _turned(
    event: dict[str, Any] | list[Any], chance: random.Random, hashes: list[int]
) -> dict[str, Any] | list[Any]:
    """The event with another parent, or in another tier."""
    if not isinstance(event, dict) or chance.random() < 0.3:
        return event
    changes: list[dict[str, Any]] = [
        {"parent_block_hash": chance.choice([None, *chance.choices(hashes, k=5)])},
        {"medium": chance.choice(["CPU", "STORAGE"])},
        {"extra_keys": [["salt"]] + [None] * (len(event.get("block_hashes", [0])) - 1)},
    ]
    return {**event, **chance.choice(changes)}


def _bytes(message: Message, chance: random.Random) -> list[Message]:
    """Flip bits; lose or repeat pieces."""
    payload = bytearray(message[2])
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(payload) + 1)
        end = min(len(payload), start + chance.randint(0, 20))
        match chance.randrange(4):
            case 0 if start < len(payload):
                payload[start] ^= 1 << chance.randrange(8)
            case 1:
                del payload[start:end]
            case 2:
                payload[start:start] = payload[start:end]
            case _:
                payload[start:end] = chance.randbytes(end - start)
    return [[*message[:2], bytes(payload)]]


def _content(message: Message, chance: random.Random) -> list[Message]:
    """Well-formed msgpack with another meaning."""
    content = msgpack.unpackb(message[2], strict_map_key=False)
    for _ in range(chance.randint(1, 3)):
        content = _replace_somewhere(content, chance)
    return [[*message[:2], msgpack.packb(content)]]


def _replace_somewhere(value: Any, chance: random.Random) -> Any:
    """The value with one part replaced, missing, or repeated."""
    if not isinstance(value, list | dict) or not value or chance.random() < 0.15:
        return chance.choice(_STRANGE)(chance)
    if isinstance(value, dict):
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: _replace_somewhere(value[key], chance)}
    place = chance.randrange(len(value))
    match chance.randrange(8):
        case 0:
            return value[:place] + value[place + 1 :]
        case 1:
            return [*value[:place], value[place], *value[place:]]
        case _:
            return [*value[:place], _replace_somewhere(value[place], chance), *value[place + 1 :]]


def _number(message: Message, chance: random.Random) -> list[Message]:
    """Another number: a gap, a repeat, a restart, a huge one, or none at all."""
    seq = int.from_bytes(message[1], "big")
    other = chance.choice([0, max(0, seq - 1), seq + 1, seq + 1000, 2**63, 2**64 - 1])
    number = chance.choice([other.to_bytes(8, "big"), other.to_bytes(8, "big"), b"", b"12", bytes(9)])
    return [[message[0], number, message[2]]]


def _frames(message: Message, chance: random.Random) -> list[Message]:
    """Too few or too many frames."""
    return [message[: chance.randrange(3)], [*message, b"more"]][chance.randrange(2) :][:1]


def _delivery(message: Message, chance: random.Random) -> list[Message]:
    """Lost, or delivered twice."""
    return [message] * chance.choice([0, 2])
