"""What operators are told of prefill and decode workers that do not serve together."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouter.core.audit.findings import Audit
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.transfers import FAILURES_MOST, REST_S
from kvrouter.core.wire.heartbeats import encode
from kvrouter.core.wire.ids import WorkerId
from tests.core.replicas import new_replica
from tests.core.worlds import POOL, card, worker_beat

P1, P2, D1 = WorkerId("p1"), WorkerId("p2"), WorkerId("d1")


def fleet(*workers: tuple[str, str, dict[str, Any]], **settings: Any) -> Replica:
    """A replica that knows these workers, of name, role and other facts."""
    replica = new_replica(settings=PoolSettings(**settings))
    for name, role, facts in workers:
        known = card(name, role=role, url=f"http://{name}:1", **({"kv_connector": "nixl"} | facts))
        replica.worker_heartbeat(WorkerId(name), encode(worker_beat(known)), 0.0)
    return replica


def told(replica: Replica, now: float = 0.0) -> dict[str, str]:
    """Kind and text of each worker's problem; /ready has it, too."""
    audit = Audit(replica)
    audit.check_events(now)
    audit.run()
    workers = replica.router(POOL).pool.workers
    found = [(name, one) for name in workers for one in audit.problems(POOL, name)]
    problems = {name: one for name, one in found if one.kind != "block_size"}
    named = [f"{POOL}: worker {name} {one.text}" for name, one in problems.items()]
    assert sorted(named) == sorted(audit.degrading())
    return {name: f"{one.kind}: {one.text}" for name, one in problems.items()}


def test_nothing_to_say() -> None:
    """A pair, a whole worker beside it, and a pool without roles have no problem."""
    both: tuple[str, str, dict[str, Any]] = ("b1", "both", {"kv_connector": ""})

    assert {} == told(fleet(both, ("p1", "prefill", {}), ("d1", "decode", {}))) == told(fleet(both))


@pytest.mark.parametrize(
    ("role", "settings", "words"),
    [
        (
            "prefill",
            {},
            "has role prefill and no decode worker is up in its pool, so it gets no requests: start one",
        ),
        (
            "decode",
            {},
            "has role decode and no prefill worker is up in its pool, so it serves whole requests",
        ),
        ("decode", {"pd_fallback": "refuse"}, "so it gets no requests"),
        ("decode", {"kv_connector": "sglang"}, "no prefill worker is up in its pool, so it gets no requests"),
    ],
)
def test_one_role_only(role: str, settings: dict[str, Any], words: str) -> None:
    """A pool of prefill or of decode workers only says which role is missing."""
    facts, settings = ({}, settings) if "pd_fallback" in settings else (settings, {})
    assert words in told(fleet(("w1", role, facts), **settings))["w1"]


@pytest.mark.parametrize(
    ("facts", "differ", "remedy"),
    [
        (
            {"engine_version": "0.32.0"},
            "engine version 0.32.0 (here 0.33.0)",
            "run one version of the engine",
        ),
        ({"engine": "sglang"}, "engine sglang (here vllm)", "run one engine"),
        ({"block_size": 32}, "block size 32 (here 16)", "give both engines one --block-size"),
        ({"kv_connector": "example"}, "KV connector example (here nixl)", "both agents its --kv-connector"),
        ({"kv_hash": "h"}, "kv-hash h (here none)", "give both agents one --kv-hash"),
        ({"labels": {"zone": "b"}}, "label zone b (here a)", "no --pd-same-label zone"),
        ({"labels": {}}, "label zone none (here a)", "give both agents one --label zone=…"),
        ({"kv_hash": "h" * 99}, f"kv-hash {'h' * 40}… (here none)", "--kv-hash"),
    ],
)
def test_what_differs(facts: dict[str, Any], differ: str, remedy: str) -> None:
    """Without a partner: the nearest one, what differs, and what to change."""
    base = {"engine": "vllm", "engine_version": "0.33.0", "labels": {"zone": "a"}}
    far = ("p2", "prefill", base | {"engine": "other", "engine_version": "1", "kv_hash": "x"})
    replica = fleet(far, ("p1", "prefill", base | facts), ("d1", "decode", base), pd_same_label=("zone",))

    found = told(replica)
    assert {"p1", "p2", "d1"} == found.keys()
    assert f"to pair with, so it serves whole requests: p1 has {differ}. To pair them, " in found["d1"]
    assert remedy in found["d1"]
    assert all(text.startswith("partner: ") for text in found.values())


def test_connector_that_is_not_served() -> None:
    """A card of a newer agent may have one."""
    facts = {"kv_connector": "lmcache"}
    found = told(fleet(("p1", "prefill", facts), ("d1", "decode", facts)))

    use = "use nixl or mooncake or example"
    assert f"KV connector lmcache is not served, so it gets no requests: {use}" in found["p1"]
    assert "so it serves whole requests: use nixl" in found["d1"]


def test_two_agents_name_one_engine() -> None:
    """The second one asks the bootstrap server of the first one's engine."""
    facts = {"kv_connector": "mooncake", "kv_engine_ids": ("e",)}
    found = told(
        fleet(
            ("p1", "prefill", facts),
            ("p2", "prefill", facts),
            ("d1", "decode", facts | {"kv_engine_ids": ()}),
        )
    )

    assert ["p2"] == [*found]
    assert "partner: names the same engine for hand-overs as p1" in found["p2"]
    assert "--bootstrap-port" in found["p2"]


def test_unknown_role() -> None:
    """The worker is named once, with what to do."""
    replica = fleet(("x1", "encode", {}))

    assert (
        "role: has role 'encode', which this version does not know (upgrade the replicas, or give its agent "
        "--role both, prefill or decode): it gets no requests"
    ) == told(replica)["x1"]
    assert not [reason for reason in replica.readiness.degraded() if "x1" in reason]


def test_pair_that_rests() -> None:
    """It is named at its decode worker, until it may be tried again."""
    replica = fleet(("p1", "prefill", {}), ("p2", "prefill", {}), ("d1", "decode", {}))
    transfers = replica.router(POOL).tables.transfers
    for prefill, times in ((P1, FAILURES_MOST), (P2, FAILURES_MOST - 1)):
        for _ in range(times):
            transfers.failed(prefill, D1, 5.0)

    found = told(replica, 6.0)
    assert ["d1"] == [*found]
    assert "pair: failed 3 times in a row with requests handed over from p1: " in found["d1"]
    assert {} == told(replica, 5.0 + REST_S)


def test_a_peer_that_gives_nothing() -> None:
    """Whole workers that read blocks from each other are named, too."""
    replica = fleet(("b1", "both", {}), ("b2", "both", {}))
    for _ in range(FAILURES_MOST):
        replica.router(POOL).tables.transfers.failed(WorkerId("b1"), WorkerId("b2"), 5.0)

    assert "p2p: --kv-address" in told(replica, 6.0)["b2"]


def test_many_kinds_of_workers() -> None:
    """However many unlike workers are announced, a text names one of them."""
    many = [(f"p{number}", "prefill", {"kv_hash": str(number)}) for number in range(200)]

    assert len(told(fleet(*many, ("d1", "decode", {})))["d1"]) < 400
