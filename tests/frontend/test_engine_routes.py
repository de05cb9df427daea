"""The list of the engines' routes, against the routes of vLLM and SGLang, and the API of each path."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.bodies import apis
from kvrouter.errors import NoRouteError
from kvrouter.frontend.requests.engine_routes import (
    CLOSED,
    PASSED,
    PATHS,
    api_of,
    error_answer,
    relayed,
    why_closed,
)

RECORD = Path(__file__).parents[1] / "data/engine_routes.json"
ROUTES = [
    (engine, *route.split())
    for engine, entry in msgspec.json.decode(RECORD.read_bytes()).items()
    for route in entry["routes"]
]
# vLLM-Omni has it, and vLLM had it before 0.33.
OF_OTHERS = {"/v1/audio/speech"}
FORMS = {
    "/v1/messages/count_tokens": "AnthropicError",
    "/v1/messages/batches": "AnthropicError",
    "/v1/messages/": "AnthropicError",
    "/v1//messages": "AnthropicError",
    "/cohere/v2/chat": "CohereError",
    "/cohere": "CohereError",
    "/cohere/v1/models": "CohereError",
    "/v2/embed": "CohereOrOpenAIError",
    "/v2/chat": "CohereOrOpenAIError",
    "/v1/rerank": "CohereOrOpenAIError",
    "/api/tags": "OllamaError",
    "/api": "Error",
    "/v1/messagesx": "Error",
    "/v1/embeddings": "Error",
    "/workers": "Error",
    "": "Error",
    "*": "Error",
}


def test_every_route_has_its_place() -> None:
    """A route of an engine's wheel is relayed, or closed with a reason: a new one must be thought about."""
    passed_on = {(method, path) for method, path, _ in relayed()}

    assert [] == [route for route in ROUTES if (route[1:] in passed_on) == (route[2] in CLOSED)]


def test_no_route_is_invented() -> None:
    """What the list has beyond the wheels is that of another engine."""
    recorded = {path for _, _, path in ROUTES}

    assert OF_OTHERS == PATHS - recorded
    assert set() == CLOSED.keys() - recorded
    assert set(apis.BY_PATH) | {path for _, path in PASSED} == PATHS


@pytest.mark.parametrize("path", FORMS)
def test_api_of(path: str) -> None:
    """A path has the API of its route, or of the nearest one above it."""
    assert FORMS[path] == api_of(path).error_schema


@given(st.sampled_from(sorted(PATHS)), st.lists(st.sampled_from(["x", "", "a%2Fb", "..", "1"]), max_size=9))
def test_below_a_route(path: str, more: list[str]) -> None:
    """Whatever stands below a route, and however many slashes separate it, is of the same API."""
    slashes = path.replace("/", "//")

    assert api_of(path) is api_of(slashes)
    assert api_of(path) is api_of("/".join([path, *more]))


@given(
    st.text(st.characters(min_codepoint=33, max_codepoint=126)) | st.just("/" * 8000) | st.just("/a" * 4000)
)
def test_any_path(path: str) -> None:
    """No path is too strange for an error."""
    assert 404 == error_answer(path, NoRouteError("no"), "id").status
    assert why_closed(path) == "" or path in CLOSED


@pytest.mark.parametrize("path", [path for path in CLOSED if "{}" in path])
def test_closed_with_parameters(path: str) -> None:
    """A parameter is one segment."""
    assert CLOSED[path] == why_closed(path.replace("{}", "resp_1"))
    assert not why_closed(path.replace("{}", ""))
    assert not why_closed(path.replace("{}", "a/b"))
