"""What is read of a request that is passed on (engine_routes.py has the routes): its model, and overrides.

Only the inputs of /v1/embeddings are read, as engines may cache them. Prompts of the others are made by
the engine (pairs of a query and a document), or computed whole (vLLM reads no cache for outputs per token).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvrouter.bodies import lax
from kvrouter.bodies.forms import FORM, guarded_in, parts, without_guarded
from kvrouter.bodies.openai import CompletionRequest, parse_completion
from kvrouter.errors import BadRequestError
from kvrouter.relay.request import Request
from kvrouter.tokens.prompt import Prompt, TextPrompt, TokenPrompt

EMBEDDINGS = "/v1/embeddings"
# A shorter input shares no blocks whose reuse is worth asking an engine for its tokens. More inputs are a
# batch of documents, which begin differently, and would be as many questions.
_FEWEST_INPUT_BYTES = 512
MOST_INPUT_BYTES = 256 * 1024
_MOST_INPUTS = 4

# Overrides have a few short fields. Larger ones are rejected before objects are made of them.
_MOST_OVERRIDES_BYTES = 64 * 1024
_NULL = msgspec.Raw(b"null")
_MOST_SALT_BYTES = 4096


class _Body(lax.Guarded):
    """The fields that placing needs. Values that may be large stay raw: nothing else bounds them."""

    model: str | None = None
    stream: bool | None = None
    kvrouter: msgspec.Raw = _NULL
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw = _NULL
    truncate_prompt_tokens: msgspec.Raw = _NULL
    cache_salt: msgspec.Raw = _NULL
    extra_key: msgspec.Raw = _NULL
    path: str | None = None
    """Of a body for /v1/route."""


_BODY = msgspec.json.Decoder(_Body)
# What is read of a body in which the inputs are too long to be read.
FIELDS = lax.names(_Body) - {"input"}
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
    fields, removed, remove, is_odd = _Body(), tuple[str, ...](), None, False
    if request.content_type == FORM:
        content_type = request.headers["content-type"]
        fields, kinds = _of_form(body, content_type)
        if kinds:
            removed, remove = tuple(sorted(kinds)), partial(without_guarded, content_type)
    elif body and is_json(request):
        fields, removed, is_odd = _of_json(body)
    embeds = EMBEDDINGS in {request.head.route, fields.path}
    return CompletionRequest(
        model=fields.model or request.in_query("model"),
        stream=bool(fields.stream),
        prompt=_inputs(fields) if embeds else None,
        cache_salt=_text(fields.cache_salt),
        extra_key=_text(fields.extra_key),
        session_id=None,
        n=1,
        kvrouter=_overrides(fields.kvrouter),
        engine_arguments=fields.vllm_xargs,
        removed=removed,
        is_odd=is_odd,
        remove=remove,
    )


def _inputs(fields: _Body) -> Prompt | None:
    """Texts or ids, as in a completion; None if they are not worth it, or have another form."""
    given = bytes(fields.input)
    is_cut = bytes(fields.truncate_prompt_tokens) != b"null"
    if is_cut or not _FEWEST_INPUT_BYTES <= len(given) <= MOST_INPUT_BYTES:
        return None
    try:
        prompt = parse_completion(b'{"prompt":%b}' % given).prompt
    except BadRequestError:
        return None  # the engine replies with the reason
    match prompt:
        case TextPrompt(texts=inputs) | TokenPrompt(token_ids=inputs) if len(inputs) <= _MOST_INPUTS:
            return prompt
    return None


def _text(raw: msgspec.Raw) -> str | None:
    """A string, or the JSON of another value."""
    given = bytes(raw)
    if given == b"null" or len(given) > _MOST_SALT_BYTES:
        return None
    try:
        value = msgspec.json.decode(given)
    except (ValueError, RecursionError):
        return None  # the engine replies with the reason
    return (value if isinstance(value, str) else given.decode("utf-8", "replace")) or None


def _of_json(body: bytes) -> tuple[_Body, tuple[str, ...], bool]:
    """The fields, the kinds of those that no client may send, and whether they were read one by one."""
    if not lax.is_suspicious(body):
        try:
            return _BODY.decode(body), (), False
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # read below
    found = lax.read(_Body, body)
    return found.body, found.removed, True


def _overrides(raw: msgspec.Raw) -> dict[str, Any] | None:
    if len(bytes(raw)) > _MOST_OVERRIDES_BYTES:
        raise BadRequestError(f"`kvrouter` has more than {_MOST_OVERRIDES_BYTES} bytes", param="kvrouter")
    try:
        return _decode_overrides(raw)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"{error} - at `$.kvrouter`", param="kvrouter") from error


def _of_form(body: bytes, content_type: str) -> tuple[_Body, set[str]]:
    """The fields `model` and `stream` of a form, and the kinds of those that no client may send."""
    found: dict[str, str] = {}
    kinds: set[str] = set()
    for part in parts(body, content_type):
        for name in part.names & {"model", "stream"}:
            found[name] = body[part.value_at : part.end][:256].decode("utf-8", "replace")
        kinds |= guarded_in(part, body)
    try:
        is_stream = lax.as_bool(found.get("stream", "false"))
    except ValueError:
        is_stream = False  # the engine judges it
    return _Body(model=found.get("model") or None, stream=is_stream), kinds
