"""Heartbeats and cards on the wire."""

from __future__ import annotations

import contextlib

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.beats import (
    Card,
    RankBeat,
    RouterBeat,
    decode_router_beat,
    decode_worker_beat,
    encode,
)
from kvrouter.core.events import VERSION
from kvrouter.errors import MalformedFrameError
from tests.core.worlds import card, worker_beat

WORKER = worker_beat(
    card("w1", tiers={"device": 100}, labels={"zone": "a"}, lora_names=("adapterA",)),
    ranks=[RankBeat(0, 100, 7), RankBeat(1, 100, 9, True, 2, 3, 0.25)],
)
ROUTER = RouterBeat(VERSION, 5, "up", "http://10.0.0.1:8000", {"llama-0a1b2c3d": 7}, 3)


def test_heartbeats_come_back() -> None:
    """With a card, without one, and a replica's: read as written."""
    assert WORKER == decode_worker_beat(encode(WORKER))
    assert worker_beat("w1") == decode_worker_beat(encode(worker_beat("w1")))
    assert ROUTER == decode_router_beat(encode(ROUTER))


def test_names_of_a_card() -> None:
    """A client may use the served names, else the model's own, and the adapters'."""
    assert ("llama", "adapterA") == card(lora_names=("adapterA",)).names()
    assert ("chat", "adapterA") == card(served_names=("chat",), lora_names=("adapterA",)).names()


def test_cards_do_not_share_their_defaults() -> None:
    """Each card has tiers and labels of its own."""
    first, second = (Card(worker_id=name, url="", model="m", block_size=16) for name in "ab")

    first.tiers["host"] = 1

    assert {"device": 0} == second.tiers


def test_newer_heartbeat_is_understood() -> None:
    """Fields behind the known ones, in the beat and in the card, are passed over."""
    raw = msgpack.unpackb(encode(WORKER))
    raw[6]["colour"] = "green"

    assert WORKER == decode_worker_beat(msgpack.packb([*raw, "new"]))


@pytest.mark.parametrize("version", [0, 2])
def test_other_versions_are_refused(version: int) -> None:
    """A heartbeat of another version is not taken for one of this."""
    for good, decode in ((WORKER, decode_worker_beat), (ROUTER, decode_router_beat)):
        raw = msgpack.unpackb(encode(good))
        with pytest.raises(MalformedFrameError, match=f"version {version}"):
            decode(msgpack.packb([version, *raw[1:]]))


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("worker_id", "a.b"),
        ("worker_id", ""),
        ("worker_id", "x" * 65),
        ("block_size", 0),
        ("ranks", 0),
        ("ranks", 1025),
    ],
)
def test_impossible_cards_are_refused(fact: str, value: str | int) -> None:
    """Names that make no subject, no block size, no ranks or far too many: refused with the value."""
    bad = msgspec.structs.replace(card(), **{fact: value})

    with pytest.raises(MalformedFrameError, match=f"{value}.*"):
        decode_worker_beat(encode(worker_beat(bad)))


def survives(data: bytes) -> None:
    """Whatever the bytes are, they are read or refused."""
    for decode in (decode_worker_beat, decode_router_beat):
        with contextlib.suppress(MalformedFrameError):
            decode(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes(data: bytes) -> None:
    """Noise raises nothing but MalformedFrameError."""
    survives(data)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([encode(WORKER), encode(ROUTER)]), st.integers(0, 500), st.binary(min_size=1, max_size=3)
)
def test_mutated_heartbeats(data: bytes, at: int, patch: bytes) -> None:
    """Real heartbeats with bytes changed raise nothing but MalformedFrameError."""
    at %= len(data)

    survives(data[:at] + patch + data[at + len(patch) :])


def test_text_that_is_no_utf_8_is_refused() -> None:
    """A pool's name, or an address, that is no text."""
    for good, text in ((WORKER, b"llama-0a1b2c3d"), (ROUTER, b"http://10.0.0.1:8000")):
        survives(encode(good).replace(text, b"\xff" * len(text)))
