"""Which pool a worker joins, if several could serve its engine's names (`--served-model-name new old`).

Its first name makes a pool of its own. In a rolling rename that would split a fleet: old and new engines
serve a name together, with equal tokens. So the agent joins the pool of live workers that serve one of its
names, if both engines make the same token ids of the same prompts:

    card of a live worker ──serves one of the names──> PROBES to both engines ──same ids──> its pool

If one of the two cannot be asked, equal model directories count instead. Of several pools the one with most
workers is joined, of equal ones the first by name: agents that look at the same fleet choose the same pool.
`--model` overrides all this.

An agent whose engine has several names looks before its first heartbeat. All agents look again when a replica
tells them in a hello that several pools serve one of their names (`Rejoining`):

    [k]  [k-v2, k]   the second joins pool k        [k-v2]   makes pool k-v2; told of k-v2, it joins pool k

Cards come with a worker's first heartbeat, with a hello, and every CARD_EVERY_S.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

import structlog

from kvrouter.bus import Bus, BusPart, Subjects
from kvrouter.bus.subjects import EVERY_WORKER
from kvrouter.core.wire.addresses import host_error
from kvrouter.core.wire.heartbeats import Card, decode_worker_beat
from kvrouter.core.wire.senders import WorkerSource
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.announcer import CARD_EVERY_S
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.options import AgentOptions

if TYPE_CHECKING:
    from kvrouter.tokens.remote_tokenizer import EngineTokenizer

log = structlog.get_logger()

# Longer than an agent that starts at the same time waits before its first heartbeat (agent.py, SETTLE_S).
LISTEN_S = 3.5
_LOOK_EVERY_S = 0.05
# After the hello of a replica. It is answered with cards, and another replica's hello follows within 1 s.
LISTEN_AGAIN_S = 1.5
# Between two looks of one agent. They follow hellos, and anyone who may publish those could send many.
LOOK_AGAIN_S = 10.0
# Of all comparisons with one pool: five prompts to each engine, which serves the chats with one token.
COMPARE_S = 10.0
# Members of a pool that are tried until one can be asked.
_MOST_ASKED = 3
# Pools that are compared in one look, those with most workers first.
_MOST_POOLS = 8
# Cards of a fleet. The rest is not looked at.
_MOST_HEARD = 10_000

_SAME_IDS = "an engine of this pool makes the same token ids"
_SAME_DIRECTORY = (
    "a live worker of this pool has the same model directory; the engines' ids were not compared"
)


def pool_of(own: str, cards: Iterable[Card], why: Mapping[str, str]) -> str:
    """The name of the pool: `own`, or one that `why` allows, if it has more live workers.

    Of pools with equally many workers the first by name.
    """
    pools = Counter(card.model for card in cards if card.model == own or why.get(card.model))
    return min({own, *pools}, key=lambda pool: (-pools[pool], pool))


class _Fleet:
    """The cards of workers, as they are heard."""

    def __init__(self, namespace: str, ignored: str = "") -> None:
        """`ignored`: the worker whose heartbeats do not count."""
        self._subjects = Subjects(namespace)
        self._ignored = ignored
        self._cards: dict[str, Card | None] = {}

    async def listen(self, bus: Bus | BusPart) -> None:
        """Hear all workers. Users that versions before wrote may subscribe to the first wildcard only."""
        for every in EVERY_WORKER:
            await bus.subscribe(self._subjects.live_worker(every), self.note)

    def note(self, subject: str, payload: bytes, _reply: str) -> None:
        """Take a heartbeat."""
        source = self._subjects.parse_live(subject)
        if not isinstance(source, WorkerSource):
            return
        worker = source.worker_id
        try:
            beat = decode_worker_beat(payload, worker)
        except MalformedFrameError:
            return
        if worker != self._ignored and (worker in self._cards or len(self._cards) < _MOST_HEARD):
            self._cards[worker] = beat.card or self._cards.get(worker)

    def wait_s(self, least_s: float) -> float:
        """How long to listen: so long, or until each worker that was heard has sent its card."""
        return least_s if all(self._cards.values()) else CARD_EVERY_S + 1.0

    def cards(self) -> list[Card]:
        """Those that are known, by worker id."""
        return [card for _, card in sorted(self._cards.items()) if card is not None]


def pool_name(options: AgentOptions, facts: EngineFacts) -> str:
    """The name of the pool that the options give, or else the engine's first name."""
    return options.model or facts.models.served_names[0]


async def choose_pool(
    options: AgentOptions, bus: BusPart, facts: EngineFacts, leave: asyncio.Event
) -> str | None:
    """The name of the pool at the start, if it is given or is not the engine's first name; else None."""
    names = facts.models.served_names
    if options.model is not None or len(names) < 2:
        return options.model
    fleet = _Fleet(options.namespace, options.worker_id)
    await fleet.listen(bus)
    connected = asyncio.Event()
    bus.on_connect(connected.set)
    now = asyncio.get_running_loop().time
    began, pool = now(), names[0]
    why: dict[str, str] = {}
    while pool == names[0] and not leave.is_set():
        if not connected.is_set():
            began = now()
        elif now() >= began + fleet.wait_s(LISTEN_S):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
        pool = await _best(options, facts, pool, fleet.cards(), why)
    return None if pool == names[0] else pool


class Rejoining:
    """Looks again which pool is the right one, when a replica tells of a name that several pools serve."""

    def __init__(self, bus: Bus, options: AgentOptions, pool: str) -> None:
        self._bus = bus
        self._options = options
        self._pool = pool
        self._told: set[str] = set()
        self._is_told = asyncio.Event()

    def tell(self, shared_names: Iterable[str]) -> None:
        """Several pools serve these names."""
        self._told.update(shared_names)
        self._is_told.set()

    async def until_better(self, facts: Callable[[], EngineFacts]) -> str:
        """Wait until there is a better pool than its own; returns the name."""
        while True:
            await self._is_told.wait()
            self._is_told.clear()
            told, self._told = self._told, set()
            if told & {*facts().models.served_names}:
                pool = await self._look(facts())
                if pool != self._pool:
                    return pool
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _look(self, facts: EngineFacts) -> str:
        fleet = _Fleet(self._options.namespace)
        async with self._bus.part() as listening:
            await fleet.listen(listening)
            await asyncio.sleep(LISTEN_AGAIN_S)
            await asyncio.sleep(fleet.wait_s(LISTEN_AGAIN_S) - LISTEN_AGAIN_S)
        return await _best(self._options, facts, self._pool, fleet.cards(), {})


async def _best(
    options: AgentOptions, facts: EngineFacts, own: str, cards: Sequence[Card], why: dict[str, str]
) -> str:
    """The best pool of these workers. Notes in `why` which pools may be joined, and asks each pool once."""
    names = {*facts.models.served_names}
    sharing = [card for card in cards if names & {*card.base_names()}]
    for pool, _ in Counter(card.model for card in sharing).most_common(_MOST_POOLS):
        if pool not in {own, *why}:
            members = [card for card in sharing if card.model == pool]
            why[pool] = await why_equal(options, facts, members)
    pool = pool_of(own, cards, why)
    if pool != own:
        log.info(
            "worker.joins_pool", worker=options.worker_id, pool=pool, names=sorted(names), reason=why[pool]
        )
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
            effect="its engines have a name of this engine, but other token ids: this one does not join it",
        )
    return _SAME_IDS if is_equal else ""


async def _compare(options: AgentOptions, facts: EngineFacts, members: Sequence[Card]) -> bool | None:
    """Whether the engine makes the ids of the first of these workers that answers; None if none does."""
    # tokenizers and templates, which an agent whose engine has one name does not need
    from kvrouter.tokens.remote_tokenizer import EngineTokenizer, EngineTokenizerError

    try:
        async with (
            asyncio.timeout(COMPARE_S),
            EngineTokenizer.open(options.api_key, options.tls) as own_engine,
            # without the key: whoever may publish a card can name any URL in it
            EngineTokenizer.open(None, options.tls) as others,
        ):
            own = await _ids(own_engine, options.engine_url, facts.models.served_names[0])
            for card in members[:_MOST_ASKED]:
                if host_error(card.url):
                    continue
                try:
                    return own == await _ids(others, card.url, card.base_names()[0])
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
