"""Problems are told once when they begin and once when they end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvrouter.core.audit.problems import Compared
from kvrouter.core.audit.watch import Watch
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.predictions import ANNOUNCE_S, LEAST, WINDOW, Usage
from kvrouter.core.wire.heartbeats import RankBeat, encode
from kvrouter.core.wire.ids import WorkerId
from tests.core.replicas import new_replica
from tests.core.tables.test_predictions import TEXT, foretold
from tests.core.worlds import POOL, T1, W1, W2, card, worker_beat


@pytest.fixture
def replica() -> Replica:
    """It knows one worker with an empty, live feed."""
    replica = new_replica()
    replica.worker_heard(W1, encode(worker_beat(card())), 0.0)
    return replica


def kinds(watch: Watch) -> tuple[list[str], list[str]]:
    """What a look tells: what has begun, what is over."""
    begun, over = watch.look()
    return [told.problem.kind for told in begun], [told.problem.kind for told in over]


def answer(replica: Replica, usage: Usage) -> None:
    """A window of answers with this usage, where four blocks were foretold."""
    for _ in range(WINDOW):
        replica.router(POOL).truth.observe(foretold(4), usage)


def test_told_once(replica: Replica) -> None:
    """Begun, shown for as long as it lasts, over; and told again when it returns."""
    watch = Watch(replica)
    answer(replica, Usage(90, 64))

    assert (["tokens"], []) == kinds(watch)
    answer(replica, Usage(91, 64))
    assert ([], []) == kinds(watch)
    assert "last 91, here 100" in watch.problems(POOL, W1)[0].text
    assert [] == watch.problems(POOL, "")

    answer(replica, Usage(100, 64))
    assert ([], ["tokens"]) == kinds(watch)
    assert [] == watch.problems(POOL, W1)
    answer(replica, Usage(90, 64))
    assert (["tokens"], []) == kinds(watch)


def test_pool_whose_tokens_differ(replica: Replica) -> None:
    """What a comparison with an engine has found is told of the pool, until it is right again."""
    compared = [Compared(difference="do this")]
    watch = Watch(replica, lambda _: compared[0])

    assert (["tokens_differ"], []) == kinds(watch)
    assert ["do this"] == [problem.text for problem in watch.problems(POOL, "")]
    compared[0] = Compared()
    assert ([], ["tokens_differ"]) == kinds(watch)


def test_goes_with_its_worker(replica: Replica) -> None:
    """A worker that leaves takes its problems and records along."""
    watch = Watch(replica)
    answer(replica, Usage(90, 64))
    watch.look()
    replica.worker_heard(W1, encode(worker_beat(state="leave")), 0.0)

    assert ([], ["tokens"]) == kinds(watch)
    assert {} == replica.router(POOL).truth.records


def expect(replica: Replica) -> None:
    """Requests were served whose blocks no event has named."""
    for hash_ in range(LEAST):
        replica.router(POOL).truth.expect(T1, TEXT, [hash_], 0.0)


def test_missing_events(replica: Replica) -> None:
    """A live feed that names nothing of what was served is a problem."""
    watch = Watch(replica)
    expect(replica)
    watch.settle(ANNOUNCE_S)

    assert (["no_events"], []) == kinds(watch)


def test_feed_that_is_behind(replica: Replica) -> None:
    """While a feed recovers nothing can be said, neither of events nor of predictions."""
    watch = Watch(replica)
    assert watch.is_firm(POOL, T1)
    behind = worker_beat(ranks=[RankBeat(0, 100, 7)])
    replica.worker_heard(W1, encode(behind), 0.0)
    expect(replica)
    watch.settle(ANNOUNCE_S)

    assert ([], []) == kinds(watch)
    assert not watch.is_firm(POOL, T1)


def test_partial_rank(replica: Replica) -> None:
    """What was cached before its agent came is never announced; that nothing at all is, is wrong."""
    watch = Watch(replica)
    partial = worker_beat(ranks=[RankBeat(0, 100, 0, partial=True)])
    replica.worker_heard(W1, encode(partial), 0.0)
    replica.router(POOL).pool.index.store(T1, [99])
    expect(replica)
    watch.settle(ANNOUNCE_S)
    assert ([], []) == kinds(watch)
    assert not watch.is_firm(POOL, T1)

    replica.router(POOL).pool.index.clear(T1)
    expect(replica)
    watch.settle(ANNOUNCE_S)
    assert (["no_events"], []) == kinds(watch)


@pytest.mark.parametrize(("workers", "steps"), [(9, 4), (9, 1), (9, 100), (1, 4)])
def test_look_in_steps(workers: int, steps: int) -> None:
    """A look in steps finds what one at once does, in no more steps than asked for; then it is told once."""
    replica = new_replica()
    with replica.batch():
        for number in range(workers):
            name = f"w{number}"
            shown = replace(card(worker_id=name), block_size=32 if number % 2 else 16)
            replica.worker_heard(WorkerId(name), encode(worker_beat(shown)), 0.0)
    whole, stepped = Watch(replica), Watch(replica)

    begun, _ = whole.look()
    taken = len(list(stepped.looking(steps)))

    assert workers // 2 == len(begun)
    assert (begun, []) == stepped.told()
    assert 1 <= taken <= steps
    assert ([], []) == stepped.told()


@pytest.mark.parametrize(("workers", "steps"), [(0, 4), (100, 4), (250, 10), (1000, 40), (3000, 40)])
def test_few_steps_while_idle(workers: int, steps: int) -> None:
    """A replica wakes up for many looks where workers are many, or while events are expected."""
    replica = new_replica()
    with replica.batch():
        for number in range(workers):
            shown = card(worker_id=f"w{number}")
            replica.worker_heard(WorkerId(shown.worker_id), encode(worker_beat(shown)), 0.0)

    assert steps == Watch(replica).steps()


def test_many_steps_while_events_are_expected(replica: Replica) -> None:
    """Until they have come, or their time is over."""
    watch = Watch(replica)
    idle = watch.steps()
    expect(replica)
    assert idle < watch.steps()

    watch.settle(ANNOUNCE_S)
    assert idle == watch.steps()


def test_worker_that_leaves_amid_a_look(replica: Replica) -> None:
    """Its problems are not told."""
    replica.worker_heard(W2, encode(worker_beat(replace(card(worker_id=W2), block_size=32))), 0.0)
    watch = Watch(replica)

    steps = watch.looking(2)
    next(steps)
    replica.worker_heard(W2, encode(worker_beat(state="leave")), 0.0)
    list(steps)

    assert ([], []) == watch.told()


def test_two_workers_with_one_address(replica: Replica) -> None:
    """Two ids for one engine: said of the pool, with both names, until one of them is gone."""
    watch = Watch(replica)
    twin = replace(card("w2"), url=card("w1").url)
    replica.worker_heard(W2, encode(worker_beat(twin)), 0.0)

    assert (["address"], []) == kinds(watch)
    assert "workers w1, w2 have one address" in watch.problems(POOL, "")[0].text
    replica.worker_heard(W2, encode(worker_beat("w2", state="leave")), 0.0)
    assert ([], ["address"]) == kinds(watch)
