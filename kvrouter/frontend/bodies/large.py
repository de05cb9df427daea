"""Large bodies: what is in them is counted, and token ids are read, in slices, other requests between.

    body ──a slice at a time──> runs of ids, and the rest: the body with MARK in place of each run
    rest ──parsed──> the prompt is one run ──longer than any context──> 400
                         │                └────────────────────────────> its ids, a slice at a time
                         ├─ many prompts, or of unknown use ──> not read: the request goes by load
                         └─ a text, a chat ──> the runs stand in it: parsed as a whole

JSON is decoded in one step that nothing can interrupt, 70 ns for each id: 6 M ids held the loop for 0.4 s,
and 20 M empty lists in a chat for seconds, with a gigabyte of memory. So values are counted before. The
engine gets the client's own bytes, and judges what is not looked at here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from kvrouter.core.wire.values import TokenId
from kvrouter.errors import BadRequestError
from kvrouter.frontend.bodies.edits import Edit, apply
from kvrouter.frontend.bodies.openai import CompletionRequest
from kvrouter.tokens.prompt import TokenPrompt

LARGE_BYTES = 256 * 1024
"""Bodies of no more are parsed in one step."""
SLICE_BYTES = 64 * 1024
MOST_UNREAD_TOKENS = 131_072
"""Ids that are parsed in one step where they are in several lists; and of a prompt if no context is known."""
MARK = 2**32 - 1
"""The largest token id; no model has it. A client that sends it is served, by load at worst."""

MOST_VALUES = 200_000
"""JSON values in a large body, lists of ids aside: decoding them takes 50 ms. A message has about 8."""
STRING_SLICE_BYTES = 1024 * 1024
"""Of the inside of a string, which is passed over much faster than other JSON."""

_LEAST_CHARACTERS = 200
_VALUE_COST_BYTES = 64
"""Finding a string's end costs as much as passing over so many bytes."""
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_START = re.compile(rb"\[\s*+\d[\d\s,]{%d}" % _LEAST_CHARACTERS)
_IDS = re.compile(rb"[\d\s,]*+")
_MARKED = b"[%d]" % MARK
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode

Run: TypeAlias = tuple[int, int]
"""Where a long list of ids begins and ends, its brackets left out."""
Parse: TypeAlias = Callable[[bytes], CompletionRequest]


class LargeBody:
    """A body with its long lists of ids; a small one has none."""

    def __init__(self, body: bytes, runs: Sequence[Run] = ()) -> None:
        self.body = body
        self.runs = runs
        self.rest = self._without_runs() if runs else body

    @classmethod
    async def read(cls, body: bytes) -> LargeBody:
        """Look for lists of ids. Raises BadRequestError if there are far too many other values."""
        large = cls(body, await _runs(body))
        await _count_values(large.rest)
        return large

    async def with_ids(
        self, asked: CompletionRequest, parse: Parse, longest_context: int
    ) -> CompletionRequest:
        """The request that `rest` was parsed as, with the ids that it stands for. Raises BadRequestError.

        `longest_context`: of any worker of the model, in tokens; 0: not known.
        """
        prompt = asked.prompt
        if prompt is None:
            return asked
        if not isinstance(prompt, TokenPrompt):
            return await self._parsed(parse)
        counts = [self.body.count(b",", *run) + 1 for run in self.runs]
        is_one = len(self.runs) == 1 and list(prompt.token_ids) == [[MARK]]
        if not is_one and sum(counts) <= MOST_UNREAD_TOKENS:
            return await self._parsed(parse)
        if is_one and counts[0] <= (longest_context or MOST_UNREAD_TOKENS):
            ids = await _ids(self.body, self.runs[0])
            return msgspec.structs.replace(asked, prompt=TokenPrompt([ids], prompt.kept_tokens))
        if is_one and longest_context and b'"truncate_prompt_tokens"' not in self.rest:
            raise BadRequestError(
                f"the prompt has {counts[0]} token ids; the longest context of a worker of this model is "
                f"{longest_context} tokens",
                param="prompt",
            )
        return msgspec.structs.replace(asked, prompt=None)

    async def _parsed(self, parse: Parse) -> CompletionRequest:
        await _count_values(self.body)
        return parse(self.body)

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The body after edits of what is not a long list of ids."""
        if not edits:
            return self.body
        edited = apply(edits, self.rest)
        pieces = edited.split(_MARKED) if self.runs else [edited]
        if len(pieces) != len(self.runs) + 1:
            return apply(edits, self.body)  # the client itself has sent a MARK
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
        start = _START.search(body, at, stop + 2 * _LEAST_CHARACTERS)  # one may begin at the slice's end
        if start is None:
            at = stop
        else:
            at = start.end()
            while (end := _end_of_ids(body, at)) == at + SLICE_BYTES:
                at = end
                await asyncio.sleep(0)
            if body[end : end + 1] == b"]":  # else other values stand in the list, too
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
    """Pass over JSON, well-formed or not. Raises BadRequestError if it has more than MOST_VALUES."""
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
    """Behind the quote that closes it; the end of the body if none does."""
    while True:
        found = _IN_STRING.match(body, at, at + STRING_SLICE_BYTES)
        end = found.end() if found is not None else at
        if end < at + STRING_SLICE_BYTES - 1 or end >= len(body):  # a backslash may be the slice's last byte
            return end + 1
        at = end
        await asyncio.sleep(0)


async def _ids(body: bytes, run: Run) -> list[int]:
    """The ids of a run. Raises BadRequestError."""
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
