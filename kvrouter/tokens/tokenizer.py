"""The model's tokenizer, off the event loop.

    texts ──> fastokens, where it is on (fast_ids.py)
          └─> the reference library, `tokenizers`; of a long text only what follows its known beginning
              (prefix_tokens.py)

`tokenizers` holds the GIL during `encode` (10 ms for 9,000 tokens; two threads are no faster than one) and
releases it during `encode_batch_fast`. So this module always encodes batches, and long texts in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import tokenizers

from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.settings.declare import MIB
from kvrouter.tokens.fast_ids import FastIds
from kvrouter.tokens.job_queue import JobQueue
from kvrouter.tokens.prefix_tokens import CacheSettings, Encoded, PrefixStore, PrefixTokens, trial_fault
from kvrouter.tokens.splits import Splits, find_splits

# Encoding up to this length takes at most 75 µs; handing it to a thread and back costs more than 100 µs.
INLINE_CHARACTERS = 400
# The same with fastokens, template included: 0.2 ms, and 0.7 ms of text that it has not seen before.
FAST_INLINE_CHARACTERS = 20_000
# Text that may wait for a thread, in characters: 10 s of two cores with the reference library.
MOST_WAITING = 64 * MIB

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The prefix-token cache of one tokenizer, or the reason why it is off."""

    off_because: str
    prefix: PrefixTokens | None = None
    splits: Splits | None = None
    enough: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether texts are tokenized through the cache."""
        return self.prefix is not None

    @classmethod
    def open(
        cls, tokenizer: tokenizers.Tokenizer, settings: CacheSettings, store: PrefixStore, model: str
    ) -> Self:
        """A cache, if a proof and a trial show that cutting texts does not change their ids."""
        splits = find_splits(tokenizer)
        if splits.pattern is None:
            return cls(splits.reason)
        if fault := trial_fault(tokenizer, splits):
            return cls(f"cutting changed the ids of {fault[:200]!r}")
        size = settings.part_characters
        prefix = PrefixTokens(tokenizer, splits, store, model=model, part_characters=size)
        return cls("", prefix, splits, settings.enough)


class Tokenizer:
    """One `tokenizer.json` and the bounded pool of threads that it runs in. Close it with `with`."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        threads: int,
        cache: CacheSettings | None = None,
        store: PrefixStore | None = None,
        model: str = "",
        is_fast: bool = False,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """`store`: shared with other tokenizers; None gives this one its own.

        `is_fast`: with fastokens, where it is installed and has the same ids.
        """
        # These settings in tokenizer.json are for training batches. Engines switch them off, too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.jobs = JobQueue(threads, most_waiting, "tokenizer")
        self.cache = PrefixCache("switched off")
        if cache is not None:
            own = PrefixStore(max_parts=cache.max_parts, max_bytes=cache.max_bytes)
            self.cache = PrefixCache.open(tokenizer, cache, own if store is None else store, model)
        # leaving out the end of known prompts is what the cache alone can do
        self.fast = FastIds(tokenizer) if is_fast and self.cache.enough is None else None
        """None: the reference library alone."""

    @classmethod
    def load(
        cls,
        model_path: Path,
        *,
        threads: int = 8,
        cache: CacheSettings | None = None,
        store: PrefixStore | None = None,
        is_fast: bool = False,
        most_waiting: int = MOST_WAITING,
    ) -> Self:
        """Read `model_path/tokenizer.json`; raise ConfigError if it is missing or not a tokenizer."""
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{file} is missing: --model-path must name a model directory with a tokenizer.json "
                "(for an older model, AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # `tokenizers` raises plain Exception for what it cannot read
            raise ConfigError(f"{file} is not a tokenizer that `tokenizers` can read: {error}") from error
        return cls(
            tokenizer,
            threads=threads,
            cache=cache,
            store=store,
            model=str(model_path),
            is_fast=is_fast,
            most_waiting=most_waiting,
        )

    @property
    def inline_characters(self) -> int:
        """Texts of up to this length are encoded on the event loop."""
        return FAST_INLINE_CHARACTERS if self.fast is not None and self.fast.is_on else INLINE_CHARACTERS

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`; a long text is encoded in a thread.

        Raises BadRequestError for a text that has no UTF-8 form.
        """
        if len(text) <= self.inline_characters:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        job = partial(self.encode_now, text, add_special_tokens=add_special_tokens)
        return await self.in_thread(job, len(text))

    async def in_thread(self, job: Callable[[], _Result], characters: int) -> _Result:
        """The result of `job`, run in a thread, the shortest first. If cancelled while queued, never run."""
        return await self.jobs.run(job, characters)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`, in the caller's thread."""
        return self.encode_all_now([text], add_special_tokens=add_special_tokens)[0]

    def encode_all_now(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text, in the caller's thread."""
        found = self.encode_known_now(texts, add_special_tokens=add_special_tokens, may_estimate=False)
        return [list(encoded.ids) for encoded in found]

    def encode_known_now(
        self, texts: Sequence[str], *, add_special_tokens: bool, may_estimate: bool = True
    ) -> list[Encoded]:
        """Like `encode_all_now`, with long texts looked up in the prefix-token cache.

        `may_estimate`: the end of a mostly known text (`CacheSettings.enough`) may be missing.
        """
        encode = partial(self._encode_one, add_special_tokens=add_special_tokens, may_estimate=may_estimate)
        if self.fast is not None:
            fast = self.fast.encode(texts, add_special_tokens=add_special_tokens)
            if fast is not None:
                return [Encoded(ids, len(ids)) for ids in fast]
        try:
            if self.cache.prefix is not None and any(len(text) > INLINE_CHARACTERS for text in texts):
                return [encode(text) for text in texts]
            return self._encode_whole(texts, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            # half a surrogate pair, for example from the JSON in a tool call's arguments
            raise BadRequestError(
                "the prompt contains text that is not valid Unicode", param="prompt"
            ) from error

    def _encode_one(self, text: str, *, add_special_tokens: bool, may_estimate: bool) -> Encoded:
        if self.cache.prefix is None or len(text) <= INLINE_CHARACTERS:
            return self._encode_whole([text], add_special_tokens)[0]
        enough = self.cache.enough if may_estimate else None
        return self.cache.prefix.encode(text, add_special_tokens=add_special_tokens, enough=enough)

    def _encode_whole(self, texts: Sequence[str], add_special_tokens: bool) -> list[Encoded]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [Encoded(ids := encoding.ids, len(ids)) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """The text of `token_ids`."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not with_special)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, the special ones included."""
        return self._tokenizer.get_vocab_size()

    def retire(self) -> None:
        """Take no new jobs; queued ones end, since a cancelled one would look like a client that left."""
        self.jobs.retire()
        if self.fast is not None:
            self.fast.close(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.jobs.shutdown()
        if self.fast is not None:
            self.fast.close()
