"""Which pool a worker joins, if its engine has several names (`--served-model-name new old`).

Its first name makes a pool of its own. In a rolling rename that would split a fleet: the engines that are
renamed still serve the old name, with equal tokens. So an agent first listens, and joins the pool of live
workers that is called by another of its names, if both engines make the same token ids of the same prompts:

    card of a live worker ──its pool is one of the names──> PROBES to both engines ──same ids──> that pool

If one of the two cannot be asked, equal model directories count instead. `--model` overrides all this.

Cards come with a worker's first heartbeat and every CARD_EVERY_S; agents may not send hellos.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

import structlog

from kvrouter.bus import BusPart, Subjects
from kvrouter.core.wire.heartbeats import Card, decode_worker_beat
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import MalformedFrameError
from kvrouter.tls import trusting
from kvrouter.worker.announcer import CARD_EVERY_S
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.options import AgentOptions

if TYPE_CHECKING:
    from kvrouter.tokens.remote_tokenizer import EngineTokenizer

log = structlog.get_logger()

# Longer than an agent that starts at the same time waits before its first heartbeat (agent.py, SETTLE_S).
LISTEN_S = 3.5
_LOOK_EVERY_S = 0.05
# Of all comparisons with one pool: five prompts to each engine, which serves the chats with one token.
COMPARE_S = 10.0
# Members of a pool that are tried until one can be asked.
_MOST_ASKED = 3

_SAME_IDS = "an engine of this pool makes the same token ids"
_SAME_DIRECTORY = (
    "a live worker of this pool has the same model directory; the engines' ids were not compared"
)


def pool_of(names: Sequence[str], cards: Iterable[Card], why: Mapping[str, str]) -> str:
    """The name of the pool: that of most live workers, of those that `why` allows; else the first name."""
    pools = Counter(card.model for card in cards if card.model == names[0] or why.get(card.model))
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
    why: dict[str, str] = {}
    while pool == names[0] and not leave.is_set():
        if not connected.is_set():
            began = now()
        elif now() >= began + (LISTEN_S if all(heard.values()) else CARD_EVERY_S + 1.0):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
        cards = [heard[worker] for worker in sorted(heard)]
        known = [card for card in cards if card is not None]
        for name in names[1:]:
            members = [card for card in known if card.model == name]
            if members and name not in why:
                why[name] = await why_equal(options, facts, members)
        pool = pool_of(names, known, why)
    if pool == names[0]:
        return None
    log.info("worker.joins_pool", worker=options.worker_id, pool=pool, names=names, reason=why[pool])
    return pool


async def why_equal(options: AgentOptions, facts: EngineFacts, members: Sequence[Card]) -> str:
    """Why the engine's prompts may be hashed as those of these workers; empty if they may not."""
    is_equal = await _compare(options, facts, members)
    if is_equal is None:
        # model directories may be below different paths on different hosts: their last part counts
        own = PurePath(facts.tokenizer).name
        return _SAME_DIRECTORY if own and any(PurePath(one.tokenizer).name == own for one in members) else ""
    if not is_equal:
        log.warning(
            "worker.other_tokens",
            worker=options.worker_id,
            pool=members[0].model,
            effect="it serves this name, but other token ids: the engine makes a pool of its first name",
        )
    return _SAME_IDS if is_equal else ""


async def _compare(options: AgentOptions, facts: EngineFacts, members: Sequence[Card]) -> bool | None:
    """Whether the engine makes the ids of the first of these workers that answers; None if none does."""
    # tokenizers and templates, which an agent whose engine has one name does not need
    from kvrouter.tokens.remote_tokenizer import EngineTokenizer, EngineTokenizerError

    try:
        async with (
            asyncio.timeout(COMPARE_S),
            EngineTokenizer.open(options.api_key, trusting(options.tls_ca)) as engines,
        ):
            own = await _ids(engines, options.engine_url, facts.models.served_names[0])
            for card in members[:_MOST_ASKED]:
                try:
                    return own == await _ids(engines, card.url, card.model)
                except EngineTokenizerError:
                    continue
    except (EngineTokenizerError, TimeoutError):
        pass
    return None


async def _ids(engines: EngineTokenizer, url: str, model: str) -> list[Sequence[int] | None]:
    """The ids of each probe; None for one that the engine rejects. Raises EngineTokenizerError."""
    from kvrouter.tokens.id_comparison import PROBES
    from kvrouter.tokens.remote_tokenizer import PromptRejectedError

    found: list[Sequence[int] | None] = []
    for prompt in (*PROBES["text"], *PROBES["chat"]):
        try:
            found.append(await engines.reference(url, model, prompt))
        except PromptRejectedError:
            if prompt in PROBES["text"]:
                raise
            found.append(None)  # some templates reject a system message
    return found
