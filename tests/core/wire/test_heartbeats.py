"""Heartbeats and cards on the wire."""

from __future__ import annotations

import contextlib
from functools import partial

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.heartbeats import (
    Card,
    RankBeat,
    RouterBeat,
    card_trouble,
    decode_router_beat,
    decode_worker_beat,
    encode,
)
from kvrouter.core.wire.ops import VERSION
from kvrouter.errors import MalformedFrameError, RefusedCardError
from tests.core.worlds import W1, card, worker_beat
from tests.long import examples

WORKER = worker_beat(
    card("w1", tiers={"device": 100}, labels={"zone": "a"}, lora_names=("adapterA",)),
    ranks=[RankBeat(0, 100, 7), RankBeat(1, 100, 9, True, 2, 3, 0.25)],
)
of_w1 = partial(decode_worker_beat, worker_id=W1)
ROUTER = RouterBeat(VERSION, 5, "up", "http://10.0.0.1:8000", {"llama-0a1b2c3d": 7}, 3)


def test_heartbeats_come_back() -> None:
    """A worker's, with and without a card, and a replica's are read as they were written."""
    assert WORKER == decode_worker_beat(encode(WORKER), W1)
    assert worker_beat("w1") == decode_worker_beat(encode(worker_beat("w1")), W1)
    assert ROUTER == decode_router_beat(encode(ROUTER))


def test_names_of_a_card() -> None:
    """A client may use the served names (without them, the model's name) and the adapters' names."""
    assert ("llama", "adapterA") == card(lora_names=("adapterA",)).names()
    assert ("chat", "adapterA") == card(served_names=("chat",), lora_names=("adapterA",)).names()


def test_cards_do_not_share_their_defaults() -> None:
    """Each card has its own tiers and labels."""
    first, second = (Card(worker_id=name, url="", model="m", block_size=16) for name in "ab")

    first.tiers["host"] = 1

    assert {"device": 0} == second.tiers


def test_newer_heartbeat_is_understood() -> None:
    """Unknown additional fields, in the heartbeat and in the card, are ignored."""
    raw = msgpack.unpackb(encode(WORKER))
    raw[6]["colour"] = "green"

    assert WORKER == decode_worker_beat(msgpack.packb([*raw, "new"]), W1)


def test_card_of_an_older_agent() -> None:
    """A card without the later fields says nothing that its agent does not know."""
    raw = msgpack.unpackb(encode(WORKER))
    pair = ("role", "kv_connector", "bootstrap_port", "kv_address", "kv_hash")
    for later in ("takes_token_ids", "lookahead", "speculates", *pair):
        del raw[6][later]
    raw[6]["repairs_by_report"] = True  # of the release before

    assert WORKER == decode_worker_beat(msgpack.packb(raw), W1)


def test_older_replica_serves_nothing_known() -> None:
    """A heartbeat that ends before `serves` has an empty one."""
    newer = RouterBeat(VERSION, 5, "up", "http://a", {}, 3, 1000, [], {"llama-0a1b2c3d": 16})

    assert newer == decode_router_beat(encode(newer))
    assert {} == decode_router_beat(msgpack.packb(msgpack.unpackb(encode(newer))[:8])).serves


@pytest.mark.parametrize("version", [0, 2])
def test_other_versions_are_rejected(version: int) -> None:
    """A heartbeat of another version is an error."""
    for good, decode in ((WORKER, of_w1), (ROUTER, decode_router_beat)):
        raw = msgpack.unpackb(encode(good))
        with pytest.raises(MalformedFrameError, match=f"version {version}"):
            decode(msgpack.packb([version, *raw[1:]]))


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("worker_id", "a.b.c"),
        ("worker_id", ""),
        ("worker_id", "x" * 65),
        ("worker_id", "w2"),
        ("block_size", 0),
        ("block_size", 2**21),
        ("ranks", 0),
        ("ranks", 1025),
        ("model", ""),
        ("model", "two\nlines"),
        ("served_names", ("a\x1b[31m",)),
        ("lora_names", ("x" * 1025,)),
        ("url", ""),
        ("url", "ftp://w1:9000"),
        ("url", "http://w1:0"),
        ("url", "http://w1:99999"),
        ("url", "http://w1:9000/?x"),
        ("url", "http://user:secret@w1:9000"),
        ("url", "http://w1:9000\r\nx-evil: 1"),
        ("url", "http://"),
        ("rank_header", "content-length"),
        ("rank_header", "x-rank: 1\r\nx-evil"),
        ("rank_header", "x-"),
        ("rank_header", "host"),
        ("rank_header", "authorization"),
        ("rank_header", "X-Request-Id"),
        ("rank_header", "x-kvrouter-hops"),
        ("rank_header", "X-Forwarded-For"),
        ("rank_header", "x-override-rank"),
        ("tiers", {"device": -1}),
        ("tiers", {"device": 2**63}),
        ("max_model_len", -1),
        ("started_at_us", 2**63),
    ],
)
def test_impossible_cards_are_rejected(fact: str, value: object) -> None:
    """A card with one value that no honest agent sends, or that would do harm, is rejected as a whole."""
    bad = msgspec.structs.replace(card("w1"), **{fact: value})

    with pytest.raises(MalformedFrameError):
        of_w1(encode(worker_beat(bad)))


def test_taken_rank_header_is_named() -> None:
    """The reason names the header, for the agent's operator too."""
    for name in ("X-Request-Id", "x-kvrouter-hops", "X-Forwarded-For"):
        bad = msgspec.structs.replace(card("w1"), rank_header=name)
        with pytest.raises(MalformedFrameError, match=f"rank_header '{name}'"):
            of_w1(encode(worker_beat(bad)))
        assert f"rank_header '{name}'" in card_trouble(bad)
    assert not card_trouble(msgspec.structs.replace(card("w1"), rank_header="X-data-parallel-rank"))


@pytest.mark.parametrize(
    "url", ["http://w1:9000", "https://w1", "http://10.0.0.1:80", "http://[fd00::1]:80", "http://w_1:1/v1"]
)
def test_addresses_of_engines(url: str) -> None:
    """Names, IPv4 and IPv6, with or without a port, are accepted."""
    good = worker_beat(card("w1", url=url))

    assert good == of_w1(encode(good))


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.0.1]", "0.0.0.0", "[ff02::1]"]
)
def test_addresses_that_no_engine_has(host: str) -> None:
    """A card with one is refused by name, by agents before they publish it, too."""
    bad = card("w1", url=f"http://{host}:80")

    with pytest.raises(RefusedCardError, match="no worker or replica has such an address"):
        of_w1(encode(worker_beat(bad)))
    assert host.strip("[]") in card_trouble(bad)


@pytest.mark.parametrize(
    "rank",
    [
        RankBeat(-1, 1, 1),
        RankBeat(1024, 1, 1),
        RankBeat(0, -1, 1),
        RankBeat(0, 1, 2**63),
        RankBeat(0, 1, 1, running=2**60),
        RankBeat(0, 1, 1, waiting=-1),
        RankBeat(0, 1, 1, kv_usage=float("nan")),
        RankBeat(0, 1, 1, kv_usage=-0.1),
        RankBeat(0, 1, 1, metrics={"own": float("inf")}),
        RankBeat(0, 1, 1, waiting_loras=("x" * 5000,)),
    ],
)
def test_impossible_ranks_are_rejected(rank: RankBeat) -> None:
    """Numbers that later sums, comparisons or encodings could not handle are rejected."""
    with pytest.raises(MalformedFrameError):
        of_w1(encode(worker_beat("w1", ranks=[rank])))


def test_rank_named_twice_is_rejected() -> None:
    """It would not be clear which of the two counts."""
    with pytest.raises(MalformedFrameError, match="twice"):
        of_w1(encode(worker_beat("w1", ranks=[RankBeat(0, 1, 1), RankBeat(0, 1, 2)])))


@pytest.mark.parametrize(
    "beat",
    [
        msgspec.structs.replace(ROUTER, address="no address"),
        msgspec.structs.replace(ROUTER, address="http://h:0"),
        msgspec.structs.replace(ROUTER, feeds={"a b": 1}),
        msgspec.structs.replace(ROUTER, feeds={"a": -1}),
        msgspec.structs.replace(ROUTER, feeds={f"p{n}": 1 for n in range(1025)}),
        msgspec.structs.replace(ROUTER, round=-1),
        msgspec.structs.replace(ROUTER, workers=["a.b.c"]),
    ],
)
def test_impossible_heartbeats_of_replicas_are_rejected(beat: RouterBeat) -> None:
    """Names that subjects cannot contain, numbers that cannot be sent on, and endless lists are rejected."""
    with pytest.raises(MalformedFrameError):
        decode_router_beat(encode(beat))


def test_trouble_with_a_card_is_known_before_it_is_sent() -> None:
    """`card_trouble` makes the same check as readers."""
    assert "" == card_trouble(card("w1"))
    assert "url" in card_trouble(card("w1", url="nowhere"))
    assert card_trouble(card("w1", max_loras=2**70))


def survives(data: bytes) -> None:
    """Decode the bytes; the only error may be MalformedFrameError."""
    for decode in (of_w1, decode_router_beat):
        with contextlib.suppress(MalformedFrameError):
            decode(data)


@examples(200)
@given(st.binary(max_size=100))
def test_any_bytes(data: bytes) -> None:
    """Random bytes raise nothing but MalformedFrameError."""
    survives(data)


@examples(400)
@given(
    st.sampled_from([encode(WORKER), encode(ROUTER)]), st.integers(0, 500), st.binary(min_size=1, max_size=3)
)
def test_mutated_heartbeats(data: bytes, at: int, patch: bytes) -> None:
    """Real heartbeats with changed bytes raise nothing but MalformedFrameError."""
    at %= len(data)

    survives(data[:at] + patch + data[at + len(patch) :])


def test_text_not_in_utf_8_is_rejected() -> None:
    """In a pool's name and in an address."""
    for good, text in ((WORKER, b"llama-0a1b2c3d"), (ROUTER, b"http://10.0.0.1:8000")):
        survives(encode(good).replace(text, b"\xff" * len(text)))
