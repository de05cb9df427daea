"""The model's own tokenizer, off the event loop.

`tokenizers` holds the GIL in `encode` (10 ms for 9,000 tokens; two threads are no faster than one) and lets
it go in `encode_batch_fast`, so everything here encodes in batches, and anything long in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

import tokenizers

from kvrouter.errors import BadRequestError, ConfigError

INLINE_CHARACTERS = 400
"""Up to here encoding takes 75 µs or less: the way to a thread and back alone costs more than 100."""

_Result = TypeVar("_Result")


class Tokenizer:
    """One `tokenizer.json` and the bounded pool of threads that it runs in. Close it with `with`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, threads: int) -> None:
        # What the file says about batches of training data; an engine switches both off, too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, model_path: Path, *, threads: int = 8) -> Self:
        """Read `model_path/tokenizer.json`; raise ConfigError if it is missing or not a tokenizer."""
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{file} is missing: --model-path must name a model directory with a tokenizer.json "
                "(for an older model, AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), threads=threads)
        except Exception as error:  # `tokenizers` raises plain Exception for what it cannot read
            raise ConfigError(f"{file} is not a tokenizer that `tokenizers` can read: {error}") from error

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`; a long text is encoded in a thread.

        Raises BadRequestError for a text that has no UTF-8 form.
        """
        if len(text) <= INLINE_CHARACTERS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await self.in_thread(lambda: self.encode_now(text, add_special_tokens=add_special_tokens))

    async def in_thread(self, job: Callable[[], _Result]) -> _Result:
        """The result of `job`, run by the pool. Cancelled while it waits for a thread, it never runs."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`, in the caller's thread."""
        return self.encode_all_now([text], add_special_tokens=add_special_tokens)[0]

    def encode_all_now(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text, in the caller's thread."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:  # half a surrogate pair, which a tool call's arguments can bring in
            raise BadRequestError(
                "the prompt holds text that is not valid Unicode", param="prompt"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        return self._tokenizer.decode(token_ids)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, the special ones included."""
        return self._tokenizer.get_vocab_size()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
