"""Compares the token ids made here with those of an engine: at the start, then for a sample of prompts.

If one id in the first block differs, no request ever finds its cached prefix, and no error is raised.
So for each pool a probe, and later one real prompt in a thousand, is also tokenized by an engine: a chat by
its chat route (remote_tokenizer.py).

Engines may get the ids of chats (`--send-token-ids`). Then each of them is compared before the first ids, and
again by its first chat of each shape (id_comparison.py), which goes without. If a chat differs whose shape
was equal before, no engine of the pool gets any more, until this process starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from kvrouter.core.audit.problems import TokenComparison
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.ids import PoolId
from kvrouter.errors import BadRequestError
from kvrouter.prompts.ways import EncoderOf, Kind, Naming, kind_of
from kvrouter.tokens.chat_options import ChatOptions
from kvrouter.tokens.chat_options import learn as learn_options
from kvrouter.tokens.id_comparison import PROBES, Difference, find_difference, shape_of
from kvrouter.tokens.prefix_tokens import Encoded
from kvrouter.tokens.prompt import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenIds,
    TokenPrompt,
    has_media,
)
from kvrouter.tokens.remote_tokenizer import EngineTokenizer, EngineTokenizerError, PromptRejectedError

log = structlog.get_logger()

# One prompt in ONE_IN is compared, and at most one per pool in AT_MOST_EVERY_S: it is work for the engine.
ONE_IN = 1000
AT_MOST_EVERY_S = 10.0
# Longer prompts are not compared: they would take the engine too long.
MOST_TOKENS = 20_000
# Longer chats are compared with /tokenize: the chat route would compute them.
MOST_SERVED_TOKENS = 4_096
LOOK_EVERY_S = 0.5
# Between comparisons of chats of new shapes, in one pool.
SHAPES_EVERY_S = 1.0
# Of one engine. Chats of further ones are sent without ids.
MOST_SHAPES = 1_000
# After a probe that no engine answered.
PROBE_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat whose ids engines may get (`Sendable`)."""

    check: PoolCheck
    prompt: ChatPrompt
    ids: Sequence[int]
    model: str | None
    shape: bytes

    def may_go_to(self, worker: Worker) -> bool:
        """Whether chats of its shape had the ids of this engine. The first one is kept for a comparison."""
        is_equal, check = worker.shapes.get(self.shape), self.check
        if is_equal is None and check.unproven is None and len(self.ids) <= MOST_TOKENS:
            is_due = asyncio.get_running_loop().time() >= check.next_shape_at
            if is_due and len(worker.shapes) < MOST_SHAPES:
                check.unproven = self, worker
        return is_equal is True


@dataclass(slots=True)
class PoolCheck:
    """What comparisons have found in one pool. /workers contains its fields."""

    state: str = "unchecked"
    """unchecked, equal, differs, or unanswered."""
    equal: int = 0
    different: int = 0
    unanswered: int = 0
    engine: str = ""
    reason: str = ""
    prompt: str = ""
    """chat or text: the kind of prompt whose ids differ."""
    difference: Difference | None = None
    due_at: float = 0.0
    seen: int = 0
    pending: tuple[ChatPrompt | TextPrompt, list[int], str | None] | None = None
    next_engine_at: float = 0.0
    """When the next engine that may get ids is compared."""
    unproven: tuple[Chat, Worker] | None = None
    """A chat that its engine got without ids, as its shape was not compared yet."""
    next_shape_at: float = 0.0
    equal_prompts: frozenset[str] = frozenset()
    """Kinds of prompt whose ids were equal at their last comparison."""
    options: ChatOptions = field(default_factory=ChatOptions)

    def compared(self) -> TokenComparison:
        found = self.difference
        if found is None:
            return TokenComparison(self.equal_prompts)
        named = f"token ids of {self.prompt}s differ from those of {self.engine} at position {found.position}"
        return TokenComparison(self.equal_prompts, f"{named}: {found.remedy}")

    def view(self) -> dict[str, Any]:
        hidden = {"due_at", "seen", "pending", "next_engine_at", "unproven", "next_shape_at", "equal_prompts"}
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in hidden
        }


class ServingEncoders(EncoderOf, Protocol):
    def serves(self, pool: Pool, kind: Kind) -> bool:
        """Whether such prompts are tokenized by the encoder of the pool."""
        ...


class TokenChecks:
    """Compares, one pool after the other, in the task `run`, and learns what engines make of options."""

    def __init__(
        self,
        replica: Replica,
        encoders: ServingEncoders,
        engines: EngineTokenizer,
        dropped: Callable[[Pool, str], bool] = lambda *_: False,
        *,
        sends_ids: bool = False,
    ) -> None:
        """`dropped` is called with each difference; returns whether the tokenizer is not used any more.

        `sends_ids`: whether engines that take token ids get those of chats.
        """
        self.pools: dict[PoolId, PoolCheck] = {}
        self._replica = replica
        self._encoders = encoders
        self._engines = engines
        self._dropped = dropped
        self._sends_ids = sends_ids

    def options_of(self, pool: Pool) -> ChatOptions:
        """What the engines of a pool make of options of chats, as far as it was learnt."""
        check = self.pools.get(pool.id)
        return check.options if check is not None else ChatOptions()

    def seen(self, prompt: Prompt, encoded: list[Encoded], naming: Naming) -> Chat | None:
        """Called for every prompt that was tokenized here; returns a chat whose ids engines may get.

        Keeps one in a thousand for `run`.
        """
        check = self.pools.get(naming.pool.id)
        if check is None or isinstance(prompt, TokenPrompt):
            return None
        check.seen += 1
        is_sample = check.seen % ONE_IN == 0 and asyncio.get_running_loop().time() >= check.due_at
        if not is_sample and naming.found_ids is None:  # nearly always, if no engine takes ids
            return None
        # Not if only a part was tokenized, and not with media: only the engine knows their tokens.
        is_whole = len(encoded) == 1 and encoded[0].isl == len(encoded[0].ids)
        if not is_whole or has_media(prompt):
            return None
        if is_sample and not check.pending and len(encoded[0].ids) <= MOST_TOKENS:
            check.pending = (prompt, list(encoded[0].ids), naming.model)
        if naming.found_ids is None or not isinstance(prompt, ChatPrompt):
            return None
        return Chat(check, prompt, encoded[0].ids, naming.model, shape_of(prompt))

    async def run(self) -> None:
        """Probe new pools, and compare the prompts that `seen` kept. Never returns."""
        while True:
            for router in list(self._replica.routers.values()):
                is_served = self._encoders.serves(router.pool, "text")
                if router.pool.targets and router.needs_tokens and is_served:
                    await self._look_at(router.pool)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look_at(self, pool: Pool) -> None:
        now = asyncio.get_running_loop().time()
        check = self.pools.setdefault(pool.id, PoolCheck())
        if check.pending is not None:
            prompt, ids, model = check.pending
            check.due_at = now + AT_MOST_EVERY_S
            await self._compare(pool, check, prompt, ids, model)
            check.pending = None
        elif check.unproven is not None:
            check.next_shape_at = now + SHAPES_EVERY_S
            await self._prove(*check.unproven)
            check.unproven = None
        elif check.state in {"unchecked", "unanswered"} and now >= check.due_at:
            await self._probe(pool, check)
            check.due_at = now + (PROBE_AGAIN_S if check.state == "unanswered" else AT_MOST_EVERY_S)
        elif self._sends_ids and now >= check.next_engine_at:
            await self._compare_next_engine(pool, check, now)

    async def _probe(self, pool: Pool, check: PoolCheck) -> None:
        for kind in PROBES:
            async for probe, ids in self._encoded_probes(pool, kind):
                if not await self._compare(pool, check, probe, ids, None):
                    return
        if self._encoders.serves(pool, "chat"):
            await self._learn_options(pool, check)

    async def _encoded_probes(
        self, pool: Pool, kind: Kind
    ) -> AsyncIterator[tuple[ChatPrompt | TextPrompt, TokenIds]]:
        """Those that can be encoded here, with their ids."""
        # A card's tokenizer may have the ids of texts and not those of chats.
        for probe in PROBES[kind] if self._encoders.serves(pool, kind) else ():
            try:
                encoded = await self._encoders.of(pool).encode(probe)
            except BadRequestError:
                continue  # this template rejects the probe; real prompts are compared later
            if encoded:
                yield probe, encoded[0]

    async def _learn_options(self, pool: Pool, check: PoolCheck) -> None:
        url, encoder = engine_url(pool, None), self._encoders.of(pool)
        if url is None or encoder.has_own_chats:
            return

        async def here(chat: ChatPrompt) -> TokenIds:
            (ids,) = await encoder.encode(chat) or [[]]
            return ids

        options = await learn_options(here, partial(self._engines.served_ids, url))
        if options != check.options:
            check.options = options
            _forget_engines(pool)

    async def _compare_next_engine(self, pool: Pool, check: PoolCheck, now: float) -> None:
        """Compare one of the engines that would take ids of chats and were not compared yet."""
        waiting = [worker for worker in pool.targets.values() if _may_get_ids(worker)]
        if not waiting:
            return
        worker, compared = random.choice(waiting), []
        try:
            async for probe, ids in self._encoded_probes(pool, "chat"):
                served, _ = await self._engines.chat_ids(worker.card.url, None, probe)
                if served:  # else its template rejects this probe
                    compared.append(ids == served)
        except EngineTokenizerError:
            compared = []
        if not compared:
            check.next_engine_at = now + PROBE_AGAIN_S
            return
        pool.compared_ids(worker, are_equal=all(compared))
        if not all(compared):
            effect = "its engine gets no ids, and no overlap is found on it"
            log.warning("tokens.engine_differs", pool=pool.id, worker=worker.card.worker_id, effect=effect)

    async def _prove(self, chat: Chat, worker: Worker) -> None:
        """Compare a chat of a new shape with this engine's chat route. None shown: another follows."""
        with contextlib.suppress(EngineTokenizerError):
            served, _ = await self._engines.chat_ids(worker.card.url, chat.model, chat.prompt)
            if served:
                worker.shapes[chat.shape] = are_equal = served == list(chat.ids)
                if not are_equal:
                    effect = "chats with such fields are sent without token ids, and find no overlap"
                    log.info("tokens.shape_differs", worker=worker.card.worker_id, effect=effect)

    async def _compare(
        self, pool: Pool, check: PoolCheck, prompt: ChatPrompt | TextPrompt, ids: list[int], model: str | None
    ) -> bool:
        """Compare with a random engine of the pool; returns whether its ids are the same."""
        url, kind = engine_url(pool, model), kind_of(prompt)
        try:
            if url is None:
                raise EngineTokenizerError(f"no live worker for {model}")
            if len(ids) <= MOST_SERVED_TOKENS:
                engine_ids = await self._engines.reference(url, model, prompt)
            else:
                (engine_ids,) = await self._engines.tokenize(url, model, prompt)
        except EngineTokenizerError as error:
            if isinstance(error, PromptRejectedError) and prompt in PROBES[kind]:
                return True  # the engine's template rejects the probe; real prompts are compared later
            check.unanswered += 1
            check.reason = str(error)
            if check.state == "unchecked":
                check.state = "unanswered"
                effect = "token ids may differ from the engine's; then the overlap is always zero"
                log.warning("tokens.not_compared", pool=pool.id, reason=check.reason, effect=effect)
            return False
        encoder = self._encoders.of(pool)
        if ids != engine_ids and prompt in PROBES[kind] and await encoder.settle(prompt, engine_ids):
            ids = engine_ids
            for router in self._replica.routers.values():
                if self._encoders.of(router.pool) is encoder:
                    _forget_engines(router.pool)
        found = find_difference(ids, engine_ids, encoder.decode, is_chat=kind == "chat")
        if found is not None and isinstance(prompt, ChatPrompt):
            shape = shape_of(prompt)
            if any(worker.shapes.get(shape) for worker in pool.workers.values() if worker.card.url == url):
                pool.distrust_ids()
        check.engine = url
        return self._note(pool, check, found, kind)

    def _note(self, pool: Pool, check: PoolCheck, found: Difference | None, prompt: str) -> bool:
        if found is None:
            check.equal += 1
            check.equal_prompts |= {prompt}
            if check.state != "differs":
                check.state, check.reason = "equal", ""
            elif check.prompt == prompt:  # a text that is equal does not repair a chat that differs
                check.state, check.prompt, check.difference = "equal", "", None
                log.info("tokens.equal_again", pool=pool.id)
            return True
        check.different += 1
        check.equal_prompts -= {prompt}
        is_news = check.state != "differs"
        check.state, check.prompt, check.difference = "differs", prompt, found
        if is_news:
            _log_difference(pool, check, found)
        if self._dropped(pool, check.compared().difference):
            del self.pools[pool.id]
            _forget_engines(pool)
        return False

    def view(self) -> dict[str, Any]:
        return {str(pool): check.view() for pool, check in self.pools.items()}


def _may_get_ids(worker: Worker) -> bool:
    return worker.card.takes_token_ids and worker.has_equal_ids is None


def _forget_engines(pool: Pool) -> None:
    """Chats are printed in another way now: no engine gets ids before it was compared again."""
    for worker in pool.workers.values():
        pool.compared_ids(worker, are_equal=None)


def engine_url(pool: Pool, model: str | None) -> str | None:
    """A random worker of the pool that serves the model (None: any model); None without a live one."""
    cards = {worker.card.url: worker.card for worker in pool.targets.values()}
    urls = [url for url, card in cards.items() if model is None or model in card.names()]
    return random.choice(urls) if urls else None


def _log_difference(pool: Pool, check: PoolCheck, found: Difference) -> None:
    fields = dataclasses.asdict(found)
    # the position and the remedy come first in the line: it is long
    log.warning(
        "tokens.differ",
        prompt=check.prompt,
        position=fields.pop("position"),
        remedy=fields.pop("remedy"),
        here_text=fields.pop("here_text"),
        engine_text=fields.pop("engine_text"),
        pool=pool.id,
        engine=check.engine,
        effect="requests do not find their cached prefixes",
        **fields,
    )
