"""The way `engines`: the token ids of prompts from `/tokenize` of a live worker.

Chats come from its render route, if `/tokenize` makes other ids of them than its chat route does.

    request ──> an engine that answers ──> ids, within REQUEST_TIMEOUT_S
                    │ fails, or is late: the request asks a second engine (tokens/second_engine.py)
                    v
                avoided for AVOIDED_S, if there is another
                    │ no route, or FAILURES failures in a row
                    v
                rests ──> probed after 5, 10, 20, … 300 s ──> answers again

Only probes ask an engine that rests, so no request waits for it.
"""

from __future__ import annotations

import contextlib
import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace
from xxhash import xxh3_128_digest

from kvrouter.core.fleet.block_size import NAMED_MOST
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import PoolId
from kvrouter.prompts.ways import KINDS, Hashes, Kind, Naming, kind_of, named
from kvrouter.tokens.chat_options import ChatOptions
from kvrouter.tokens.chat_options import learn as learn_options
from kvrouter.tokens.id_comparison import PROBES
from kvrouter.tokens.media import estimated_tokens
from kvrouter.tokens.messages import without_media
from kvrouter.tokens.prefix_tokens import Encoded
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt, TokenIds, has_media
from kvrouter.tokens.remote_tokenizer import (
    RENDER,
    REQUEST_TIMEOUT_S,
    TOKENIZE,
    BusyError,
    EngineTokenizer,
    EngineTokenizerError,
    NoTokenizeRouteError,
    PromptRejectedError,
    RefusedError,
    SlowError,
    tokenize_bodies,
)
from kvrouter.tokens.second_engine import ask_in_turn

FAILURES = 3
# An engine that failed once may have died: its lease ends after 5 s.
AVOIDED_S = 5.0
# An engine usually answers in a few milliseconds. Half of the time is left for a second one.
LATE_SHARE = 0.5
FIRST_REST_S = 5.0
LONGEST_REST_S = 300.0
# A longer body may take an engine more than REQUEST_TIMEOUT_S: that it was slow says nothing of the engine.
LONG_BODY_BYTES = 64 * 1024
PROBES_A_LOOK = 4
OTHER_CHATS = "its chat route makes other tokens of chats than /tokenize, and its render route is off"

# Answers are kept for a minute (a template may print the time), and until the workers of the pool change.
KEPT_S = 60.0
KEPT_BYTES = 32 * 1024 * 1024
# The key, the entry, and the array of the ids.
_ENTRY_BYTES = 250


@dataclass(slots=True)
class Answering:
    """What is known of one engine's `/tokenize` for one kind of prompt."""

    is_proven: bool = False
    """It has answered once, so what it refuses later is the request's fault."""
    failures: int = 0
    failed_at: float = -math.inf
    rests: bool = False
    """Only probes ask it."""
    probe_at: float = 0.0
    rest_s: float = 0.0
    reason: str = ""
    is_refusal: bool = False
    """It refuses such prompts, as an engine without a tokenizer or a chat template does."""

    def answered(self, *, by_probe: bool = False) -> None:
        self.is_proven, self.rests, self.is_refusal = True, False, False
        self.failures, self.failed_at, self.reason = 0, -math.inf, ""
        # a probe may take longer than a request: an engine too slow for requests must rest longer each time
        if not by_probe:
            self.rest_s = 0.0

    def failed(self, error: EngineTokenizerError, now: float) -> None:
        self.failures += 1
        self.failed_at, self.reason = now, str(error)
        if isinstance(error, NoTokenizeRouteError) or self.failures >= FAILURES:
            self.rest(error, now)

    def refused(self, error: RefusedError, now: float) -> None:
        """A request was refused. Before any answer, a probe tells whether the engine refuses all."""
        self.reason = str(error)
        if not self.is_proven:
            self.probe_at = now

    def rest(self, error: EngineTokenizerError, now: float) -> None:
        self.rests, self.is_refusal, self.reason = True, isinstance(error, RefusedError), str(error)
        self.rest_s = min(2 * self.rest_s, LONGEST_REST_S) or FIRST_REST_S
        self.probe_at = now + self.rest_s

    def is_avoided(self, now: float) -> bool:
        return now < self.failed_at + AVOIDED_S

    def is_due(self, now: float) -> bool:
        return (self.rests or not self.is_proven) and now >= self.probe_at


@dataclass(slots=True)
class RemoteCounters:
    """Prompts for engines' tokenizers, by result."""

    answered: int = 0
    remembered: int = 0
    refused: int = 0
    failed: int = 0
    not_asked: int = 0


class RecentAnswers:
    """The ids of whole prompts that engines answered a moment ago.

    Only of whole prompts: without the tokenizer nothing proves that a text that begins with another begins
    with its ids.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self.held_bytes = 0
        self._most_bytes = most_bytes
        self._held: OrderedDict[bytes, tuple[float, array[int]]] = OrderedDict()

    def get(self, key: bytes, now: float) -> array[int] | None:
        kept_until, ids = self._held.get(key, (0.0, None))
        if ids is None or now >= kept_until:
            return None
        self._held.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: array[int], now: float) -> None:
        self._drop(key)
        self._held[key] = (now + KEPT_S, ids)
        self.held_bytes += _bytes(ids)
        while self.held_bytes > self._most_bytes:
            self._drop(next(iter(self._held)))

    def _drop(self, key: bytes) -> None:
        _, ids = self._held.pop(key, (0.0, None))
        if ids is not None:
            self.held_bytes -= _bytes(ids)


def _bytes(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES


class EnginesWay:
    """`now()`: seconds on the monotonic clock."""

    name = "engines"

    def __init__(self, engines: EngineTokenizer, now: Callable[[], float]) -> None:
        self.counters = RemoteCounters()
        self.recent = RecentAnswers()
        self._engines = engines
        self._now = now
        self._known: dict[PoolId, dict[tuple[str, Kind], Answering]] = {}
        self._cards: dict[PoolId, tuple[int, list[Card]]] = {}
        # Where the engines of a pool make the ids of chats; empty: nowhere.
        self._chat_routes: dict[PoolId, str] = {}
        # Of engines whose /tokenize makes them.
        self._options: dict[PoolId, ChatOptions] = {}

    def why_not(self, pool: Pool, kind: Kind) -> str:
        cards, known = self._live(pool), self._known.get(pool.id, {})
        if not cards:
            return "no live worker"
        if not self._route(pool, kind):
            return OTHER_CHATS
        reasons: dict[str, None] = {}
        for card in cards:
            one = known.get((card.url, kind))
            if one is None or not one.rests:
                return ""
            reasons[one.reason] = None
        return "; ".join([*reasons][:NAMED_MOST])

    def refuses(self, pool: Pool, kind: Kind) -> bool:
        """Whether all engines refuse such prompts, in which case they should refuse the requests as well."""
        known = self._known.get(pool.id, {})
        return all(
            (one := known.get((card.url, kind))) is not None and one.rests and one.is_refusal
            for card in self._live(pool)
        )

    def unknown(self, pool: Pool) -> str:
        options = self._options.get(pool.id)
        return options.unknown() if options is not None and self._route(pool, "chat") == TOKENIZE else ""

    async def hashes(self, prompt: ChatPrompt | TextPrompt, naming: Naming) -> Hashes | None:
        """After any failure the request is placed in another way, and its engine accepts or rejects it."""
        pool, kind = naming.pool, kind_of(prompt)
        route = self._route(pool, kind)
        urls = self._choose(pool, kind, naming.model) if route else []
        served = self._as_served(prompt, pool, route)
        if not urls or served is None:
            self.counters.not_asked += 1
            return None
        outcome, more = "", 0
        if isinstance(served, ChatPrompt) and has_media(served):
            # An engine would process the images for the length alone: it does not say where they are.
            outcome, more = "way", estimated_tokens(served.messages)
            served = replace(served, messages=without_media(served.messages))
        try:
            bodies = tokenize_bodies(naming.model, served, route)
        except RefusedError:
            self.counters.refused += 1
            return None
        found = await self._ids(urls, bodies, pool, kind)
        if found is None:
            return None
        kept = served.kept_tokens
        parts = found if kept is None else [ids[kept] for ids in found]
        return named([Encoded(ids, len(ids) + more, media_outcome=outcome) for ids in parts], naming)

    def _as_served(
        self, prompt: ChatPrompt | TextPrompt, pool: Pool, route: str
    ) -> ChatPrompt | TextPrompt | None:
        """What `/tokenize` is to be asked for the ids of the chat route; None: that is unknown."""
        options = self._options.get(pool.id)
        if route != TOKENIZE or options is None or isinstance(prompt, TextPrompt):
            return prompt
        return options.applied(prompt)

    async def _ids(
        self, urls: list[str], bodies: list[bytes], pool: Pool, kind: Kind
    ) -> list[Sequence[int]] | None:
        """None: no engine has answered."""
        scope = f"{pool.id} {pool.changes} ".encode()
        keys = [xxh3_128_digest(scope + body) for body in bodies]
        now = self._now()
        found: list[Sequence[int] | None] = [self.recent.get(key, now) for key in keys]
        missing = [place for place, ids in enumerate(found) if ids is None]
        self.counters.remembered += len(bodies) - len(missing)
        if missing:
            answers = await self._ask(urls, [bodies[one] for one in missing], pool, kind)
            if answers is None:
                return None
            for place, ids in zip(missing, answers, strict=True):
                found[place] = kept = array("I", ids)
                self.recent.put(keys[place], kept, self._now())
            self.counters.answered += len(missing)
        return [ids for ids in found if ids is not None]

    async def _ask(
        self, urls: list[str], bodies: list[bytes], pool: Pool, kind: Kind
    ) -> list[TokenIds] | None:
        """Ask, and note how each engine has answered. The request is counted once."""
        is_long = sum(map(len, bodies)) > LONG_BODY_BYTES
        limit_s = REQUEST_TIMEOUT_S
        late_s = limit_s if is_long else limit_s * LATE_SHARE
        route = self._route(pool, kind)
        asked = await ask_in_turn(self._engines, urls, bodies, route=route, late_s=late_s, limit_s=limit_s)
        for url, error in asked.errors.items():
            self._note(self._of(pool, url, kind), error, is_long=is_long)
        if asked.answered:
            self._of(pool, asked.answered, kind).answered()
            return asked.found
        errors = asked.errors.values()
        if any(isinstance(error, RefusedError) for error in errors):
            self.counters.refused += 1
        elif all(isinstance(error, BusyError) for error in errors):
            self.counters.not_asked += 1
        else:
            self.counters.failed += 1
        return None

    def _note(self, one: Answering, error: EngineTokenizerError, *, is_long: bool) -> None:
        match error:
            case BusyError():  # not a failure: too many calls of this replica are in flight
                pass
            case RefusedError():
                one.refused(error, self._now())
            case SlowError() if is_long:
                pass
            case _:
                one.failed(error, self._now())

    async def look(self, pool: Pool) -> None:
        """Probe an engine of a new pool, and those whose rest is over."""
        cards = self._live(pool)
        known = self._known.setdefault(pool.id, {})
        urls = {card.url for card in cards}
        for gone in [key for key in known if key[0] not in urls]:
            del known[gone]
        if cards and not known:
            known.update({(random.choice(cards).url, kind): Answering() for kind in KINDS})
        due = [key for key, one in known.items() if one.is_due(self._now())]
        for url, kind in due[:PROBES_A_LOOK]:
            await self._probe(pool, url, kind, known[url, kind])

    def has_looked_at(self, pool: Pool) -> bool:
        """Whether an engine of the pool has been probed or asked."""
        known = self._known.get(pool.id, {})
        return any(one.is_proven or one.rests for one in known.values())

    def keep(self, pools: Iterable[PoolId]) -> None:
        """Forget pools that are gone."""
        for gone in self._known.keys() - set(pools):
            del self._known[gone]
            self._cards.pop(gone, None)
            self._chat_routes.pop(gone, None)
            self._options.pop(gone, None)

    def _route(self, pool: Pool, kind: Kind) -> str:
        return self._chat_routes.get(pool.id, TOKENIZE) if kind == "chat" else TOKENIZE

    async def _probe(self, pool: Pool, url: str, kind: Kind, one: Answering) -> None:
        try:
            if kind == "chat":
                self._chat_routes[pool.id] = route = await self._chat_route(url)
                if route == TOKENIZE:
                    self._options[pool.id] = await self._learn_options(url)
            else:
                for probe in PROBES[kind]:
                    await self._engines.tokenize(url, None, probe)
        except BusyError:
            return
        except EngineTokenizerError as error:
            one.rest(error, self._now())
        else:
            one.answered(by_probe=True)

    async def _learn_options(self, url: str) -> ChatOptions:
        async def here(chat: ChatPrompt) -> TokenIds:
            (ids,) = await self._engines.tokenize(url, None, chat)
            return ids

        return await learn_options(here, partial(self._engines.served_ids, url), by_template=False)

    async def _chat_route(self, url: str) -> str:
        """Where the ids of the engine's chat route come from. Raises EngineTokenizerError."""
        found = set()
        for probe in PROBES["chat"]:
            with contextlib.suppress(PromptRejectedError):
                found.add(await self._route_of(url, probe))
        if not found:
            raise RefusedError(f"{url} rejects every probe chat")
        return min(found - {TOKENIZE}, default=TOKENIZE)

    async def _route_of(self, url: str, probe: ChatPrompt | TextPrompt) -> str:
        lacks: NoTokenizeRouteError | None = None
        try:
            tokenized = await self._engines.tokenize(url, None, probe)
        except NoTokenizeRouteError as error:
            tokenized, lacks = [], error
        ids, shown_by = await self._engines.chat_ids(url, None, probe)
        if lacks is not None and shown_by != RENDER:
            raise lacks
        if not ids or [ids] == tokenized:
            return TOKENIZE
        return RENDER if shown_by == RENDER else ""

    def _choose(self, pool: Pool, kind: Kind, model: str | None) -> list[str]:
        """The engine to ask and a second one, of those that serve the model (None: any) and do not rest.

        Engines that failed a moment ago come last.
        """
        # Beginning at random: else one worker would tokenize for all requests of its pool.
        cards, known, now = self._live(pool), self._known.get(pool.id, {}), self._now()
        start = random.randrange(len(cards)) if cards else 0
        chosen: list[str] = []
        avoided: list[str] = []
        for place in range(len(cards)):
            card = cards[(start + place) % len(cards)]
            one = known.get((card.url, kind))
            if (one is not None and one.rests) or not (model is None or model in card.names()):
                continue
            (avoided if one is not None and one.is_avoided(now) else chosen).append(card.url)
            if len(chosen) == 2:
                break
        return [*chosen, *avoided][:2]

    def _live(self, pool: Pool) -> list[Card]:
        """The cards of the pool's targets, one for each address."""
        changes, cards = self._cards.get(pool.id, (-1, []))
        if changes != pool.changes:
            cards = list({worker.card.url: worker.card for worker in pool.targets.values()}.values())
            self._cards[pool.id] = (pool.changes, cards)
        return cards

    def _of(self, pool: Pool, url: str, kind: Kind) -> Answering:
        return self._known.setdefault(pool.id, {}).setdefault((url, kind), Answering())
