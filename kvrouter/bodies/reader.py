"""Large bodies are read in slices, so that other requests run in between.

    body ──scanned (scan.py)──> small: parsed at once
              └─> holes: long strings, long lists of ids; where too much is left, also large fields
           rest: the body with a mark in place of each hole ──mended if need be (lax.py), parsed──> request
           its prompt, where a policy needs it: what is in the holes, decoded a slice at a time

msgspec decodes JSON in one call that nothing can interrupt: 5 instructions for a byte of text, 25 for one of
escapes, 100 to 400 for an id, 600 for an empty list. A step of the loop takes at most 6 M of them. What takes
more is not read, and the request is placed by load: many short prompts, one message of thousands of values.
The engine gets the client's own bytes, and checks what is not read here.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvrouter.bodies import lax, messages, openai, responses
from kvrouter.bodies.edits import Edit, apply
from kvrouter.bodies.openai import CompletionRequest
from kvrouter.bodies.scan import GROUP_VALUES, Place, Scan, new_scan, read_ids
from kvrouter.errors import BadRequestError, NotMendedError
from kvrouter.tokens.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt

# Bodies up to this size are not even scanned: two passes of msgspec over the worst of them take 6 M.
LARGE_BYTES = 16 * 1024
SLICE_BYTES = 64 * 1024  # 1.7 M instructions; a step may end one loop and begin another
# What is parsed in one step.
REST_BYTES = 64 * 1024
REST_VALUES = 6_000
# Of a field's items, of which nothing but the JSON is read: one item may be larger than a group.
MOST_GROUP_BYTES = 192 * 1024
# Values of JSON besides those of large fields.
MOST_VALUES = 20_000
MOST_REST_BYTES = 512 * 1024
# Of bodies whose conversion to a chat cannot be cut into steps (/v1/messages, /v1/responses).
MOST_CONVERTED_VALUES = 200_000
# Ids in several lists. Also the longest prompt if no worker's context is known.
MOST_UNREAD_TOKENS = 131_072
# In place of the first list of ids; the next one has the number below. No model has such a token.
MARK = 2**32 - 1

# The fields whose items are decoded in groups.
_LISTS = frozenset({"messages", "tools", "documents"})
_LISTED = _LISTS | {"prompt"}
_FILLED = _LISTED | {"input", "instructions", "system", "chat_template", "kv_transfer_params"}
# What no API reads may be left out of the rest.
_READ = openai.FIELDS | messages.FIELDS | responses.FIELDS
_NAME = re.compile(rb'\s*+"([A-Za-z_]*+)"\s*+:\s*+')
_NAME_BYTES = 64
_MARKS = re.compile(rb'\{"\\u0000":"\\u0000(\d{1,9})"\}|"\\u0000(\d{1,9})"|(?<=\[)(4\d{9})(?=\])')
_STRING_BYTES = 32 * 1024
# A slice of a string may end where no backslash is in so many bytes before: \ud83d\ude00.
_ESCAPE_BYTES = 12
# A slice with escapes takes as long as so many without.
_ESCAPED_SLICES = 8
_WHOLE_ESCAPES = re.compile(
    rb"(?:[^\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u])*"
)
_decode_text = msgspec.json.Decoder(str).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode

Parse: TypeAlias = Callable[[bytes], CompletionRequest]


class Hole(Struct, frozen=True):
    """A part of the body, in place of which the rest has a mark."""

    start: int
    end: int
    mark: bytes
    tokens: int = 0
    """How many, if it is a list of ids, without its brackets."""
    field: str = ""
    """Whose value it is, or the items of its list; empty: a string, with its quotes."""
    values: int = 0


class LargeBody:
    """A body, and the rest of it without its holes."""

    def __init__(
        self, body: bytes, small: Sequence[Hole] = (), large: Sequence[Hole] = (), scan: Scan | None = None
    ) -> None:
        """`small`: long strings and lists of ids; `large`: fields."""
        self.body = body
        self._values = scan.values if scan is not None else 0
        self._cuts = scan.cuts if scan is not None else []
        self._small = small
        self.holes = [*small, *large]
        self._outer = _outermost(self.holes)
        self.rest = self._given = self._without(self._outer, 0, len(body)) if self.holes else body
        self._has_forged: bool | None = None
        self._values_left = self._values - sum(hole.values for hole in large)

    @classmethod
    async def read(cls, body: bytes) -> LargeBody | None:
        """Find the holes; None if the body is small enough to be parsed at once.

        Raises BadRequestError if too much cannot be left out.
        """
        scan = await scanned(body)
        if len(body) <= REST_BYTES and scan.values <= REST_VALUES and not scan.ids:
            return None
        small = _small_holes(body, scan)
        left = len(body) - sum(hole.end - hole.start for hole in small)
        is_too_much = left > REST_BYTES or scan.values > REST_VALUES
        large = cls(body, small, _large_holes(body, scan, len(small)) if is_too_much else (), scan)
        if large._values_left > MOST_VALUES:
            raise BadRequestError(f"the body has more than {MOST_VALUES} JSON values outside of its prompt")
        if len(large.rest) > MOST_REST_BYTES:
            raise BadRequestError(f"the body has more than {MOST_REST_BYTES} bytes outside of its prompt")
        return large

    @classmethod
    async def read_fields(cls, body: bytes, kept: Collection[str]) -> LargeBody:
        """A body of which only these fields are read."""
        scan = await scanned(body)
        return cls(body, (), _large_holes(body, scan, 0, kept, ()), scan)

    async def parse(self, parse: Parse) -> CompletionRequest:
        """The request of `rest`, which is mended if only Python's json reads it. Raises BadRequestError."""
        try:
            return parse(self.rest)
        except NotMendedError:
            self.rest = await in_slices(lax.mended(self.rest))
            return parse(self.rest)

    def check_length(self, request: CompletionRequest, longest_context: int) -> None:
        """Raise BadRequestError if no worker's context holds the ids of the prompt.

        `longest_context`: tokens of the longest context of the model's workers; 0 if not known.
        """
        counts = self._counts(request)
        is_too_long = len(counts) == 1 and 0 < longest_context < counts[0]
        if is_too_long and b'"truncate_prompt_tokens"' not in self.rest:
            raise BadRequestError(
                f"This model's maximum context length is {longest_context} tokens, on any of its workers; "
                f"the prompt has {counts[0]} token ids",
                param="prompt",
            )

    async def whole(
        self, request: CompletionRequest, parse: Parse, longest_context: int, *, is_native: bool
    ) -> CompletionRequest:
        """The request of `rest` with what is in the holes of its prompt. A prompt that is not read is None.

        `is_native`: its prompt is what was parsed, not converted. Raises BadRequestError.
        """
        if not self.holes:
            return request
        if self._is_forged():
            return replace(request, prompt=None)
        if not is_native:
            return self._at_once(request, parse)
        hole = self._hole_of(request.token_ids)
        if hole is not None:
            request = replace(request, token_ids=await self.ids(hole))
        counts = self._counts(request)
        most = (longest_context if len(counts) == 1 else 0) or MOST_UNREAD_TOKENS
        prompt = await self._filled(request.prompt) if sum(counts) <= most else None
        return replace(request, prompt=prompt)

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The body after edits. They get `rest`, so they are fast."""
        if not edits:
            return self.body
        if self._is_forged():
            return apply(edits, self.body)
        edited = lax.with_nan(apply(edits, self.rest), self._given)
        return _MARKS.sub(self._content, edited)

    def _at_once(self, request: CompletionRequest, parse: Parse) -> CompletionRequest:
        """The request of the whole body, which takes one long step."""
        tokens = sum(hole.tokens for hole in self.holes)
        if tokens > MOST_UNREAD_TOKENS or self._values + tokens > MOST_CONVERTED_VALUES:
            return replace(request, prompt=None)
        return replace(request, prompt=parse(self.body).prompt)

    def _counts(self, request: CompletionRequest) -> list[int]:
        """The number of ids of each prompt."""
        lists = request.prompt.token_ids if isinstance(request.prompt, TokenPrompt) else []
        return [len(ids) if (hole := self._hole_of(ids)) is None else hole.tokens for ids in lists]

    async def _filled(self, prompt: Prompt | None) -> Prompt | None:
        try:
            match prompt:
                case TokenPrompt():
                    return await self._of_ids(prompt)
                case TextPrompt():
                    return await self._of_texts(prompt)
                case ChatPrompt():
                    return prompt if await self._fill_chat(prompt) else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the engine judges it
        return None

    async def _of_ids(self, prompt: TokenPrompt) -> TokenPrompt:
        holes = [(ids, self._hole_of(ids)) for ids in prompt.token_ids]
        prompts = [ids if hole is None else await self.ids(hole) for ids, hole in holes]
        return TokenPrompt(prompts, prompt.kept_tokens)

    async def _of_texts(self, prompt: TextPrompt) -> TextPrompt | None:
        holes = [(text, self._hole_of(text)) for text in prompt.texts]
        if any(hole is not None and hole.field for _, hole in holes):
            return None  # many prompts
        return replace(
            prompt, texts=[text if hole is None else await self.text(hole) for text, hole in holes]
        )

    async def _fill_chat(self, prompt: ChatPrompt) -> bool:
        """Fill the holes of the objects themselves: what is made of them later has it all, too."""
        variables = prompt.chat_template_kwargs
        for items in (prompt.messages, prompt.tools, variables.get("documents")):
            if isinstance(items, list) and not await self._fill_list(items):
                return False
        for top in (prompt.messages, prompt.tools or [], variables):
            for slot in _slots(top):
                if slot is None:
                    await asyncio.sleep(0)
                    continue
                holder, key = slot
                hole = self._hole_of(holder[key])
                if hole is not None and not hole.field:
                    holder[key] = list(await self.ids(hole)) if hole.tokens else await self.text(hole)
        return True

    async def _fill_list(self, items: list[Any]) -> bool:
        """Decode the items in place of their mark; returns whether they could be."""
        is_mark = len(items) == 1 and isinstance(items[0], dict)
        hole = self._hole_of(items[0].get("\0")) if is_mark else None
        if hole is None:
            return True
        found: list[dict[str, Any]] = []
        for start, end, values in self._groups(hole):
            rest = self._without(self._small, start, end)
            if values > REST_VALUES or len(rest) > MOST_GROUP_BYTES:
                return False
            found += _decode_items(b"[%b]" % rest)
            await asyncio.sleep(0)
        items[:] = found
        return True

    def _groups(self, hole: Hole) -> Iterator[tuple[int, int, int]]:
        """Start, end and number of values of each group of a field's items."""
        at, values = hole.start, hole.values
        for cut, more in self._cuts[bisect_left(self._cuts, (at, 0)) :]:
            if cut >= hole.end:
                break
            yield at, cut, more
            at, values = cut + 1, values - more
        yield at, hole.end, values

    def _hole_of(self, value: object) -> Hole | None:
        """The hole in place of which a value was parsed."""
        number = -1
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], int):
            number = MARK - value[0]
        elif isinstance(value, str) and value[:1] == "\0" and value[1:].isdecimal() and len(value) < 10:
            number = int(value[1:])
        hole = self.holes[number] if 0 <= number < len(self.holes) else None
        return hole if hole is not None and bool(hole.tokens) == isinstance(value, list) else None

    def _content(self, mark: re.Match[bytes]) -> bytes:
        number = MARK - int(mark[3]) if mark[3] else int(mark[1] or mark[2])
        hole = self.holes[number] if 0 <= number < len(self.holes) else None
        return mark[0] if hole is None else self.body[hole.start : hole.end]

    def _is_forged(self) -> bool:
        """Whether the client itself sent what is a mark here."""
        if self._has_forged is None:
            found = [mark[0] for mark in _MARKS.finditer(self._given)]
            self._has_forged = found != [hole.mark for hole in self._outer]
        return self._has_forged

    def _without(self, holes: Sequence[Hole], start: int, end: int) -> bytes:
        """A part of the body, with the marks of these holes."""
        parts, at = [], start
        for hole in holes[bisect_left(holes, start, key=_start) :]:
            if hole.start >= end:
                break
            parts += [self.body[at : hole.start], hole.mark]
            at = hole.end
        return b"".join([*parts, self.body[at:end]])

    async def ids(self, hole: Hole) -> list[int]:
        """The ids of a list, as an array, which all that is done with them takes. Raises BadRequestError."""
        ids = array("I")
        for at, stop in self.slices(hole.start, hole.end):
            ids += read_ids(self.body, at, stop)
            await asyncio.sleep(0)
        return cast("list[int]", ids)

    def slices(self, at: int, end: int) -> Iterator[tuple[int, int]]:
        """Start and end of parts of a list of numbers, between two commas."""
        while at < end:
            comma = self.body.rfind(b",", at, at + SLICE_BYTES) if end - at > SLICE_BYTES else end
            stop = comma if comma > at else end
            yield at, stop
            at = stop + 1

    async def text(self, hole: Hole) -> str:
        """The text of a string. Raises an error if it is none, as with half of a surrogate pair."""
        parts: list[str] = []
        at, end, left = hole.start + 1, hole.end - 1, _ESCAPED_SLICES
        while at < end:
            stop, has_escapes = _end_of_slice(self.body, at, min(at + _STRING_BYTES, end), end)
            parts.append(_decode_text(b'"%b"' % self.body[at:stop]))
            at = stop
            left -= _ESCAPED_SLICES if has_escapes else 1
            if left <= 0:
                left = _ESCAPED_SLICES
                await asyncio.sleep(0)
        return "".join(parts)


def _start(hole: Hole) -> int:
    return hole.start


def _small_holes(body: bytes, scan: Scan) -> list[Hole]:
    """Long lists of ids and long strings, but for those in fields that routing reads at once."""
    found = [*scan.ids, *((start - 1, end + 1, 0) for start, end in scan.strings)]
    ends = [end for _, end, _ in scan.members]
    holes: list[Hole] = []
    for start, end, tokens in sorted(found):
        place = bisect_left(ends, end)
        is_inside = place < len(ends) and scan.members[place][0] < start
        name = named_field(body, scan.members[place])[0] if is_inside else None
        if name is not None and (name in _FILLED or name not in _READ):
            holes.append(Hole(start, end, _mark(len(holes), tokens), tokens))
    return holes


def named_field(body: bytes, member: Place) -> tuple[str | None, int]:
    """The name of a field, None if it is written in an odd way; and where its value begins."""
    found = _NAME.match(body, member[0], member[0] + _NAME_BYTES)
    return (None, 0) if found is None else (found[1].decode(), found.end())


async def scanned(body: bytes) -> Scan:
    scan = new_scan(body)
    for _ in iter(partial(scan.step, SLICE_BYTES), False):
        await asyncio.sleep(0)
    return scan


def _large_holes(
    body: bytes,
    scan: Scan,
    number: int,
    kept: Collection[str] = _READ,
    listed: Collection[str] = _LISTED,
) -> list[Hole]:
    """Large fields that are not kept, and the items of those that are `listed`."""
    holes: list[Hole] = []
    for member in scan.members:
        (name, at), (_, end, values) = named_field(body, member), member
        if name is None:
            continue
        is_list = name in listed and body[at : at + 1] == b"["
        if is_list or name not in kept:
            inside = (at + 1, body.rfind(b"]", at, end)) if is_list else (at, end)
            holes.append(Hole(*inside, _mark(number + len(holes), 0, name), field=name, values=values))
    return holes


def _mark(number: int, tokens: int = 0, field: str = "") -> bytes:
    if tokens:
        return b"%d" % (MARK - number)
    return (b'{"\\u0000":"\\u0000%d"}' if field in _LISTS else b'"\\u0000%d"') % number


def _outermost(holes: Sequence[Hole]) -> list[Hole]:
    """Those that are in no other, by their start."""
    found: list[Hole] = []
    for hole in sorted(holes, key=_start):
        if not found or hole.start >= found[-1].end:
            found.append(hole)
    return found


def _end_of_slice(body: bytes, start: int, stop: int, end: int) -> tuple[int, bool]:
    """Where a slice of a string may end, at most at `stop`, and whether it was searched for escapes."""
    if stop == end:
        return stop, True
    if b"\\" in body[stop - _ESCAPE_BYTES : stop]:
        found = _WHOLE_ESCAPES.match(body, start, stop)
        return (found.end() if found is not None and found.end() > start else end), True
    while stop > start + 1 and body[stop] & 0xC0 == 0x80:
        stop -= 1
    return stop, False


def _slots(top: Any) -> Iterator[tuple[Any, Any] | None]:
    """Where a mark may be, list or object and index or key; None after GROUP_VALUES values."""
    stack, seen = [top], 0
    while stack:
        holder = stack.pop()
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, dict):
                stack.append(value)
            elif isinstance(value, list):
                if len(value) == 1 and isinstance(value[0], int):
                    yield holder, key
                else:
                    stack.append(value)
            elif isinstance(value, str) and value[:1] == "\0":
                yield holder, key
            seen += 1
            if seen % GROUP_VALUES == 0:
                yield None


async def in_slices(steps: Generator[None, None, bytes]) -> bytes:
    """What `steps` returns. Others get a turn of the loop between its slices."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(end.value)
        await asyncio.sleep(0)
