"""Hostile templates: each ends soon, with its reason, and takes little memory."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.tokens.template import MOST_TEMPLATE_BYTES, ChatTemplate
from kvrouter.tokens.template_limits import TemplateLimitError

CHAT = [{"role": "user", "content": "hello"}]

GROWS = "{%% set s = namespace(t=%s) %%}{%% for a in range(60) %%}{%% set s.t = s.t %s s.t %%}{%% endfor %%}"
HOSTILE = {
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "many prints": "{% for a in range(99999) %}{{ a }}{{ a }}{{ a }}{% endfor %}",
    "calls that double": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "filters in loops": "{% for a in range(99999) %}{% set b = range(99999)|list %}{% endfor %}",
    "generators": "{% for a in range(999) %}{% for b in range(9999)|map('string') %}{% endfor %}{% endfor %}",
    "times": "{{ 'x' * 10**10 }}",
    "times, the other way round": "{% set n = 10**10 %}{{ n * 'x' }}{{ n * [1] }}",
    "joined again and again": GROWS % ("'x'", "~"),
    "added again and again": GROWS % ("'x'", "+"),
    "lists added": GROWS % ("[1]", "+"),
    "squares": GROWS % ("99", "*"),
    "powers": "{{ 10 ** (10 ** 10) }}",
    "padding by filter": "{% set n = 10**10 %}{{ messages[0].content|center(n) }}",
    "padding by method": "{% set n = 10**10 %}{{ messages[0].content.ljust(n) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format by filter": "{{ '%10000000000d'|format(messages|length) }}",
    "a wide format by method": "{{ '{:10000000000}'.format(messages|length) }}",
    "replaced by much": "{% set s = 'x' * 10**6 %}{{ s.replace('x', s) }}",
    "replaced by much by filter": "{% set s = 'x' * 10**6 %}{{ s|replace('x', s) }}",
    "joined with much": "{% set s = 'x' * 10**6 %}{{ s.join(s) }}",
    "joined with much by filter": "{% set s = 'x' * 10**6 %}{{ s|join(s) }}",
    "indented JSON": "{% set n = 10**10 %}{{ messages|tojson(indent=n) }}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    """The error names the limit that was exceeded."""
    template = ChatTemplate(HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(TemplateLimitError, match="the chat template"):
        template.render(CHAT)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024  # KiB


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_sandbox(text: str) -> None:
    """An operation that jinja2's own sandbox rejects is a 400."""
    with pytest.raises(Exception, match="the chat template"):
        ChatTemplate(text).render(CHAT)


def test_budget_is_of_one_rendering() -> None:
    """The budget is per rendering: any number of renderings and long chats fit."""
    template = ChatTemplate(
        "{% for m in messages %}{% for n in messages[:20] %}{{ n.role ~ '-' ~ loop.index }}{% endfor %}"
        "{{ m.content|trim ~ loop.length }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a" * 1000} for _ in range(1000)]

    assert len(template.render(chat)) == len(template.render(chat)) > 1_000_000


def test_loops_keep_what_they_know() -> None:
    """Counted loops over lists, dictionaries and generators keep their `loop` variable."""
    text = (
        "{% for a in [3, 4] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v }} {% endfor %}"
        "{% for a in [1, 2, 3]|select('odd') %}{{ a }}{{ loop.last }} {% else %}none{% endfor %}"
        "{% for a in [] %}{% else %}none{% endfor %}"
    )
    assert "1/2False 2/2True a1 1False 3True none" == ChatTemplate(text).render(CHAT)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe{{ 1 }}"),
        ("chat_template.jinja", b"{{ 1 }}" * MOST_TEMPLATE_BYTES),
        ("chat_template.jinja", b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}"),
        ("chat_template.jinja", b"{% for a in b %}" * 200 + b"{% endfor %}" * 200),
        ("tokenizer_config.json", b'{"chat_template": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [1]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 5}]}'),
        ("chat_template.json", b'{"chat_template": [{"name": "default"}]}'),
    ],
)
def test_files(tmp_path: Path, name: str, content: bytes) -> None:
    """A file that is not a template is a ConfigError that names it or its folder."""
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError, match=str(tmp_path)):
        ChatTemplate.load(tmp_path)
