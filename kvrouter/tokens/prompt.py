"""From the prompt of a client's request to the token ids that the engine will compute for it.

    ChatPrompt  --chat template-->  text  --tokenizer-->  token ids
    TextPrompt                      text  --tokenizer-->  token ids
    TokenPrompt                                           token ids

Without a model directory only the last row has token ids. The others have None and so no hashes: such a
request is placed by load alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kvrouter.errors import BadRequestError
from kvrouter.tokens.fast_ids import FastIds
from kvrouter.tokens.harmony import Harmony
from kvrouter.tokens.job_queue import JobQueue
from kvrouter.tokens.media import Images, Outcome, VisionModel, estimated_tokens, expand
from kvrouter.tokens.messages import Message, is_text
from kvrouter.tokens.prefix_tokens import CacheSettings, Encoded, PrefixStore
from kvrouter.tokens.renderers import own_renderer, writes_harmony
from kvrouter.tokens.template import ChatTemplate
from kvrouter.tokens.tokenizer import MOST_WAITING, PrefixCache, Tokenizer

TokenIds: TypeAlias = list[int]

# A prompt with more messages or texts is not short even if each is: every one costs a call.
_SHORT_PROMPT_ITEMS = 4


class ChatPrompt(Struct, frozen=True):
    """The messages of a chat request and the fields that shape its prompt, with their names in the body."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    kept_tokens: slice | None = None
    system_first: Sequence[Message] | None = None
    """`messages` for a template that allows a system message only in the first place; None: the same."""
    effort: str | None = None
    """The reasoning effort of the request, which the engine may replace (chat_options.py)."""
    least_effort: str | None = None
    """`effort` for a template that ignores or rejects "none"; None: the same."""
    tool_choice: Any = None
    """As in the body of a chat. "none" may leave the tools out (chat_options.py)."""
    names_first: bool = False
    """See `messages.conversation`."""
    has_media_options: bool = False
    """The request has settings for the engine's processor of images (`mm_processor_kwargs`)."""
    for_sglang: Callable[[], ChatPrompt] | None = None
    """Makes the chat that SGLang makes of the same body: all else here is as vLLM makes it. None: this one.

    Raises BadRequestError for a body that SGLang rejects.
    """

    def variables(self) -> dict[str, Any]:
        """`chat_template_kwargs` with the effort, in the names that vLLM uses."""
        variables = dict(self.chat_template_kwargs)
        if self.effort is not None:
            variables.setdefault("enable_thinking", self.effort != "none")
            variables["reasoning_effort"] = self.effort
        return variables


class TextPrompt(Struct, frozen=True):
    """The prompts of a completion request, as text."""

    texts: Sequence[str]
    add_special_tokens: bool = True
    kept_tokens: slice | None = None


class TokenPrompt(Struct, frozen=True):
    """The prompts of a completion request, as token ids."""

    token_ids: Sequence[TokenIds]
    kept_tokens: slice | None = None


# English has 4 characters for a token; Chinese one or two, of 3 bytes.
_BYTES_PER_TOKEN = 4
# `kept_tokens` of each is the slice left by the client's `truncate_prompt_tokens`.
Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt


class PromptEncoder:
    """The tokenizer and the chat template of one model. Close it with `with`."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        vision: VisionModel | None = None,
        *,
        harmony: Harmony | None = None,
        why_no_chats: str = "",
    ) -> None:
        """`vision`: how the model's prompts carry images; None: not known.

        `harmony`: writes the chats in place of the template. `why_no_chats`: why the template does not.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._harmony = harmony
        is_written = template is not None or harmony is not None
        self.why_no_chats = why_no_chats or ("" if is_written else "the directory has no chat template")
        """Why chats have no ids here, though texts may have; empty: they have."""
        self.images = Images(vision) if vision is not None else None
        """None: the model carries no images."""

    @classmethod
    def load(
        cls,
        model_path: Path | None,
        *,
        threads: int = 8,
        cache: CacheSettings | None = None,
        store: PrefixStore | None = None,
        chat_template: Path | None = None,
        is_fast: bool = False,
        most_waiting: int = MOST_WAITING,
    ) -> Self:
        """Read a model directory; None stands for no directory. Raises ConfigError for a broken one.

        `cache`: settings of the prefix-token cache, None to switch it off. `store`: shared with other models;
        None gives the model its own. `chat_template`: a file that replaces the directory's template.
        `is_fast`: with fastokens, see `Tokenizer`. `most_waiting`: characters that may wait for a thread.
        """
        if model_path is None:
            return cls(None, None)
        # before the tokenizer, whose threads would be left running if the template raised an error
        template = ChatTemplate.load(model_path, chat_template)
        harmony, why_no_chats = None, ""
        if writes_harmony(model_path):
            harmony, why_no_chats = Harmony.load()
        elif chat_template is None and (renderer := own_renderer(model_path)):
            why_no_chats = (
                f"vLLM writes chats of this model by its tokenizer mode {renderer}, not by the chat "
                "template: only engines have their tokens (give --chat-template if they use a template)"
            )
        tokenizer = Tokenizer.load(
            model_path, threads=threads, cache=cache, store=store, is_fast=is_fast, most_waiting=most_waiting
        )
        vision = VisionModel.load(model_path)
        return cls(tokenizer, template, vision, harmony=harmony, why_no_chats=why_no_chats)

    @property
    def can_encode_text(self) -> bool:
        """Whether there is a tokenizer for texts."""
        return self._tokenizer is not None

    @property
    def can_encode_chats(self) -> bool:
        """Whether there are both a tokenizer and what writes the chats."""
        return self._tokenizer is not None and not self.why_no_chats

    @property
    def cache(self) -> PrefixCache | None:
        """The prefix-token cache, which may be off; None without a tokenizer."""
        return self._tokenizer.cache if self._tokenizer is not None else None

    @property
    def fast(self) -> FastIds | None:
        """The fast library beside the reference one; None without it, or without a tokenizer."""
        return self._tokenizer.fast if self._tokenizer is not None else None

    @property
    def jobs(self) -> JobQueue | None:
        """Where prompts wait for a thread; None without a tokenizer."""
        return self._tokenizer.jobs if self._tokenizer is not None else None

    def admit(self, prompt: Prompt) -> None:
        """Raise TokenizerBusyError if more text waits than may."""
        if self.jobs is not None and self.jobs.waiting:
            self.jobs.admit(_size(prompt))

    @property
    def has_own_chats(self) -> bool:
        """Whether the engine makes other chats of clients' bodies than vLLM does (`for_sglang`)."""
        return self._template is not None and self._template.dialect.has_own_chats

    def settled(self, prompt: ChatPrompt) -> ChatPrompt:
        """The chat in the variant that suits engine and template. Raises BadRequestError."""
        template = self._template
        if template is None:
            return prompt
        if prompt.for_sglang is not None and self.has_own_chats:
            prompt = prompt.for_sglang()
        if prompt.system_first is not None and template.dialect.wants_system_first:
            prompt = replace(prompt, messages=prompt.system_first)
        if prompt.least_effort is not None and (self._harmony or not template.can_skip_thinking):
            prompt = replace(prompt, effort=prompt.least_effort)
        return replace(prompt, system_first=None, least_effort=None, for_sglang=None)

    async def encode(self, prompt: Prompt | None) -> list[TokenIds] | None:
        """The token ids of each prompt (a chat is one prompt); None if they cannot be computed here.

        `prompt` is None if only the engine can know it. Raises BadRequestError if the chat template rejects
        the messages. Without a template here, the engine decides that: it may have one.
        """
        found = await self.encode_known(prompt, may_estimate=False)
        return None if found is None else [list(encoded.ids) for encoded in found]

    async def encode_known(
        self, prompt: Prompt | None, *, may_estimate: bool = True, engine_model: str | None = None
    ) -> list[Encoded] | None:
        """Like `encode`; with `may_estimate` the cache may leave out the end of a mostly known prompt.

        `engine_model`: given if the prompt has media. The model's name in the hashes of the engine, empty if
        that is not known.
        """
        if isinstance(prompt, TokenPrompt):
            return [Encoded(ids, len(ids)) for ids in _kept(prompt, prompt.token_ids)]
        if prompt is None or self._tokenizer is None:
            return None
        if isinstance(prompt, ChatPrompt) and not self.can_encode_chats:
            return None
        if isinstance(prompt, ChatPrompt):
            prompt = self.settled(prompt)
        if engine_model is not None and isinstance(prompt, ChatPrompt):
            return await self._tokenizer.in_thread(
                partial(self._encode_media_now, self._tokenizer, prompt, engine_model),
                _size(prompt),
            )
        job = partial(self._encode_now, self._tokenizer, prompt, may_estimate)
        is_harmony = self._harmony is not None and isinstance(prompt, ChatPrompt)  # takes milliseconds
        if not is_harmony and _is_short(prompt, self._tokenizer.inline_characters):
            return job()
        return await self._tokenizer.in_thread(job, _size(prompt))

    async def settle(self, probe: Prompt, engine_ids: TokenIds) -> bool:
        """Print chats as the engine does, whose ids of a probe these are; False if no way leads to them."""
        template = self._template
        if template is None:
            return False
        for dialect in template.dialects:
            trial = PromptEncoder(self._tokenizer, template.printed_by(dialect))
            with contextlib.suppress(BadRequestError):
                if await trial.encode(probe) == [engine_ids]:
                    # an engine may use the template of a model that vLLM writes in Harmony, as SGLang does
                    template.dialect, self._harmony = dialect, None
                    return True
        return False

    def decode(self, token_ids: Sequence[int], *, with_special: bool = True) -> str:
        """The text of `token_ids`; empty without a tokenizer."""
        return self._tokenizer.decode(token_ids, with_special=with_special) if self._tokenizer else ""

    def _encode_now(
        self, tokenizer: Tokenizer, prompt: ChatPrompt | TextPrompt, may_estimate: bool
    ) -> list[Encoded]:
        harmony = self._harmony  # `settle` may drop it meanwhile
        if harmony is not None and isinstance(prompt, ChatPrompt):
            ids = harmony.ids(
                prompt.messages, tools=prompt.tools, effort=prompt.effort, is_response=prompt.names_first
            )
            return [Encoded(ids, len(ids))]  # vLLM does not truncate these
        texts = prompt.texts if isinstance(prompt, TextPrompt) else [self._render(prompt)]
        encoded = tokenizer.encode_known_now(
            texts,
            add_special_tokens=prompt.add_special_tokens,
            # `kept_tokens` counts from the end of the prompt, so the end must be exact
            may_estimate=may_estimate and prompt.kept_tokens is None,
        )
        if prompt.kept_tokens is None:
            return encoded
        return [Encoded(ids, len(ids)) for ids in _kept(prompt, [each.ids for each in encoded])]

    def _encode_media_now(self, tokenizer: Tokenizer, prompt: ChatPrompt, engine_model: str) -> list[Encoded]:
        if self.images is None:
            return self._encode_in_part(tokenizer, prompt, "model")
        placed = self.images.place(prompt.messages, engine_model)
        if prompt.has_media_options or prompt.kept_tokens:
            return self._encode_in_part(tokenizer, prompt, "options")
        if not placed.images:
            return self._encode_in_part(tokenizer, prompt, placed.outcome)
        (encoded,) = self._encode_now(tokenizer, replace(prompt, messages=placed.messages), False)
        expanded = expand(encoded.ids, self.images.vision.image_token, placed.images)
        if expanded is None:
            return self._encode_in_part(tokenizer, prompt, "template")
        ids, spans = expanded
        return [Encoded(ids, len(ids) + estimated_tokens(placed.messages), None, spans, placed.outcome)]

    def _encode_in_part(self, tokenizer: Tokenizer, prompt: ChatPrompt, outcome: Outcome) -> list[Encoded]:
        """With text in the places of all media; the length is estimated."""
        more = estimated_tokens(prompt.messages)
        return [
            each._replace(isl=each.isl + more, media_outcome=outcome)
            for each in self._encode_now(tokenizer, prompt, False)
        ]

    def _render(self, prompt: ChatPrompt) -> str:
        assert self._template is not None, "encode_known checks it"
        return self._template.render(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            chat_template_kwargs=prompt.variables(),
            names_first=prompt.names_first,
        )

    def retire(self) -> None:
        """Take no new prompts (RuntimeError); those that were taken are encoded."""
        if self._tokenizer is not None:
            self._tokenizer.retire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tokenizer is not None:
            self._tokenizer.__exit__(*error)


def text_characters(prompt: Prompt) -> int:
    """Characters to tokenize. Media can be far larger in the body, but are not text."""
    if isinstance(prompt, TokenPrompt):
        return 0
    if isinstance(prompt, TextPrompt):
        return sum(map(len, prompt.texts))
    return sum(_content_characters(message.get("content")) for message in prompt.messages)


def _size(prompt: Prompt) -> int:
    """Characters to tokenize, with those of the tools, which agents send with each turn."""
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
    return text_characters(prompt) + (len(msgspec.json.encode(tools)) if tools else 0)


def estimated_isl(prompt: Prompt | None) -> int:
    """About how many tokens the longest prompt has, before any is tokenized. Tools do not count."""
    match prompt:
        case TokenPrompt():
            return max(map(len, prompt.token_ids), default=0)
        case TextPrompt():
            return max(map(_estimated, prompt.texts), default=0)
        case ChatPrompt():
            return _estimated(plain_text(prompt)) + estimated_tokens(prompt.messages)
        case None:
            return 0


def _estimated(text: str) -> int:
    return len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN


def count_of(prompt: Prompt | None) -> int:
    """How many prompts a request has; each gets its answers."""
    many = prompt.token_ids if isinstance(prompt, TokenPrompt) else ()
    return max(1, len(prompt.texts if isinstance(prompt, TextPrompt) else many))


def has_media(prompt: Prompt) -> bool:
    """Whether the prompt has images, audio or video."""
    if not isinstance(prompt, ChatPrompt):
        return False
    contents = [message.get("content") for message in prompt.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and not is_text(part) for part in parts)


def plain_text(prompt: Prompt | None) -> str:
    """The text as Ray Serve's router compares it; empty for token ids.

    For a chat: the text of all messages joined without separators, without roles or template.
    """
    match prompt:
        case ChatPrompt():
            return "".join(_text_of(message.get("content")) for message in prompt.messages)
        case TextPrompt():
            return "".join(prompt.texts)
        case _:
            return ""


def _content_characters(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return sum(len(text) for text in texts if isinstance(text, str))


def _kept(prompt: Prompt, token_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    if prompt.kept_tokens is None:
        return list(token_ids)
    return [ids[prompt.kept_tokens] for ids in token_ids]


def _is_short(prompt: ChatPrompt | TextPrompt, most: int) -> bool:
    """Whether the prompt has at most `most` characters. Parts, tools and variables count as long."""
    if isinstance(prompt, TextPrompt):
        return _are_short(prompt.texts, most)
    if prompt.tools or prompt.variables():
        return False
    return _are_short([message.get("content") for message in prompt.messages], most)


def _are_short(texts: Sequence[object], most: int) -> bool:
    if len(texts) > _SHORT_PROMPT_ITEMS:
        return False
    lengths = [len(text) for text in texts if isinstance(text, str)]
    return len(lengths) == len(texts) and sum(lengths) <= most


def _text_of(content: object) -> str:
    """The text of a message's content, as `PrefixCacheAffinityRouter` of Ray 2.60 takes it.

    Of a part its `text`, whatever its type; without one, what is in its `content`.
    """
    texts, pending = [], [content]
    while pending:  # not by recursion: a client decides how deep it goes
        match pending.pop():
            case str(text) | {"text": str(text)}:
                texts.append(text)
            case list(parts):
                pending.extend(reversed(parts))
            case {"content": inner}:
                pending.append(inner)
    return "".join(texts)
