"""The page at `/` of the admin listener."""

from __future__ import annotations

import re

from tests.frontend.clients import get
from tests.frontend.fleet import FleetOf


async def test_page_and_its_files(fleet_of: FleetOf) -> None:
    """Every file that the page names is served, by a relative URL, and may load nothing from elsewhere."""
    async with fleet_of() as fleet:
        admin = fleet.frontend.admin_url
        page = await get(admin, "/")
        paths = re.findall(r'(?:href|src)="([^":]+)"', page.body.decode())
        loaded = {path: await get(admin, f"/{path}") for path in paths}

        loaded["dashboard/traffic.js"] = await get(admin, "/dashboard/traffic.js")  # page.js imports it

        assert ["uplot.css", "page.css", "uplot.js", "page.js"] == [path.partition("/")[2] for path in paths]
        assert {200} == {each.status for each in (page, *loaded.values())}
        types = [each.header("content-type") for each in (page, *loaded.values())]
        kinds = ("html", "css", "css", "javascript", "javascript", "javascript")
        assert [f"text/{kind}; charset=utf-8" for kind in kinds] == types
        assert all("default-src 'none'" in each.header("content-security-policy") for each in loaded.values())
        assert not any(b"innerHTML" in loaded[f"dashboard/{own}.js"].body for own in ("page", "traffic"))


async def test_only_for_operators(fleet_of: FleetOf) -> None:
    """Other files do not exist, and the clients' port does not serve the page."""
    async with fleet_of() as fleet:
        admin = fleet.frontend.admin_url

        assert [404, 404, 404] == [
            (await get(url, path)).status
            for url, path in ((admin, "/dashboard/page.py"), (admin, "/other"), (fleet.url, "/"))
        ]
