"""GET /openapi.json: the routes of a port, as an OpenAPI 3.1 document.

    the routing table of the port ──each method and path──> _ROUTES ──> document

Bodies and answers that have a type are described by it (msgspec). Those of the engines' APIs are the
engines': here stand the fields that routing reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from kvrouter.dashboard.fleet import Fleet
from kvrouter.dashboard.page import FILES_PATH, PAGE_PATH
from kvrouter.dashboard.prefixes import PrefixSample
from kvrouter.frontend import passthrough
from kvrouter.frontend.admin import MODEL_PATH
from kvrouter.frontend.bodies import apis
from kvrouter.frontend.busy_threshold import Wanted as WantedThresholds
from kvrouter.frontend.decision_views import DECISION_PATH
from kvrouter.frontend.routing_change import Wanted as WantedRouting
from kvrouter.frontend.worker_blocks import WORKER_PATH
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


_OBJECT: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _engine_body(*required: str, **properties: Schema) -> Schema:
    """Fields that routing reads; an engine reads more."""
    read = {"model": {"type": "string"}, "stream": {"type": "boolean"}, **properties}
    return {"type": "object", "properties": read, "required": list(required), "additionalProperties": True}


_MESSAGES: Schema = {"type": "array", "items": _OBJECT}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": _COUNT},
        {"type": "array", "items": {"type": "array", "items": _COUNT}},
    ]
}
_ANSWERS = {200: _JSON, 400: _JSON, 404: _JSON, 502: _JSON, 503: _JSON, 504: _JSON}
_BODIES = {
    "/v1/chat/completions": _engine_body("messages", messages=_MESSAGES),
    "/v1/completions": _engine_body("prompt", prompt=_PROMPT),
    "/v1/messages": _engine_body("messages", "max_tokens", messages=_MESSAGES, max_tokens=_COUNT),
    "/v1/responses": _engine_body("input", input={"anyOf": [{"type": "string"}, _MESSAGES]}),
}
_ROUTES: dict[tuple[str, str], Described] = {
    **{
        ("POST", path): Described(
            "Answered by a worker that is chosen by its cache", _ANSWERS, body=_BODIES[path], tag="engines"
        )
        for path in apis.BY_PATH
    },
    **{
        ("POST", path): Described("Passed on to a worker of the model", _ANSWERS, body=_OBJECT, tag="engines")
        for path in passthrough.POST_ROUTES
    },
    **{
        ("GET", path): Described("Passed on to a worker", _ANSWERS, tag="engines")
        for path in passthrough.GET_ROUTES
    },
    ("GET", "/v1/models"): Described("The models of all workers", {200: _JSON}, tag="clients"),
    ("GET", MODEL_PATH): Described(
        "One model", {200: _JSON, 404: _JSON}, path=f"{MODEL_PATH}{{model}}", tag="clients"
    ),
    ("GET", "/live"): Described("200 while the event loop runs", {200: _TEXT}, tag="health"),
    ("GET", "/ready"): Described(
        "Whether to send requests here", {200: _JSON, 503: _JSON}, query={"verbose": {}}, tag="health"
    ),
    ("GET", "/health"): Described("Status, version, peers and workers", {200: _JSON}, tag="health"),
    ("GET", "/metrics"): Described(
        "Prometheus metrics; `name[]` selects samples", {200: _TEXT, 421: _TEXT, 503: _TEXT}, tag="health"
    ),
    ("GET", OPENAPI_PATH): Described("This document", {200: _JSON}, tag="health"),
    ("GET", PAGE_PATH): Described("The dashboard", {200: "text/html"}),
    ("GET", FILES_PATH): Described(
        "A file of the dashboard", {200: "text/javascript", 404: _JSON}, path=f"{FILES_PATH}{{file}}"
    ),
    ("GET", "/fleet"): Described("The fleet as this replica knows it", {200: _JSON}, answer=Fleet),
    ("GET", "/fleet/stream"): Described(
        "/fleet once a second, its targets as a table", {200: _SSE, 503: _JSON}, answer={"type": "string"}
    ),
    ("GET", "/prefixes"): Described(
        "The prefixes that the last requests shared: a sample", {200: _JSON}, answer=PrefixSample
    ),
    ("GET", "/workers"): Described("Every target, feed and booking", {200: _JSON}),
    ("GET", WORKER_PATH): Described(
        "The blocks of a worker, page by page",
        {200: _LINES, 400: _JSON, 404: _JSON},
        path=f"{WORKER_PATH}{{worker_id}}/blocks",
        query={"after": _COUNT, "limit": {"type": "integer", "minimum": 1}},
    ),
    ("POST", "/v1/route"): Described(
        "Where a request would go, and why; nothing is sent",
        {200: _JSON, 400: _JSON, 404: _JSON, 503: _JSON},
        body=_OBJECT,
    ),
    ("GET", "/decisions"): Described(
        "The last decisions, the newest first; with `blocks=true` as lines",
        {200: f"{_JSON} {_LINES}", 400: _JSON},
        query={"limit": {"type": "integer", "minimum": 1, "maximum": 1000}, "blocks": {"type": "boolean"}},
    ),
    ("GET", DECISION_PATH): Described(
        "The decisions about one request", {200: _JSON, 404: _JSON}, path=f"{DECISION_PATH}{{request_id}}"
    ),
    ("GET", "/busy_threshold"): Described("The thresholds of filter `busy`", {200: _JSON}),
    ("POST", "/busy_threshold"): Described(
        "Change them in this replica", {200: _JSON, 400: _JSON, 404: _JSON}, body=WantedThresholds
    ),
    ("GET", "/routing"): Described("How all replicas route, and who has changed it", {200: _JSON}),
    ("POST", "/routing"): Described(
        "Change it in all replicas", {200: _JSON, 400: _JSON}, body=WantedRouting
    ),
    ("POST", "/config/reload"): Described("Read the settings again", {200: _JSON, 400: _JSON}, body=_OBJECT),
}

_WRONG: Schema = {
    "type": "object",
    "required": ["message"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "code": {}, "param": {}},
}
_ERROR: Schema = {"type": "object", "required": ["error"], "properties": {"error": _WRONG}}


def document(routes: Iterable[tuple[str, str]]) -> Schema:
    """The document of these methods and paths. Raises KeyError for one that is not described."""
    found = {key: _ROUTES[key] for key in sorted(routes, key=lambda key: (key[1], key[0]))}
    kinds = [kind for one in found.values() for kind in (one.body, one.answer) if isinstance(kind, type)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Schema] = {}
    for (method, path), one in found.items():
        operation = _operation(one, by_kind)
        paths.setdefault(one.path or path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrouter", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _operation(one: Described, by_kind: dict[type[Struct], Schema]) -> Schema:
    made: Schema = {"summary": one.summary, "tags": [one.tag], "responses": {}}
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
    for status, kinds in one.answers.items():
        is_error = status >= 400 and kinds == _JSON and one.tag != "health"
        schema = {"$ref": "#/components/schemas/Error"} if is_error else answer
        content: Schema = {kind: {"schema": schema} for kind in kinds.split()}
        if one.tag == "engines":
            content = content if status >= 400 else {_JSON: {}, _SSE: {}}
        made["responses"][str(status)] = {"description": _MEANINGS.get(status, "done"), "content": content}
    return made


_MEANINGS = {
    400: "wrong request: the message says what to change",
    404: "not known here",
    421: "several processes share this port: ask their admin listeners",
    502: "the worker failed",
    503: "no worker is left, or not ready",
    504: "the worker was silent for too long",
}
