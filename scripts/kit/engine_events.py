"""Records the fields of vLLM's and SGLang's KV events in tests/data/engine_events.json, from their wheels.

    python -m scripts.kit.engine_events FILE.whl …    shows what is new, and writes the file

A test compares them with the structs of the agent's adapters. The wheels are read, not installed or run.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

FILE = Path(__file__).resolve().parents[2] / "tests/data/engine_events.json"
MODULES = {"vllm": "vllm/distributed/kv_events.py", "sglang": "sglang/srt/disaggregation/kv_events.py"}
_BASES = frozenset({"KVCacheEvent", "EventBatch"})


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


def recorded(wheel: Path) -> tuple[str, dict[str, object]]:
    """The engine's name, and its entry of the file."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as packed:
        source = packed.read(MODULES[name]).decode()
    about = f"the classes of {MODULES[name]} in {wheel.name}"
    return name, {"version": version, "source": about, "licence": "Apache-2.0", "events": fields_of(source)}


def main(wheels: list[str]) -> int:
    before = msgspec.json.decode(FILE.read_bytes()) if FILE.exists() else {}
    after = {**before, **dict(recorded(Path(wheel)) for wheel in wheels)}
    for name, entry in after.items():
        for event, fields in entry["events"].items():
            known = set(before.get(name, {}).get("events", {}).get(event, ()))
            sys.stdout.writelines(f"+ {name} {event}.{field}\n" for field in fields if field not in known)
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(after), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
