"""Large bodies: what is read of them, in Python and in C, and how much of them in one step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.bodies import reader
from kvrouter.bodies.edits import without_overrides
from kvrouter.bodies.openai import CompletionRequest, parse_chat, parse_completion
from kvrouter.bodies.reader import (
    LARGE_BYTES,
    MARK,
    MOST_UNREAD_TOKENS,
    MOST_VALUES,
    REST_BYTES,
    REST_VALUES,
    LargeBody,
)
from kvrouter.bodies.scan import LIMITS, PythonScan, read_hashes, read_ids
from kvrouter.core.native import versions
from kvrouter.errors import BadRequestError
from kvrouter.tokens.prompt import ChatPrompt, TokenPrompt
from tests.long import examples

needs_native = pytest.mark.skipif(bool(versions.why_not_built), reason=f"not built: {versions.why_not_built}")
IDS = random.Random(1).choices(range(200_000), k=50_000)
TEXT = 'Grüße, "Welt" \\ \n😀 ' * 4_000


@pytest.fixture(autouse=True, params=[versions.PYTHON, pytest.param(versions.NATIVE, marks=needs_native)])
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test runs on both versions."""
    before = versions.in_use()
    yield versions.choose(str(request.param))
    versions.choose(before)


class Parsed:
    """A parser, and the longest body that it was given."""

    def __init__(self, parse: Callable[[bytes], CompletionRequest]) -> None:
        self._parse = parse
        self.most_bytes = 0

    def __call__(self, body: bytes) -> CompletionRequest:
        self.most_bytes = max(self.most_bytes, len(body))
        return self._parse(body)


async def read(
    body: bytes,
    longest_context: int = 0,
    parse: Callable[[bytes], CompletionRequest] = parse_completion,
    *,
    is_native: bool = True,
) -> tuple[CompletionRequest, int]:
    """The request, and the most bytes that were parsed in one step."""
    parsed = Parsed(parse)
    large = await LargeBody.read(body)
    if large is None:
        return parsed(body), parsed.most_bytes
    asked = await large.parse(parsed)
    large.check_length(asked, longest_context)
    return await large.whole(asked, parsed, longest_context, is_native=is_native), parsed.most_bytes


def plain(asked: CompletionRequest) -> dict[str, Any]:
    """Its fields, with lists in place of arrays, and without the function that makes SGLang's chat."""
    fields = msgspec.structs.asdict(asked)
    match asked.prompt:
        case TokenPrompt(token_ids=prompts, kept_tokens=kept):
            fields["prompt"] = TokenPrompt([list(ids) for ids in prompts], kept)
        case ChatPrompt():
            made = asked.prompt.for_sglang
            fields["sglang"] = msgspec.structs.replace(made(), for_sglang=None) if made is not None else None
            fields["prompt"] = msgspec.structs.replace(asked.prompt, for_sglang=None)
    return fields | {"token_ids": None if asked.token_ids is None else list(asked.token_ids)}


def encoded(**fields: Any) -> bytes:
    """A body."""
    return json.dumps({"model": "m", **fields}).encode()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n" + " " * 9, ":")])
async def test_ids(separators: tuple[str, str]) -> None:
    """Ids read in slices equal those of the whole body, and most of it is not parsed in one step."""
    fields = {"kvrouter": {"mode": "kv"}, "prompt": IDS, "max_tokens": 3, "n": 2}
    body = json.dumps(fields, separators=separators).encode()

    asked, most_bytes = await read(body)
    assert plain(parse_completion(body)) == plain(asked)
    assert most_bytes < 1000


async def test_ids_that_end_with_a_slice() -> None:
    """No id is split or lost where a slice ends."""
    for digits in (1, 2, 5, 9):
        ids = [10**digits - 1] * (600_000 // (digits + 1))
        asked, _ = await read(json.dumps({"prompt": ids}, separators=(",", ":")).encode(), len(ids))
        assert plain(asked)["prompt"] == TokenPrompt([ids])


async def test_longer_than_any_context() -> None:
    """More ids than any context are rejected without parsing them."""
    with pytest.raises(BadRequestError, match=f"maximum context length is 4096 .* {len(IDS)} token ids"):
        await read(encoded(prompt=IDS), 4096)


async def test_longer_and_unread() -> None:
    """If the engine may accept them anyway, the ids are not parsed and the request is placed by load."""
    for body, longest in (
        (encoded(prompt=IDS, truncate_prompt_tokens=100), 4096),
        (encoded(prompt=[7] * (MOST_UNREAD_TOKENS + 1)), 0),
        (encoded(prompt=[[7] * 1000] * (MOST_UNREAD_TOKENS // 1000 + 1)), 4096),
        (encoded(prompt=[[7, 8]] * MOST_VALUES), 4096),
        (encoded(prompt=["a"] * 2 * MOST_VALUES), 4096),
    ):
        asked, most_bytes = await read(body, longest)
        assert asked.prompt is None
        assert most_bytes < REST_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [IDS[:9000], IDS[9000:], [1, 2]]},
        {"prompt": [1, 2], "allowed_token_ids": IDS},
        {"prompt": "[" + ",".join(map(str, IDS)) + "]"},
        {"prompt": [*IDS, "a"]},
        {"prompt": TEXT},
        {"prompt": [TEXT, "short", TEXT[:5000]], "add_special_tokens": False},
        {"prompt": TEXT, "user": TEXT, "logit_bias": {str(number): 1 for number in range(9_000)}},
        {"prompt": [MARK], "allowed_token_ids": IDS, "max_tokens": 3},
        {"prompt": "\0" + "0", "more": TEXT},
        {"prompt": "\0" + "0", "suffix": "x", "messages": [TEXT]},
        {"prompt": TEXT, "cache_salt": "s" * 2000, "n": float("nan")},
    ],
    ids=[
        "prompts",
        "elsewhere",
        "text",
        "mixed",
        "one text",
        "texts",
        "unread",
        "mark",
        "text mark",
        "marks",
        "odd",
    ],
)
async def test_others(fields: dict[str, Any]) -> None:
    """Other large bodies are read as small ones are, but for those with a mark. Engines get all bytes."""
    body = encoded(**fields)
    large = await LargeBody.read(body)
    assert large is not None
    asked, _ = await read(body)

    wanted = plain(parse_completion(body.replace(b"NaN", b"null")))
    is_forged = fields["prompt"] == [MARK] or "\0" in fields["prompt"]
    wanted |= {"is_odd": asked.is_odd} | ({"prompt": None} if is_forged else {})
    assert wanted == plain(asked)
    assert body == large.edited([])


@pytest.mark.parametrize(
    "fields",
    [{"prompt": IDS}, {"prompt": [IDS, [MARK], IDS]}, {"prompt": [1]}, {"prompt": TEXT, "user": TEXT}],
)
async def test_edited(fields: dict[str, Any]) -> None:
    """Edits get the body without its holes; afterwards their contents are in their places."""
    body = encoded(**fields, kvrouter={"mode": "kv"}, max_tokens=5, more=TEXT)
    large = await LargeBody.read(body)

    assert large is not None
    assert without_overrides(body) == large.edited([without_overrides])


@pytest.mark.parametrize("odd", ["4294967296", "1 2", "01", ""])
async def test_odd_ids(odd: str) -> None:
    """A value that is not a token id is rejected at any place."""
    ids = ",".join(map(str, IDS))
    with pytest.raises(BadRequestError):
        await read(f'{{"prompt": [{ids},{odd},{ids}]}}'.encode(), 10**6)


@pytest.mark.parametrize("odd", ["4294967296", "1 2", "01", "", "-1", "1.0", "null", "\f1"])
def test_odd_id(odd: str) -> None:
    """Both versions reject it with msgspec's reason."""
    with pytest.raises(BadRequestError, match=r"Expected `int`|valid JSON"):
        read_ids(f"1,{odd},2".encode(), 0, len(odd) + 4)


def test_hashes() -> None:
    """Numbers of 64 bits, signed or not, with any space between them."""
    text = b"0, 18446744073709551615,-1\t,-9223372036854775808 ,\n7,-0"

    read = read_hashes(b"x" + text + b"x", 1, 1 + len(text))

    assert [0, (1 << 64) - 1, (1 << 64) - 1, 1 << 63, 7, 0] == [*read]
    assert [] == [*read_hashes(b"[ ]", 1, 2)]


ODD_HASHES = [
    "18446744073709551616",
    "-9223372036854775809",
    "1" * 30,
    "- 1",
    "--1",
    "01",
    "-01",
    "1.0",
    "",
    "null",
]


@pytest.mark.parametrize("odd", ODD_HASHES)
def test_odd_hash(odd: str) -> None:
    """Both versions reject it."""
    with pytest.raises(ValueError, match=r"64 bits|Expected `int`|malformed|out of range"):
        read_hashes(f"1,{odd},2".encode(), 0, len(odd) + 4)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"text": TEXT})}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": TEXT[:3000], "parameters": {"type": "object"}},
}
IMAGE = {"type": "image_url", "image_url": {"url": "x" * 99_999}}
CHATS: dict[str, dict[str, Any]] = {
    "one text": {"messages": [{"role": "user", "content": TEXT}]},
    "image": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "turns": {"messages": [{"role": "user", "content": TEXT[: 10 * number]} for number in range(300)]},
    "many": {"messages": [{"role": "user", "content": "hello"}] * 9000, "tools": [TOOL] * 40},
    "calls": {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}] * 5,
        "tools": [TOOL],
    },
    "ids": {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": IDS}},
    "variables": {
        "messages": [{"role": "user", "content": TEXT}] * 9,
        "chat_template_kwargs": {"more": TEXT[:3000], "ids": [IDS[:3000]]},
        "documents": [{"text": TEXT}] * 9,
    },
    "twice": {"messages": [{"role": "user", "content": "\0" + "1"}] * 3000, "unknown": ["\0" + "2"] * 3000},
}


@pytest.mark.parametrize("name", CHATS)
async def test_chats(name: str) -> None:
    """Chats are read as small ones are, in steps; also the one that SGLang makes of them."""
    body = encoded(**CHATS[name])
    asked, most_bytes = await read(body, parse=parse_chat)

    assert plain(parse_chat(body)) == plain(asked)
    assert most_bytes <= 2 * REST_BYTES


async def test_half_a_surrogate_pair_in_a_long_text() -> None:
    """As in a small body the engine judges it, and the request is placed by load."""
    for text in ("\ud83d" + TEXT, TEXT + "\ude00", "\ud83d" * 40_000):
        assert parse_completion(encoded(prompt=text[:9] + text[-9:])).prompt is None
        assert (await read(encoded(prompt=text)))[0].prompt is None
        assert (await read(encoded(messages=[{"content": text}]), parse=parse_chat))[0].prompt is None


@pytest.mark.parametrize("value", ["[]", "{}", "1.5", '""', '{"a":[1]}', '"\\\\"', "null"])
async def test_too_many_values(value: str) -> None:
    """A message of too many values is not decoded: the chat is placed by load. Elsewhere it is an error."""
    values = ",".join([value] * 70_000)
    body = f'{{"messages": [{{"role": "user", "content": [{values}]}}]}}'.encode()
    asked, most_bytes = await read(body, parse=parse_chat)

    assert asked.prompt is None
    assert most_bytes < 1000
    with pytest.raises(BadRequestError, match="more than 20000 JSON values outside of its prompt"):
        await read(f'{{"messages": [], "kvrouter": {{"x": [{values}]}}}}'.encode(), parse=parse_chat)


# Instructions for a byte, by callgrind: the most that each call took for any of the bodies here.
PARSED, DECODED, SCANNED, READ = 70, 25, 25, 25
MOST_INSTRUCTIONS = 6_000_000


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """Estimates of the instructions of each step of the loop: the bytes of its calls, by what each takes."""
    steps = [0]

    def count(name: str, cost: int, size: Callable[..., int]) -> None:
        call = getattr(reader, name)

        def counting(*args: Any) -> Any:
            steps[-1] += cost * size(*args)
            return call(*args)

        patch.setattr(reader, name, counting)

    count("_decode_items", DECODED, len)
    count("_decode_text", DECODED, len)
    count("read_ids", READ, lambda _, start, end: end - start)

    class Counting(PythonScan):
        def step(self, most: int) -> bool:
            before = self._at
            more = super().step(most)
            steps[-1] += SCANNED * (self._at - before)
            return more

    async def turn(_: float) -> None:
        steps.append(0)

    patch.setattr(reader, "new_scan", lambda body: Counting(body, LIMITS))
    patch.setattr("asyncio.sleep", turn)
    return steps


@pytest.mark.parametrize("name", [*CHATS, "ids of a prompt", "escapes", "digits", "prompts"])
async def test_no_step_is_long(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of the loop takes more than 6 M instructions for a body, by the sizes of its calls.

    An estimate that is the same on any machine.
    """
    prompts: dict[str, Any] = {
        "ids of a prompt": IDS * 2,
        "escapes": "\u4e2d\n" * 200_000,
        "digits": [7] * MOST_UNREAD_TOKENS,
        "prompts": [IDS[:1000]] * 100,
    }
    is_chat = name in CHATS
    body = encoded(**(CHATS[name] if is_chat else {"prompt": prompts[name]}))
    steps = counted(monkeypatch)

    parse = parse_chat if is_chat else parse_completion
    asked, most_bytes = await read(body, parse=parse)
    assert asked.prompt is not None
    assert max([PARSED * most_bytes, *steps]) < MOST_INSTRUCTIONS


async def test_small_enough() -> None:
    """A text below REST_BYTES is parsed at once."""
    assert await LargeBody.read(encoded(prompt="x" * 3 * LARGE_BYTES)) is None
    assert await LargeBody.read(encoded(prompt="x" * REST_BYTES)) is not None
    assert await LargeBody.read(encoded(prompt=[[1]] * REST_VALUES)) is not None


@pytest.mark.parametrize("text", ['[{,"' * 300_000, "\\" * 300_001, "x" * 262_143 + '\\"' * 9], ids=str.strip)
async def test_marks_in_texts(text: str) -> None:
    """Brackets and commas in strings do not count as values, wherever slices end."""
    asked, _ = await read(encoded(messages=[{"role": "user", "content": text}]), parse=parse_chat)

    assert [{"role": "user", "content": text}] == getattr(asked.prompt, "messages", None)


JSONS = st.recursive(
    st.none()
    | st.integers(0, 300)
    | st.text('a"\\,[]{}:\n😀', max_size=30)
    | st.lists(st.integers(0, 99), min_size=9),
    lambda values: (
        st.lists(values, max_size=6) | st.dictionaries(st.text('ab"\\', max_size=4), values, max_size=6)
    ),
    max_leaves=40,
)
PIECES = st.lists(st.sampled_from([*'"\\[]{},: 1\na', "23", "[1, 22,3 ]"]))


@needs_native
@given(
    st.one_of(JSONS.map(json.dumps), PIECES.map("".join)).map(str.encode),
    st.integers(1, 40),
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 40), st.integers(1, 9)),
)
@examples(2000, 300)
def test_both_scans(body: bytes, step: int, limits: tuple[int, int, int, int]) -> None:
    """The scan in C finds what the one in Python does, in slices of any size, whatever the body is."""
    assert versions.chosen.bodies is not None or versions.choose(versions.NATIVE)
    assert versions.chosen.bodies is not None
    scans = [PythonScan(body, limits), versions.chosen.bodies.Scan(body, limits), PythonScan(body, limits)]
    for scan, size in zip(scans, (step, step, 10**9), strict=True):
        while scan.step(size):
            pass
    found = [(scan.values, scan.ids, scan.strings, scan.members, scan.cuts) for scan in scans]
    assert found[0] == found[1] == found[2]
    assert LIMITS
