"""--root-path: a frontend behind a proxy that serves it under a prefix, and removes that or not."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import ConfigError
from kvrouter.frontend.operators.openapi import _ROUTES, check_root_path
from kvrouter.frontend.settings import parse_options
from kvrouter.relay.request import without_root
from tests.frontend.clients import ask, connected, get
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.workers import OK, answer, says

ROOT = "/api/llm"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATHS = st.lists(st.sampled_from(["v1", "api", "llm", "", "a%2Fb"]), max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)


@given(PATHS, st.sampled_from(["", "?a=b", "?path=/api/llm/x"]), st.sampled_from(["", "/api", ROOT]))
def test_prefix_is_removed_once(path: str, query: str, root: str) -> None:
    """With the prefix a path is what it is without it; a path that only begins alike stays."""
    target = path + query

    assert target == without_root(root + target, root)
    assert "/apix" + target == without_root("/apix" + target, "/api")
    assert query == without_root(root + query, root)


@pytest.mark.parametrize("prefix", ["", ROOT])
async def test_routes(fleet_of: FleetOf, prefix: str) -> None:
    """Routes are found with the prefix and without it, on both ports; workers get no prefix."""
    async with fleet_of("--root-path", f"{ROOT}/", scripts=(OK,)) as fleet:
        requests = fleet.workers[0].requests
        for path, body in {
            "/v1/completions": BODY,
            "/v1/chat/completions?x=1": CHAT,
            "/v1/messages": {**CHAT, "max_tokens": 3},
            "/v1/embeddings": {"model": "m", "input": "hi"},
        }.items():
            for url in (fleet.url, fleet.frontend.admin_url):
                assert 200 == (await ask(url, body, path=prefix + path)).status
            assert requests[-1].head.startswith(b"POST %b HTTP/1.1\r\n" % path.encode())
        for path in ("/v1/models", "/v1/models/m", "/live", "/health", "/metrics"):
            assert 200 == (await get(fleet.url, prefix + path)).status
        for path in ("/workers", "/decisions", "/fleet", "/"):
            assert 200 == (await get(fleet.frontend.admin_url, prefix + path)).status
        chunked = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        async with connected(fleet.url) as client:  # not a plain head
            head = f"POST {prefix}/v1/completions HTTP/1.1\r\nhost: test\r\n"
            client.writer.write(head.encode() + chunked)
            assert b"prompt" in (await client.response()).body


async def test_errors_keep_their_form(fleet_of: FleetOf) -> None:
    """A client of Anthropic's API gets its own form of error under the prefix, too."""
    async with fleet_of("--root-path", ROOT, scripts=(says(answer(b"{}", 500)),)) as fleet:
        found = (await ask(fleet.url, {"model": "other"}, path=f"{ROOT}/v1/messages")).json

        assert "error" == found["type"]
        for path in ("/v1/nothing", "/api/v1/models", "/api/llmv1/models", f"{ROOT}{ROOT}/v1/models"):
            assert 404 == (await get(fleet.url, path)).status


async def test_openapi_names_it(fleet_of: FleetOf) -> None:
    """A client that is made from the document asks under the prefix; its paths have no prefix."""
    async with fleet_of("--root-path", ROOT, scripts=(OK,)) as fleet:
        for url in (fleet.url, fleet.frontend.admin_url):
            found = (await get(url, "/openapi.json")).json
            assert [{"url": ROOT}] == found["servers"]
            assert {"/v1/models", "/v1/completions"} <= found["paths"].keys()
            assert all(path.startswith("/") and not path.startswith(ROOT) for path in found["paths"])


async def test_dashboard(fleet_of: FleetOf) -> None:
    """The page and all it loads are found below the prefix; the prefix alone leads there."""
    async with fleet_of("--root-path", ROOT, scripts=(OK,)) as fleet:
        admin = fleet.frontend.admin_url
        moved = await get(admin, ROOT)
        assert 307 == moved.status
        page_path = urljoin(ROOT, moved.header("location"))
        page = (await get(admin, page_path)).body.decode()
        links = [link for link in re.findall(r'(?:href|src)="([^"]+)"', page) if ":" not in link]

        assert (f"{ROOT}/", 4) == (page_path, len(links))
        for link in links:
            assert 200 == (await get(admin, urljoin(page_path, link))).status


async def test_without_it(fleet_of: FleetOf) -> None:
    """Without the flag no prefix is removed, and the document names no server."""
    async with fleet_of(scripts=(OK,)) as fleet:
        assert 404 == (await ask(fleet.url, BODY, path="/api/v1/completions")).status
        assert "servers" not in (await get(fleet.url, "/openapi.json")).json


@pytest.mark.parametrize("text", ["/", "", "/a/"])
def test_last_slash(text: str) -> None:
    """A slash at the end says nothing."""
    assert text.rstrip("/") == parse_options(["--root-path", text]).root_path


@pytest.mark.parametrize(
    "text", ["api", "/a b", "/a?b", "/a//b", "/..", "/a/../b", "/a%20b", "/é", "http://x/a"]
)
def test_wrong_values(text: str) -> None:
    """Anything but plain segments is refused with what it may be."""
    with pytest.raises(ConfigError, match="must be a path of plain segments"):
        parse_options(["--root-path", text])


@pytest.mark.parametrize("path", sorted({path for _, path in _ROUTES} - {"/"}))
def test_own_paths(path: str) -> None:
    """A prefix that would hide a route ends the start."""
    first = "/" + path.split("/")[1]
    for root in {path.rstrip("/"), first} | ({f"{path}x"} if path.endswith("/") else set()):
        with pytest.raises(ConfigError, match="use another prefix"):
            check_root_path(root)
