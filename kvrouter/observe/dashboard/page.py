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
# By the end of a file's name. uplot.*: uPlot 1.6.32 as it is distributed, with its licence in uplot.LICENSE.
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page:
    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        for file in (files("kvrouter.observe.dashboard") / "page").iterdir():
            if kind := _TYPES.get(file.name.rpartition(".")[2]):
                headers = {**_HEADERS, "content-type": f"{kind}; charset=utf-8"}
                self._answers[file.name] = Answer(200, file.read_bytes(), headers)

    async def page(self, _request: Request) -> Answer:
        """GET /."""
        return self._answers["index.html"]

    async def file(self, request: Request) -> Answer:
        """GET /dashboard/NAME. Raises NoRouteError."""
        found = self._answers.get(request.path_after(FILES_PATH))
        if found is None:
            raise NoRouteError(f"{request.head.method} {request.head.route}: Not Found")
        return found
