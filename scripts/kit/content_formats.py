"""Compares `content_format.wants_parts` with vLLM's own rule over recorded templates, and records it.

    cd CHECKOUT; VENV/bin/python -m scripts.kit.content_formats

VENV belongs to a vLLM; run it with each version. It writes tests/data/content_formats.json: a new template is
added there first. The exit code is 1 if one template is read in another way.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path

import jinja2

from kvrouter.tokens.content_format import wants_parts

RECORDED = Path(__file__).resolve().parents[2] / "tests/data/content_formats.json"
# From this version on vLLM follows messages into namespaces.
FOLLOWS = (0, 33)


def read_by_vllm(template: str) -> bool:
    from vllm.renderers.hf import _detect_content_format

    return bool(_detect_content_format(template, default="string") == "openai")


def main() -> int:
    logging.disable()  # vLLM logs each template that it cannot classify
    number = version("vllm").partition("+")[0]
    follows = tuple(map(int, number.split(".")[:2])) >= FOLLOWS
    known = json.loads(RECORDED.read_text())
    templates = dict.fromkeys(each for entry in known.values() for each in entry["wants_parts"])
    cases = {template: read_by_vllm(template) for template in templates}
    others = [
        template
        for template, theirs in cases.items()
        if theirs != wants_parts(jinja2.Environment().parse(template), follows_namespaces=follows)
    ]
    sys.stdout.write(f"vllm {number}: {len(templates)} templates, {len(others)} read in another way\n")
    sys.stdout.writelines(f"{each}\n" for each in others[:10])
    about = f"vllm {number}: _detect_content_format of renderers/hf.py, for random templates"
    known[number] = {"source": about, "licence": "Apache-2.0", "wants_parts": cases}
    RECORDED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return 1 if others else 0


if __name__ == "__main__":
    raise SystemExit(main())
