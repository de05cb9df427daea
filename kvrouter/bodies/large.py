"""Large bodies: values are counted and token ids read in slices, so that other requests run in between.

    body ──a slice at a time──> runs of ids, and the rest: the body with MARK in place of each run
    rest ──mended if need be (lax.py), parsed──> the prompt is one run ──longer than any context──> 400
                         │                └────────────────────────────> its ids, a slice at a time
                         ├─ many prompts, or of unknown use ──> not read: the request is placed by load
                         └─ a text, a chat ──> the body is parsed as a whole, runs included

msgspec decodes JSON in one call that nothing can interrupt, 70 ns for each id: 6 M ids blocked the event loop
for 0.4 s, and 20 M empty lists in a chat for seconds, with a gigabyte of memory. So values are counted first.
The engine gets the client's own bytes, and checks what is not read here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import msgspec

from kvrouter.bodies import lax
from kvrouter.bodies.edits import Edit, apply
from kvrouter.bodies.openai import CompletionRequest
from kvrouter.core.wire.values import TokenId
from kvrouter.errors import BadRequestError, NotMendedError
from kvrouter.tokens.prompt import TokenPrompt

# Bodies up to this size are parsed in one step: 131,072 ids of one digit, the worst case, take 9 ms.
LARGE_BYTES = 256 * 1024
SLICE_BYTES = 64 * 1024
# Ids in several lists that are parsed in one step. Also the longest prompt if no worker's context is known.
MOST_UNREAD_TOKENS = 131_072
# The largest token id; no model has it. A client that sends it is served, at worst placed by load.
MARK = 2**32 - 1
# JSON values in a large body, without lists of ids. Decoding them takes 50 ms. A message has about 8.
MOST_VALUES = 200_000
# Larger than SLICE_BYTES: the inside of a string is skipped much faster than other JSON.
STRING_SLICE_BYTES = 1024 * 1024

_LEAST_CHARACTERS = 200
# Finding the end of a string costs as much as skipping this many bytes.
_VALUE_COST_BYTES = 64
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_START = re.compile(rb"\[\s*+\d[\d\s,]{%d}" % _LEAST_CHARACTERS)
_IDS = re.compile(rb"[\d\s,]*+")
_MARKED = b"[%d]" % MARK
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode

Run: TypeAlias = tuple[int, int]
"""Start and end of a long list of ids, without its brackets."""
Parse: TypeAlias = Callable[[bytes], CompletionRequest]


class LargeBody:
    """A body, with the places of its long lists of ids."""

    def __init__(self, body: bytes, runs: Sequence[Run] = ()) -> None:
        self.body = body
        self.runs = runs
        self.rest = self._without_runs() if runs else body

    @classmethod
    async def read(cls, body: bytes) -> LargeBody:
        """Find the lists of ids. Raises BadRequestError if there are more than MOST_VALUES other values."""
        large = cls(body, await _runs(body))
        await _count_values(large.rest)
        return large

    async def parse(self, parse: Parse) -> CompletionRequest:
        """The request of `rest`, which is mended if only Python's json reads it. Raises BadRequestError."""
        try:
            return parse(self.rest)
        except NotMendedError:
            self.rest = await in_slices(lax.mended(self.rest))
            return parse(self.rest)

    async def with_ids(
        self, request: CompletionRequest, parse: Parse, longest_context: int
    ) -> CompletionRequest:
        """The request, with the ids in place of MARK. `request` was parsed from `rest`.

        `longest_context`: tokens of the longest context of the model's workers; 0 if not known.
        Raises BadRequestError.
        """
        prompt = request.prompt
        if prompt is None:
            return request
        if not isinstance(prompt, TokenPrompt):
            return await self._parsed(parse)
        counts = [self.body.count(b",", *run) + 1 for run in self.runs]
        is_one = len(self.runs) == 1 and list(prompt.token_ids) == [[MARK]]
        if not is_one and sum(counts) <= MOST_UNREAD_TOKENS:
            return await self._parsed(parse)
        if is_one and counts[0] <= (longest_context or MOST_UNREAD_TOKENS):
            ids = await _ids(self.body, self.runs[0])
            return msgspec.structs.replace(request, prompt=TokenPrompt([ids], prompt.kept_tokens))
        if is_one and longest_context and b'"truncate_prompt_tokens"' not in self.rest:
            raise BadRequestError(
                f"the prompt has {counts[0]} token ids; the longest context of a worker of this model is "
                f"{longest_context} tokens",
                param="prompt",
            )
        return msgspec.structs.replace(request, prompt=None)

    async def _parsed(self, parse: Parse) -> CompletionRequest:
        await _count_values(self.body)
        return parse(self._with_runs(self.rest) or self.body)

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The body after edits. They get `rest`, so they are fast."""
        if not edits:
            return self.body
        edited = self._with_runs(apply(edits, self.rest)) or apply(edits, self.body)
        return lax.with_nan(edited, self.body)

    def _with_runs(self, rest: bytes) -> bytes:
        """The whole body again; empty if that is not possible, as the client sent a MARK itself."""
        pieces = rest.split(_MARKED) if self.runs else [rest]
        if len(pieces) != len(self.runs) + 1:
            return b""
        parts = [pieces[0]]
        for (start, end), piece in zip(self.runs, pieces[1:], strict=True):
            parts += [b"[", self.body[start:end], b"]", piece]
        return b"".join(parts)

    def _without_runs(self) -> bytes:
        parts, at = [], 0
        for start, end in self.runs:
            parts += [self.body[at:start], b"%d" % MARK]
            at = end
        return b"".join([*parts, self.body[at:]])


async def _runs(body: bytes) -> list[Run]:
    runs: list[Run] = []
    at, left = 0, SLICE_BYTES
    while at < len(body):
        begin, stop = at, at + SLICE_BYTES
        start = _START.search(body, at, stop + 2 * _LEAST_CHARACTERS)  # a run may begin at the slice's end
        if start is None:
            at = stop
        else:
            at = start.end()
            while (end := _end_of_ids(body, at)) == at + SLICE_BYTES:
                at = end
                await asyncio.sleep(0)
            if body[end : end + 1] == b"]":  # else the list contains other values, too
                runs.append((start.start() + 1, end))
            at = end
        left -= at - begin + _VALUE_COST_BYTES
        if left < 0:
            left = SLICE_BYTES
            await asyncio.sleep(0)
    return runs


def _end_of_ids(body: bytes, at: int) -> int:
    found = _IDS.match(body, at, at + SLICE_BYTES)
    return found.end() if found is not None else at


async def _count_values(body: bytes) -> None:
    """Count the values of JSON, well-formed or not. Raises BadRequestError above MOST_VALUES."""
    values = at = 0
    left = SLICE_BYTES
    while at < len(body):
        stop = min(at + SLICE_BYTES, len(body))
        quote = body.find(b'"', at, stop)
        end = stop if quote < 0 else quote
        values += sum(body.count(mark, at, end) for mark in (b"[", b"{", b",")) + (quote >= 0)
        if values > MOST_VALUES:
            raise BadRequestError(f"the body has more than {MOST_VALUES} JSON values")
        left -= end - at + _VALUE_COST_BYTES
        at = end if quote < 0 else await _end_of_string(body, quote + 1)
        if left < 0:
            left = SLICE_BYTES
            await asyncio.sleep(0)


async def _end_of_string(body: bytes, at: int) -> int:
    """The place after the closing quote, or after the body's end if there is no closing quote."""
    while True:
        found = _IN_STRING.match(body, at, at + STRING_SLICE_BYTES)
        end = found.end() if found is not None else at
        if end < at + STRING_SLICE_BYTES - 1 or end >= len(body):  # the slice may end in a backslash
            return end + 1
        at = end
        await asyncio.sleep(0)


async def in_slices(steps: Generator[None, None, bytes]) -> bytes:
    """What `steps` returns. Others get a turn of the loop between its slices."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(end.value)
        await asyncio.sleep(0)


async def _ids(body: bytes, run: Run) -> list[int]:
    """Decode the ids of a run. Raises BadRequestError."""
    ids: list[int] = []
    at, end = run
    while at < end:
        comma = body.rfind(b",", at, at + SLICE_BYTES) if end - at > SLICE_BYTES else end
        stop = comma if comma > at else end
        try:
            ids += _decode_ids(b"[%b]" % body[at:stop])
        except msgspec.ValidationError as error:
            raise BadRequestError(str(error), param="prompt") from error
        except msgspec.DecodeError as error:
            raise BadRequestError(f"the body is not valid JSON: {error}") from error
        at = stop + 1
        await asyncio.sleep(0)
    return ids
