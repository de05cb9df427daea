"""The page at `/`: static files of this package, with headers that let it load nothing else.

It reads the routes for operators by relative URLs: it works below a path of a proxy, too. The files show
nothing of the fleet, so they are served without a key, and the page asks for it if a route needs one.
"""

from __future__ import annotations

from importlib.resources import files

from kvrouter.errors import NoRouteError
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request

PAGE_PATH = "/"
FILES_PATH = "/dashboard/"
_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "asking.js": "text/javascript",
    "table.js": "text/javascript",
    "fleet.js": "text/javascript",
    "traffic.js": "text/javascript",
    "decisions.js": "text/javascript",
    "agreement.js": "text/javascript",
    "clients.js": "text/javascript",
    # uPlot 1.6.32, its distributed files as they are; licence: uplot.LICENSE
    "uplot.css": "text/css",
    "uplot.js": "text/javascript",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page:
    def __init__(self) -> None:
        folder = files("kvrouter.observe.dashboard") / "page"
        self._answers = {
            name: Answer(
                200, (folder / name).read_bytes(), {**_HEADERS, "content-type": f"{kind}; charset=utf-8"}
            )
            for name, kind in _TYPES.items()
        }

    async def page(self, _request: Request) -> Answer:
        """GET /."""
        return self._answers["index.html"]

    async def file(self, request: Request) -> Answer:
        """GET /dashboard/NAME. Raises NoRouteError."""
        found = self._answers.get(request.path_after(FILES_PATH))
        if found is None:
            raise NoRouteError(f"{request.head.method} {request.head.route}: Not Found")
        return found
