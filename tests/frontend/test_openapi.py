"""GET /openapi.json: every route of a port is described, with types of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvrouter.frontend.operators.openapi import _ROUTES, document
from kvrouter.frontend.requests.engine_routes import relayed
from tests.frontend.clients import ask, get
from tests.frontend.fleet import FleetOf
from tests.frontend.workers import OK

HTTP_PAGE = (Path(__file__).parents[2] / "docs/reference/http.md").read_text()
_CLIENTS, _ADMIN = HTTP_PAGE.split("## Admin listener")
Route = tuple[str, str]


def routes_of(section: str) -> set[Route]:
    """Method and path of each route in the first column of a table; a path inherits the method before it."""
    found: set[Route] = set()
    for line in section.splitlines():
        method = ""
        for given, path in re.findall(
            r"`(?:(GET|POST|PUT|DELETE) )?(/[^`]*)`", line.split("|")[1] if "|" in line else ""
        ):
            method = given or method
            found.add((method, nameless(path)))
    return found


def nameless(path: str) -> str:
    """Without the names of its parameters."""
    return re.sub(r"{\w+}", "{}", path)


def operations(described: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }


async def test_each_port_describes_its_routes(fleet_of: FleetOf) -> None:
    """Both ports; the admin listener has the operators' routes, too. Every described route is served."""
    async with fleet_of("--router-mode", "kv", scripts=(OK,)) as fleet:
        admin = (await get(fleet.frontend.admin_url, "/openapi.json")).json
        found = operations(admin)

        assert set(found) == set(operations(document(_ROUTES)))
        for method, path in found:
            if method == "GET" and "{" not in path and not path.endswith("/stream"):  # which has no end
                status = (await get(fleet.frontend.admin_url, path)).status
                assert str(status) in found[method, path]["responses"], path
        assert (
            400
            == (
                await ask(fleet.frontend.admin_url, b"{", "content-type: application/json", path="/routing")
            ).status
        )
        assert found[("GET", "/fleet")]["responses"]["200"]["content"]["application/json"]["schema"] == {
            "$ref": "#/components/schemas/Fleet"
        }


def test_references_lead_somewhere() -> None:
    """Each `$ref` is a schema of the document."""
    described = document(_ROUTES)
    refs = set(re.findall(r"'#/components/schemas/(\w+)'", str(described)))

    assert refs
    assert refs <= set(described["components"]["schemas"])


def test_a_route_without_a_description_fails() -> None:
    """So that a new one cannot be forgotten."""
    with pytest.raises(KeyError):
        document([("GET", "/new")])


async def test_clients_port(fleet_of: FleetOf, tmp_path: Path) -> None:
    """Without a key it describes what it serves: no operators' route. With one all of them, and their 401."""
    key = tmp_path / "key"
    key.write_text("s3cret")
    async with fleet_of("--router-mode", "kv", scripts=(OK,)) as fleet:
        found = operations((await get(fleet.url, "/openapi.json")).json)
    async with fleet_of("--router-mode", "kv", "--admin-key-file", str(key), scripts=(OK,)) as fleet:
        keyed = operations((await get(fleet.url, "/openapi.json")).json)
        refused = (await get(fleet.url, "/workers")).status

    own = {"/v1/models", "/v1/models/{model}", "/live", "/ready", "/health", "/metrics", "/openapi.json"}
    expected = {(method, path) for method, path, _ in relayed()} | {("GET", path) for path in own}
    assert expected == set(found)
    assert set(operations(document(_ROUTES))) == set(keyed)
    assert 401 == refused
    assert set(keyed) - expected == {route for route, one in keyed.items() if "security" in one}
    assert all("401" in keyed[route]["responses"] for route in set(keyed) - expected)
    assert ({(nameless(path), method) for method, path in expected}) == {
        (path, method) for method, path in routes_of(_CLIENTS)
    }


def test_the_page_has_every_route() -> None:
    """docs/reference/http.md: each route in its tables, with its method, and no other."""
    described = {(method, nameless(path)) for method, path in operations(document(_ROUTES))}

    assert described == routes_of(HTTP_PAGE)
    assert set() == routes_of(_CLIENTS) & routes_of(_ADMIN)


def test_every_answer_of_our_own_has_a_schema() -> None:
    """No schema is `{}`; engines' routes have the engines' schemas."""
    for route, one in operations(document(_ROUTES)).items():
        for status, answer in one["responses"].items():
            schemas = [content.get("schema") for content in answer["content"].values()]
            assert "engines" in one["tags"] or all(schemas), (route, status)
        assert ("requestBody" in one) == ("413" in one["responses"])


async def test_a_path_with_a_line_end(fleet_of: FleetOf) -> None:
    """The admin listener answers it as any other path that is not served."""
    async with fleet_of("--router-mode", "kv", scripts=(OK,)) as fleet:
        answer = await get(fleet.frontend.admin_url, "/dashboard/%0AZ")

        assert (404, "application/json") == (answer.status, answer.header("content-type"))
