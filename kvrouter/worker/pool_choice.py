"""Which pool a worker joins, if its engine has several names (`--served-model-name new old`).

Its first name makes a pool of its own. In a rolling rename that would split a fleet: the engines that are
renamed still serve the old name, with equal tokens. So an agent first listens, and joins the pool of a live
worker that is called by one of its names and has the same model directory. `--model` overrides this.

Cards come with a worker's first heartbeat and every CARD_EVERY_S; agents may not send hellos.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

import structlog

from kvrouter.bus import BusPart, Subjects
from kvrouter.core.wire.heartbeats import Card, decode_worker_beat
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.announcer import CARD_EVERY_S
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.options import AgentOptions

log = structlog.get_logger()

# Longer than an agent that starts at the same time waits before its first heartbeat (agent.py, SETTLE_S).
LISTEN_S = 3.5
_LOOK_EVERY_S = 0.05


def pool_of(names: Sequence[str], tokenizer: str, cards: Iterable[Card]) -> str:
    """The name of the pool: that of most of these workers that may be joined, else the first name.

    Model directories may be below different paths on different hosts: their last part counts.
    """
    own = PurePath(tokenizer).name
    pools = Counter(card.model for card in cards if own and PurePath(card.tokenizer).name == own)
    return max(names, key=lambda name: (pools[name], -names.index(name)))


async def choose_pool(
    options: AgentOptions, bus: BusPart, facts: EngineFacts, leave: asyncio.Event
) -> str | None:
    """The name of the pool, if it is given or is not the engine's first name; else None."""
    names = facts.models.served_names
    if options.model is not None or len(names) < 2:
        return options.model
    heard: dict[str, Card | None] = {}

    def note(subject: str, payload: bytes, _reply: str) -> None:
        worker = subject.rpartition(".")[2]
        try:
            beat = decode_worker_beat(payload, WorkerId(worker))
        except MalformedFrameError:
            return
        if worker != options.worker_id:
            heard[worker] = beat.card or heard.get(worker)

    await bus.subscribe(Subjects(options.namespace).live_worker(WorkerId("*")), note)
    connected = asyncio.Event()
    bus.on_connect(connected.set)
    now = asyncio.get_running_loop().time
    began, pool = now(), names[0]
    while pool == names[0] and not leave.is_set():
        if not connected.is_set():
            began = now()
        elif now() >= began + (LISTEN_S if all(heard.values()) else CARD_EVERY_S + 1.0):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
        pool = pool_of(names, facts.tokenizer, filter(None, heard.values()))
    if pool == names[0]:
        return None
    reason = "a live worker with the same model directory serves this name"
    log.info("worker.joins_pool", worker=options.worker_id, pool=pool, names=names, reason=reason)
    return pool
