"""Counts of tenants: a minute that slides, what requests settle, and what is not heard yet of peers."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.tables.tenants import (
    LEAST_S,
    MINUTE_S,
    MOST_OWNERS,
    MOST_S,
    STEP_S,
    Charge,
    KeyLimits,
    Left,
    TenantTable,
    Window,
)
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import TenantUse

A, B = RouterId("a"), RouterId("b")
NOW = 1000.0


def table(name: str = A) -> TenantTable:
    made = TenantTable(name)
    made.limit({"t", "u"})
    return made


def check(
    one: TenantTable, limits: KeyLimits, now: float = NOW, tokens: int = 1, peers: int = 0, hears: bool = True
) -> Left:
    return one.check("t", limits, tokens, now, peers=peers, hears=hears)


def begin(one: TenantTable, now: float = NOW, prompt: int = 10, output: int = 5) -> Charge:
    charge = Charge("t", prompt, prompt + output)
    one.begin(charge, now)
    return charge


@pytest.mark.parametrize("seed", range(20))
def test_window(seed: int) -> None:
    """Its sums are those of a list of all that was counted, less what is older than a minute."""
    rng, window, now = random.Random(seed), Window(), NOW
    kept: list[tuple[float, int]] = []
    for _ in range(500):
        now += rng.choice((0, 0.01, 0.7, 3, 40))
        window.slide(now)
        if kept and rng.random() < 0.3:
            at, tokens = kept.pop(rng.randrange(len(kept)))
            window.take(at, 1, tokens)
        window.add(now, 1, tokens := rng.randrange(100))
        kept.append((now, tokens))
        window.slide(now)
        counted = [one for one in kept if int(one[0]) > int(now) - MINUTE_S - 1]
        assert (window.requests, window.tokens) == (len(counted), sum(one[1] for one in counted))


def test_no_minute_has_more() -> None:
    """Whenever requests come, those of any 60 s that passed are at most the limit."""
    one, rng, now, passed = table(), random.Random(1), NOW, []
    limits = KeyLimits(requests=20)
    for _ in range(3000):
        now += rng.expovariate(1.0)
        if not check(one, limits, now).refused:
            begin(one, now)
            passed.append(now)
            assert 20 >= sum(1 for at in passed if at > now - MINUTE_S)
    assert len(passed) > 0.9 * (now - NOW) / MINUTE_S * 20


def test_when_to_come_again() -> None:
    """After `retry_s` a request passes, and not a second earlier."""
    one, limits = table(), KeyLimits(requests=3)
    for at in (0.0, 10.0, 10.0):
        begin(one, NOW + at)

    left = check(one, limits, NOW + 20)

    assert ("requests", 0) == (left.refused, left.requests)
    assert check(one, limits, NOW + 20 + left.retry_s - 1.01).refused
    assert not check(one, limits, NOW + 20 + left.retry_s).refused


def test_tokens_are_settled() -> None:
    """Prompt and asked output at first, and at the end what was used, of the second in which it began."""
    one, limits = table(), KeyLimits(tokens=100)
    charge = begin(one, prompt=40, output=50)
    assert (10, "tokens") == ((left := check(one, limits, tokens=11)).tokens, left.refused)

    charge.used, charge.is_booked = 45, True
    assert -45 == one.settle(charge, NOW + 30)
    one.end(charge, NOW + 30)

    assert 55 == check(one, limits, NOW + 30).tokens
    assert 100 == check(one, limits, NOW + MINUTE_S + 1).tokens  # nothing of it is left


def test_longer_than_asked() -> None:
    """An answer above the mean counts whole."""
    one = table()
    charge = begin(one, prompt=10, output=5)
    charge.used = 100

    assert 85 == one.settle(charge, NOW)
    assert 900 == check(one, KeyLimits(tokens=1000)).tokens


def test_failed_and_retried() -> None:
    """An attempt that used nothing does not count, its retry does; a request without a worker does not."""
    one, limits = table(), KeyLimits(requests=10, tokens=1000)
    charge = begin(one)
    charge.is_booked = True
    assert -15 == one.settle(charge, NOW)
    assert (10, 1000) == ((left := check(one, limits)).requests, left.tokens)

    one.count(charge, NOW)
    one.count(charge, NOW)
    assert (9, 985) == ((left := check(one, limits)).requests, left.tokens)

    one.end(charge, NOW)
    one.end(begin(one), NOW)
    assert (9, 985) == ((left := check(one, limits)).requests, left.tokens)


def test_at_once() -> None:
    """Those of this replica that have begun, and those booked at peers."""
    one, limits = table(), KeyLimits(at_once=3)
    charges = [begin(one) for _ in range(2)]
    assert not check(one, limits).refused

    one.booked_elsewhere["t"] += 1
    assert "at_once" == check(one, limits).refused
    one.end(charges[0], NOW)
    assert not check(one, limits).refused


def test_peers_count() -> None:
    """What they have booked and settled; of tenants without a limit nothing is kept."""
    one, limits = table(), KeyLimits(requests=10, tokens=1000)
    one.begun_elsewhere(B, "t", 100, NOW)
    one.begun_elsewhere(B, "nobody", 100, NOW)
    one.ended_elsewhere(B, "t", NOW + 1, settled=-40, tokens=100, begun_at=NOW)
    one.ended_elsewhere(B, "nobody", NOW + 1, settled=-40, tokens=100, begun_at=NOW)

    assert (9, 940) == ((left := check(one, limits, NOW + 1)).requests, left.tokens)
    assert 10 == one.check("nobody", limits, 1, NOW + 1, peers=0, hears=True).requests


def test_unsure() -> None:
    """A replica lets its share of what is left pass, and the next share once all know of the first."""
    one, limits, now, steps = table(), KeyLimits(requests=100), NOW, [0]
    while sum(steps) < 100:
        while not (left := check(one, limits, now, peers=3)).is_unsure and not left.refused:
            begin(one, now)
            steps[-1] += 1
        now += LEAST_S + 2 * STEP_S
        steps.append(0)

    assert [26, 19, 15] == steps[:3]  # (105 - 0) / 4, …
    assert 100 == sum(steps)
    assert len(steps) < 15
    assert check(one, limits, now, peers=3).refused


def test_tokens_are_unsure() -> None:
    """They have shares, too; one request always passes, however large its part."""
    one, limits = table(), KeyLimits(tokens=300)
    assert not check(one, limits, tokens=290, peers=3).is_unsure
    begin(one, prompt=60, output=0)

    assert [False, True] == [check(one, limits, tokens=more, peers=3).is_unsure for more in (18, 19)]


def test_echo() -> None:
    """What the echo takes, twice, is what peers need to know; a lost one is waited for, for a second."""
    one = table()
    begin(one)
    one.published("m", 1)
    one.echoed("m", 0, NOW)
    one.echoed("n", 1, NOW)
    assert 2 * 0.3 == pytest.approx(one.unknown_s(NOW + 0.3))
    one.echoed("m", 1, NOW + 0.2)
    assert not one.awaits_echo
    assert 2 * 0.2 == pytest.approx(one.unknown_s(NOW + 5))

    begin(one)
    one.published("m", 2)
    one.published("m", 3)  # with nothing that counts
    one.echoed("m", 3, NOW)
    assert MOST_S == one.unknown_s(NOW + 0.9)
    assert 2 * 0.2 == pytest.approx(one.unknown_s(NOW + 1.1))


@pytest.mark.parametrize("seed", range(5))
def test_bursts_at_all(seed: int) -> None:
    """Four replicas that hear each other as late as themselves: at most 10 % above the limit."""
    rng, limits = random.Random(seed), KeyLimits(requests=400)
    tables = [table(str(number)) for number in range(4)]
    way: list[tuple[float, int, TenantTable, TenantTable]] = []
    passed, now = 0, NOW
    for turn in range(3000):
        now += 0.001
        here = tables[rng.randrange(4) if rng.random() < 0.7 else seed % 4]
        left = check(here, limits, now, peers=3)
        if not left.refused and not left.is_unsure:
            begin(here, now)
            passed += 1
            here.published("m", turn)
            way += [(now + 0.02 + 0.08 * rng.random(), turn, here, each) for each in tables]
        for one in [one for one in way if one[0] <= now]:
            way.remove(one)
            _, number, sender, each = one
            if each is sender:
                each.echoed("m", number, now)
            else:
                each.begun_elsewhere(RouterId(sender.router_id), "t", 15, now)

    assert 400 <= passed <= 440


def let_pass(one: TenantTable, limits: KeyLimits, peers: int, now: float = NOW) -> int:
    """Requests that pass without bookings of peers."""
    passed = 0
    while not (left := check(one, limits, now, tokens=15, peers=peers, hears=False)).refused:
        assert not left.is_unsure
        begin(one, now)
        passed += 1
    return passed


@pytest.mark.parametrize("limits", [KeyLimits(requests=20), KeyLimits(tokens=300), KeyLimits(at_once=20)])
def test_cut_off(limits: KeyLimits) -> None:
    """Of a tenant that was not seen each of four replicas lets a quarter pass; with bookings all counts."""
    one = table()
    assert 5 == let_pass(one, limits, 3)
    assert not check(one, limits, tokens=15).refused


def test_last_known_share() -> None:
    """Without bookings of peers a replica lets pass the part that it had of the tenant's use."""
    limits, uses = KeyLimits(requests=1000), [80, 20, 0]
    tables = [table(str(number)) for number in range(3)]
    for here, count in zip(tables, uses, strict=True):
        for _ in range(count):
            begin(here)
            for each in tables:
                if each is not here:
                    each.begun_elsewhere(RouterId(here.router_id), "t", 15, NOW)
    later = NOW + 5 * MINUTE_S  # nothing was asked meanwhile: what was known has not gone

    passed = [let_pass(one, limits, 2, later) for one in tables]

    assert [754, 214, 34] == passed  # 90 % by use, 10 % equally, rounded up
    tables[2].begun_elsewhere(A, "t", 1, later)
    assert 34 == tables[2]._uses["t"].own.requests
    assert "requests" == check(tables[2], limits, later, peers=2, hears=False).refused


def test_served_fades() -> None:
    """What was said of a tenant is halved every half minute, however much it was; nobody's memory grows."""
    one = table()
    for number in range(3 * MOST_OWNERS):  # a forger
        one.begun_elsewhere(RouterId(f"r{number}"), "t", 1, NOW, 2**60)
        one.ended_elsewhere(RouterId(f"r{number}"), "t", NOW, settled=2**60, tokens=1, begun_at=NOW)
    assert 2**30 == one.served("t")
    peers = one._uses["t"].peers
    assert MOST_OWNERS == len(peers)

    for minute in range(1, 16):
        one.begun_elsewhere(B, "u", 1, NOW + 60 * minute, 1)

    assert 1 == one.served("t") == 2**30 / 2**one.halvings
    for second in range(1000):
        one.begun_elsewhere(RouterId("r0"), "t", 1, NOW + second)
    assert len(peers["r0"].counts) <= 2 * MINUTE_S + 1


def test_owners_in_snapshots() -> None:
    """A snapshot names any number of replicas that have left; a bounded number of them is kept."""
    one = table()
    ops = [TenantUse("t", 0, 1, 1, f"gone{number}") for number in range(3 * MOST_OWNERS)]
    one.load(B, ops, NOW)

    assert MOST_OWNERS == len(list(one.ops(NOW, set(), is_elder=True)))


def test_snapshot() -> None:
    """A replica that starts knows what its peers have counted, and what one had that has left."""
    one, other, limits = table(), table(B), KeyLimits(requests=100, tokens=10_000)
    for at in range(30):
        begin(one, NOW + at)
        one.begun_elsewhere(RouterId("gone"), "t", 7, NOW + at)
        one.begun_elsewhere(B, "t", 1, NOW + at)  # its own former life at the joiner has another id
    later = 5.0  # the joiner's clock is another one

    for is_elder, count in ((False, 30), (True, 60)):
        for _ in range(2):  # a snapshot replaces what the last one said
            other.load(A, list(one.ops(NOW + 29, {B}, is_elder=is_elder)), later)
            assert 100 - count == check(other, limits, later).requests
    assert 10_000 - 30 * 15 - 30 * 7 == check(other, limits, later).tokens
    assert 100 == check(other, limits, later + MINUTE_S + 2).requests
