"""Counts words that turn a sentence into a riddle, per 1,000 words of everything a person reads.

It reads comments, docstrings, sentences in strings, log events and names of tests, and Markdown without its
fenced code. Exits 1 if one row, or all together, are above their limit in the code, the tests or the docs.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW_LIMIT, TOTAL_LIMIT = 1.0, 2.5  # per 1,000 words, in each area
AREAS = ("code", "tests", "docs")
_AREA_OF = {"kvrouter": "code", "scripts": "code", "tests": "tests"}  # the rest: docs

ROWS = {  # name: pattern, what to write instead
    "told": ("told|tells?|telling", "report, log, pass, state; distinguish"),
    "nobody": ("nobody|somebody", "name it: no client, a worker, ..."),
    "beside": ("beside|anew|dear(?:er|est)?|whom|by and by|for ever", "next to; again; costly; forever"),
    "those-that": ("those that|the ones? that", "repeat the noun"),
    "is-no": ("is no|is none", "is not, has no ('there is no X' may stay)"),
    "whoever": ("whoever|whomever|whatever|whichever", "name it; any, every"),
    "hear": ("hears?|heard|hearing", "receive"),
    "so-many": ("so many|so long", "name the number or the setting"),
    "foretold": ("foretold|foretells?|foretelling", "predict"),
    "ones-own": ("one'?s own", "your own, custom"),
}
_EXCEPTIONS = (
    "is no longer",  # plain English: was until now
)
_LEFT_OUT = (
    "scripts/kit/words.py",  # the rows themselves
    "tests/scripts/test_words.py",  # a sentence for each row
    "tests/data/*",  # recorded from engines
)
_SUFFIXES = {".py", ".pyx", ".pxi", ".md"}
_STRING = re.compile(r"""([A-Za-z]*)('{3}|"{3}|['"])(.*)\2""", re.DOTALL)
_FENCE = re.compile(r"^ *(```|~~~).*?(?:^ *\1[^\n]*$|\Z)", re.DOTALL | re.MULTILINE)
_SHELL_COMMENT = re.compile(r"(?:^|\s)#(?!!)(.*)")


def read_prose(path: Path) -> str:
    """What a person reads in a file: line n of it is from line n of the file, without indentation."""
    text = path.read_text()
    if path.suffix == ".md":
        text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    elif path.suffix:
        text = _python_prose(text)
    else:
        text = "\n".join(" ".join(_SHELL_COMMENT.findall(line)) for line in text.split("\n"))
    return "\n".join(" ".join(line.split()) for line in text.replace("\u2019", "'").split("\n"))


def _python_prose(source: str) -> str:
    lines = [""] * (source.count("\n") + 2)
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = ""
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#:")
        elif before == "def" and token.string.startswith("test_"):
            text = token.string.replace("_", " ")
        elif tokenize.tok_name[token.type] in {"STRING", "FSTRING_MIDDLE"}:
            text = _sentence(token.string)
        for number, line in enumerate(text.split("\n"), token.start[0] - 1):
            lines[number] += " " + line
        before = token.string
    return "\n".join(lines)


def _sentence(literal: str) -> str:
    """A string literal's text if it is a sentence or a log event; empty for keys and bytes."""
    match = _STRING.fullmatch(literal)
    prefix, text = (match[1].lower(), match[3]) if match else ("f", literal)
    if re.fullmatch(r"[a-z]+\.[a-z_]+", text):
        return text.replace("_", " ")
    is_sentence = " " in text and "b" not in prefix
    text = re.sub(r"\{[^{}]*\}", " ", text) if "f" in prefix else text
    return re.sub(r"\\[^\n]", " ", text) if is_sentence else ""


def find_files(root: Path, under: list[Path]) -> Iterator[Path]:
    """The files with prose, all or those in `under`."""
    in_folders = (path for top in (*_AREA_OF, "docs") for path in (root / top).rglob("*"))
    for path in sorted({*root.glob("*.md"), *in_folders}):
        is_shell = not path.suffix and path.is_file() and path.read_bytes().startswith(b"#!")
        is_asked = any(path.is_relative_to(wanted) for wanted in under or [root])
        is_left_out = any(path.relative_to(root).match(name) for name in _LEFT_OUT)
        if (is_shell or path.suffix in _SUFFIXES) and is_asked and not is_left_out:
            yield path


def find_words(name: str, prose: str) -> list[tuple[int, str]]:
    """Where a row is found, also across the end of a line: numbers and texts of lines."""
    pattern = rf"\b(?!(?:{'|'.join(_EXCEPTIONS)})\b)(?:{ROWS[name][0]})\b".replace(" ", "[ \n]")
    numbers = [prose.count("\n", 0, m.start()) for m in re.finditer(pattern, prose, re.IGNORECASE)]
    return [(number + 1, prose.split("\n")[number]) for number in numbers]


def print_table(rows: list[str], words: Counter[str], counts: Counter[tuple[str, str]]) -> list[str]:
    """Returns what is above a limit."""
    above: list[str] = []
    print(f"{'':18}count", *(f"{area:>7}" for area in AREAS), "    all  per 1,000 words; instead")
    for name in [*rows, "all rows"]:
        limit, instead = (ROW_LIMIT, ROWS[name][1]) if name in ROWS else (TOTAL_LIMIT, "")
        found = {area: sum(counts[area, row] for row in rows if name in {row, "all rows"}) for area in AREAS}
        rates = {area: 1000 * found[area] / max(words[area], 1) for area in AREAS}
        columns = [*rates.values(), 1000 * sum(found.values()) / max(words.total(), 1)]
        print(f"{name:16}{sum(found.values()):7}", *(f"{rate:7.2f}" for rate in columns), f" {instead}")
        above += [f"{name} in {area} {rate:.2f}" for area, rate in rates.items() if rate > limit]
    print(f"{'words':16}{words.total():7}", *(f"{words[area]:7}" for area in AREAS))
    return above


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/words", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="ROW|PATH", help="these rows, these files; no limits then")
    parser.add_argument("--list", action="store_true", help="print file:line of each place")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to read")
    flags = parser.parse_args(arguments)
    root, rows = flags.root.resolve(), [name for name in ROWS if name in flags.only] or list(ROWS)
    under = [Path(name).resolve() for name in flags.only if name not in ROWS]
    if missing := [str(path) for path in under if not path.exists()]:
        parser.error(f"neither a path nor one of {', '.join(ROWS)}: {', '.join(missing)}")
    words, counts = Counter[str](), Counter[tuple[str, str]]()
    for path in find_files(root, under):
        place, prose = path.relative_to(root), read_prose(path)
        area = _AREA_OF.get(place.parts[0], "docs")
        words[area] += len(re.findall(r"[A-Za-z][A-Za-z']*", prose))
        for name in rows:
            for number, line in find_words(name, prose):
                counts[area, name] += 1
                if flags.list:
                    print(f"{place}:{number}: {name}: {line}")
    above = print_table(rows, words, counts)
    if is_failed := bool(above) and not flags.only:  # a few files are too short for a rate
        print(f"words: above {ROW_LIMIT} a row, {TOTAL_LIMIT} in all: {', '.join(above)}", file=sys.stderr)
    return int(is_failed)


if __name__ == "__main__":
    sys.exit(main())
