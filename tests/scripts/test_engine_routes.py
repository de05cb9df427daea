"""The routes of an engine, as `python -m scripts.kit.engine_routes` finds them in its wheel."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import msgspec
import pytest

from scripts.kit import engine_routes
from scripts.kit.engine_routes import main, recorded, routes_of

SOURCE = """
router = APIRouter(prefix="/v1/images")
bare = APIRouter()
VERTEX = os.environ.get("ROUTE", "/vertex")

@router.post("/edits", dependencies=[1])
@bare.get(VERTEX)
async def edit(): ...

@bare.websocket("/live")
@app.api_route("/{name:path}/x", methods=["PUT", "POST"])
@bare.get(os.environ.get("NOT_SET"))
@cache.get
def put(): ...

bare.add_api_route("/plain", put)
app.mount("/static", files)
Mount("/metrics", app)
session.mount(other, adapter)
"""
FOUND = {
    "POST /v1/images/edits",
    "GET /vertex",
    "WEBSOCKET /live",
    "PUT /{}/x",
    "POST /{}/x",
    "GET /plain",
    "GET /static",
    "GET /metrics",
}


def wheel_with(folder: Path, source: str) -> Path:
    wheel = folder / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("vllm/entrypoints/api.py", source)
        packed.writestr("vllm/entrypoints/cli/preload.py", '@app.get("/other")\ndef other(): ...')
        packed.writestr("vllm/model.py", '@app.get("/other")\ndef other(): ...')
    return wheel


def test_found() -> None:
    """Decorators, added and mounted routes; with the prefix of a router and the default of a variable."""
    found = set(routes_of({"a.py": SOURCE}))

    assert FOUND <= found
    assert {"/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc"} == {
        route.split()[1] for route in found - FOUND
    }


def test_unknown_form() -> None:
    """A path that is computed is an error, not a route that is forgotten."""
    with pytest.raises(ValueError, match=r"a\.py: the path of a route is not a constant: '/' \+ name"):
        routes_of({"a.py": "@app.get('/' + name)\ndef get(): ..."})


def test_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The difference is shown, and the file written; entries of other engines stay."""
    file = tmp_path / "routes.json"
    old = {"vllm": {"routes": ["GET /gone"]}, "other": {"routes": ["GET /kept"]}}
    file.write_bytes(msgspec.json.encode(old))
    monkeypatch.setattr(engine_routes, "FILE", file)

    assert 0 == main([str(wheel_with(tmp_path, '@app.get("/new")\ndef get(): ...'))])

    shown = capsys.readouterr().out.splitlines()
    assert {"+ vllm GET /new", "- vllm GET /gone"} <= set(shown)
    written = msgspec.json.decode(file.read_bytes())
    assert ("9.9.9", old["other"]) == (written["vllm"]["version"], written["other"])
    assert "GET /other" not in written["vllm"]["routes"]


@pytest.mark.skipif("KVROUTER_ENGINE_WHEELS" not in os.environ, reason="KVROUTER_ENGINE_WHEELS=FILE.whl:…")
def test_the_record_is_that_of_the_wheels() -> None:
    """The file in tests/data is what the wheels have."""
    kept = msgspec.json.decode(engine_routes.FILE.read_bytes())

    for wheel in os.environ["KVROUTER_ENGINE_WHEELS"].split(":"):
        name, entry = recorded(Path(wheel))
        assert kept[name] == entry
