"""Single forged messages: impossible numbers and versions in the name of a real process.

None of them carries blocks or bookings: a forged one makes a copy wrong until the next Check, which
tests/core covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire.heartbeats import RankBeat, RouterBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import VERSION, Frame
from kvrouter.core.wire.ops import encode as encode_frame
from tests.convergence.engines import NAMESPACE, SimAgent
from tests.convergence.replicas import SimReplica

Message = tuple[str, bytes]

SUBJECTS = Subjects(NAMESPACE)
FAR = 2**40
"""More frames than any process publishes."""
NEVER = 2**60
"""An incarnation that starts in thousands of years."""
POISONS = (
    "frame far ahead", "heartbeat far ahead", "frame of the future", "heartbeat of the future",
    "frame of version 2", "round of the future", "pools out of nowhere",
)  # fmt: skip


def poison(kind: str, victim: SimReplica | SimAgent, number: int) -> Iterator[Message]:
    """The forged message in the victim's name; no two are equal."""
    if isinstance(victim, SimAgent):
        yield from _of_agent(kind, victim, number)
    else:
        yield from _of_replica(kind, victim, number)


def _of_agent(kind: str, agent: SimAgent, number: int) -> Iterator[Message]:
    publisher, worker_id = agent.publishers[0], WorkerId(agent.card.worker_id)
    subject = SUBJECTS.live_kv(agent.pool_id, worker_id, 0)
    life, seq = publisher.incarnation, publisher.seq

    def beat(incarnation: int, rank_life: int, rank_seq: int) -> Message:
        ranks = [RankBeat(0, rank_life, rank_seq)]
        told = WorkerBeat(VERSION, incarnation, "up", str(agent.pool_id), ranks, 1)
        return SUBJECTS.live_worker(worker_id), encode(told)

    yield from _frames(kind, subject, life, seq, number)
    if kind == "heartbeat far ahead":
        yield beat(agent.incarnation, life, FAR + number)
    elif kind == "heartbeat of the future":
        yield beat(NEVER + number, NEVER + number, number % 3)


def _of_replica(kind: str, sim: SimReplica, number: int) -> Iterator[Message]:
    replica = sim.replica
    pool_id = min(replica.routers, default=PoolId("none-00000000"))
    seq = replica.routers[pool_id].feed.source.seq if pool_id in replica.routers else 0

    def beat(incarnation: int, feeds: dict[str, int], number: int = 0) -> Message:
        told = RouterBeat(VERSION, incarnation, "up", "", feeds, number)
        return SUBJECTS.live_router(replica.router_id), encode(told)

    beats: dict[str, Callable[[], Message]] = {
        "heartbeat far ahead": lambda: beat(replica.incarnation, {pool_id: FAR + number}),
        "heartbeat of the future": lambda: beat(NEVER + number, {pool_id: number % 3}),
        "round of the future": lambda: beat(replica.incarnation, {}, NEVER + number),
        "pools out of nowhere": lambda: beat(
            replica.incarnation, {f"none{n}-0000000{number % 10}": n for n in range(4)}
        ),
    }
    yield from _frames(kind, SUBJECTS.live_sync(pool_id, replica.router_id), replica.incarnation, seq, number)
    if kind in beats:
        yield beats[kind]()


def _frames(kind: str, subject: str, life: int, seq: int, number: int) -> Iterator[Message]:
    if kind == "frame far ahead":
        yield subject, encode_frame(Frame(VERSION, life, FAR + number, []))
    elif kind == "frame of the future":
        yield subject, encode_frame(Frame(VERSION, NEVER + number, 7, []))
    elif kind == "frame of version 2":
        yield subject, encode_frame(Frame(2, life, seq + 1, []))
