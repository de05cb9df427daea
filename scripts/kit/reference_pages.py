"""Writes the pages of docs/reference but http.md, and the tables of docs/metrics.md, from the code."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec

from kvrouter import errors
from kvrouter.core.wire import heartbeats, ops, values
from kvrouter.telemetry.catalog import SECTIONS, Metric
from scripts.kit.settings_page import MADE, settings_page

FOLDER = Path(__file__).resolve().parents[2] / "docs/reference"
MOST_CHOICES = 3  # the union of all ops has more
_FORMS = {
    "`/v1/messages`": """Anthropic's: `{"type": "error", "error": {"type": "not_found_error", \
"message": "…"}, "request_id": "…"}`, and the header `request-id`, which its packages read""",
    "`/cohere`": """Cohere's: `{"message": "…", "id": "…"}`""",
    "`/v2`, `/v1/rerank`": """both Cohere's and OpenAI's: `{"message": "…", "id": "…", "error": {…}}`""",
    "`/api/chat`, `/api/generate`, `/api/show`, `/api/tags`": """Ollama's: `{"error": "…"}`""",
    "all others": """OpenAI's: `{"error": {"message": "…", "type": "NotFoundError", "param": null, \
"code": 404}}`""",
}
_ERRORS = f"""\
Which errors there are, and which status a client gets. An error of kvrouter itself has the form of the API
whose path the client used.

| path, and all below it | form |
|---|---|
{"".join(f"| {path} | {form} |{chr(10)}" for path, form in _FORMS.items())}
A stream that has begun ends with the API's own error event. `message` has the wrong value and the remedy.
A 503 has a `Retry-After` header: the client may retry. Errors of an engine are passed on with their status
and body. Errors with status *none* never answer a request. The access log and `kvrouter_requests_total`
count all of them. In Python they are in `kvrouter.errors`; all derive from `KvRouterError`."""
_WIRE = """\
What travels over NATS, field by field, for those who write another sender or reader. All of it is
MessagePack. Which subject carries what, and the order of things, is in [Design:
Wire](../concepts/design.md#wire); what happens to a message that breaks these rules is in
[Reliability](../reliability.md#what-a-damaged-or-forged-message-can-do).

A structure with a code is an array that begins with the code; one without is an array of its fields,
except the card and a replica's traffic, which are maps. Readers skip unknown codes and further fields.
Hashes (`bytes`) are packed little-endian u64. `=` names the default of a field."""


def errors_page() -> str:
    """Return the table of all errors, from the most general on."""
    found = [
        one
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.KvRouterError) and one is not errors.KvRouterError
    ]
    found.sort(key=lambda one: (one.status, inspect.getsourcelines(one)[1]))
    rows = [_error(one) for one in found]
    head = "| status | `type` | class | situation |\n|---|---|---|---|"
    return "\n\n".join(["# Errors", MADE, _ERRORS, "\n".join([head, *rows])]) + "\n"


def _error(one: type[errors.KvRouterError]) -> str:
    status = "none" if one.status == errors.KvRouterError.status else str(one.status)
    closes = " Closes the connection." if one.is_body_left else ""
    return f"| {status} | `{one.type}` | `{one.__name__}` | {_first_line(one)}{closes} |"


def wire_page() -> str:
    """Return every structure with its fields."""
    parts = []
    for title, module in (("Ops, frames and repair", ops), ("Heartbeats and cards", heartbeats)):
        parts.append(f"## {title}")
        parts += [_structure(one) for one in _structures(module)]
    used = set(re.findall(r"\w+", " ".join(parts)))
    rows = [f"| {name} | {_spelled(kind)} |" for kind, name in _VALUES.items() if name in used]
    table = "\n".join(["| value | is |", "|---|---|", *rows])
    return "\n\n".join(["# Wire", MADE, _WIRE, table, *parts]) + "\n"


def _structures(module: ModuleType) -> Iterator[type[msgspec.Struct]]:
    own = [
        one
        for name, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, msgspec.Struct)
        and one.__module__ == module.__name__
        and not name.startswith("_")
        and one not in (ops.PartialChunk, ops.Decoded)
    ]
    yield from sorted(own, key=lambda one: inspect.getsourcelines(one)[1])


def _structure(one: type[msgspec.Struct]) -> str:
    tag = one.__struct_config__.tag
    code = f", code {tag}" if tag is not None else ""
    text = inspect.cleandoc(one.__doc__ or "").replace("\n", " ").replace("  ", " ")
    head = f"### {one.__name__}{code}"
    fields = [
        f"- `{field.encode_name}`: {_kind(field.type)}{_default(field)}"
        for field in msgspec.structs.fields(one)
    ]
    return "\n\n".join(filter(None, (head, text, "\n".join(fields))))


# The values that core/wire names, such as Amount: the page spells each out once.
_VALUES = {kind: name for name, kind in vars(values).items() if hasattr(kind, "__metadata__")}
_NAMES = {str: "text", int: "integer", float: "float", bool: "bool", bytes: "bytes", type(None): "nil"}


def _kind(kind: typing.Any) -> str:
    """Return a type as a reader of another language knows it: its name in core/wire, else its range."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if hasattr(kind, "__metadata__"):
        return _VALUES.get(kind) or _spelled(kind)
    if origin in (list, tuple):
        return f"array of {_kind(arguments[0])}"
    if origin is dict:
        return f"map of {_kind(arguments[0])} to {_kind(arguments[1])}"
    if len(arguments) > MOST_CHOICES:
        return "op"
    if arguments:
        return " or ".join(_kind(one) for one in arguments)
    return _NAMES.get(kind) or str(getattr(kind, "__name__", kind))


def _spelled(kind: typing.Any) -> str:
    return _kind(typing.get_args(kind)[0]) + _limits(kind.__metadata__)


def _limits(metadata: tuple[object, ...]) -> str:
    texts = []
    for meta in metadata:
        if not isinstance(meta, msgspec.Meta):
            continue
        low, high = meta.ge, meta.le
        if meta.lt is not None:
            high = int(meta.lt) - 1
        if low is not None or high is not None:
            texts.append(f"{_number(low)} to {_number(high)}" if high is not None else f"from {_number(low)}")
        if meta.max_length is not None:
            texts.append(f"at most {meta.max_length:,}")
        if meta.pattern is not None:
            texts.append(f"`{meta.pattern}`".replace("|", "\\|"))
    return f" ({', '.join(texts)})" if texts else ""


def _number(value: float | None) -> str:
    if value is None:
        return "…"  # no lower bound
    if isinstance(value, int) and value > 2**32 and not value & (value - 1):
        return f"2^{value.bit_length() - 1}"
    return f"{value:,}" if abs(value) < 2**32 else f"{value:g}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f" = `{field.default!r}`" if field.default is not None else " = nil"
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = `{field.default_factory()!r}`"
    return ""


def _first_line(one: type) -> str:
    return re.split(r"\n\s*\n", inspect.cleandoc(one.__doc__ or ""))[0].replace("\n", " ")


def metrics_page(page: str) -> str:
    """Return the page with its tables as in the catalog. Raises ValueError for a section without one."""
    for title, metrics in SECTIONS.items():
        rows = [_metric(name, metric) for name, metric in metrics.items()]
        table = "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows])
        before, heading, section = page.partition(f"\n## {title}\n")
        lead, head, rest = section.partition("\n| metric |")
        if not head or "\n## " in lead:
            raise ValueError(f"docs/metrics.md: no table below '{title}'")
        _, _, after = rest.partition("\n\n")
        page = f"{before}{heading}{lead}\n{table}\n\n{after}"
    return page


def _metric(name: str, metric: Metric) -> str:
    labels = "".join(f" `{label}`," for label in metric.labels).removesuffix(",")
    see = f" ([{metric.see.rpartition('/')[2].partition('#')[0]}]({metric.see}))" if metric.see else ""
    return f"| `{name}` | {metric.kind} |{labels} | {metric.text}{see} |"


def pages() -> dict[Path, str]:
    metrics = FOLDER.parent / "metrics.md"
    return {
        FOLDER / "errors.md": errors_page(),
        FOLDER / "settings.md": settings_page(),
        FOLDER / "wire.md": wire_page(),
        metrics: metrics_page(metrics.read_text()),
    }


def main() -> int:
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
