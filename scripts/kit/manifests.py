"""Writes deploy/kubernetes from the chart: one file of plain manifests for each example of values.

Rendered by Helm itself, from the package helm-python-sdk, which is no part of the set-up (244 MB).
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from scripts.kit.proxies import DEPLOY

CHART = DEPLOY / "helm" / "kvrouter"
EXAMPLES = DEPLOY / "helm" / "examples"
MANIFESTS = DEPLOY / "kubernetes"
RELEASE = "kvrouter"
_MADE = "# Written by `python -m scripts.kit.manifests` from deploy/helm with {name}; a test compares it.\n"


def values_of(name: str) -> dict[str, Any]:
    """The values of an example, with YAML's anchors and merges resolved."""
    values: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return values


def render(values: dict[str, Any]) -> str:
    """All manifests as one text. Raises ImportError without helm-python-sdk, and Helm's errors."""
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        rendered: dict[str, str] = chart.render(values, name=RELEASE, namespace="default")
    texts = (text.strip().removeprefix("---").strip() for _, text in sorted(rendered.items()))
    return "".join(f"---\n{text}\n" for text in texts if text)


def written(name: str) -> str:
    """The file of an example, as it should be."""
    return _MADE.format(name=f"examples/{name}") + render(values_of(name))


def examples() -> list[str]:
    return sorted(path.name for path in EXAMPLES.glob("*.yaml"))


def main() -> int:
    try:
        texts = {name: written(name) for name in examples()}
    except ImportError:
        print("manifests: Helm is missing: pip install helm-python-sdk", file=sys.stderr)
        return 1
    for name, text in texts.items():
        (MANIFESTS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
