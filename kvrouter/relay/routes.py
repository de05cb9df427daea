"""The routes of a listener."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvrouter.errors import NoRouteError, TrailingSlashError, WrongMethodError
from kvrouter.relay.request import Serve


class Routes:
    """By path; one that ends with `/` stands for all paths below it, but `/` for itself."""

    def __init__(self, why_closed: Callable[[str], str] = lambda _: "") -> None:
        """`why_closed`: why a path is no route; empty if there is no particular reason."""
        self._why_closed = why_closed
        self._by_path: dict[str, dict[str, Serve]] = {}
        self.exact: dict[tuple[str, str], Serve] = {}
        """By method and path, those that are no beginning of a path."""

    def listed(self) -> list[tuple[str, str]]:
        """Method and path of each."""
        return [(method, path) for path, methods in self._by_path.items() for method in methods]

    def add(self, method: str, path: str, serve: Serve) -> None:
        self._by_path.setdefault(path, {})[method] = serve
        if path == "/" or not path.endswith("/"):
            self.exact[method, path] = serve

    def get(self, method: str, path: str) -> Serve | None:
        """What serves this method and path, without a query; None: `find` says why nothing does."""
        return self._at(path).get(method)

    def find(self, method: str, target: str) -> Serve:
        """What serves this method and path. Its query does not matter.

        Raises NoRouteError, TrailingSlashError or WrongMethodError.
        """
        path, _, query = target.partition("?")
        methods = self._at(path)
        if not methods:
            raise self._missing(method, path, query)
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            raise WrongMethodError(f"{method} {path}: use {allowed}", allowed=allowed)
        return methods[method]

    def _missing(self, method: str, path: str, query: str) -> NoRouteError:
        """As FastAPI, and so the engines, a path with one slash too many leads to its route."""
        meant = path.removesuffix("/")
        is_beginning = path in self._by_path  # of paths below it, which name something
        if meant and meant != path and meant in self._by_path and not (meant.endswith("/") or is_beginning):
            location = f"../{meant.rpartition('/')[2]}{query and f'?{query}'}"
            return TrailingSlashError(f"{method} {path}: use {meant}", location=location)
        reason = self._why_closed(meant or path)
        return NoRouteError(f"{method} {path}: Not Found{reason and f' ({reason})'}")

    def _at(self, path: str) -> Mapping[str, Serve]:
        exact = None if path.endswith("/") and path != "/" else self._by_path.get(path)
        return exact or self._below(path)

    def _below(self, path: str) -> Mapping[str, Serve]:
        at = path.find("/", 1)
        while 0 < at < len(path) - 1:
            if found := self._by_path.get(path[: at + 1]):
                return found
            at = path.find("/", at + 1)
        return {}
