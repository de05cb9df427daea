"""From a client's prompt to the hashes that routing needs, in the three ways of `--tokenizer`.

    local    chat template and tokenizer of --model-path
    remote   the tokenizer of a live worker, over HTTP
    none     hashes of the text: they match assumed blocks only, so this mode has no KV events

Prompts of token ids need no tokenizer. Without hashes (an empty tuple) a request is placed by load alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.cost import Prompt as HashedPrompt
from kvrouter.core.wire.hashes import block_seed, seeded_prompt_hashes
from kvrouter.tokens.prefix_hashes import PrefixHashes
from kvrouter.tokens.prefix_tokens import Encoded
from kvrouter.tokens.prompt import ChatPrompt, Prompt, PromptEncoder, TokenPrompt
from kvrouter.tokens.remote_tokenizer import BusyError, EngineTokenizer, EngineTokenizerError, RefusedError
from kvrouter.tokens.template_limits import TemplateLimitError
from kvrouter.tokens.text_blocks import text_blocks

log = structlog.get_logger()

# After FAILURES_IN_A_ROW, skip the engines for REST_S: each attempt delays its request until the time-out.
FAILURES_IN_A_ROW = 3
REST_S = 5.0

Hashes = tuple[HashedPrompt, ...]


@dataclass(frozen=True, slots=True)
class Naming:
    """What block hashes depend on besides the tokens, and whose they are."""

    pool: Pool
    model: str | None
    """As the client names it: a base model or a LoRA adapter."""
    lora_name: str | None = None
    salt: str | None = None


class Encoders:
    """One prompt encoder for each model of `--model-path`; `default` serves every other pool."""

    def __init__(self, default: PromptEncoder, by_name: Mapping[str, PromptEncoder] | None = None) -> None:
        self.default = default
        self.by_name = dict(by_name or {})

    @classmethod
    @contextlib.contextmanager
    def load(
        cls, read: Callable[[str | None], PromptEncoder], default: str | None, by_name: Mapping[str, str]
    ) -> Iterator[Encoders]:
        """Read the models with `read(path)`. Raises ConfigError for a broken one."""
        with contextlib.ExitStack() as stack:
            named = {name: stack.enter_context(read(path)) for name, path in by_name.items()}
            yield cls(stack.enter_context(read(default)), named)

    def of(self, pool: Pool) -> PromptEncoder:
        """The encoder of a pool, by any name under which its base model is served."""
        for name, encoder in self.by_name.items():
            if name == pool.model or name in pool.names:
                return encoder
        return self.default

    def all(self) -> dict[str, PromptEncoder]:
        """All encoders by model. The default one has an empty name."""
        return {"": self.default, **self.by_name}


class PromptBlocks(Protocol):
    async def hashes(self, prompt: Prompt, naming: Naming) -> Hashes:
        """Hashes and length of each prompt; empty if its tokens are not known. Raises BadRequestError."""
        ...


Seen = Callable[[Prompt, list[Encoded], Naming], None]
"""Called with every prompt that this process tokenized."""


class LocalBlocks:
    """With the tokenizer of a model directory. Without one, only prompts of token ids have hashes."""

    def __init__(self, encoders: Encoders, seen: Seen | None, known: PrefixHashes) -> None:
        self._encoders = encoders
        self._seen = seen
        self._known = known
        self._has_warned = False

    async def hashes(self, prompt: Prompt, naming: Naming) -> Hashes:
        encoder = self._encoders.of(naming.pool)
        if isinstance(prompt, ChatPrompt):
            prompt = encoder.settled(prompt)
        try:
            encoded = await encoder.encode_known(prompt)
        except TemplateLimitError as error:
            self._warn_once(naming, error)
            return ()
        if encoded is None:
            return ()
        if self._seen is not None and not isinstance(prompt, TokenPrompt):
            self._seen(prompt, encoded, naming)
        return _named(encoded, naming, self._known)

    def _warn_once(self, naming: Naming, error: TemplateLimitError) -> None:
        if not self._has_warned:
            self._has_warned = True
            effect = "chats with this template are placed by load; correct it, or give --chat-template"
            log.warning("template.limit", model=naming.model, reason=str(error), effect=effect)


@dataclass(slots=True)
class RemoteCounters:
    """Requests to engines' tokenizers, by result."""

    answered: int = 0
    refused: int = 0
    failed: int = 0
    not_asked: int = 0


class RemoteBlocks:
    """With the tokenizer of a live worker of the pool."""

    def __init__(self, engines: EngineTokenizer, encoder: PromptEncoder) -> None:
        self.counters = RemoteCounters()
        self._engines = engines
        self._encoder = encoder
        self._failures = 0
        self._rests_until = 0.0

    async def hashes(self, prompt: Prompt, naming: Naming) -> Hashes:
        """After any failure the request is placed by load, and its engine accepts or rejects it."""
        if isinstance(prompt, TokenPrompt):
            return _named(await self._encoder.encode_known(prompt) or [], naming)
        url = engine_url(naming.pool, naming.model)
        if url is None or asyncio.get_running_loop().time() < self._rests_until:
            self.counters.not_asked += 1
            return ()
        try:
            token_ids = await self._engines.tokenize(url, naming.model, prompt)
        except BusyError:  # not a failure: too many calls of this replica are in flight
            self.counters.not_asked += 1
            return ()
        except RefusedError:  # not a failure: the engine works, and will reject the request with its reason
            self.counters.refused += 1
            return ()
        except EngineTokenizerError as error:
            self._failed(error)
            return ()
        self._answered()
        return _named([Encoded(ids, len(ids)) for ids in token_ids], naming)

    def _failed(self, error: EngineTokenizerError) -> None:
        self.counters.failed += 1
        self._failures += 1
        if self._failures == FAILURES_IN_A_ROW:  # logged once, until an engine answers again
            effect = f"texts and chats are placed by load; the next attempt is in {REST_S:g} s"
            log.warning("tokenizer.engines_fail", reason=str(error), effect=effect)
        if self._failures >= FAILURES_IN_A_ROW:
            self._rests_until = asyncio.get_running_loop().time() + REST_S

    def _answered(self) -> None:
        self.counters.answered += 1
        if self._failures >= FAILURES_IN_A_ROW:
            log.info("tokenizer.engines_answer")
        self._failures = 0


class TextBlocks:
    """With hashes of the text. Token ids have their usual hashes."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder

    async def hashes(self, prompt: Prompt, naming: Naming) -> Hashes:
        if isinstance(prompt, TokenPrompt):
            return _named(await self._encoder.encode_known(prompt) or [], naming)
        size = naming.pool.block_size
        if not size:
            return ()
        return tuple(text_blocks(prompt, size, lora_name=naming.lora_name, salt=naming.salt))


def engine_url(pool: Pool, model: str | None) -> str | None:
    """A random worker of the pool that serves the model (None: any model); None without a live one."""
    # At random: else one worker would tokenize for all requests of its pool.
    cards = {worker.card.url: worker.card for worker in pool.targets.values()}
    urls = [url for url, card in cards.items() if model is None or model in card.names()]
    return random.choice(urls) if urls else None


def _named(encoded: Iterable[Encoded], naming: Naming, known: PrefixHashes | None = None) -> Hashes:
    size = naming.pool.block_size
    if not size:
        return ()
    seed = block_seed(naming.lora_name, naming.salt)
    prompts = []
    for ids, isl, beginnings in encoded:
        # Most blocks of a chat are those of its previous turn: their hashes are looked up, not computed.
        if known is None or beginnings is None:
            hashes = seeded_prompt_hashes(ids, size, seed)
        else:
            hashes = known.of(ids, beginnings, size, seed)
        prompts.append(HashedPrompt(hashes, isl, isl != len(ids), size))
    return tuple(prompts)
