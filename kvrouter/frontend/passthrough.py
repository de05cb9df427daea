"""The engine routes that are passed on: to a worker of the model, by load.

Only the inputs of /v1/embeddings are read, as engines may cache them. Prompts of the others are made by
the engine (pairs of a query and a document), or computed whole (vLLM reads no cache for outputs per token).

Only the routes listed here are passed on. An engine's /metrics, /health and administration
(/reset_prefix_cache, /sleep, LoRA loading, …) concern one engine, and must not be open to every client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from kvrouter.errors import BadRequestError
from kvrouter.frontend.bodies import lax
from kvrouter.frontend.bodies.large import LARGE_BYTES
from kvrouter.frontend.bodies.openai import CompletionRequest, parse_completion
from kvrouter.relay.request import Request
from kvrouter.tokens.prompt import Prompt, TextPrompt, TokenPrompt

POST_ROUTES = (
    "/v1/embeddings",
    "/v1/messages/count_tokens",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/pooling",
    "/classify",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/tokenize",
    "/detokenize",
)
GET_ROUTES = ("/version",)
EMBEDDINGS = "/v1/embeddings"
# A shorter input shares no blocks whose reuse is worth asking an engine for its tokens. More inputs are a
# batch of documents, which begin differently, and would be as many questions.
_FEWEST_INPUT_BYTES = 512
_MOST_INPUTS = 4

# Parts of a form in which `model` and `stream` are searched: bounds the work for a hostile body.
_MAX_PARTS = 64
_FORM = "multipart/form-data"
_NAME = re.compile(rb';\s*name="?([^";\r\n]*)', re.IGNORECASE)

_BOUNDARY = re.compile(r';\s*boundary="?([^";]+)', re.IGNORECASE)

# Overrides have a few short fields. Larger ones are rejected before objects are made of them.
_MOST_OVERRIDES_BYTES = 64 * 1024
_NULL = msgspec.Raw(b"null")


class _Body(lax.Guarded):
    """The fields that placing needs. Values that may be large stay raw: nothing else bounds them."""

    model: str | None = None
    stream: bool | None = None
    kvrouter: msgspec.Raw = _NULL
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw = _NULL
    truncate_prompt_tokens: msgspec.Raw = _NULL
    path: str | None = None
    """Of a body for /v1/route."""
    sampling_params: None = None
    """Of /generate, as the next two: engines look in them for fields that no client may send (lax.py)."""
    extra_args: None = None
    custom_params: None = None


_BODY = msgspec.json.Decoder(_Body)
_decode_overrides: Callable[[msgspec.Raw], dict[str, Any] | None] = msgspec.json.Decoder(
    dict[str, Any] | None
).decode


def is_json(request: Request) -> bool:
    """Whether the body is read, and may be changed, as JSON. Without a content type it is taken for JSON."""
    kind = request.content_type
    return kind in {"application/json", "application/octet-stream"} or kind.endswith("+json")


def parse(request: Request, body: bytes) -> CompletionRequest:
    """The model, from the body or else the query, the overrides, and inputs to embed; nothing else is read.

    Raises BadRequestError for what is no JSON object. Invalid forms are left to the engine.
    """
    fields, removed, remove = _Body(), tuple[str, ...](), None
    if request.content_type == _FORM:
        boundary = _BOUNDARY.search(request.headers["content-type"])
        fields, kinds = _of_form(body, boundary)
        if kinds and boundary is not None:
            removed, remove = tuple(sorted(kinds)), partial(_without_guarded_parts, _delimiter(boundary))
    elif body and is_json(request):
        fields, removed = _of_json(body)
    embeds = EMBEDDINGS in {request.head.route, fields.path}
    return CompletionRequest(
        model=fields.model or request.in_query("model"),
        stream=bool(fields.stream),
        prompt=_inputs(fields) if embeds else None,
        cache_salt=None,
        session_id=None,
        n=1,
        kvrouter=_overrides(fields.kvrouter),
        engine_arguments=fields.vllm_xargs,
        removed=removed,
        remove=remove,
    )


def _inputs(fields: _Body) -> Prompt | None:
    """Texts or ids, as in a completion; None if they are not worth it, or have another form."""
    given = bytes(fields.input)
    is_cut = bytes(fields.truncate_prompt_tokens) != b"null"
    if is_cut or not _FEWEST_INPUT_BYTES <= len(given) <= LARGE_BYTES:
        return None
    try:
        prompt = parse_completion(b'{"prompt":%b}' % given).prompt
    except BadRequestError:
        return None  # the engine replies with the reason
    match prompt:
        case TextPrompt(texts=inputs) | TokenPrompt(token_ids=inputs) if len(inputs) <= _MOST_INPUTS:
            return prompt
    return None


def _of_json(body: bytes) -> tuple[_Body, tuple[str, ...]]:
    """The fields, and the kinds of those that no client may send."""
    try:
        return _BODY.decode(body), ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = lax.read(_Body, body)
        return found.body, found.removed


def _overrides(raw: msgspec.Raw) -> dict[str, Any] | None:
    if len(bytes(raw)) > _MOST_OVERRIDES_BYTES:
        raise BadRequestError(f"`kvrouter` has more than {_MOST_OVERRIDES_BYTES} bytes", param="kvrouter")
    try:
        return _decode_overrides(raw)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"{error} - at `$.kvrouter`", param="kvrouter") from error


def _of_form(body: bytes, boundary: re.Match[str] | None) -> tuple[_Body, set[str]]:
    """The fields `model` and `stream` of a form, and the kinds of those that no client may send."""
    found: dict[str, str] = {}
    removed: set[str] = set()
    for name, start, end in _parts(body, _delimiter(boundary)) if boundary else ():
        if name in {"model", "stream"}:
            found[name] = body[start:end][:256].decode("utf-8", "replace")
        removed |= _guarded_in_part(name, body[start:end])
    is_stream = found.get("stream", "").strip().lower() in {"true", "1", "on", "t", "y", "yes"}
    return _Body(model=found.get("model") or None, stream=is_stream), removed


def _delimiter(boundary: re.Match[str]) -> bytes:
    return b"--" + boundary[1].encode("utf-8", "surrogateescape")


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, beginning and end of the content of each part. Files are skipped, not copied."""
    start = body.find(delimiter)
    for _ in range(_MAX_PARTS):
        head_end = body.find(b"\r\n\r\n", start)
        end = body.find(b"\r\n" + delimiter, start + 1)
        if start < 0 or head_end < 0 or end < 0:
            return
        name = _NAME.search(body, start, head_end)
        yield name[1].decode("utf-8", "replace") if name is not None else "", head_end + 4, end
        start = end + 2


def _guarded_in_part(name: str, content: bytes) -> set[str]:
    """The kinds of fields in a part that no client may send. vLLM reads `vllm_xargs` as JSON."""
    if kind := lax.kind_of(name.partition("[")[0]):
        return {kind}
    if name != "vllm_xargs" or len(content) > LARGE_BYTES:
        return set()
    try:
        return lax.guarded_in(lax.fields_of(content))
    except BadRequestError:
        return set()  # not what an engine takes


def _without_guarded_parts(delimiter: bytes, body: bytes) -> bytes:
    """The form with those parts empty, and without what is in `vllm_xargs`."""
    pieces, at = [], 0
    for name, start, end in _parts(body, delimiter):
        content = body[start:end]
        if not _guarded_in_part(name, content):
            continue
        is_object = name == "vllm_xargs"
        kept = msgspec.json.encode(lax.without_guarded(lax.fields_of(content))) if is_object else b""
        # A part under another name, which no engine reads: its end and its headers stay as they are.
        head_start = body.rfind(delimiter, 0, start)
        head = body[head_start:start] if is_object else _NAME.sub(b'; name="removed"', body[head_start:start])
        pieces += [body[at:head_start], head, kept]
        at = end
    return b"".join([*pieces, body[at:]])
