"""Where native tables place hashes: every search ends, and no client can crowd a place."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.client.membership import replica_with
from kvrouter.core.fleet.replica import ReplicaSettings
from kvrouter.core.native import versions
from kvrouter.core.tables.table import CountedSet, FlatTable
from kvrouter.frontend import run as serve
from kvrouter.frontend.settings import parse_options
from kvrouter.policies.baseline import Random
from tests.core.aimed import AT_ONE_END, SECRET, aimed, counted_together, native_table
from tests.long import examples

pytestmark = pytest.mark.skipif(bool(versions.why_not_built), reason=f"not built: {versions.why_not_built}")

ROWS = 32_768
SHARDS = 2048


def both_tables(secret: int = SECRET) -> list[FlatTable]:
    """The Python version, then the native one."""
    return [FlatTable(secret), native_table().FlatTable(secret)]


def test_search_ends_where_rows_passed_every_bucket() -> None:
    """Eleven rows in and five out leave two buckets that rows have passed: an absent hash is still absent."""
    hashes = aimed(SECRET)
    first, last = hashes[:7], hashes[-7:]
    for table in both_tables():
        table.label(0, "a")
        table.add(0, first[:6])  # five in the first bucket, the sixth in the second
        table.discard(0, first[:5])
        table.add(0, last[:5])  # the fifth in the first bucket
        table.check()
        assert {} == table.depths([first[6]])
        assert 0 == table.accepted(0, [last[6]], 0, 0, 0)
        assert {"a": 1} == table.depths([last[4], first[6]])
        assert 6 == len(table)


@examples(100)
@given(st.integers(0, 2**32), st.sampled_from([6, 12, 30]))
def test_all_rows_in_one_shard(seed: int, most: int) -> None:
    """Rows come and go in two crowded buckets: both versions hold and find the same."""
    rng, held = random.Random(seed), set[int]()
    ends = rng.sample(aimed(SECRET)[:AT_ONE_END], most), rng.sample(aimed(SECRET)[AT_ONE_END:], most)
    tables = both_tables()
    for _ in range(50):
        some = set(rng.sample(rng.choice(ends), rng.choice([1, most // 2, most - 1, most])))
        gone, new = some & held, list(some - held)[: most - len(held)]
        held = held - gone if gone else held.union(new)
        for table in tables:
            answer = table.discard(0, list(gone)) if gone else table.add(0, new)
            assert len(gone or new) == answer[0]
            for end in ends:
                assert [one in held for one in end] == [table.holds(0, one) for one in end]
    for table in tables:
        table.check()


@examples(30)
@given(st.integers(0, 2**32))
def test_counted_hashes_at_one_place(seed: int) -> None:
    """Both versions count references alike, also if all hashes share a place."""
    rng = random.Random(seed)
    hashes = rng.sample(counted_together(SECRET), 40)
    tables = both_tables()
    counted: list[CountedSet] = [table.counted_set(3) for table in tables]
    held: list[int] = []
    for _ in range(60):
        rng.shuffle(held)
        removed, added = held[: rng.randrange(6)], rng.choices(hashes, k=rng.randrange(6))
        held = held[len(removed) :] + added
        for one in counted:
            one.discard(removed)
            one.add(added)
            assert Counter(held) == one.counts()
    tables[1].check()


def answers(table: FlatTable, seed: int) -> list[Any]:
    """The answers of a table to a random history, in order."""
    rng, found = random.Random(seed), list[Any]()
    chains = [[rng.getrandbits(64) for _ in range(40)] for _ in range(20)]
    for slot in range(70):
        table.label(slot, f"owner {slot}")
    for _ in range(300):
        slot, chain = rng.randrange(70), rng.choice(chains)
        cut = rng.randrange(40)
        found.append(table.add(slot, chain[:cut]) if rng.random() < 0.7 else table.discard(slot, chain[cut:]))
        found.append(list(table.depths(chain).items()))
    table.sweep([1, 2], 0)
    return [*found, len(table)]


def test_each_process_draws_a_secret() -> None:
    """Frontends and library objects draw a secret for their pools; the core draws none."""
    options = parse_options([])
    drawn = [serve.new_replica(options).settings.pool.placement_secret for _ in range(2)]
    drawn += [replica_with(Random, ReplicaSettings()).settings.pool.placement_secret for _ in range(2)]

    assert 4 == len({*drawn, 0} - {0})
    assert 0 == options.replica.pool.placement_secret


def test_answers_do_not_depend_on_the_secret() -> None:
    """The same answers in the same order with any secret; a secret has 64 bits."""
    new = native_table().FlatTable

    assert answers(FlatTable(1), 5) == answers(new(0), 5) == answers(new(2**64 - 1), 5)
    for wrong in (-1, 2**64):
        with pytest.raises(OverflowError):
            new(wrong)


def reversed_bits(number: int) -> int:
    return int(f"{number:064b}"[::-1], 2)


FAMILIES: dict[str, Callable[[int], int]] = {
    "small numbers": lambda i: i,
    "multiples of 2^20": lambda i: i << 20,
    "multiples of 2^48": lambda i: i << 48,
    "only the high bits": reversed_bits,
    "low and high bits": lambda i: i & 0xFF | i >> 8 << 56,
    "evenly spaced": lambda i: i * 0x9E3779B97F4A7C15 % 2**64,
    "aimed at another table": lambda i: aimed(SECRET)[i % 128] ^ i >> 7 << 40,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hashes_spread_without_the_secret(family: str) -> None:
    """Hashes of any pattern fill shards and buckets evenly, like random ones: 16 ± 4 in each."""
    hashes = array("Q", map(FAMILIES[family], range(ROWS)))
    for secret in (0, 1, 2**63, 0xFEDCBA9876543210):
        shards, homes = [0] * SHARDS, [0] * SHARDS
        for shard, home in native_table().FlatTable(secret).homes(hashes):
            shards[shard] += 1
            homes[home >> 21] += 1
        assert max(*shards, *homes) < 16 + 8 * 4


def test_aimed_hashes_miss_with_another_secret() -> None:
    """Hashes that fill one shard under a known secret are scattered under another one."""
    shards = {
        secret: {shard for shard, _ in native_table().FlatTable(secret).homes(aimed(SECRET))}
        for secret in (SECRET, SECRET + 1)
    }

    assert {77} == shards[SECRET]
    assert 100 < len(shards[SECRET + 1])
