"""When a replica publishes a hello, and which names are in it."""

from __future__ import annotations

import itertools

from kvrouter.core.fleet.hellos import Hellos
from kvrouter.core.wire.heartbeats import MOST_SHARED_NAMES, decode_hello
from kvrouter.core.wire.ids import PoolId
from tests.core.replicas import new_replica, receive_worker
from tests.core.worlds import card

ROUNDS = 5


def names(hello: bytes | None) -> tuple[str, ...] | None:
    """The names in a hello; None without a hello."""
    return None if hello is None else decode_hello(hello).shared_names


def test_missing_card() -> None:
    """At most one hello per lease, because all members answer."""
    hellos = Hellos(ROUNDS)
    sent = []
    for round_ in range(1, 13):
        hellos.lacks_card = True
        sent.append(hellos.due(round_, {}))

    assert [1, 6, 11] == [round_ for round_, hello in enumerate(sent, 1) if hello is not None]
    assert {b"", None} == {*sent}
    assert hellos.due(20, {}) == b""
    assert hellos.due(30, {}) is None


def test_shared_names() -> None:
    """They are told at once, and less and less often while nothing changes."""
    hellos = Hellos(ROUNDS)
    told = [round_ for round_ in range(1, 2000) if names(hellos.due(round_, {"k": 2}))]

    assert [1, 6, 16, 36, 76, 156, 316, 636] == told[:8]
    assert {600} == {later - earlier for earlier, later in itertools.pairwise(told[8:])}
    assert ("k",) == names(hellos.due(2000, {"k": 3}))


def test_many_shared_names() -> None:
    """A hello names a bounded number."""
    many = {f"k{number:03}": 2 for number in range(500)}

    assert MOST_SHARED_NAMES == len(names(Hellos(ROUNDS).due(1, many)) or ())


def test_replica_tells_of_shared_names() -> None:
    """Names of base models that live workers of two pools serve; no names of one pool only, no adapters."""
    replica = new_replica()
    receive_worker(replica, card("w1", model="k", served_names=("k",), lora_names=("sql",)), pool=PoolId("k"))
    receive_worker(replica, card("w2", model="q", served_names=("q",), lora_names=("sql",)), pool=PoolId("q"))
    assert replica.hello() is None

    receive_worker(replica, card("w3", model="k", served_names=("k-v2", "k")), pool=PoolId("k"))
    receive_worker(replica, card("w4", model="k-v2", served_names=("k-v2",)), pool=PoolId("k-v2"))

    assert ("k-v2",) == names(replica.hello())


def test_malformed_hello() -> None:
    """What cannot be read is a hello without names."""
    for payload in (b"", b"\xc1", b"\x91\x91\x01", b"\x91\xdd\xff\xff\xff\xff"):
        assert () == names(payload)
