"""Bodies that the fast decoders refuse, read as an engine reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.bodies import forms, lax
from kvrouter.bodies.apis import BY_PATH
from kvrouter.bodies.edits import apply, edits_of, removed_from
from kvrouter.bodies.openai import CompletionRequest
from kvrouter.bodies.reader import LargeBody
from kvrouter.errors import BadRequestError
from tests.frontend.fleet import BODY, FleetOf

parses = pytest.mark.parametrize("parse", [api.parse for api in BY_PATH.values()], ids=list(BY_PATH))
CODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
WORDS = ["true", "TRUE", "on", "Off", "yes", "n", "T", "f", "1", "0", " true", "maybe", ""]
NUMBERS = ["1.0", "2.50", " 7 ", "+3", "-0", "1_000", "1__0", "0x1", "1e3", "²", "٣", "9" * 30, "nan", "1."]
# Numbers that pydantic takes and kvrouter does not: 0-5 is -5, 0__1 is 1, other spaces, more than 40 digits.
ODD = re.compile(r"0_*[-_]|[^\0-\x7f]|.{41}")
scalars: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 2)
    | st.floats()
    | st.sampled_from([0.0, 1.0, -0.0, 2.0])
    | st.text(max_size=5)
    | st.text("0123456789_.+- e\n", max_size=6)
    | st.sampled_from(WORDS + NUMBERS)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner))


def value_of(body: bytes) -> Any:
    """What a body says to Python's json; None: nothing."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def accepted(kind: type, value: object) -> tuple[bool, Any]:
    """Whether pydantic takes a value, and as what."""
    try:
        return True, pydantic.TypeAdapter(kind).validate_python(value)
    except pydantic.ValidationError:
        return False, None


@pytest.mark.parametrize(("read", "kind"), [(lax.as_bool, bool), (lax.as_int, int)])
@given(value=values)
def test_as_pydantic(read: Callable[[object], Any], kind: type, value: object) -> None:
    """What is read is what pydantic reads, the oracle of every engine; no usual spelling is left out."""
    is_accepted, expected = accepted(kind, value)
    try:
        found = read(value)
    except ValueError:
        assert not is_accepted or ODD.search(str(value)), (value, expected)
    else:
        assert (True, expected) == (is_accepted, found)


def body_of(**fields: Any) -> dict[str, Any]:
    """A body that each API accepts."""
    chat = [{"role": "user", "content": "x"}]
    return {"model": "m", "messages": chat, "prompt": [1, 2], "input": "x", "max_tokens": 4, **fields}


@parses
@given(stream=scalars, n=scalars, unknown=values)
def test_never_refused(
    parse: Callable[[bytes], CompletionRequest], stream: object, n: object, unknown: object
) -> None:
    """No value of an engine's field is refused, and those that pydantic takes are read as it reads them."""
    asked = parse(json.dumps(body_of(stream=stream, n=n, unheard_of=unknown)).encode())

    is_accepted, expected = accepted(bool, stream)
    assert asked.stream is (expected if is_accepted and stream is not None else False)
    assert "m" == asked.model


@parses
@given(name=st.sampled_from(["messages", "prompt", "input", "tools", "model", "cache_salt"]), value=values)
def test_any_value(parse: Callable[[bytes], CompletionRequest], name: str, value: object) -> None:
    """A field that cannot be read costs the prompt at most; only a missing prompt is an error."""
    if name in {"messages", "prompt"} and value is None:
        return  # no prompt, see test_openai.py

    assert parse(json.dumps(body_of(**{name: value})).encode()).stream is False


@parses
@pytest.mark.parametrize("coding", CODINGS)
def test_codings(parse: Callable[[bytes], CompletionRequest], coding: str) -> None:
    """A body in any coding of Unicode is the same body."""
    text = json.dumps(body_of(user="é𝄞"), ensure_ascii=False)

    assert text.encode() == lax.in_utf8(text.encode(coding))
    assert parse(text.encode()) == parse(lax.in_utf8(text.encode(coding)))


@given(st.sampled_from(CODINGS), st.text(max_size=8), st.binary(max_size=4), st.integers(0, 4))
def test_not_quite_codings(coding: str, text: str, more: bytes, cut: int) -> None:
    """Bytes that are cut off, or have others behind them, say to Python's json what they said before."""
    body = json.dumps(text).encode(coding)
    body = body[: len(body) - cut] + more

    assert value_of(body) == value_of(lax.in_utf8(body))


@parses
@pytest.mark.parametrize("odd", [b'"\\ud800"', b"NaN", b"[Infinity, -Infinity]", b'{"a": NaN}'])
def test_what_python_reads(parse: Callable[[bytes], CompletionRequest], odd: bytes) -> None:
    """What Python's json reads is JSON enough: engines use it."""
    body = json.dumps(body_of(stream=1)).encode()
    asked = parse(body[:-1] + b', "odd": %b}' % odd)

    assert ("m", True) == (asked.model, asked.stream)


ODD_TEXTS = ["\ud83d", "\udc00\ud83d", "é\U0001f600", 'NaN, "Infinity"', "\\", '\\"', "\\\\ud83d", "x" * 9]
odd_values = st.recursive(
    st.sampled_from([*ODD_TEXTS, math.nan, math.inf, -math.inf, 1, None]) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ODD_TEXTS), inner, max_size=3)
    ),
)


@given(value=odd_values, size=st.sampled_from([1, 2, 3, 5, 12, 1000]), cost=st.sampled_from([0, 256]))
def test_mended(value: object, size: int, cost: int) -> None:
    """What Python's json reads, msgspec reads once it is mended, wherever a slice ends, as equal values."""
    body = json.dumps({"a": value}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax, "_SLICE_BYTES", size)
        patch.setattr(lax, "_STEP_COST_BYTES", cost)
        mended = lax.at_once(lax.mended(body))

    raw = msgspec.json.decode(mended, type=msgspec.Raw)
    assert repr(json.loads(body)) == repr(json.loads(lax.with_nan(bytes(raw), body)))


@given(body=st.binary() | st.text('\\"ud83NaInfty-{}[]:,', max_size=20).map(str.encode))
def test_mending_what_is_no_json(body: bytes) -> None:
    """It ends, and leaves alone what it does not know."""
    mended = lax.at_once(lax.mended(body))

    assert value_of(body) is not None or body == mended or value_of(mended) is None


@parses
def test_texts_like_nan(parse: Callable[[bytes], CompletionRequest]) -> None:
    """A text that looks like what stands for NaN stays what it is."""
    body = body_of(user=f"{lax.NAN.decode()} NaN")

    assert (body, set()) == sent(parse, json.dumps({**body, "kvrouter": {}}).encode())


@parses
async def test_large_bodies_that_python_reads(parse: Callable[[bytes], CompletionRequest]) -> None:
    """Of any size: read in slices, and what is changed in them keeps the rest."""
    fields = body_of(odd=[math.nan, math.inf, "\ud83d"], more="\n\ud83d" * 100_000, stream=1)
    body = json.dumps({**fields, "bootstrap_room": 7, "vllm_xargs": {"disagg_x": math.nan, "b": 1}}).encode()
    large = await LargeBody.read(body)
    assert large is not None
    asked = await large.parse(parse)

    assert ("m", True) == (asked.model, asked.stream)
    assert {"bootstrap_*", "disagg_*"} == removed_from(asked)
    found = json.loads(large.edited(edits_of(asked)))
    assert repr({**fields, "vllm_xargs": {"b": 1}}) == repr(found)


@parses
async def test_large_bodies_that_are_no_json(parse: Callable[[bytes], CompletionRequest]) -> None:
    large = await LargeBody.read(b'{"model": "m", "n": NaN, "more": "%b", nan}' % (b"x" * 300_000))
    assert large is not None
    with pytest.raises(BadRequestError, match="not valid JSON"):
        await large.parse(parse)


@parses
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kvrouter": 5}, "$.kvrouter"),
        ({"kvrouter": [{}], "stream": 1}, "$.kvrouter"),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, "$.nvext.agent_hints.priority"),
    ],
)
def test_own_fields(parse: Callable[[bytes], CompletionRequest], fields: dict[str, Any], said: str) -> None:
    """A field of kvrouter's own is checked here, as no engine gets it."""
    with pytest.raises(BadRequestError) as caught:
        parse(json.dumps(body_of(**fields)).encode())

    assert said in str(caught.value)


# Fields that no client may send

# Those of routers and engines that are newer than this one begin so, too.
INVENTED = {
    "bootstrap_": "bootstrap_*",
    "bootstrap_rooms_v2": "bootstrap_*",
    "disagg_prefill_url": "disagg_*",
    "disagg_é": "disagg_*",
}
FORBIDDEN = {
    "kv_transfer_params": "kv_transfer_params",
    "ec_transfer_params": "ec_transfer_params",
    "bootstrap_host": "bootstrap_*",
    "bootstrap_port": "bootstrap_*",
    "bootstrap_room": "bootstrap_*",
    "bootstrap_pair_key": "bootstrap_*",
    "disagg_prefill_dp_rank": "disagg_*",
    "kv_cache_report_mode": "kv_cache_report_mode",
}
forged = st.sampled_from([True, 0, "full", [], [1, 2], {"do_remote_prefill": True}])


def sent(parse: Callable[[bytes], CompletionRequest], body: bytes) -> tuple[dict[str, Any], set[str]]:
    """What an engine gets of a body, and what was removed."""
    asked = parse(body)
    return json.loads(apply(edits_of(asked), body)), removed_from(asked)


@parses
@given(
    fields=st.dictionaries(st.sampled_from(sorted(FORBIDDEN | INVENTED)), forged, min_size=1),
    inside=st.booleans(),
)
def test_removed(parse: Callable[[bytes], CompletionRequest], fields: dict[str, Any], inside: bool) -> None:
    """They reach no engine, neither at the top nor in `vllm_xargs`; all other fields do."""
    kept = {"top_k": 1.50, "vllm_xargs": {"mine": 1}}
    body = body_of(**kept, **({} if inside else fields))
    if inside:
        body["vllm_xargs"] = {**fields, "mine": 1}

    found, removed = sent(parse, json.dumps(body).encode())

    assert body_of(**kept) == found
    assert {(FORBIDDEN | INVENTED)[name] for name in fields} == removed


@parses
def test_escaped_and_repeated_names(parse: Callable[[bytes], CompletionRequest]) -> None:
    """Neither escapes nor repetition hide a name."""
    plain = json.dumps(body_of()).encode()[:-1]
    for name in (rb'"\u006bv_transfer_params"', rb'"kv_transfer_param\u0073"'):
        body = plain + b', %b: {"a": 1}, "kv_transfer_params": {"b": 2}, %b: null}' % (name, name)
        found, _ = sent(parse, body)
        assert body_of() == found


@parses
def test_text_is_not_a_name(parse: Callable[[bytes], CompletionRequest]) -> None:
    """A prompt or a tool may speak of these fields."""
    text = '"kv_transfer_params": {"bootstrap_host": 1, "disagg_x": 2}'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"bootstrap_servers": {}}}}
    body = body_of(messages=[{"role": "user", "content": text}], tools=[tool])

    assert (body, set()) == sent(parse, json.dumps(body).encode())


PLACES: list[dict[str, Any]] = [
    {"sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}, "n": 1}},
    {"sampling_params": [{"kv_cache_report_mode": "full"}, {"n": 1}]},
    {"extra_args": {"bootstrap_room": 7}},
    {"instances": [{"text": "x"}], "parameters": {"bootstrap_room": 7}},
    {"instances": [{"text": "x", "kv_transfer_params": {}}]},
    {"kv_transfer_params": {"a": 1}},
    {"bootstrap_room": [1, 2], "bootstrap_host": "h"},
    {"bootstrap_rooms": [1, 2], "disagg_url": "h"},
    {"sampling_params": [{"kv_transfer_params": {}, "temperature": math.nan}], "n": math.nan},
    {"sampling_params": [1, None, {"kv_transfer_params": {}}, [{"bootstrap_room": 7, "kept": 1}]]},
    {"bootstrap_room": 7, "more": "x" * 300_000, "n": math.nan},
]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_on_the_way(fleet_of: FleetOf, path: str) -> None:
    """On routes that are passed on, too; it is counted, and so are SGLang's headers."""

    async def removed() -> float:
        lines = (await fleet.get("/metrics")).body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(counted))

    counted = "kvrouter_removed_fields_total{"
    async with fleet_of() as fleet:
        (worker,) = fleet.workers
        for number, fields in enumerate(PLACES, 1):
            body = {"model": "m", "input": "x", **fields}
            headers = ("X-Override-Bootstrap-Host: h", "x-override-priority: 9")
            before = await removed()
            assert 200 == (await fleet.ask(body, *headers, path=path)).status

            received = worker.requests[-1]
            assert number == len(worker.requests)
            assert not any(name.encode() in received.body for name in FORBIDDEN)
            assert b"x-override" not in received.head.lower()
            assert 2 <= await removed() - before, fields
            metrics = (await fleet.get("/metrics")).body
            assert b'total{field="x-override-*"} %d.0' % number in metrics


async def test_plain_bodies_keep_their_bytes(fleet_of: FleetOf) -> None:
    """A body without such fields reaches the engine byte for byte; nothing is counted."""
    body = json.dumps({**BODY, "temperature": 1.50}, indent=1).encode().replace(b"1.5", b"1.50")
    async with fleet_of() as fleet:
        await fleet.ask(body)

        assert [body] == [each.body for worker in fleet.workers for each in worker.requests]
        assert b"kvrouter_removed_fields_total{" not in (await fleet.get("/metrics")).body


async def test_in_forms(fleet_of: FleetOf) -> None:
    """A part of a form under such a name is left out, and `vllm_xargs` in a form is cleaned."""
    parts = {
        "model": b"m",
        "kv_transfer_params": b'{"do_remote_prefill": true}',
        "vllm_xargs": b'{"kv_cache_report_mode": "full", "mine": 1}',
        "file": bytes(range(256)),
    }
    pieces = [
        b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), content)
        for name, content in parts.items()
    ]
    async with fleet_of() as fleet:
        kind = "content-type: multipart/form-data; boundary=b"
        body = b"".join(pieces) + b"--b--\r\n"
        assert 200 == (await fleet.ask(body, kind, path="/v1/audio/transcriptions")).status

        (received,) = [each.body for worker in fleet.workers for each in worker.requests]
        assert received.count(b"--b") == body.count(b"--b") - 1
        assert b"remote_prefill" not in received
        assert b"kv_" not in received
        assert b'{"mine":1}' in received
        assert bytes(range(256)) in received


async def test_arguments_in_forms(fleet_of: FleetOf) -> None:
    """What only Python's json reads hides no field; what is too long to be searched is refused."""
    head = b'--b\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n'
    kind = "content-type: multipart/form-data; boundary=b"
    async with fleet_of() as fleet:
        for padding, status in ((b"x", 200), (b"x" * lax.MOST_MENDED_BYTES, 400)):
            arguments = b'{"n": NaN, "bootstrap_room": 1, "p": "%b"}\r\n--b--\r\n' % padding
            answer = await fleet.ask(head + arguments, kind, path="/v1/audio/transcriptions")
            assert status == answer.status

        (received,) = [each.body for worker in fleet.workers for each in worker.requests]
        assert b"NaN" in received
        assert b"bootstrap" not in received


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("boundary=zz; boundary=b", b"bootstrap_room"),
        ("boundary=b; charset=utf-7", b"+AGI-ootstrap_room"),
    ],
)
async def test_forms_of_two_meanings(fleet_of: FleetOf, kind: str, name: bytes) -> None:
    """A form that engines may read otherwise is refused."""
    body = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n1\r\n--b--\r\n' % name
    async with fleet_of() as fleet:
        header = f"content-type: multipart/form-data; {kind}"
        assert 400 == (await fleet.ask(body, header, path="/v1/audio/transcriptions")).status
        assert [] == fleet.requests


@parses
@pytest.mark.parametrize("name", ["bootstrap_room", "disagg_new", "kv_transfer_params"])
@given(escaped=st.sets(st.integers(0, 9), min_size=1))
def test_names_with_escapes(
    parse: Callable[[bytes], CompletionRequest], name: str, escaped: set[int]
) -> None:
    """Also names that nobody knows yet are found behind escapes."""
    spelt = "".join(f"\\u{ord(c):04x}" if at in escaped else c for at, c in enumerate(name))

    found, removed = sent(parse, json.dumps(body_of()).encode()[:-1] + f', "{spelt}": 7}}'.encode())

    assert body_of() == found
    assert {lax.kind_of(name)} == removed


HIDDEN = {
    "a name that is no text": b'{"\xff": 1, "bootstrap_room": {}}',
    "too deep": b'{"extra_args":' * 6 + b'{"kv_transfer_params": 1}' + b"}" * 6,
    "too many": b'[%b{"bootstrap_room": 1}]' % (b"{}," * 20_000),
    "fields without end": b'{"bootstrap_room": 1%b}' % b"".join(b',"%d":1' % each for each in range(20_000)),
}


@parses
@pytest.mark.parametrize("case", HIDDEN)
def test_what_cannot_be_searched(parse: Callable[[bytes], CompletionRequest], case: str) -> None:
    """An object that may have such a field and cannot be searched for it is refused."""
    for name in ("vllm_xargs", "sampling_params"):
        body = json.dumps(body_of()).encode()[:-1] + b', "%b": %b}' % (name.encode(), HIDDEN[case])
        with pytest.raises(BadRequestError, match="too large, deep or odd"):
            sent(parse, body)


@parses
@pytest.mark.parametrize("name", [rb"\ud800", rb"a\udfffb", b"\xed\xa0\x80"])
@pytest.mark.parametrize("inside", [False, True])
def test_names_that_are_no_unicode(
    parse: Callable[[bytes], CompletionRequest], name: bytes, inside: bool
) -> None:
    """They hide no field, and are as unknown to the engine as before."""
    fields = b'"%b": 1, "kv_transfer_params": {}' % name
    more = b'"vllm_xargs": {%b}' % fields if inside else fields

    found, removed = sent(parse, json.dumps(body_of()).encode()[:-1] + b", " + more + b"}")

    assert {"kv_transfer_params"} == removed
    assert body_of() == {key: found[key] for key in body_of()}
    assert b"kv_transfer" not in json.dumps(found).encode()


@parses
def test_what_needs_no_search(parse: Callable[[bytes], CompletionRequest]) -> None:
    """Without such a name nothing in it is read, however large or odd it is."""
    body = json.dumps(body_of()).encode()[:-1] + b', "sampling_params": [%b{"\\\\": 1}]}' % (b"{}," * 50_000)

    assert (json.loads(body), set()) == sent(parse, body)


@parses
def test_fields_without_end(parse: Callable[[bytes], CompletionRequest]) -> None:
    """A body that is read field by field has so many fields at most."""
    many = b"".join(b'"%d":1,' % each for each in range(120_000))
    with pytest.raises(BadRequestError, match="more than 100000 fields"):
        parse(b'{%b"bootstrap_room":1}' % many)


async def test_forms_that_take_long(fleet_of: FleetOf) -> None:
    """Heads of which Python's email takes the square, or many that need it, are refused; a few are read."""
    odd = b"--b\r\ncontent-disposition: form-data; name=%b\r\n\r\nm\r\n"
    ends = b"--b--\r\n"
    kind = "content-type: multipart/form-data; boundary=b"
    async with fleet_of() as fleet:

        async def status(body: bytes, kind: str = kind) -> int:
            return (await fleet.ask(body + ends, kind, path="/v1/audio/transcriptions")).status

        assert 400 == await status(odd % (b";" * forms.MOST_HEAD_BYTES))
        assert 400 == await status(odd % b"a" * (forms.MOST_ODD_PARTS + 1))
        assert 400 == await status(odd % b"a", kind + ";" * forms.MOST_HEAD_BYTES)
        assert 200 == await status(odd % b"model" * forms.MOST_ODD_PARTS)


def test_every_name_is_guarded() -> None:
    """The fast decoder refuses each of these names, so that none of them passes unread."""
    guarded = {field.name for field in msgspec.structs.fields(lax.Guarded)}

    assert set(FORBIDDEN) == {name for name in guarded if lax.kind_of(name)}
    assert all(FORBIDDEN[name] == lax.kind_of(name) for name in FORBIDDEN)
