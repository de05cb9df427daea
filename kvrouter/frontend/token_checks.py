"""Are the token ids made here those of the engines? Asked at the start, then now and then.

One other id in the first block, and no request ever finds its prefix: the commonest silent failure of all. So
for each pool a probe, and then one real prompt in a thousand, is tokenized by an engine as well.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from kvrouter.core.audit.problems import TokenComparison
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import PoolId
from kvrouter.errors import BadRequestError
from kvrouter.frontend.prompt_blocks import Encoders, Naming, engine_url
from kvrouter.telemetry.metrics import Sample
from kvrouter.tokens.id_comparison import Difference, find_difference
from kvrouter.tokens.prefix_tokens import Encoded
from kvrouter.tokens.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt, has_media
from kvrouter.tokens.remote_tokenizer import EngineTokenizer, EngineTokenizerError

log = structlog.get_logger()

ONE_IN = 1000
AT_MOST_EVERY_S = 10.0
"""Real prompts of one pool that are compared."""
MOST_TOKENS = 20_000
"""A longer prompt is not worth the engine's time."""
LOOK_EVERY_S = 0.5
PROBE_AGAIN_S = 30.0
"""After a probe that no engine answered."""

_PROBE_TEXT = "Hello, world! It's  1234 tokens,\n\n\tcaf\u00e9 \u4f60\u597d \U0001f642 <b>x</b> done. "
_TEXT_PROBE = TextPrompt([_PROBE_TEXT])
_CHAT_PROBE = ChatPrompt(
    [
        {"role": "user", "content": _PROBE_TEXT},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on"},
    ]
)
_PROBES: tuple[ChatPrompt | TextPrompt, ...] = (_TEXT_PROBE, _CHAT_PROBE)


@dataclass(slots=True)
class PoolCheck:
    """What comparisons have found in one pool; plain, as /workers shows it."""

    state: str = "unchecked"
    """unchecked, equal, differs, or unanswered."""
    equal: int = 0
    different: int = 0
    unanswered: int = 0
    engine: str = ""
    reason: str = ""
    prompt: str = ""
    """chat or text: what differs."""
    difference: Difference | None = None
    due_at: float = 0.0
    seen: int = 0
    pending: tuple[ChatPrompt | TextPrompt, list[int], str | None] | None = None
    equal_prompts: frozenset[str] = frozenset()
    """Kinds of prompt whose ids were equal at their last comparison."""

    def compared(self) -> TokenComparison:
        """For the problems in /workers."""
        found = self.difference
        if found is None:
            return TokenComparison(self.equal_prompts)
        named = f"token ids of {self.prompt}s differ from those of {self.engine} at position {found.position}"
        return TokenComparison(self.equal_prompts, f"{named}: {found.remedy}")

    def shown(self) -> dict[str, Any]:
        """For /workers."""
        hidden = {"due_at", "seen", "pending", "equal_prompts"}
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in hidden
        }


class TokenChecks:
    """Compares, pool by pool, in a task of its own (`run`)."""

    def __init__(self, replica: Replica, encoders: Encoders, engines: EngineTokenizer) -> None:
        self.pools: dict[PoolId, PoolCheck] = {}
        self._replica = replica
        self._encoders = encoders
        self._engines = engines

    def seen(self, prompt: Prompt, encoded: list[Encoded], naming: Naming) -> None:
        """A prompt was tokenized here: one in a thousand is kept for comparison."""
        check = self.pools.get(naming.pool.id)
        if check is None or isinstance(prompt, TokenPrompt):
            return
        check.seen += 1
        if check.seen % ONE_IN or check.pending or asyncio.get_running_loop().time() < check.due_at:
            return
        is_whole = len(encoded) == 1 and encoded[0].isl == len(encoded[0].ids) <= MOST_TOKENS
        if is_whole and not has_media(prompt):
            check.pending = (prompt, list(encoded[0].ids), naming.model)

    async def run(self) -> None:
        """For ever: probe the pools that are new, then what was sampled."""
        while True:
            for router in list(self._replica.routers.values()):
                has_tokenizer = self._encoders.of(router.pool).can_encode_text
                if router.pool.targets and router.needs_tokens and has_tokenizer:
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
        elif check.state in {"unchecked", "unanswered"} and now >= check.due_at:
            await self._probe(pool, check)
            check.due_at = now + (PROBE_AGAIN_S if check.state == "unanswered" else AT_MOST_EVERY_S)

    async def _probe(self, pool: Pool, check: PoolCheck) -> None:
        encoder = self._encoders.of(pool)
        for probe in _PROBES if encoder.can_encode_chats else _PROBES[:1]:
            try:
                encoded = await encoder.encode(probe)
            except BadRequestError:
                continue  # a template of its own kind; real prompts will show
            if encoded and not await self._compare(pool, check, probe, encoded[0], None):
                return

    async def _compare(
        self, pool: Pool, check: PoolCheck, prompt: ChatPrompt | TextPrompt, ids: list[int], model: str | None
    ) -> bool:
        """Whether the engine has the same ids."""
        url = engine_url(pool, model)
        try:
            if url is None:
                raise EngineTokenizerError(f"no live worker for {model}")
            (engine_ids,) = await self._engines.tokenize(url, model, prompt)
        except EngineTokenizerError as error:
            check.unanswered += 1
            check.reason = str(error)
            if check.state == "unchecked":
                check.state = "unanswered"
                effect = "whether tokens agree is not known; KV overlap may be zero for ever"
                log.warning("tokens.not_compared", pool=pool.id, reason=check.reason, effect=effect)
            return False
        is_chat = isinstance(prompt, ChatPrompt)
        found = find_difference(ids, engine_ids, self._encoders.of(pool).decode, is_chat=is_chat)
        check.engine = url
        return self._note(pool, check, found, "chat" if is_chat else "text")

    def _note(self, pool: Pool, check: PoolCheck, found: Difference | None, prompt: str) -> bool:
        if found is None:
            check.equal += 1
            check.equal_prompts |= {prompt}
            if check.state != "differs":
                check.state, check.reason = "equal", ""
            elif check.prompt == prompt:  # the same kind of prompt is right again
                check.state, check.prompt, check.difference = "equal", "", None
                log.info("tokens.equal_again", pool=pool.id)
            return True
        check.different += 1
        check.equal_prompts -= {prompt}
        is_news = check.state != "differs"
        check.state, check.prompt, check.difference = "differs", prompt, found
        if is_news:
            _tell(pool, check, found)
        return False

    def shown(self) -> dict[str, Any]:
        """For /workers: by pool."""
        return {str(pool): check.shown() for pool, check in self.pools.items()}

    def samples(self) -> Iterator[Sample]:
        """For /metrics."""
        for pool, check in self.pools.items():
            labels = {"pool": str(pool)}
            differs = check.state == "differs"
            yield "kvrouter_tokens_differ", "gauge", "1 if an engine has other token ids", labels, differs
            for result in ("equal", "different", "unanswered"):
                own = {**labels, "result": result}
                text = "Prompts tokenized by an engine, too, by result"
                yield "kvrouter_token_comparisons", "counter", text, own, getattr(check, result)


def _tell(pool: Pool, check: PoolCheck, found: Difference) -> None:
    """In the log: first where, and what to do."""
    told = dataclasses.asdict(found)
    log.warning(
        "tokens.differ",
        prompt=check.prompt,
        position=told.pop("position"),
        remedy=told.pop("remedy"),
        here_text=told.pop("here_text"),
        engine_text=told.pop("engine_text"),
        pool=pool.id,
        engine=check.engine,
        effect="requests will not find their cached prefixes",
        **told,
    )
