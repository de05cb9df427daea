"""From a client's prompt to the hashes that routing needs: by the best way that is possible now.

    model path   chat template and tokenizer of --model-path
    card         the same, of the directory that workers' cards name (card_way.py)
    engines      /tokenize of a live worker (engines_way.py)
    text         hashes of the text: they match assumed blocks only
    load         none: an empty tuple

Prompts of token ids need none of these. `PromptWays` is the one place that knows which way serves.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import structlog
from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.policy import Prompt as HashedPrompt
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.hashes import block_seed, media_prompt_hashes, seeded_prompt_hashes
from kvrouter.core.wire.ids import PoolId
from kvrouter.engine_versions import reaches, since
from kvrouter.errors import BadRequestError
from kvrouter.tokens.chat_options import ChatOptions
from kvrouter.tokens.media import estimated_tokens
from kvrouter.tokens.prefix_hashes import PrefixHashes
from kvrouter.tokens.prefix_tokens import Encoded
from kvrouter.tokens.prompt import ChatPrompt, Prompt, PromptEncoder, TextPrompt, TokenPrompt, has_media
from kvrouter.tokens.template_limits import TemplateLimitError
from kvrouter.tokens.text_blocks import text_blocks

log = structlog.get_logger()

LOAD = "load"
Kind: TypeAlias = Literal["chat", "text"]
KINDS: tuple[Kind, ...] = ("chat", "text")

Hashes = tuple[HashedPrompt, ...]


class Naming(Struct, frozen=True):
    """What block hashes depend on besides the tokens, and whose they are."""

    pool: Pool
    model: str | None
    """As the client names it: a base model or a LoRA adapter."""
    lora_name: str | None = None
    salt: str | None = None
    extra_key: str | None = None
    found_ids: Callable[[Sendable], object] | None = None
    """Called with the ids of a chat that engines may get; None: none gets any."""

    def namespace(self) -> str | None:
        """What keeps its blocks apart from others of equal tokens: the salt, and SGLang's extra key.

        SGLang's events do not name that key. So no block of theirs is found, not even one with the same key.
        """
        if self.extra_key is None or not _reads_extra_key(self.pool):
            return self.salt
        return f"{self.salt or ''}\0{self.extra_key}"

    def engine_model(self) -> str:
        """The model's name in the engines' hashes of media; empty if how they hash is not known here."""
        cards = [worker.card for worker in self.pool.targets.values()]
        if not all(reaches(card.engine_version, since(card.engine).media_names) for card in cards):
            return ""
        names = {card.tokenizer for card in cards}
        return names.pop() if len(names) == 1 else ""


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


class Way(Protocol):
    """One way from texts and chats to hashes."""

    name: str

    def why_not(self, pool: Pool, kind: Kind) -> str:
        """Why it does not serve such prompts of the pool now; empty if it does."""
        ...

    def unknown(self, pool: Pool) -> str:
        """Which chats it has no tokens of, though it serves chats, and why; empty: none."""
        ...

    async def hashes(self, prompt: ChatPrompt | TextPrompt, naming: Naming) -> Hashes | None:
        """Hashes and length of each prompt; None if this way has none for it after all."""
        ...


class Sendable(Protocol):
    """Token ids of a chat, and which engines may get them."""

    @property
    def ids(self) -> Sequence[int]:
        """All of them."""
        ...

    def may_go_to(self, worker: Worker) -> bool:
        """Whether they were proven to be what its engine computes. If not, a proof may follow."""
        ...


Seen = Callable[[Prompt, list[Encoded], Naming], Sendable | None]
"""Called with every prompt that this process tokenized; returns ids that engines may get."""

OptionsOf = Callable[[Pool], ChatOptions]
"""What the engines of a pool make of options of chats."""


class EncoderOf(Protocol):
    def of(self, pool: Pool) -> PromptEncoder:
        """The encoder of a pool."""
        ...


class LocalWay:
    """With the tokenizer of a model directory."""

    name = "model path"

    def __init__(
        self,
        encoders: EncoderOf,
        seen: Seen | None,
        known: PrefixHashes,
        options: OptionsOf | None = None,
    ) -> None:
        self._encoders = encoders
        self._seen = seen
        self._known = known
        self._options = options
        self._has_warned = False

    def why_not(self, pool: Pool, kind: Kind) -> str:
        encoder = self._encoders.of(pool)
        if not encoder.can_encode_text:
            return "no --model-path for this model"
        return encoder.why_no_chats if kind == "chat" else ""

    def unknown(self, pool: Pool) -> str:
        return self._options(pool).unknown() if self._options is not None else ""

    async def hashes(self, prompt: Prompt, naming: Naming) -> Hashes | None:
        """None if the template rejects the chat: that of its engine, which decides, may be another one.

        Raises TokenizerBusyError.
        """
        encoder = self._encoders.of(naming.pool)
        served: Prompt | None = prompt
        try:
            if isinstance(prompt, ChatPrompt):
                prompt = encoder.settled(prompt)
                served = prompt if self._options is None else self._options(naming.pool).applied(prompt)
            encoder.admit(prompt)
            model = naming.engine_model() if has_media(prompt) else None
            encoded = await encoder.encode_known(served, engine_model=model)
        except BadRequestError:
            return None
        except TemplateLimitError as error:
            self._warn_once(naming, error)
            return None
        if encoded is None:
            return None
        sendable = self._seen(prompt, encoded, naming) if self._seen is not None else None
        if sendable is not None and naming.found_ids is not None:
            naming.found_ids(sendable)
        return named(encoded, naming, self._known)

    def _warn_once(self, naming: Naming, error: TemplateLimitError) -> None:
        if not self._has_warned:
            self._has_warned = True
            effect = "these chats are routed without this template; correct it, or give --chat-template"
            log.warning("template.limit", model=naming.model, reason=str(error), effect=effect)


class TextWay:
    """With hashes of the text."""

    name = "text"

    def unknown(self, _pool: Pool) -> str:
        return ""

    def why_not(self, pool: Pool, _kind: Kind) -> str:
        return "" if pool.block_size else "the block size is not known yet"

    async def hashes(self, prompt: ChatPrompt | TextPrompt, naming: Naming) -> Hashes | None:
        try:
            found = text_blocks(
                prompt, naming.pool.block_size, lora_name=naming.lora_name, salt=naming.namespace()
            )
        except BadRequestError:
            return None  # malformed messages: the engine replies with the reason
        if not isinstance(prompt, ChatPrompt) or not has_media(prompt):
            return tuple(found)
        more = estimated_tokens(prompt.messages)  # else images would not count in the load
        return tuple(replace(each, isl=each.isl + more, media="way") for each in found)


@dataclass(frozen=True, slots=True)
class Serving:
    """The way that serves one kind of prompt in a pool, and why each better one does not."""

    way: str
    why_not: Mapping[str, str] = field(default_factory=dict)


class PromptWays:
    """The ways that the operator allows, best first."""

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = ways
        self.without_tokens: Counter[tuple[PoolId, Kind]] = Counter()
        """Texts and chats that were placed without their token ids."""
        self.media: Counter[str] = Counter()
        """Prompts with images or other media, by how much of them is known (tokens/media.py)."""
        self._ids = PromptEncoder.load(None)

    async def hashes(self, prompt: Prompt, naming: Naming) -> Hashes:
        """Hashes and length of each prompt; empty if it is placed by load."""
        if isinstance(prompt, TokenPrompt):
            return named(await self._ids.encode_known(prompt) or [], naming)
        kind = kind_of(prompt)
        for way in self.ways:
            if way.why_not(naming.pool, kind):
                continue
            found = await way.hashes(prompt, naming)
            if found is not None:
                break
        else:
            found = ()
        if not found or found[0].is_text:
            self.without_tokens[naming.pool.id, kind] += 1
        elif found[0].media:
            self.media[found[0].media] += 1
        return found

    def unknown(self, pool: Pool) -> str:
        """Which chats no way has tokens of, though others have, and why; empty: none."""
        serving = [way for way in self.ways if not way.why_not(pool, "chat") and way.name != TextWay.name]
        reasons = [way.unknown(pool) for way in serving]
        return reasons[0] if reasons and all(reasons) else ""

    def serving(self, pool: Pool, kind: Kind) -> Serving:
        """What `hashes` uses now."""
        reasons: dict[str, str] = {}
        for way in self.ways:
            reason = way.why_not(pool, kind)
            if not reason:
                return Serving(way.name, reasons)
            reasons[way.name] = reason
        return Serving(LOAD, reasons)


def _reads_extra_key(pool: Pool) -> bool:
    return any(since(worker.card.engine).extra_key is not None for worker in pool.targets.values())


def kind_of(prompt: ChatPrompt | TextPrompt) -> Kind:
    return "chat" if isinstance(prompt, ChatPrompt) else "text"


def named(encoded: Iterable[Encoded], naming: Naming, known: PrefixHashes | None = None) -> Hashes:
    size, ahead = naming.pool.block_size, naming.pool.lookahead
    if not size:
        return ()
    seed = block_seed(naming.lora_name, naming.namespace())
    prompts = []
    most = naming.pool.max_model_len
    for each in encoded:
        ids, isl, beginnings, media, outcome = each
        is_estimated = isl != len(ids)
        if 0 < most < len(ids) and not media:  # no engine reads so far, and millions of ids take seconds
            ids, beginnings = ids[:most], None
        # Most blocks of a chat are those of its previous turn: their hashes are looked up, not computed.
        if media or ahead:  # such names depend on more than the tokens up to the block
            hashes = media_prompt_hashes(ids, size, seed, media, ahead)
        elif known is None or beginnings is None:
            hashes = seeded_prompt_hashes(ids, size, seed)
        else:
            hashes = known.of(ids, beginnings, size, seed)
        prompts.append(HashedPrompt(hashes, isl, is_estimated, size, media=outcome))
    return tuple(prompts)
