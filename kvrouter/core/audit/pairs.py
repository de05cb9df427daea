"""Problems of prefill and decode workers: an unknown role, no partner, a pair that rests.

p1 nixl 0.33 ──> d1 nixl 0.33    a pair, unless it rests
p2 nixl 0.32 ··· d1              no pair: the text names what differs, and what to change
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from kvrouter.core.audit.problems import Problem
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.split import refusal, serves_alone, terms
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.transfers import FAILURES_MOST, REST_S, Transfers
from kvrouter.core.wire.heartbeats import BOTH, CONNECTORS, DECODE, PREFILL, Card
from kvrouter.core.wire.ids import WorkerId

_Terms: TypeAlias = Mapping[str, object]

# Other workers that a worker without a partner is compared with: a forger can announce thousands.
_COMPARED_MOST = 8
# Of values and of workers in a text: both come from others' cards.
_MOST_CHARACTERS, _MOST_NAMES = 40, 5
_REMEDIES = {
    "engine": "run one engine on both sides",
    "engine version": "run one version of the engine on both sides",
    "block size": "give both engines one --block-size",
    "KV connector": "give both engines one connector, and both agents its --kv-connector",
    "kv-hash": "give both agents one --kv-hash",
}


_SAME_ENGINE = (
    "names the same engine for hand-overs as {first}, so those of one fail: give each agent the bootstrap "
    "server of its own engine (--bootstrap-port, --kv-address)"
)


def problems_of_pairs(pool: Pool, transfers: Transfers, now: float) -> Iterator[tuple[WorkerId, Problem]]:
    """Of each worker whose role is not `both`, and of those that read from peers in vain."""
    if pool.split.whole is None:
        yield from _resting(transfers, now)
        return
    targets = list(pool.targets)
    paired = {targets[at].worker_id for one in pool.split.islands for at in (*one.prefill, *one.decode)}
    workers = {target.worker_id: worker for target, worker in pool.targets.items()}
    found: dict[object, Problem] = {}  # workers that are alike have one text
    named: dict[str, WorkerId] = {}
    for worker_id, worker in workers.items():
        role = worker.card.role
        if role not in {BOTH, PREFILL, DECODE}:
            yield worker_id, Problem("role", f"{refusal(worker.card)}: it gets no requests")
        elif role != BOTH and worker_id not in paired:
            key = (role, *terms(worker.card, pool.settings.pd_same_label).values())
            if key not in found:
                found[key] = Problem("partner", _why_alone(pool, worker.card, workers))
            yield worker_id, found[key]
        for engine_id in worker.card.kv_engine_ids:
            if (first := named.setdefault(engine_id, worker_id)) != worker_id:
                yield worker_id, Problem("partner", _SAME_ENGINE.format(first=first))
                break
    yield from _resting(transfers, now)


def _why_alone(pool: Pool, card: Card, workers: Mapping[WorkerId, Worker]) -> str:
    """Why a worker has no partner, what that means, and what to change."""
    other, refuses = (DECODE if card.role == PREFILL else PREFILL), pool.settings.pd_fallback == "refuse"
    alone = "serves whole requests" if serves_alone(card) and not refuses else "gets no requests"
    if card.kv_connector not in CONNECTORS:
        return (
            f"KV connector {_shown(card.kv_connector)} is not served, so it {alone}: use "
            f"{' or '.join(CONNECTORS)}, upgrade the replicas if a newer version serves it, or start the "
            "engine without a role"
        )
    labels = pool.settings.pd_same_label
    own, others = terms(card, labels), _others(workers, other, labels)
    if not others:
        return (
            f"has role {card.role} and no {other} worker is up in its pool, so it {alone}: start one, or "
            f"look why those that exist are down; a {other} worker of another model is in another pool"
        )
    nearest = min(others, key=lambda name: len(_differing(own, others[name])))
    names = _differing(own, others[nearest])
    differ = ", ".join(f"{name} {_shown(others[nearest][name])} (here {_shown(own[name])})" for name in names)
    remedies = "; ".join(_REMEDIES.get(name) or _label_remedy(name) for name in names)
    return (
        f"has role {card.role} and no {other} worker to pair with, so it {alone}: {nearest} has {differ}. "
        f"To pair them, {remedies}"
    )


def _others(workers: Mapping[WorkerId, Worker], role: str, labels: Sequence[str]) -> dict[WorkerId, _Terms]:
    """The first workers of a role, of each kind one."""
    found: dict[tuple[object, ...], tuple[WorkerId, _Terms]] = {}
    for worker_id, worker in workers.items():
        if worker.card.role == role and len(found) < _COMPARED_MOST:
            each = terms(worker.card, labels)
            found.setdefault(tuple(each.values()), (worker_id, each))
    return dict(found.values())


def _differing(own: _Terms, others: _Terms) -> list[str]:
    return [name for name, value in own.items() if others[name] != value]


def _label_remedy(name: str) -> str:
    return (
        f"give both agents one --{name}=…, or the replicas no --pd-same-label {name.removeprefix('label ')}"
    )


def _shown(value: object) -> str:
    text = "none" if value in {None, ""} else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def _resting(transfers: Transfers, now: float) -> Iterator[tuple[WorkerId, Problem]]:
    """The pairs that are left alone, at their decode workers: that is where they have failed."""
    failing: dict[WorkerId, list[WorkerId]] = {}
    for prefill, decode in transfers.resting(now):
        failing.setdefault(decode, []).append(prefill)
    for decode, prefills in failing.items():
        more = f" and {len(prefills) - _MOST_NAMES} more" if len(prefills) > _MOST_NAMES else ""
        text = (
            f"failed {FAILURES_MOST} times in a row with requests handed over from "
            f"{', '.join(prefills[:_MOST_NAMES])}{more}: these pairs rest for {REST_S:g} s, and again after "
            "each failure. Look at the logs of both engines, and whether this one reaches what the other "
            "hands over (nixl: VLLM_NIXL_SIDE_CHANNEL_HOST of the prefill engine; mooncake, sglang: its "
            "bootstrap server; example: the shared directory; p2p: --kv-address of the other one's agent)"
        )
        yield decode, Problem("pair", text)
