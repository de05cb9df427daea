"""Problems are reported once when they begin and once when they end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvrouter.core.audit.findings import Audit
from kvrouter.core.audit.problems import TokenComparison
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.predictions import ANNOUNCE_S, LEAST, WINDOW, Usage
from kvrouter.core.wire.heartbeats import RankBeat, encode
from kvrouter.core.wire.ids import WorkerId
from tests.core.replicas import new_replica
from tests.core.tables.test_predictions import TEXT, predicted
from tests.core.worlds import POOL, T1, W1, W2, card, worker_beat


@pytest.fixture
def replica() -> Replica:
    """One worker with an empty, live feed."""
    replica = new_replica()
    replica.worker_heartbeat(W1, encode(worker_beat(card())), 0.0)
    return replica


def kinds(audit: Audit) -> tuple[list[str], list[str]]:
    """Audit: kinds of the problems that have begun, and of the problems that ended."""
    begun, over = audit.run()
    return [one.problem.kind for one in begun], [one.problem.kind for one in over]


def answer(replica: Replica, usage: Usage) -> None:
    """A window of answers with this usage, where four blocks were predicted."""
    for _ in range(WINDOW):
        replica.router(POOL).predictions.observe(predicted(4), usage)


def test_problem_is_reported_once(replica: Replica) -> None:
    """It begins, is listed while it lasts and ends; when it returns it is reported again."""
    audit = Audit(replica)
    answer(replica, Usage(90, 64))

    assert (["tokens"], []) == kinds(audit)
    answer(replica, Usage(91, 64))
    assert ([], []) == kinds(audit)
    assert "last 91, here 100" in audit.problems(POOL, W1)[0].text
    assert [] == audit.problems(POOL, "")

    answer(replica, Usage(100, 64))
    assert ([], ["tokens"]) == kinds(audit)
    assert [] == audit.problems(POOL, W1)
    answer(replica, Usage(90, 64))
    assert (["tokens"], []) == kinds(audit)


def test_pool_whose_tokens_differ(replica: Replica) -> None:
    """Token ids that differ from an engine's are a problem of the pool, until they are equal."""
    compared = [TokenComparison(difference="do this")]
    audit = Audit(replica, lambda _: compared[0])

    assert (["tokens_differ"], []) == kinds(audit)
    assert ["do this"] == [problem.text for problem in audit.problems(POOL, "")]
    compared[0] = TokenComparison()
    assert ([], ["tokens_differ"]) == kinds(audit)


def test_problems_of_a_worker_that_leaves(replica: Replica) -> None:
    """They end, and its record goes."""
    audit = Audit(replica)
    answer(replica, Usage(90, 64))
    audit.run()
    replica.worker_heartbeat(W1, encode(worker_beat(state="leave")), 0.0)

    assert ([], ["tokens"]) == kinds(audit)
    assert {} == replica.router(POOL).predictions.records


def expect(replica: Replica) -> None:
    """Requests were served whose blocks no event has named."""
    for hash_ in range(LEAST):
        replica.router(POOL).predictions.expect(T1, TEXT, [hash_], 0.0)


def test_missing_events(replica: Replica) -> None:
    """A live feed that names no block of the requests served is a problem."""
    audit = Audit(replica)
    expect(replica)
    audit.check_events(ANNOUNCE_S)

    assert (["no_events"], []) == kinds(audit)


def test_feed_that_is_behind(replica: Replica) -> None:
    """While a feed recovers, neither missing events nor wrong predictions are problems."""
    audit = Audit(replica)
    assert audit.is_firm(POOL, T1)
    behind = worker_beat(ranks=[RankBeat(0, 100, 7)])
    replica.worker_heartbeat(W1, encode(behind), 0.0)
    expect(replica)
    audit.check_events(ANNOUNCE_S)

    assert ([], []) == kinds(audit)
    assert not audit.is_firm(POOL, T1)


def test_partial_rank(replica: Replica) -> None:
    """Blocks cached before the agent started are never announced. No block at all is a problem."""
    audit = Audit(replica)
    partial = worker_beat(ranks=[RankBeat(0, 100, 0, partial=True)])
    replica.worker_heartbeat(W1, encode(partial), 0.0)
    replica.router(POOL).pool.index.store(T1, [99])
    expect(replica)
    audit.check_events(ANNOUNCE_S)
    assert ([], []) == kinds(audit)
    assert not audit.is_firm(POOL, T1)

    replica.router(POOL).pool.index.clear(T1)
    expect(replica)
    audit.check_events(ANNOUNCE_S)
    assert (["no_events"], []) == kinds(audit)


@pytest.mark.parametrize(("workers", "steps"), [(9, 4), (9, 1), (9, 100), (1, 4)])
def test_audit_in_steps(workers: int, steps: int) -> None:
    """An audit in steps finds the same as one at once, in at most `steps` steps, and reports it once."""
    replica = new_replica()
    for number in range(workers):
        name = f"w{number}"
        own = replace(card(worker_id=name), block_size=32 if number % 2 else 16)
        replica.worker_heartbeat(WorkerId(name), encode(worker_beat(own)), 0.0, settles=False)
    replica.settle()
    whole, stepped = Audit(replica), Audit(replica)

    begun, _ = whole.run()
    taken = len(list(stepped.steps(steps)))

    assert workers // 2 == len(begun)
    assert (begun, []) == stepped.changes()
    assert 1 <= taken <= steps
    assert ([], []) == stepped.changes()


@pytest.mark.parametrize(("workers", "steps"), [(0, 4), (100, 4), (250, 10), (1000, 40), (3000, 40)])
def test_few_steps_while_idle(workers: int, steps: int) -> None:
    """Only many workers, or expected events, make many steps: an idle replica should sleep."""
    replica = new_replica()
    for number in range(workers):
        own = card(worker_id=f"w{number}")
        replica.worker_heartbeat(WorkerId(own.worker_id), encode(worker_beat(own)), 0.0, settles=False)
    replica.settle()

    assert steps == Audit(replica).step_count()


def test_many_steps_while_events_are_expected(replica: Replica) -> None:
    """Until the events have arrived or their time is over."""
    audit = Audit(replica)
    idle = audit.step_count()
    expect(replica)
    assert idle < audit.step_count()

    audit.check_events(ANNOUNCE_S)
    assert idle == audit.step_count()


def test_worker_that_leaves_during_an_audit(replica: Replica) -> None:
    """Its problems are not reported."""
    replica.worker_heartbeat(W2, encode(worker_beat(replace(card(worker_id=W2), block_size=32))), 0.0)
    audit = Audit(replica)

    steps = audit.steps(2)
    next(steps)
    replica.worker_heartbeat(W2, encode(worker_beat(state="leave")), 0.0)
    list(steps)

    assert ([], []) == audit.changes()


def test_two_workers_with_one_address(replica: Replica) -> None:
    """Of two agents of one engine the one that was announced first has a problem, until the other leaves."""
    audit = Audit(replica)
    twin = card("w2", url=card("w1").url, started_at_us=1)
    replica.worker_heartbeat(W2, encode(worker_beat(twin)), 0.0)

    assert (["address"], []) == kinds(audit)
    (problem,) = audit.problems(POOL, "w1")
    assert "is the same engine as w2 (http://w1:9000)" in problem.text
    assert problem.text in audit.degrading()[0]
    replica.worker_heartbeat(W2, encode(worker_beat("w2", state="leave")), 0.0)
    assert ([], ["address"]) == kinds(audit)


def test_queue_without_effect(replica: Replica) -> None:
    """Once for the pool, with the names; only where there is a queue, and until every card says its size."""
    replica.worker_heartbeat(W2, encode(worker_beat(card("w2", max_batched_tokens=64))), 0.0)
    audit = Audit(replica, has_queue=True)

    assert ([], []) == kinds(Audit(replica))
    assert (["never_full"], []) == kinds(audit)
    (problem,) = audit.problems(POOL, "")
    assert "is never full, as are w1, whose" in problem.text
    replica.worker_heartbeat(W1, encode(worker_beat(card(max_batched_tokens=64))), 1.0)
    assert ([], ["never_full"]) == kinds(audit)
