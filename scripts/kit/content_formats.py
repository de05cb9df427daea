"""Compares `content_format.wants_parts` with vLLM's own rule, over random templates, and records some cases.

    cd CHECKOUT; VENV/bin/python -m scripts.kit.content_formats [--templates N] [--record]

VENV is that of a vLLM. The exit code is 1 if one template is read in another way. `--record` writes what this
version answers into tests/data/content_formats.json; run it with each version.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from importlib.metadata import version
from pathlib import Path

import jinja2

from kvrouter.tokens.content_format import wants_parts

RECORDED = Path(__file__).resolve().parents[2] / "tests/data/content_formats.json"
SEED = 36
# Of each kind: templates that the two rules read in the same way, and in different ways.
RECORDED_CASES = 30
# From this version on vLLM follows messages into namespaces.
FOLLOWS = (0, 33)

_LISTS = ("messages", "messages[1:]", "rest", "ns.rest", "ns.all", "more.rest", "rest | list", "ns.rest[1:]")
_CONTENTS = ("m.content", "m['content']", "m.content | list", "content", "body", "m.parts", "x.content")
_STATEMENTS = (
    "{% set rest = LIST %}",
    "{% set ns = namespace(rest=LIST) %}",
    "{% set ns = namespace(first=true, all=LIST) %}",
    "{% set more = namespace(rest=LIST) %}",
    "{% set ns = namespace(rest=[]) %}{% set ns.rest = LIST %}",
    "{% set ns = namespace() %}{% set ns.all = LIST %}",
    "{% set one, two = LIST %}",
    "{% set other = dict(rest=LIST) %}",
    "{% set content = CONTENT %}",
)
_LOOPS = (
    "{% for m in LIST %}INNER{% endfor %}",
    "{% for m in LIST if m.role != 'system' %}INNER{% endfor %}",
    "{% for x in LIST %}INNER{% endfor %}",
    "{% for m, n in LIST %}INNER{% endfor %}",
)
_INNER = (
    "{% for p in CONTENT %}{{ p.text }}{% endfor %}",
    "{% for key, value in CONTENT %}{{ key }}{% endfor %}",
    "{{ m.content }}",
    "{{ show(CONTENT) }}",
    "{{ show(1, CONTENT) }}",
    "{{ show(n=CONTENT) }}",
    "{% set content = CONTENT %}{% for p in content %}{{ p.text }}{% endfor %}",
)
_MACROS = (
    "{% macro show(body, n) %}{% for p in body %}{{ p.text }}{% endfor %}{% endmacro %}",
    "{% macro show(n, content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}",
    "{% macro show(n) %}{{ n }}{% endmacro %}",
    "{% macro all(body) %}{% macro show(n) %}{% for p in body %}{% endfor %}{% endmacro %}{% endmacro %}",
)


def random_template(chance: random.Random) -> str:
    """Statements that move messages and contents around, then one or two loops."""
    parts = [chance.choice(_MACROS)] if chance.random() < 0.4 else []
    parts += chance.choices(_STATEMENTS, k=chance.randrange(4))
    parts += chance.choices(_LOOPS, k=chance.randrange(1, 3))
    text = "".join(parts)
    for name, choices in (("INNER", _INNER), ("LIST", _LISTS), ("CONTENT", _CONTENTS)):
        while name in text:
            text = text.replace(name, chance.choice(choices), 1)
    return text


def read_by_vllm(template: str) -> bool:
    from vllm.renderers.hf import _detect_content_format

    return bool(_detect_content_format(template, default="string") == "openai")


def read_here(template: str, follows_namespaces: bool) -> bool:
    return wants_parts(jinja2.Environment().parse(template), follows_namespaces=follows_namespaces)


def depends_on_version(template: str) -> bool:
    return read_here(template, True) != read_here(template, False)


def record(number: str, templates: list[str]) -> None:
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    cases = {template: read_by_vllm(template) for template in templates}
    about = f"vllm {number}: _detect_content_format of renderers/hf.py, for random templates"
    known[number] = {"source": about, "licence": "Apache-2.0", "wants_parts": cases}
    RECORDED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--templates", type=int, default=20_000)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    logging.disable()  # vLLM logs each template that it cannot classify
    chance, number = random.Random(SEED), version("vllm").partition("+")[0]
    follows = tuple(map(int, number.split(".")[:2])) >= FOLLOWS
    templates = [*dict.fromkeys(random_template(chance) for _ in range(options.templates))]
    others = [each for each in templates if read_by_vllm(each) != read_here(each, follows)]
    sys.stdout.write(f"vllm {number}: {len(templates)} templates, {len(others)} read in another way\n")
    sys.stdout.writelines(f"{each}\n" for each in others[:10])
    if options.record:
        kinds = [[each for each in templates if depends_on_version(each) == kind] for kind in (True, False)]
        record(number, [each for kind in kinds for each in kind[:RECORDED_CASES]])
    return 1 if others else 0


if __name__ == "__main__":
    raise SystemExit(main())
