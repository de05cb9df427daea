"""How large the package is: files, lines, its fullest folder, and how many lines have a comment."""

from __future__ import annotations

import argparse
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOR_TOOLS = ("noqa", "type:", "pragma", "fmt:", "cython:")


def comments(source: str) -> Iterator[str]:
    """The comments written for people, without the #."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#: ")
        if token.type == tokenize.COMMENT and text and not text.startswith(_FOR_TOOLS):
            yield text


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kit.house", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to read")
    root: Path = parser.parse_args(arguments).root.resolve()
    sources = {path.relative_to(root): path.read_text() for path in (root / "kvrouter").rglob("*.py")}
    lines = sum(source.count("\n") for source in sources.values())
    written = sum(1 for source in sources.values() for _ in comments(source))
    (folder, files), *_ = Counter(path.parent for path in sources).most_common(1)
    print(f"Python files of kvrouter         {len(sources)}")
    print(f"lines                            {lines}")
    print(f"fullest folder                   {folder}, {files} files")
    print(f"lines with a comment per 1,000   {1000 * written / lines:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
