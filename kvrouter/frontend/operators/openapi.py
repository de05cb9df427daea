"""GET /openapi.json: the routes of a port, as an OpenAPI 3.1 document.

    the routing table of the port ──each method and path──> _ROUTES ──> document

Bodies and answers that have a type are described by it (msgspec). Those of the engines' APIs are the
engines': here stand the fields that routing reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from kvrouter.bodies import apis
from kvrouter.bodies.models import ModelEntry, ModelList
from kvrouter.errors import ConfigError
from kvrouter.frontend.operators.admin import MODEL_PATH, Health
from kvrouter.frontend.operators.busy_threshold import AllThresholds, Thresholds, ThresholdsRequest
from kvrouter.frontend.operators.deadly_prompts import PROMPT_PATH, PROMPTS_PATH, DeadlyPromptList, Pardoned
from kvrouter.frontend.operators.decision_views import DECISION_PATH
from kvrouter.frontend.operators.routing_change import RoutingRequest, RoutingView
from kvrouter.frontend.operators.worker_blocks import WORKER_PATH
from kvrouter.frontend.records.client_totals import ClientsView
from kvrouter.frontend.records.tenant_totals import TenantsView
from kvrouter.frontend.reload import Reloaded
from kvrouter.frontend.requests import engine_routes
from kvrouter.observe.dashboard.page import FILES_PATH, PAGE_PATH
from kvrouter.observe.dashboard.prefixes import PrefixSample
from kvrouter.observe.document import Fleet
from kvrouter.version import __version__

OPENAPI_PATH = "/openapi.json"

Schema = dict[str, Any]
_JSON, _LINES, _TEXT, _SSE = "application/json", "application/x-ndjson", "text/plain", "text/event-stream"


class Described(Struct, frozen=True):
    """One method of one path. `answers`: content types by status, with spaces; `body`: its schema or type."""

    summary: str
    answers: dict[int, str]
    path: str = ""
    """With its parameters in braces, if it has any."""
    query: dict[str, Schema] = {}
    body: type[Struct] | Schema | None = None
    answer: type[Struct] | Schema = {}
    tag: str = "operators"
    error: str = "Error"
    """The schema of its errors."""


_OBJECT: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_STRINGS: Schema = {"type": "array", "items": {"type": "string"}}
_ROWS: Schema = {"type": "array", "items": _OBJECT}
_TEXTUAL: Schema = {"type": "string"}
_NAME_OR_NONE: Schema = {"type": ["string", "null"]}


def _object(**properties: Schema) -> Schema:
    """All of them required; there may be more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _engine_body(*required: str, **properties: Schema) -> Schema:
    """Fields that routing reads; an engine reads more."""
    read = {"model": {"type": "string"}, "stream": {"type": "boolean"}, **properties}
    return {"type": "object", "properties": read, "required": list(required), "additionalProperties": True}


_PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        _STRINGS,
        {"type": "array", "items": _COUNT},
        {"type": "array", "items": {"type": "array", "items": _COUNT}},
    ]
}
_ANSWERS = {
    200: _JSON,
    400: _JSON,
    401: _JSON,
    403: _JSON,
    404: _JSON,
    429: _JSON,
    502: _JSON,
    503: _JSON,
    504: _JSON,
}
_BODIES = {
    "/v1/chat/completions": _engine_body("messages", messages=_ROWS),
    "/v1/completions": _engine_body("prompt", prompt=_PROMPT),
    "/v1/messages": _engine_body("messages", "max_tokens", messages=_ROWS, max_tokens=_COUNT),
    "/v1/responses": _engine_body("input", input={"anyOf": [{"type": "string"}, _ROWS]}),
}
_ROUTES: dict[tuple[str, str], Described] = {
    **{
        ("POST", path): Described(
            "Answered by a worker that is chosen by its cache",
            _ANSWERS,
            body=_BODIES[path],
            tag="engines",
            error=api.error_schema,
        )
        for path, api in apis.BY_PATH.items()
    },
    **{
        (method, path): Described(
            "Passed on to a worker of the model",
            _ANSWERS,
            body=None if method == "GET" else _OBJECT,
            tag="engines",
            error=api.error_schema,
        )
        for (method, path), api in engine_routes.PASSED.items()
    },
    ("GET", "/v1/models"): Described(
        "The models of all workers", {200: _JSON}, answer=ModelList, tag="clients"
    ),
    ("GET", MODEL_PATH): Described(
        "One model", {200: _JSON, 404: _JSON}, path=f"{MODEL_PATH}{{model}}", answer=ModelEntry, tag="clients"
    ),
    ("GET", "/live"): Described("200 while the event loop runs", {200: _TEXT}, answer=_TEXTUAL, tag="health"),
    ("GET", "/ready"): Described(
        "Whether to send requests here",
        {200: _JSON, 503: _JSON},
        query={"verbose": {}},
        answer=_object(status={"type": "string"}, feeds=_ROWS),
        tag="health",
    ),
    ("GET", "/health"): Described(
        "Status, version, peers and workers", {200: _JSON}, answer=Health, tag="health"
    ),
    ("GET", "/metrics"): Described(
        "Prometheus metrics; `name[]` selects samples",
        {200: _TEXT, 421: _TEXT, 503: _TEXT},
        answer=_TEXTUAL,
        tag="health",
    ),
    ("GET", OPENAPI_PATH): Described("This document", {200: _JSON}, answer=_OBJECT, tag="health"),
    ("GET", PAGE_PATH): Described("The dashboard", {200: "text/html"}, answer=_TEXTUAL),
    ("GET", FILES_PATH): Described(
        "A file of the dashboard",
        {200: "text/javascript", 404: _JSON},
        path=f"{FILES_PATH}{{file}}",
        answer=_TEXTUAL,
    ),
    ("GET", "/fleet"): Described("The fleet as this replica knows it", {200: _JSON}, answer=Fleet),
    ("GET", "/fleet/stream"): Described(
        "The traffic of the last hour, then /fleet once a second, its targets as a table",
        {200: _SSE, 503: _JSON},
        answer=_object(data=_TEXTUAL),
    ),
    ("GET", "/prefixes"): Described(
        "The prefixes that the last requests shared: a sample", {200: _JSON}, answer=PrefixSample
    ),
    ("GET", "/clients"): Described(
        "Who asks for how much: the last minute, and the ten before it", {200: _JSON}, answer=ClientsView
    ),
    ("GET", "/tenants"): Described(
        "What each tenant has used on a day, at this replica",
        {200: f"{_JSON} text/csv", 400: _JSON},
        query={"day": {"type": "string", "format": "date"}, "format": {"enum": ["json", "csv"]}},
        answer=TenantsView,
    ),
    ("GET", "/workers"): Described(
        "Every target, feed and booking",
        {200: _JSON},
        answer=_object(
            router_id=_TEXTUAL,
            replica_sync={"type": "boolean"},
            core=_OBJECT,
            tokens=_OBJECT,
            namespace_peers=_STRINGS,
            **dict.fromkeys(("peers", "pools", "targets", "feeds", "bookings"), _ROWS),
        ),
    ),
    ("GET", WORKER_PATH): Described(
        "The blocks of a worker, page by page",
        {200: _LINES, 400: _JSON, 404: _JSON},
        path=f"{WORKER_PATH}{{worker_id}}/blocks",
        query={"after": _COUNT, "limit": {"type": "integer", "minimum": 1}},
        answer=_OBJECT,
    ),
    ("POST", "/v1/route"): Described(
        "Where a request would go, and why; nothing is sent",
        {200: _JSON, 400: _JSON, 404: _JSON, 503: _JSON},
        body=_OBJECT,
        answer=_object(winner=_NAME_OR_NONE, order=_STRINGS, candidates=_ROWS, removed=_ROWS, model=_TEXTUAL),
    ),
    ("GET", "/decisions"): Described(
        "The last decisions, the newest first; with `blocks=true` as lines",
        {200: f"{_JSON} {_LINES}", 400: _JSON},
        query={"limit": {"type": "integer", "minimum": 1, "maximum": 1000}, "blocks": {"type": "boolean"}},
        answer=_object(decisions=_ROWS),
    ),
    ("GET", DECISION_PATH): Described(
        "The decisions about one request",
        {200: _JSON, 404: _JSON},
        path=f"{DECISION_PATH}{{request_id}}",
        answer=_object(request_id=_TEXTUAL, decisions=_ROWS),
    ),
    ("GET", "/busy_threshold"): Described(
        "The thresholds of filter `busy`", {200: _JSON}, answer=AllThresholds
    ),
    ("POST", "/busy_threshold"): Described(
        "Change them in this replica",
        {200: _JSON, 400: _JSON, 404: _JSON},
        body=ThresholdsRequest,
        answer=Thresholds,
    ),
    ("GET", PROMPTS_PATH): Described(
        "The prompts with which workers were lost, and which all replicas refuse",
        {200: _JSON},
        answer=DeadlyPromptList,
    ),
    ("DELETE", PROMPTS_PATH): Described("Let all of them pass", {200: _JSON}, answer=Pardoned),
    ("DELETE", PROMPT_PATH): Described(
        "Let one of them pass",
        {200: _JSON, 404: _JSON},
        path=f"{PROMPT_PATH}{{hash}}",
        answer=Pardoned,
    ),
    ("GET", "/routing"): Described(
        "How all replicas route, and who has changed it", {200: _JSON}, answer=RoutingView
    ),
    ("POST", "/routing"): Described(
        "Change it in all replicas", {200: _JSON, 400: _JSON}, body=RoutingRequest, answer=RoutingView
    ),
    ("POST", "/config/reload"): Described(
        "Read the settings again",
        {200: _JSON, 400: _JSON},
        body=_OBJECT,
        answer=Reloaded,
    ),
}

_WRONG: Schema = {
    "type": "object",
    "required": ["message"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "code": {}, "param": {}},
}
_ERROR: Schema = _object(error=_WRONG)
_BY_COHERE: Schema = _object(message=_TEXTUAL)
_ERRORS: dict[str, Schema] = {
    "Error": _ERROR,
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXTUAL, message=_TEXTUAL)),
    "CohereError": _BY_COHERE,
    "CohereOrOpenAIError": {"anyOf": [_ERROR, _BY_COHERE]},
    "OllamaError": _object(error=_TEXTUAL),
}
_KEY = "operators"
_ABOUT = (
    "Not listed per route: 405 (with `allow`) for other methods of a path; 307 for a slash too many at its "
    "end; 400, 408, 414, 417, 431 and 505 for invalid HTTP; on the admin listener 401 and 403 for those who "
    "may not ask, and 415 for a body that is not JSON. Routes tagged `engines` pass on an engine's "
    "error with its status."
)


def check_root_path(root_path: str) -> None:
    """Raise ConfigError for a prefix that own routes begin with: removing it would hide them."""
    for _, path in _ROUTES:
        if root_path and (path == root_path or path.startswith(f"{root_path}/") or _covers(path, root_path)):
            raise ConfigError(f"--root-path {root_path}: kvrouter serves {path} itself; use another prefix")


def _covers(path: str, other: str) -> bool:
    return path.endswith("/") and path != "/" and other.startswith(path)


def document(routes: Iterable[tuple[str, str]], *, is_keyed: bool = False, root_path: str = "") -> Schema:
    """The document of these methods and paths. Raises KeyError for one that is not described.

    `is_keyed`: the routes for operators need the key of --admin-key-file.
    """
    found = {key: _ROUTES[key] for key in sorted(routes, key=lambda key: (key[1], key[0]))}
    kinds = [kind for one in found.values() for kind in (one.body, one.answer) if isinstance(kind, type)]
    by_kind, components = _schemas(tuple(kinds))
    paths: dict[str, Schema] = {}
    for (method, path), one in found.items():
        operation = _operation(one, by_kind, is_keyed=is_keyed and one.tag == "operators")
        paths.setdefault(one.path or path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrouter", "version": __version__, "description": _ABOUT},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {**components, **_ERRORS},
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


@functools.cache
def _schemas(kinds: tuple[type[Struct], ...]) -> tuple[dict[type[Struct], Schema], Schema]:
    """The schemas of bodies, and those that they refer to: the same for each port, and slow to make."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, schemas, strict=True)), components


def _operation(one: Described, by_kind: dict[type[Struct], Schema], *, is_keyed: bool) -> Schema:
    made: Schema = {"summary": one.summary, "tags": [one.tag], "responses": {}}
    if is_keyed:
        made["security"] = [{_KEY: []}]
    answers = (
        one.answers | ({401: _JSON} if is_keyed else {}) | ({413: _JSON} if one.body is not None else {})
    )
    parameters = [
        {"name": name.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}
        for name in one.path.split("/")
        if name.startswith("{")
    ] + [{"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()]
    if parameters:
        made["parameters"] = parameters
    if one.body is not None:
        schema = by_kind[one.body] if isinstance(one.body, type) else one.body
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    answer = by_kind[one.answer] if isinstance(one.answer, type) else one.answer
    for status, kinds in sorted(answers.items()):
        is_error = status >= 400 and kinds == _JSON and one.tag != "health"
        schema = {"$ref": f"#/components/schemas/{one.error}"} if is_error else answer
        content: Schema = {kind: {"schema": schema} for kind in kinds.split()}
        if one.tag == "engines":
            content = content if status >= 400 else {_JSON: {}, _SSE: {}}
        made["responses"][str(status)] = {"description": _MEANINGS.get(status, "done"), "content": content}
    return made


_MEANINGS = {
    400: "wrong request: the message says what to change",
    401: "the key is missing or wrong: that of the operators, or of the engine",
    404: "not known here",
    413: "the body is larger than --max-body-mib",
    421: "several processes share this port: ask their admin listeners",
    502: "the worker failed",
    503: "no worker is left, or not ready",
    504: "the worker was silent for too long",
}
