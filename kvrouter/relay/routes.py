"""The routes of a listener."""

from __future__ import annotations

from collections.abc import Mapping

from kvrouter.errors import NoRouteError, WrongMethodError
from kvrouter.relay.request import Serve


class Routes:
    """By path; one that ends with `/` stands for all paths below it, but `/` for itself."""

    def __init__(self) -> None:
        self._by_path: dict[str, dict[str, Serve]] = {}
        self._posts: dict[str, Serve] = {}

    @property
    def posts(self) -> Mapping[str, Serve]:
        """What serves a POST, by path."""
        return self._posts

    def listed(self) -> list[tuple[str, str]]:
        """Method and path of each."""
        return [(method, path) for path, methods in self._by_path.items() for method in methods]

    def add(self, method: str, path: str, serve: Serve) -> None:
        self._by_path.setdefault(path, {})[method] = serve
        if method == "POST":
            self._posts[path] = serve

    def find(self, method: str, path: str) -> Serve:
        """What serves this request. Raises NoRouteError or WrongMethodError."""
        exact = None if path.endswith("/") and path != "/" else self._by_path.get(path)
        methods = exact or self._below(path)
        if not methods:
            raise NoRouteError(f"{method} {path}: Not Found")
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            raise WrongMethodError(f"{method} {path}: use {allowed}", allowed=allowed)
        return methods[method]

    def _below(self, path: str) -> Mapping[str, Serve]:
        ends = (at for at, character in enumerate(path[1:-1], 2) if character == "/")
        return next((found for end in ends if (found := self._by_path.get(path[:end]))), {})
