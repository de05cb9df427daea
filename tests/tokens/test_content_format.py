from __future__ import annotations

import jinja2
import pytest

from kvrouter.tokens.content_format import wants_parts

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
    "messages kept in a namespace": (
        "{% set ns = namespace(m=1) %}{% set ns.m = messages[1:] %}"
        "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS)
def test_parts(text: str) -> None:
    """A template that loops over a message's content receives parts, as with vLLM 0.32."""
    assert wants_parts(jinja2.Environment().parse(text))


@pytest.mark.parametrize("text", STRING.values(), ids=STRING)
def test_string(text: str) -> None:
    """All other templates receive strings, also if vLLM 0.32 cannot classify them."""
    assert not wants_parts(jinja2.Environment().parse(text))
