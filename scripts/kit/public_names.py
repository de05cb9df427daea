"""Lists what users rely on by name, one name a line: `python -m scripts.kit.public_names`.

    kvrouter, docs/metrics.md ─────────────────────> commands, metrics, errors, library, wire
    two replicas and a mocker ──/openapi.json──────> routes, fields of answers with a type
                              ──answers────────────> fields of the others

    command frontend --port                     a flag; its variables and choices stand behind it
    json GET /workers targets lag               a field of an answer with status 200
    python kvrouter KvRouter best_worker        a member; its parameters stand behind it

The last word of a line is the name, the words before it are the line of its owner. scripts/release stores the
list in tests/upgrade/public_names.txt; tests/upgrade/test_public_names.py compares it with this checkout.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

import kvrouter
from kvrouter import errors
from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire import heartbeats, ops
from kvrouter.observe.verify.comparison import Report
from kvrouter.settings.commands import MODULES, command_named
from scripts.kit.deployment import SETTLE_TIMEOUT_S, Deployment, Plan, open_stage
from scripts.kit.http_client import Client

LIBRARIES = ("kvrouter", "kvrouter.compat.dynamo", "kvrouter.compat.ray")
_PACKAGE = Path(kvrouter.__file__).parent
_EXIT_CODE = re.compile(r"(?:Exit code|;) (\d)")
_FIELD = re.compile(r"[a-z][a-z_]*")
_JSON = {"application/json", "application/x-ndjson"}
_REQUESTS = 4  # the second one finds the blocks of the first
_REQUEST = {"model": "mock", "prompt": "Hello " * 99, "max_tokens": 2}


def named_in_code() -> set[str]:
    """All but routes and what their answers hold."""
    return {*_commands(), *_metrics(), *_errors(), *_library(), *_wire(), *_headers(), *_reports()}


def _commands() -> Iterator[str]:
    for name in MODULES:
        command = command_named(name)
        yield f"command {name}"
        yield from (f"command {name} exit {code}" for code in re.findall(_EXIT_CODE, command.summary))
        for one in command.declared():
            if not one.setting.is_hidden:
                yield from (f"command {name} {spelling}" for spelling in one.spellings)
                for spelling in (one.flag, *one.setting.old):
                    for word in filter(None, (one.variable, one.setting.variable, *one.choices)):
                        yield f"command {name} {spelling} {word}"


def _metrics() -> Iterator[str]:
    """The metrics of the page, which a test compares with the code."""
    page = (_PACKAGE.parent / "docs/metrics.md").read_text()
    for name, labels in re.findall(r"^\| `(kvrouter_\w+)` \| \w+ \|([^|]*)\|", page, re.MULTILINE):
        yield f"metric {name}"
        yield from (f"metric {name} {label}" for label in re.findall(r"`(\w+)`", labels))


def _errors() -> Iterator[str]:
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.KvRouterError):
            named = f"python kvrouter.errors {name}"
            yield from (named, f"{named} {kind.status}", f"{named} {kind.type}")


def _library() -> Iterator[str]:
    for module in LIBRARIES:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            yield f"python {module} {name}"
            yield from (f"python {module} {name} {parameter}" for parameter in _parameters(value))
            for base in inspect.getmro(value) if inspect.isclass(value) else ():
                if base.__module__.startswith("kvrouter"):
                    yield from _members(f"python {module} {name}", base)


def _members(owner: str, kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        if not name.startswith("_"):
            yield f"{owner} {name}"
            function = getattr(value, "__func__", value)
            yield from (f"{owner} {name} {parameter}" for parameter in _parameters(function))


def _parameters(value: object) -> list[str]:
    if inspect.isclass(value) and issubclass(value, msgspec.Struct):
        return [*value.__struct_fields__]  # inspect evaluates the annotations, where a field may hide a type
    if inspect.isclass(value) and value.__init__ is not object.__init__:
        value = value.__init__  # Python 3.11.2 takes `__new__` instead, wherever that is defined
    try:
        found = inspect.signature(value).parameters.values() if callable(value) else ()
    except ValueError:  # some classes of the standard library have no signature
        return []
    named = (one.name for one in found if one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD})
    return [name for name in named if name != "self" and not name.startswith("_")]


def _wire() -> Iterator[str]:
    for name, kind in {**vars(ops), **vars(heartbeats)}.items():
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and not name.startswith("_"):
            yield f"wire {name}"
            yield from (f"wire {name} {one.encode_name}" for one in msgspec.structs.fields(kind))
    subjects = Subjects("NAMESPACE")
    yield from (f"subject {value}" for name, value in vars(subjects).items() if name in {"hello", "live"})
    for name, function in inspect.getmembers(Subjects, inspect.isfunction):
        parameters = _parameters(function)
        if not name.startswith("_") and not {"feed", "subject"} & {*parameters}:
            yield f"subject {function(subjects, *(f'<{parameter}>' for parameter in parameters))}"


def _headers() -> Iterator[str]:
    """Names that end a text, or stand before a value."""
    named = re.compile(r'(?<![\w-])(x-kvrouter-[a-z-]*[a-z])(?:"|: {)')
    for path in _PACKAGE.rglob("*.py"):
        yield from (f"header {name}" for name in named.findall(path.read_text()))


def _reports() -> Iterator[str]:
    """The keys in the functions that make the `--json` of commands."""
    yield from (f"report verify {field.name}" for field in dataclasses.fields(Report))
    for path in _PACKAGE.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "as_json(" in source else ():
            if isinstance(node, ast.FunctionDef) and node.name.strip("_") == "as_json":
                keys = (key for one in ast.walk(node) if isinstance(one, ast.Dict) for key in one.keys)
                names = (key.value for key in keys if isinstance(key, ast.Constant))
                yield from (f"report {path.parent.name} {name!s}" for name in names)


@contextlib.asynccontextmanager
async def small_fleet(folder: Path) -> AsyncIterator[tuple[Deployment, Client]]:
    """Two replicas, which have compared their token ids with an engine's.

    The engine states its speed, so that decisions compare seconds from the first one on.
    """
    async with open_stage(folder) as stage:
        flags = {0: ["--prefill-tokens-per-s=8000"]}
        deployed = await stage.deploy(Plan("kv", stage.model_path, engines=1, agent_flags=flags))
        await _until_compared(deployed, stage.client)
        yield deployed, stage.client
        await asyncio.gather(*(process.kill() for process in stage.fleet.processes.values()))  # at once


async def _until_compared(deployed: Deployment, client: Client) -> None:
    async with asyncio.timeout(SETTLE_TIMEOUT_S):
        while True:
            view = await client.get_json(f"{deployed.replicas[0].admin_url}/workers")
            if view["tokens"]["compared"]:
                return
            await asyncio.sleep(0.05)


async def served(deployed: Deployment, client: Client) -> set[str]:
    """The routes of a replica, and the names in what it takes and answers now."""
    url, admin_url = deployed.replicas[0].url, deployed.replicas[0].admin_url
    for _ in range(_REQUESTS):
        await client.post_json(f"{url}/v1/completions", json.dumps(_REQUEST).encode())
    found = {*_described(await client.get_json(f"{url}/openapi.json"), "clients")}
    found |= {*_described(await client.get_json(f"{admin_url}/openapi.json"), "admin")}
    (decision,) = (await client.get_json(f"{admin_url}/decisions?limit=1"))["decisions"]
    worker_id = decision["winner"].rpartition("/")[0]
    for path in re.findall(r"^json GET (?!/openapi)(\S+)$", "\n".join(found), re.MULTILINE):
        status, body = await client.get(f"{admin_url}{path.format(worker_id=worker_id, **decision)}")
        answers = [json.loads(answer) for answer in body.splitlines() if status == 200]
        found |= {f"json GET {path} {name}" for name in fields(answers)}
    for weight in ("auto", 1):
        request = json.dumps(_REQUEST | {"kvrouter": {"overlap_weight": weight}}).encode()
        answer = await client.post_json(f"{admin_url}/v1/route", request)
        found |= {f"json POST /v1/route {name}" for name in fields(answer)}
    return found


def fields(value: Any) -> Iterator[str]:
    """The names in an answer, behind the names that contain them. A name that is data is a `*`."""
    if isinstance(value, list):
        for item in value:
            yield from fields(item)
    elif isinstance(value, dict):
        for key, inner in value.items():
            word = key if _FIELD.fullmatch(key) else "*"
            yield from (word, *(f"{word} {name}" for name in fields(inner)))


def _described(document: Mapping[str, Any], port: str) -> Iterator[str]:
    """The routes of an OpenAPI document, and the fields of its types."""
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            route = f"{method.upper()} {path}"
            yield f"http {port} {route}"
            yield from (f"http {port} {route} {given['name']}" for given in one.get("parameters", ()))
            for kind, body in (("body", one.get("requestBody", {})), ("json", one["responses"]["200"])):
                contents = body.get("content", {})
                if _JSON & {*contents} and one["tags"] != ["engines"]:
                    yield f"{kind} {route}"
                    for content in contents.values():
                        yield from (f"{kind} {route} {name}" for name in _typed(content["schema"], document))


def _typed(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """The names in what a schema describes. None of ours holds itself."""
    parts = [*schema.get("anyOf", ()), *schema.get("prefixItems", ()), schema.get("items") or {}]
    if "$ref" in schema:
        parts.append(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    for part in filter(None, parts):
        yield from _typed(part, document)
    properties = dict(schema.get("properties", {}))
    if isinstance(values := schema.get("additionalProperties"), dict):
        properties["*"] = values
    for word, part in properties.items():
        yield from (word, *(f"{word} {name}" for name in _typed(part, document)))


async def all_names() -> set[str]:
    """The names in the code, and the names that a small fleet serves."""
    with tempfile.TemporaryDirectory() as folder:
        async with small_fleet(Path(folder)) as (deployed, client):
            return named_in_code() | await served(deployed, client)


def main() -> int:
    sys.stdout.writelines(f"{line}\n" for line in sorted(asyncio.run(all_names())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
