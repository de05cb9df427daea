"""Heartbeats that arrive together: work over all workers is done once."""

from __future__ import annotations

from unittest import mock

import pytest

from kvrouter.core.fleet import replica as core_replica
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.wire.heartbeats import State, encode
from kvrouter.core.wire.ids import WorkerId
from tests.core.replicas import new_replica
from tests.core.worlds import POOL, T1, card, worker_beat

CARDS = [card(f"w{n}") for n in range(300)]


def test_many_cards_at_once() -> None:
    """Three hundred workers join in one batch: their pool chooses its targets once."""
    replica = new_replica()

    choose = Pool._choose_targets
    with mock.patch.object(Pool, "_choose_targets", autospec=True, side_effect=choose) as chosen:
        for one in CARDS:
            data = encode(worker_beat(one))
            replica.worker_heartbeat(WorkerId(one.worker_id), data, 0.0, settles=False)
        replica.settle()

        assert 1 == chosen.call_count
    assert 300 == len(replica.router(POOL).pool.targets)


def test_message_alone() -> None:
    """Outside a batch each message takes effect at once."""
    replica = new_replica()
    replica.worker_heartbeat(T1.worker_id, encode(worker_beat(card())), 0.0)
    assert [T1] == list(replica.router(POOL).pool.targets)

    replica.worker_heartbeat(T1.worker_id, encode(worker_beat("w1", state="down")), 0.0)

    assert [] == list(replica.router(POOL).pool.targets)


@pytest.mark.parametrize("state", ["up", "draining"])
def test_targets_that_are_too_many(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of targets holds within a batch, and for draining workers."""
    monkeypatch.setattr(core_replica, "TARGETS_MOST", 10)
    replica = new_replica()

    for one in [card(f"w{n}", ranks=4) for n in range(5)]:
        data = encode(worker_beat(one, state=state))
        replica.worker_heartbeat(WorkerId(one.worker_id), data, 0.0, settles=False)
    replica.settle()

    assert (2, 3) == (len(replica.router(POOL).pool.workers), replica.counters.members_refused)
    replica.worker_heartbeat(WorkerId("w1"), encode(worker_beat("w1", state="leave")), 0.0)
    replica.worker_heartbeat(WorkerId("w2"), encode(worker_beat(card("w2", ranks=4))), 0.0)
    assert {"w0", "w2"} == set(replica.router(POOL).pool.workers)
