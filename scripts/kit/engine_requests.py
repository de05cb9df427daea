"""Records the fields of the engines' request models, as `tests/data/engine_requests.json` has them.

    python -m scripts.kit.engine_requests VLLM SGLANG

VLLM and SGLANG are folders with the unpacked wheels. Types of other packages become `Any`: a recorded model
accepts at least what the engine's own accepts. Tests build pydantic models of it (tests/bodies).
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

RECORDED = Path(__file__).parents[2] / "tests" / "data" / "engine_requests.json"
# Models by route; several: the engine takes what one of them accepts.
VLLM = {
    "/v1/chat/completions": ["ChatCompletionRequest"],
    "/v1/completions": ["CompletionRequest"],
    "/v1/messages": ["AnthropicMessagesRequest"],
    "/v1/responses": ["ResponsesRequest"],
    "/v1/embeddings": ["EmbeddingCompletionRequest", "EmbeddingChatRequest"],
}
SGLANG = {**VLLM, "/v1/embeddings": ["EmbeddingRequest"]}
SOURCES = {"vllm": ("vllm/entrypoints", VLLM), "sglang": ("sglang/srt/entrypoints", SGLANG)}
LICENCE = "Apache-2.0"
_KNOWN = {"str", "int", "float", "bool", "bytes", "dict", "list", "object", "None", "Any"}
_TYPING = {"Optional": "Optional", "Union": "Union", "Dict": "dict", "List": "list", "Literal": "Literal"}
_LIMITS = {"ge", "le", "gt", "lt", "min_length", "max_length"}


def record(folders: Mapping[str, Path]) -> str:
    """The text of the file, from the folders of the unpacked wheels."""
    engines = {}
    for engine, folder in folders.items():
        below, routes = SOURCES[engine]
        classes = _classes(folder / below)
        (version,) = [found.name for found in folder.glob(f"{engine}-*.dist-info")]
        engines[engine] = {
            "source": f"{version.removesuffix('.dist-info')}: {below}/**/protocol.py",
            "licence": LICENCE,
            "models": {
                route: [dict(_fields(name, classes)) for name in names] for route, names in routes.items()
            },
        }
    return json.dumps(engines, indent=1) + "\n"


def _classes(folder: Path) -> dict[str, ast.ClassDef]:
    """The classes of all files with protocols. Of two with one name the last counts: see the paths' order."""
    found = {}
    for path in sorted(folder.rglob("protocol.py"), key=lambda path: -len(path.parts)):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
    return found


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[tuple[str, dict[str, object]]]:
    """Name, type, limits and presence of each field, the bases' fields first."""
    node = classes.get(name)
    if node is None:
        return
    for base in reversed(node.bases):
        if isinstance(base, ast.Name):
            yield from _fields(base.id, classes)
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if line.target.id.startswith("_") or line.target.id in {"model_config", "field_names"}:
            continue
        yield line.target.id, {"type": _type(line.annotation), **_given(line.value)}


def _given(value: ast.expr | None) -> dict[str, object]:
    is_field = isinstance(value, ast.Call) and ast.unparse(value.func) == "Field"
    call = value if isinstance(value, ast.Call) and is_field else None
    names = {keyword.arg for keyword in call.keywords} if call else set()
    has_default = call is None or bool(call.args) or not names.isdisjoint({"default", "default_factory"})
    limits = _limits(value) if is_field and value is not None else {}
    return {**limits, **({} if value is not None and has_default else {"required": True})}


def _limits(node: ast.expr) -> dict[str, object]:
    """Limits that are numbers; for others, the recorded model accepts more."""
    found: dict[str, object] = {}
    for call in ast.walk(node):
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg in _LIMITS and isinstance(keyword.value, ast.Constant):
                found[keyword.arg] = keyword.value.value
    return found


def _type(node: ast.expr) -> str:  # noqa: PLR0911 - a case for each form
    match node:
        case ast.Constant(value=None):
            return "None"
        case ast.Name(id=name):
            return _TYPING.get(name, name if name in _KNOWN else "Any")
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_type(left)} | {_type(right)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return _type(kind)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return ast.unparse(node)
        case ast.Subscript(value=outer, slice=ast.Tuple(elts=parts)):
            return f"{_type(outer)}[{', '.join(map(_type, parts))}]"
        case ast.Subscript(value=outer, slice=part):
            return "Any" if _type(outer) == "Any" else f"{_type(outer)}[{_type(part)}]"
    return "Any"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("sglang", type=Path)
    folders = parser.parse_args()
    RECORDED.write_text(record({"vllm": folders.vllm, "sglang": folders.sglang}))


if __name__ == "__main__":
    main()
