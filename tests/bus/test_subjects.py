"""Subjects that are written can be read."""

from __future__ import annotations

import pytest

from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire.hashes import pool_token
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.senders import KvSource, RouterSource, Source, SyncSource, WorkerSource
from kvrouter.errors import ConfigError

POOL, WORKER, ROUTER = PoolId(pool_token("meta/Llama-3.1")), WorkerId("host_9000"), RouterId("3f-2a")
MEMBER = WorkerId("vllm.vllm-0")


@pytest.fixture
def subjects() -> Subjects:
    """The subjects of namespace prod."""
    return Subjects("prod")


def test_table_of_the_design(subjects: Subjects) -> None:
    """Every subject is that of docs/concepts/design.md#wire."""
    assert "kvrouter.prod.hello" == subjects.hello
    assert "kvrouter.prod.live.>" == subjects.live
    assert "kvrouter.prod.live.worker.host_9000" == subjects.live_worker(WORKER)
    assert f"kvrouter.prod.live.kv.{POOL}.host_9000.3" == subjects.live_kv(POOL, WORKER, 3)
    assert "kvrouter.prod.live.router.3f-2a" == subjects.live_router(ROUTER)
    assert f"kvrouter.prod.live.sync.{POOL}.3f-2a" == subjects.live_sync(POOL, ROUTER)
    assert "kvrouter.prod.kv-replay.host_9000" == subjects.kv_replay(WORKER)
    assert "kvrouter.prod.sync-replay.3f-2a" == subjects.sync_replay(ROUTER)
    assert "kvrouter.prod.answer.kv.host_9000.r.1" == subjects.answer(KvSource(POOL, WORKER, 0), "r", "1")
    assert "kvrouter.prod.answer.sync.3f-2a.r.1" == subjects.answer(SyncSource(POOL, ROUTER), "r", "1")
    assert "kvrouter.prod.answer.*.*.r.*" == subjects.answers("r")
    assert "kvrouter.prod.answer.kv.*.*.r.*" == subjects.group_answers("r")


def test_a_group_is_a_token(subjects: Subjects) -> None:
    """The subjects of a worker in a group have one token more, so that a wildcard is the group."""
    feed = KvSource(POOL, MEMBER, 3)

    assert "kvrouter.prod.live.worker.vllm.vllm-0" == subjects.live_worker(MEMBER)
    assert f"kvrouter.prod.live.kv.{POOL}.vllm.vllm-0.3" == subjects.live_kv(POOL, MEMBER, 3)
    assert "kvrouter.prod.kv-replay.vllm.vllm-0" == subjects.replay(feed)
    assert "kvrouter.prod.answer.kv.vllm.vllm-0.r.1" == subjects.answer(feed, "r", "1")


@pytest.mark.parametrize(
    "source",
    [
        WorkerSource(WORKER),
        RouterSource(ROUTER),
        KvSource(POOL, WORKER, 12),
        WorkerSource(MEMBER),
        KvSource(POOL, MEMBER, 12),
        WorkerSource(WorkerId(f"{'g' * 64}.{'n' * 64}")),
        SyncSource(POOL, ROUTER),
    ],
)
def test_live_subjects_come_back(subjects: Subjects, source: Source) -> None:
    """A live subject names its sender."""
    match source:
        case WorkerSource():
            subject = subjects.live_worker(source.worker_id)
        case RouterSource():
            subject = subjects.live_router(source.router_id)
        case KvSource():
            subject = subjects.live_kv(source.pool, source.worker_id, source.rank)
        case SyncSource():
            subject = subjects.live_sync(source.pool, source.router_id)

    assert source == subjects.parse_live(subject)


@pytest.mark.parametrize(
    "rest",
    [
        *("", "worker", "worker.a.b.c", "worker.a.", "worker..a", f"worker.{'g' * 65}.a", "new.a"),
        *("kv.pool.w1", "kv.pool.w1.x", "kv.pool.w1.-1", "kv.pool.0", "kv.pool.a.b.c.0", "kv.pool.a..0"),
        *("sync.pool", "sync.pool.a.b", "router.a.b"),
    ],
)
def test_unknown_live_subjects(subjects: Subjects, rest: str) -> None:
    """Live subjects of a newer version are ignored; pools and routers have no groups."""
    assert subjects.parse_live(f"kvrouter.prod.live.{rest}") is None


def test_replay_subject_of_a_feed(subjects: Subjects) -> None:
    """A KV feed is requested from its agent, a sync feed from its replica."""
    assert subjects.kv_replay(WORKER) == subjects.replay(KvSource(POOL, WORKER, 0))
    assert subjects.sync_replay(ROUTER) == subjects.replay(SyncSource(POOL, ROUTER))


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", "*", ">", "x" * 65, "ü"])
def test_bad_namespace_fails_at_start(namespace: str) -> None:
    """A namespace that is invalid in a subject is rejected, with its value."""
    with pytest.raises(ConfigError, match="use 1 to 64"):
        Subjects(namespace)
