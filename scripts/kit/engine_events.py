"""Records the fields of vLLM's and SGLang's KV events in tests/data/engine_events.json, from their wheels.

    python -m scripts.kit.engine_events FILE.whl …    shows what is new, and writes the file

Of vLLM also its KV connectors, and the hand-over parameters of the served ones. Tests compare this with
the structs of the agent's adapters and with kvrouter/connectors. The wheels are read, not installed or run.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

FILE = Path(__file__).resolve().parents[2] / "tests/data/engine_events.json"
MODULES = {"vllm": "vllm/distributed/kv_events.py", "sglang": "sglang/srt/disaggregation/kv_events.py"}
_BASES = frozenset({"KVCacheEvent", "EventBatch"})
CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
# What schedules NixlConnector's pull: the request's parameters are read here, and nowhere else.
NIXL = ("base_scheduler", "pull_scheduler", "metadata")
_PARAMETERS = frozenset({"params", "kv_transfer_params"})
Read: TypeAlias = Callable[[str], str]
"""The text of a file, by its path in the wheel."""


def fields_of(source: str) -> dict[str, list[str]]:
    """The fields of each event and of the batch, in their order."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        each.name: list(_own_fields(each))
        for each in classes
        if each.name in _BASES or {ast.unparse(base) for base in each.bases} & _BASES
    }


def _own_fields(made: ast.ClassDef) -> Iterator[str]:
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def hand_over_of(read: Read) -> dict[str, list[str]]:
    """The names of vLLM's connectors, and the parameters on each side of the served ones.

    `needs`: without one of them the decode engine fetches nothing.
    """
    factory = ast.parse(read(f"{CONNECTORS}/factory.py"))
    nixl = [node for name in NIXL for node in ast.walk(ast.parse(read(f"{CONNECTORS}/v1/nixl/{name}.py")))]
    example = ast.walk(ast.parse(read(f"{CONNECTORS}/v1/example_connector.py")))
    mooncake = list(ast.walk(ast.parse(read(f"{CONNECTORS}/v1/mooncake/mooncake_connector.py"))))
    return {
        "connectors": sorted(set(_registered(factory))),
        "nixl_answers": sorted({name for node in nixl for name in _answered(node)}),
        "nixl_needs": sorted({name for node in nixl for name in _needed(node)}),
        "nixl_reads": sorted({name for node in nixl for name in (*_read(node), *_needed(node))}),
        "mooncake_needs": sorted({name for node in mooncake for name in _needed(node)}),
        "mooncake_reads": sorted({name for node in mooncake for name in (*_read(node), *_needed(node))}),
        "example_reads": sorted({name for node in example for name in _read(node)}),
    }


def _registered(factory: ast.AST) -> Iterator[str]:
    for node in ast.walk(factory):
        match node:
            case ast.Call(func=ast.Attribute(attr="register_connector"), args=[ast.Constant(str(name)), *_]):
                yield name


def _answered(node: ast.AST) -> Iterator[str]:
    """Of `dict(do_remote_prefill=…)`."""
    match node:
        case ast.Call(func=ast.Name("dict"), keywords=[ast.keyword("do_remote_prefill"), *_] as named):
            yield from (each.arg for each in named if each.arg)


def _needed(node: ast.AST) -> Iterator[str]:
    """Of `all(p in params for p in (…))`."""
    match node:
        case ast.GeneratorExp(
            elt=ast.Compare(comparators=[ast.Name(name)]),
            generators=[ast.comprehension(iter=ast.Tuple(names))],
        ) if name in _PARAMETERS:
            yield from (ast.literal_eval(each) for each in names)


def _read(node: ast.AST) -> Iterator[str]:
    """Of `params.get(…)` and `params[…]`, without keys that the engine sets itself."""
    match node:
        case ast.Call(
            func=ast.Attribute(ast.Name(name), "get"), args=[ast.Constant(str(key)), *_]
        ) | ast.Subscript(ast.Name(name), ast.Constant(str(key)), ast.Load()) if (
            name in _PARAMETERS and not key.startswith("_")
        ):
            yield key


def recorded(wheel: Path) -> tuple[str, dict[str, object]]:
    """The engine's name, and its entry of the file."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as packed:

        def read(path: str) -> str:
            return packed.read(path).decode()

        entry: dict[str, object] = {"events": fields_of(read(MODULES[name]))}
        about = f"the classes of {MODULES[name]} in {wheel.name}"
        if name == "vllm":
            entry["hand_over"] = hand_over_of(read)
            about = f"the classes of {MODULES[name]}, and the names in {CONNECTORS}, in {wheel.name}"
    return name, {"version": version, "source": about, "licence": "Apache-2.0"} | entry


def main(wheels: list[str]) -> int:
    before = msgspec.json.decode(FILE.read_bytes()) if FILE.exists() else {}
    after = {**before, **dict(recorded(Path(wheel)) for wheel in wheels)}
    for name, part in ((name, part) for name in after for part in ("events", "hand_over")):
        for event, fields in after[name].get(part, {}).items():
            known = set(before.get(name, {}).get(part, {}).get(event, ()))
            sys.stdout.writelines(f"+ {name} {event}.{field}\n" for field in fields if field not in known)
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(after), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
