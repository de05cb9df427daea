"""Records the HTTP routes of vLLM and SGLang in tests/data/engine_routes.json, from their wheels.

    python -m scripts.kit.engine_routes FILE.whl …    shows what is new, and writes the file

A test compares the routes of kvrouter/frontend/requests/engine_routes.py with the file. The wheels are read,
not installed or run: decorators (`@router.post(…)`), `add_api_route` and mounts of each engine's server.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

FILE = Path(__file__).resolve().parents[2] / "tests/data/engine_routes.json"
_METHODS = frozenset({"get", "post", "put", "delete", "patch", "head", "options", "websocket"})
# FastAPI adds them to each application.
_OF_FASTAPI = ("/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc")


class Server(NamedTuple):
    """The modules that make an engine's HTTP server, and those among them that are other programs."""

    parts: tuple[str, ...]
    without: tuple[str, ...] = ()


# Not read: servers between the parts of one engine (SGLang's bootstrap and encoder, vLLM's supervisor).
SERVERS = {
    "vllm": Server(
        ("vllm/entrypoints/",),
        ("vllm/entrypoints/launchers/dp_supervisor.py", "vllm/entrypoints/cli/preload.py"),
    ),
    "sglang": Server(
        (
            "sglang/srt/entrypoints/",
            "sglang/srt/utils/common.py",
            "sglang/multimodal_gen/runtime/entrypoints/",
        ),
        ("sglang/srt/entrypoints/engine_info_bootstrap_server.py",),
    ),
}


def routes_of(sources: Mapping[str, str]) -> list[str]:
    """`METHOD /path` of each route in these modules, by name; a parameter is `{}`."""
    found = {f"GET {path}" for path in _OF_FASTAPI}
    for name, source in sources.items():
        try:
            found |= set(_Module(ast.parse(source)).routes())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return sorted(found, key=lambda route: route.split()[::-1])


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._values = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def routes(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute):
                        yield from self._decorated(decorator, decorator.func)
            elif isinstance(node, ast.Call) and node.args:
                yield from self._called(node)

    def _decorated(self, call: ast.Call, made_by: ast.Attribute) -> Iterator[str]:
        if made_by.attr in _METHODS or made_by.attr == "api_route":
            path = self._prefix(made_by.value) + self._path(call.args[0])
            for method in self._methods(call) if made_by.attr == "api_route" else [made_by.attr]:
                if path:
                    yield f"{method.upper()} {path}"

    def _called(self, call: ast.Call) -> Iterator[str]:
        """Routes that are added without a decorator, and mounted applications."""
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in {"Mount", "mount"} and isinstance(call.args[0], ast.Constant):
            yield f"GET {self._path(call.args[0])}"
        elif name == "add_api_route" and isinstance(call.args[0], ast.Constant):
            for method in self._methods(call):
                yield f"{method} {self._path(call.args[0])}"

    def _methods(self, call: ast.Call) -> list[str]:
        given = next((word.value for word in call.keywords if word.arg == "methods"), None)
        return ast.literal_eval(given) if given is not None else ["GET"]

    def _prefix(self, router: ast.expr) -> str:
        made = self._values.get(router.id) if isinstance(router, ast.Name) else None
        words = made.keywords if isinstance(made, ast.Call) else []
        return next((ast.literal_eval(word.value) for word in words if word.arg == "prefix"), "")

    def _path(self, given: ast.expr) -> str:
        """The text of a path; the default of a path that an environment variable may change."""
        if isinstance(given, ast.Name) and given.id in self._values:
            return self._path(self._values[given.id])
        if isinstance(given, ast.Constant):
            return re.sub(r"{[^}]*}", "{}", str(given.value))
        if isinstance(given, ast.Call) and ast.unparse(given.func) == "os.environ.get":
            return self._path(given.args[1]) if len(given.args) > 1 else ""
        if ast.unparse(given) == "app.swagger_ui_oauth2_redirect_url":
            return "/docs/oauth2-redirect"
        raise ValueError(f"the path of a route is not a constant: {ast.unparse(given)}")


def recorded(wheel: Path) -> tuple[str, dict[str, object]]:
    """The engine's name, and its entry of the file."""
    name, version = wheel.name.split("-")[:2]
    server = SERVERS[name]
    with zipfile.ZipFile(wheel) as packed:
        sources = {
            one: packed.read(one).decode()
            for one in packed.namelist()
            if one.endswith(".py") and one.startswith(server.parts) and one not in server.without
        }
    source = f"the decorators of {', '.join(server.parts)} in {wheel.name}"
    return name, {"version": version, "source": source, "licence": "Apache-2.0", "routes": routes_of(sources)}


def main(wheels: list[str]) -> int:
    before = msgspec.json.decode(FILE.read_bytes()) if FILE.exists() else {}
    after = {**before, **dict(recorded(Path(wheel)) for wheel in wheels)}
    for name, entry in after.items():
        old, new = set(before.get(name, {}).get("routes", ())), set(entry["routes"])
        sys.stdout.writelines(f"+ {name} {route}\n" for route in sorted(new - old))
        sys.stdout.writelines(f"- {name} {route}\n" for route in sorted(old - new))
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(after), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
