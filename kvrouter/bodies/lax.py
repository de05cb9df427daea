"""Bodies that the fast decoders refuse: their fields are read one by one, as leniently as engines read them.

    body ──fast, typed──> fields                                             nearly all bodies
       └─refused──> raw fields ──each: typed, else as pydantic takes it──> fields
                         ├── unreadable: as if absent; if the prompt depends on it, placed by load
                         └── that no client may send (Guarded): removed, see edits.py

Engines read a body with Python's json and check it with pydantic in its lax mode: `"n": 1.0` is accepted
there, and so are `"stream": "true"`, NaN and UTF-16. The engine judges what cannot be read here.
Sources: pydantic 2, "Conversion table"; RFC 8259; CPython, json.loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import msgspec
from msgspec import Raw, Struct

from kvrouter.errors import BadRequestError, NotMendedError

# Larger bodies are mended in slices only (reader.py): this much may take 20 ms.
MOST_MENDED_BYTES = 32 * 1024
_SLICE_BYTES = 64 * 1024
# A step costs as much as this many bytes of a string.
_STEP_COST_BYTES = 512
# 3 s altogether. A body without lists of ids that an API reads has at most a fifth of it (reader.py).
_MOST_STEPS = 1_000_000
# Fields of kvrouter's own: a wrong one is an error here, as no engine gets it.
_OWN = frozenset({"kvrouter", "nvext"})
# Objects inside a body in which engines look for the same fields.
_CONTAINERS = frozenset(
    {
        *("vllm_xargs", "extra_args", "sampling_params", "custom_params", "extra_body"),
        *("instances", "parameters"),  # of Vertex AI
    }
)
_MOST_DEPTH = 4
_RANKS = ("data_parallel_rank", "routed_dp_rank", "routed_prefill_dp_rank", "routed_decode_dp_rank")
# By these a client steers its request at an engine: its place in the queue, its rank, whether it goes on once
# the client has left, its adapter besides `model` (SGLang). With each the values that change nothing.
STEERS: dict[str, tuple[bytes, ...]] = {
    "priority": (b"null", b"0"),
    "background": (b"null", b"false"),
    "lora_path": (b"null",),
    **dict.fromkeys(_RANKS, (b"null",)),
}
_STEERS_PARTS = (b"priority", b"_rank", b"background", b"lora_path", b"\\u")
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
# pydantic's: digits with single underscores between them, and a fraction of zeros.
_INTEGER = re.compile(r"\s*([+-]?\d+(?:_\d+)*)(?:\.0+)?\s*", re.ASCII)
_MOST_DIGITS = 40
# pydantic takes no whole number of more than 64 bits from a float.
_MOST_FLOAT = 2.0**63
# A larger number decides nothing more here.
_MOST_NUMBER = 2**31 - 1
_NULL = b"null"
# In place of NaN: no type takes it, as a number of Python's json it would be infinite, and nobody writes it.
NAN = b"1e930772281"
_CONSTANTS = {b"NaN": NAN, b"Infinity": b"1e999", b"-Infinity": b"-1e999"}
_TOO_ODD = f"the body has NaN or half of a surrogate pair, and more than {_MOST_STEPS} strings: too many"
_CONSTANT_BYTES = len(b"-Infinity")
_QUOTE_OR_CONSTANT = re.compile(rb'"|NaN|-?Infinity')
# The inside of a string, up to its end or to half of a surrogate pair.
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Not possessive (`*+`): Python 3.11.2 then loses its place where an alternative fails in the middle.
_IN_STRING = re.compile(rb'(?:[^"\\]+|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|%b)*' % _PAIR)
_ESCAPE = re.compile(rb"(?:%b|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.)" % _PAIR, re.DOTALL)
_HALF_IN_NAME = re.compile(rb'\xed[\xa0-\xbf][\x80-\xbf](?=[^"]{0,64}+"\s*:)')
# Finds what may be a field of a router for prefill and decode workers, besides those of Guarded; 1 ns a byte.
is_suspicious = re.compile(rb'"(?:bootstrap_|disagg_|[a-z_]*\\u00[4-7])').search
# Finds what may be such a field in an object that is to be searched: its name, or an escape that may hide it.
may_forbid = re.compile(rb"(?:bootstrap|disagg)_|[ek][cv]_transfer_params|kv_cache_report_mode|\\u").search
_FIELDS = re.compile(rb'[{\[]|"\s*:')
_MOST_SEARCHED = 10_000
# Of a body that is read field by field: 50 ms.
_MOST_FIELDS = 100_000
_NOT_SEARCHED = "`{}` may have a field that no client may send, and is too large, deep or odd to be searched"
# As nearly all bodies begin: in UTF-8, without a mark.
PLAIN = (b'{"', b"{\n", b"{ ")

_Body = TypeVar("_Body", bound=Struct)
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode


class Guarded(Struct):
    """Fields that no client may send, as engines take them from routers and hand-over partners only.

    With any value but null the fast decoder refuses the body, which costs other bodies nothing. Names that
    only begin as such fields do are found by `is_suspicious`.
    """

    kv_transfer_params: None = None
    ec_transfer_params: None = None
    bootstrap_host: None = None
    bootstrap_port: None = None
    bootstrap_room: None = None
    bootstrap_pair_key: None = None
    disagg_prefill_dp_rank: None = None
    kv_cache_report_mode: None = None
    sampling_params: None = None
    """Objects in which engines look for these fields, so a body that has one is read slowly."""
    extra_args: None = None
    custom_params: None = None
    extra_body: None = None
    instances: None = None
    parameters: None = None
    priority: None = None
    """This one and those below: STEERS."""
    background: None = None
    data_parallel_rank: None = None
    routed_dp_rank: None = None
    routed_prefill_dp_rank: None = None
    routed_decode_dp_rank: None = None


class Found(Struct, Generic[_Body], frozen=True):
    """What could be read of a body."""

    body: _Body
    unreadable: frozenset[str]
    removed: tuple[str, ...]
    """The kinds of fields in it that no client may send."""

    def shapes_prompt(self, others: Collection[str]) -> bool:
        """Whether a field is unreadable on which the prompt may depend: all do but `others`."""
        return not self.unreadable <= set(others)


def read(kind: type[_Body], body: bytes) -> Found[_Body]:
    """Read each field of `kind` by itself. Raises BadRequestError for what is no JSON object."""
    fields = fields_of(body)
    values, unreadable = {}, set()
    for field in msgspec.structs.fields(kind):
        raw = fields.get(field.encode_name)
        if raw is None or field.type is NoneType or bytes(raw) == _NULL:
            continue
        try:
            values[field.name] = _value(field.name, raw, field.type)
        except (ValueError, RecursionError):
            unreadable.add(field.name)
    return Found(kind(**values), frozenset(unreadable), tuple(sorted(guarded_in(fields))))


def names(*kinds: type[Struct]) -> frozenset[str]:
    """The fields of these kinds of bodies, as bodies name them."""
    return frozenset(field.encode_name for kind in kinds for field in msgspec.structs.fields(kind))


def fields_of(body: bytes) -> dict[str, Raw]:
    """The fields of an object, each as it is written, or mended. Raises BadRequestError."""
    if not body.strip():
        raise BadRequestError("the request has no body: send a JSON object")
    if len(body) > MOST_MENDED_BYTES and _has_more_than(_MOST_FIELDS, body):
        raise BadRequestError(f"the body has more than {_MOST_FIELDS} fields: too many to be read one by one")
    try:
        return _decoded(body)
    except msgspec.ValidationError as error:  # before DecodeError, its base class
        raise BadRequestError(f"the body is not a JSON object: {error}") from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _mended_fields(body, error)


def _decoded(body: bytes) -> dict[str, Raw]:
    try:
        return _decode_fields(body)
    except UnicodeDecodeError:  # a name with half of a surrogate pair: no field of an engine's
        if body.count(b"\xed") > _MOST_SEARCHED:
            raise
        return _decode_fields(_HALF_IN_NAME.sub(b"\xef\xbf\xbd", body))


def _mended_fields(body: bytes, error: Exception) -> dict[str, Raw]:
    if len(body) > MOST_MENDED_BYTES:
        raise NotMendedError(f"the body is not valid JSON: {error}") from None
    try:
        return _decoded(at_once(mended(body)))
    except (msgspec.DecodeError, UnicodeDecodeError) as still:
        raise BadRequestError(f"the body is not valid JSON: {still}") from None


def _value(name: str, raw: Raw, kind: Any) -> Any:
    """A field as its type has it. Raises ValueError, or BadRequestError for a field of kvrouter's own."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if name in _OWN:
            raise BadRequestError(_named(error, name), param=name) from None
        kinds = _kinds(kind)
        value = msgspec.json.decode(raw)
    if bool in kinds:
        return as_bool(value)
    if int in kinds:
        return msgspec.convert(max(-_MOST_NUMBER - 1, min(_MOST_NUMBER, as_int(value))), kind)
    raise ValueError(name)


def _named(error: Exception, name: str) -> str:
    """`Expected … - at `$.kvrouter.mode`` for an error inside the value of this field."""
    text, at, path = str(error).rpartition(" - at `$")
    return f"{text}{at}.{name}{path}" if at else f"{error} - at `$.{name}`"


def _kinds(kind: Any) -> set[Any]:
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) is UnionType or str(get_origin(kind)) == "typing.Union":
        return {found for each in get_args(kind) for found in _kinds(each)}
    return {kind}


def as_bool(value: object) -> bool:
    """As pydantic takes it. Raises ValueError."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in {0, 1}:
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError(value)


def as_int(value: object) -> int:
    """As pydantic takes it. Raises ValueError."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and -_MOST_FLOAT <= value < _MOST_FLOAT and value.is_integer():
        return int(value)
    found = _INTEGER.fullmatch(value) if isinstance(value, str) and len(value) <= _MOST_DIGITS else None
    if found is None:
        raise ValueError(value)
    return int(found[1])


# Fields that no client may send


def kind_of(name: str) -> str:
    """The kind of a field that no client may send; empty: any other field."""
    if name in {"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"}:
        return name
    return next((f"{start}*" for start in ("bootstrap_", "disagg_") if name.startswith(start)), "")


def guarded_in(fields: Mapping[str, Raw]) -> set[str]:
    """The kinds of such fields, also inside the objects in which engines look for them.

    Raises BadRequestError for an object that cannot be searched and may have one.
    """
    return _cleaned(fields)[1]


def without_guarded(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    """The fields without those that no client may send. All others keep their bytes."""
    return _cleaned(fields)[0]


def _has_more_than(most: int, raw: bytes) -> bool:
    """Whether it has more fields, objects and lists; also such signs in texts count."""
    # counting bytes takes a fiftieth of the search, and finds at least as many
    return sum(map(raw.count, (b"{", b"[", b":"))) > most and len(_FIELDS.split(raw, most)) > most


def _cleaned(fields: Mapping[str, Raw], depth: int = 0) -> tuple[dict[str, Raw], set[str]]:
    """The fields without forbidden ones, and the kinds of those."""
    kinds = {name: kind for name in fields if (kind := kind_of(name))}
    kept = {name: raw for name, raw in fields.items() if name not in kinds}
    found = set(kinds.values())
    for name in _CONTAINERS & kept.keys():
        raw = bytes(kept[name])
        if may_forbid(raw):
            if depth == _MOST_DEPTH or _has_more_than(_MOST_SEARCHED, raw):
                raise BadRequestError(_NOT_SEARCHED.format(name), param=name)
            cleaned, inner = _cleaned_value(name, raw, depth + 1)
            if inner:
                kept[name], found = Raw(cleaned), found | inner
    return kept, found


def _cleaned_value(name: str, raw: bytes, depth: int) -> tuple[bytes, set[str]]:
    """A container's value, without forbidden fields: an object, or a list of some."""
    start = raw.lstrip()[:1]
    try:
        if start == b"{":
            kept, found = _cleaned(fields_of(raw), depth)
            return msgspec.json.encode(kept), found
        if start == b"[":
            parts = [_cleaned_value(name, bytes(item), depth) for item in _decode_items(raw)]
            return b"[%b]" % b",".join([part for part, _ in parts]), {
                kind for _, kinds in parts for kind in kinds
            }
    except (BadRequestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequestError(_NOT_SEARCHED.format(name), param=name) from None
    return raw, set()


def may_steer(raw: bytes) -> bool:
    """Whether it may have a field of STEERS, perhaps written with escapes."""
    return any(part in raw for part in _STEERS_PARTS)


def steering_in(raw: bytes, depth: int = 0) -> Iterator[str]:
    """The fields of STEERS in a JSON object, also inside the objects in which engines look for them.

    Raises BadRequestError for what cannot be searched.
    """
    for name, value in fields_of(raw).items():
        if name in STEERS and bytes(value) not in STEERS[name]:
            yield name
        elif name in _CONTAINERS and may_steer(inner := bytes(value)):
            yield from _steering_in_value(name, inner, depth + 1)


def _steering_in_value(name: str, raw: bytes, depth: int) -> Iterator[str]:
    if depth > _MOST_DEPTH or _has_more_than(_MOST_SEARCHED, raw):
        raise BadRequestError(_NOT_SEARCHED.format(name), param=name)
    start = raw.lstrip()[:1]
    try:
        if start == b"{":
            yield from steering_in(raw, depth)
        for item in _decode_items(raw) if start == b"[" else ():
            yield from _steering_in_value(name, bytes(item), depth + 1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequestError(_NOT_SEARCHED.format(name), param=name) from None


# What only Python's json reads


def mended(body: bytes) -> Generator[None, None, bytes]:
    """Returns the body with NaN, infinities and halves of surrogate pairs as msgspec reads them.

    Python's json reads the same from both, but for NaN, which is NAN then. Half of a pair becomes the three
    bytes that Python decodes with "surrogatepass". Yields after each slice of the body.
    Raises BadRequestError for a body that would take too long.
    """
    out = bytearray()
    copied, at, is_in_string, left, steps = 0, 0, False, _SLICE_BYTES, 0
    while at < len(body):
        steps += 1
        if steps > _MOST_STEPS:
            raise BadRequestError(_TOO_ODD)
        begin, until = at, min(at + _SLICE_BYTES, len(body))
        instead: bytes | None = None
        if is_in_string:
            found = _IN_STRING.match(body, at, until)
            start = at = found.end() if found is not None else at
            if body[at : at + 1] == b'"':
                at, is_in_string = at + 1, False
            elif (escape := _ESCAPE.match(body, at)) is not None:  # also one that the slice's end has cut
                at = escape.end()
                if escape[1] is not None:
                    instead = chr(int(escape[1], 16)).encode("utf-8", "surrogatepass")
            elif at < until:
                at = until  # not JSON either
        else:
            found = _QUOTE_OR_CONSTANT.search(body, at, until + _CONSTANT_BYTES)
            start, at = found.span() if found is not None else (until, until)
            is_in_string = found is not None and found[0] == b'"'
            instead = None if found is None else _CONSTANTS.get(found[0])
        if instead is not None:
            out += body[copied:start]
            out += instead
            copied = at
        left -= at - begin + _STEP_COST_BYTES
        if left < 0:
            left = _SLICE_BYTES
            yield
    out += body[copied:]
    return bytes(out)


def with_nan(edited: bytes, body: bytes) -> bytes:
    """What was edited, as the engine gets it: with NaN where the client's body has it."""
    return edited.replace(NAN, b"NaN") if b"NaN" in body and NAN not in body else edited


def at_once(steps: Generator[None, None, bytes]) -> bytes:
    """What `mended` returns, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(end.value)


# UTF-16 and UTF-32


def in_utf8(body: bytes) -> bytes:
    """The body in UTF-8 without a byte order mark. Python's json, and so an engine, reads the others, too."""
    coding = json.detect_encoding(body)
    if coding == "utf-8":
        return body
    try:
        return body.decode(coding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body  # not JSON either
