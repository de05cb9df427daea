"""Which route serves a request."""

from __future__ import annotations

import pytest

from kvrouter.errors import NoRouteError, TrailingSlashError, WrongMethodError
from kvrouter.relay.answer import Served
from kvrouter.relay.request import Request
from kvrouter.relay.routes import Routes


async def one(_request: Request) -> Served:
    return Served(201, keeps_alive=True)


async def below(_request: Request) -> Served:
    return Served(202, keeps_alive=True)


@pytest.fixture
def routes() -> Routes:
    made = Routes()
    made.add("GET", "/models", one)
    made.add("POST", "/models", one)
    made.add("GET", "/models/", below)
    made.add("POST", "/chat", one)
    return made


def test_found(routes: Routes) -> None:
    """By path, or by the beginning of a longer one."""
    assert one is routes.find("GET", "/models") is routes.find("GET", "/models?a=/b/")
    for path in ("/models/m", "/models/a/b", "/models/a/"):
        assert below is routes.find("GET", path)
        assert below is routes.get("GET", path)
    assert one is routes.get("POST", "/chat") is routes.exact["POST", "/chat"]
    assert ("GET", "/models/") not in routes.exact
    for method, path in (("GET", "/chat"), ("GET", "/chat/x"), ("GET", "*"), ("POST", "/models/m")):
        assert routes.get(method, path) is None


@pytest.mark.parametrize(
    "path", ["/", "*", "", "//", "/model", "/modelsx", "/chat//", "/chat/x", "//models", "//models/"]
)
def test_no_route(routes: Routes, path: str) -> None:
    with pytest.raises(NoRouteError, match=f"GET {path.replace('*', '.')}: Not Found$") as raised:
        routes.find("GET", path)

    assert 404 == raised.value.status


def test_closed() -> None:
    """The reason stands behind the 404, with a last slash or without it."""
    routes = Routes(lambda path: "closed" if path == "/sleep" else "")

    for path in ("/sleep", "/sleep/"):
        with pytest.raises(NoRouteError, match=rf"POST {path}: Not Found \(closed\)"):
            routes.find("POST", path)


@pytest.mark.parametrize(
    ("target", "location"),
    [("/chat/", "../chat"), ("/chat/?", "../chat"), ("/chat/?a=b?c/", "../chat?a=b?c/")],
)
def test_slash_at_the_end(routes: Routes, target: str, location: str) -> None:
    """The error leads to the route without it, whatever the method, with the query."""
    for method in ("GET", "DELETE"):
        with pytest.raises(TrailingSlashError) as raised:
            routes.find(method, target)

        assert location == raised.value.location


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "/models", "GET, POST"), ("HEAD", "/chat", "POST"), ("POST", "/models/m", "GET")],
)
def test_wrong_method(routes: Routes, method: str, path: str, allowed: str) -> None:
    """The error names the methods that the path supports."""
    with pytest.raises(WrongMethodError) as raised:
        routes.find(method, path)

    assert allowed == raised.value.allowed
