from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from kvrouter.tokens.content_format import wants_parts

# Written by scripts/kit/content_formats.py.
RECORDED = json.loads((Path(__file__).parents[1] / "data/content_formats.json").read_text())

PARTS = {
    "loop over content": "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}",
    "by item": "{% for m in messages %}{% for part in m['content'] %}{% endfor %}{% endfor %}",
    "through a filter": "{% for m in messages %}{% for part in m.content | list %}{% endfor %}{% endfor %}",
    "renamed messages": (
        "{% set rest = messages[1:] %}{% set all = rest %}"
        "{% for m in all %}{% for part in m.content %}{% endfor %}{% endfor %}"
    ),
    "variable named content": (
        "{% for m in messages %}{% set content = m.content %}"
        "{% for part in content %}{% endfor %}{% endfor %}"
    ),
    "macro": (
        "{% macro show(n, body) %}{% for part in body %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(1, m.content) }}{% endfor %}"
    ),
    "messages kept in a namespace": (
        "{% set ns = namespace(m=1) %}{% set ns.m = messages[1:] %}"
        "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
    ),
    "messages looped over in a namespace": (
        "{% set ns = namespace(rest=messages) %}{% set more = ns.rest[1:] %}"
        "{% for m in more %}{% for part in m.content %}{% endfor %}{% endfor %}"
    ),
    "macro by keyword": (
        "{% macro show(n, body) %}{% for part in body %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(1, body=m['content']) }}{% endfor %}"
    ),
}
STRING = {
    "printed": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "loop over something else": "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
    "content of something else": "{% for m in messages %}{% for c in tool.content %}{% endfor %}{% endfor %}",
    "macro given something else": (
        "{% macro show(content) %}{% for part in content %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show([1]) }}{% endfor %}"
    ),
    "parts unpacked": "{% for m in messages %}{% for k, v in m.content %}{% endfor %}{% endfor %}",
    "messages kept in a list": (
        "{% set kept = [messages] %}{% for m in kept[0] %}{% for part in m.content %}{% endfor %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS)
def test_parts(text: str) -> None:
    """A template that loops over a message's content receives parts, as with vLLM 0.33."""
    assert wants_parts(jinja2.Environment().parse(text))


@pytest.mark.parametrize("text", STRING.values(), ids=STRING)
def test_string(text: str) -> None:
    """All other templates receive strings, also if vLLM cannot classify them."""
    assert not wants_parts(jinja2.Environment().parse(text))


@pytest.mark.parametrize("name", [name for name in PARTS if "in a namespace" in name])
def test_namespaces_before_033(name: str) -> None:
    """By the rule of vLLM 0.32, messages in a namespace make it use strings."""
    assert not wants_parts(jinja2.Environment().parse(PARTS[name]), follows_namespaces=False)


@pytest.mark.parametrize("version", RECORDED)
def test_recorded(version: str) -> None:
    """Random templates are read as each version of vLLM reads them."""
    read = {
        template: wants_parts(
            jinja2.Environment().parse(template), follows_namespaces=not version.startswith("0.32.")
        )
        for template in RECORDED[version]["wants_parts"]
    }

    assert RECORDED[version]["wants_parts"] == read
