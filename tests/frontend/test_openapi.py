"""GET /openapi.json: every route of a port is described, with types of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvrouter.frontend.openapi import _ROUTES, document
from tests.frontend.clients import ask, get
from tests.frontend.fleet import FleetOf
from tests.frontend.workers import OK

HTTP_PAGE = (Path(__file__).parents[2] / "docs/reference/http.md").read_text()


def operations(described: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }


async def test_each_port_describes_its_routes(fleet_of: FleetOf) -> None:
    """Both ports; the admin listener has those of operators, too. Every described route is served."""
    async with fleet_of("--router-mode", "kv", scripts=(OK,)) as fleet:
        admin = (await get(fleet.frontend.admin_url, "/openapi.json")).json
        found = operations(admin)

        assert set(found) == set(operations(document(_ROUTES)))
        for method, path in found:
            if method == "GET" and "{" not in path and not path.endswith("/stream"):  # which has no end
                status = (await get(fleet.frontend.admin_url, path)).status
                assert str(status) in found[method, path]["responses"], path
        assert 400 == (await ask(fleet.frontend.admin_url, b"{", path="/routing")).status
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


@pytest.mark.parametrize("route", sorted({path for _, path in _ROUTES} - {"/dashboard/"}))
def test_the_page_has_every_route(route: str) -> None:
    """docs/reference/http.md."""
    assert f"{route}" in HTTP_PAGE


async def test_a_path_with_a_line_end(fleet_of: FleetOf) -> None:
    """The admin listener answers it as any other path that is not served."""
    async with fleet_of("--router-mode", "kv", scripts=(OK,)) as fleet:
        answer = await get(fleet.frontend.admin_url, "/dashboard/%0AZ")

        assert (404, "application/json") == (answer.status, answer.header("content-type"))
