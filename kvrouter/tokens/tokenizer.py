"""The model's tokenizer, off the event loop.

`tokenizers` holds the GIL during `encode` (10 ms for 9,000 tokens; two threads are no faster than one) and
releases it during `encode_batch_fast`. So this module always encodes batches, and long texts in a thread. The
known beginning of a long text is not tokenized again (prefix_tokens.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import tokenizers

from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.tokens.prefix_tokens import CacheSettings, Encoded, PrefixStore, PrefixTokens, trial_fault
from kvrouter.tokens.splits import Splits, find_splits

# Encoding up to this length takes at most 75 µs; handing it to a thread and back costs more than 100 µs.
INLINE_CHARACTERS = 400

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
    ) -> None:
        """`store`: shared with other tokenizers; None gives this one its own."""
        # These settings in tokenizer.json are for training batches. Engines switch them off, too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self.cache = PrefixCache("switched off")
        if cache is not None:
            own = PrefixStore(max_parts=cache.max_parts, max_bytes=cache.max_bytes)
            self.cache = PrefixCache.open(tokenizer, cache, own if store is None else store, model)

    @classmethod
    def load(
        cls,
        model_path: Path,
        *,
        threads: int = 8,
        cache: CacheSettings | None = None,
        store: PrefixStore | None = None,
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
        return cls(tokenizer, threads=threads, cache=cache, store=store, model=str(model_path))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`; a long text is encoded in a thread.

        Raises BadRequestError for a text that has no UTF-8 form.
        """
        if len(text) <= INLINE_CHARACTERS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await self.in_thread(lambda: self.encode_now(text, add_special_tokens=add_special_tokens))

    async def in_thread(self, job: Callable[[], _Result]) -> _Result:
        """The result of `job`, run in the thread pool. If cancelled while queued, it never runs."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

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
        self._threads.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
