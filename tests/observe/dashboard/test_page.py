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
        modules = ["dashboard/page.js"]  # and what each module imports
        for path in modules:
            loaded[path] = await get(admin, f"/{path}")
            imported = re.findall(rb'from "./(.+)"', loaded[path].body)
            modules += {f"dashboard/{name.decode()}" for name in imported} - set(modules)

        assert ["uplot.css", "page.css", "uplot.js", "page.js"] == [path.partition("/")[2] for path in paths]
        assert 8 == len(modules)
        for path, answer in {"index.html": page, **loaded}.items():
            kind = {"html": "html", "css": "css", "js": "javascript"}[path.rpartition(".")[2]]
            assert (200, f"text/{kind}; charset=utf-8") == (answer.status, answer.header("content-type"))
            assert "default-src 'none'" in answer.header("content-security-policy")
        assert not any(b"innerHTML" in loaded[path].body for path in modules)


async def test_only_for_operators(fleet_of: FleetOf) -> None:
    """Other files do not exist, and the clients' port does not serve the page."""
    async with fleet_of() as fleet:
        admin = fleet.frontend.admin_url

        assert [404, 404, 404] == [
            (await get(url, path)).status
            for url, path in ((admin, "/dashboard/page.py"), (admin, "/other"), (fleet.url, "/"))
        ]
