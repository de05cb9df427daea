"""How large the package is: files, lines, functions, classes, comments, arrows in core/; docs/ and scripts/.

And how often tests reach inside instead of asking what users can ask.

Exits 1 if anything is above its limit here. A change may raise one, with its reason beside it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL_LINES = 60
FUNCTION_LINES = 60
CLASS_LINES = 300
# Classes that were longer when the limit came (issue "The request, the router, the cost"): each limit is its
# size.
# Pool has the roles of its targets since prefill and decode are apart; Agent learns restarted engines again;
# Attempt hands committed streams to C and takes them back; Completions asks for blocks of a peer; Replica,
# BookingTable and Completions have four lines more each for tenants. Attempt and Completions know of streams
# that move, and Attempt passes reads of several chunks, and a last one, as they are, knows bodies that end
# amid an event, passes what came before a failure, and lets none look whole.
# FeedReader, BlockIndex show C where the next frame goes, and count what it took; Bus reports all messages of
# a read at once. BlockIndex answers by slot, too; Replica knows heartbeats without news.
LARGER = {
    "Attempt": 650, "Replica": 501, "FeedReader": 467, "BlockIndex": 436, "Pool": 394, "Agent": 379,
    "BookingTable": 366, "Completions": 339, "Bus": 341, "EngineBlocks": 313,
    "ReferenceEngine": 351,  # with both halves of a request, and blocks of a peer
    "Router": 250, "OwnBookings": 250, "SyncFeed": 250,  # one router in three
}  # fmt: skip
# Class names in two modules: two of the library, which Dynamo has too, and the mocker's Answer, which others
# import (tests/test_moved.py).
TWICE = {"Answer", "ApproxKvIndexer", "KvIndexer"}
FILES = 25
# 2,160 of them for prefill and decode apart, 530 of these in the mocker, 150 its problems; 460 more for pairs
# of SGLang, whose halves are sent at once: 220 of these in the mocker. 475 for fastokens, its comparison with
# the reference library, and the order of what waits for a thread. 430 for bodies that are read in steps, with
# a Python and a C version of the scan. 500 for pairs in the simulator and analyze. 420 for blocks from a
# peer: 90 in the mocker, 80 in the simulator. 210 for streams in C. 1,600 for keys of clients: 710 the file,
# the command, and what each may; 610 limits that hold for the fleet; 180 what tenants use, and their salts;
# 120 turns of tenants that wait. 1,680 for placement as a service: 460 its calls in three dialects, 450
# what is asked and reserved, 240 engines that callers register, 200 the class for Ray. 400 for what an
# attacker or a flood could still do: 70 certificates of clients and for engines, 70 workers that stay idle
# for others, 60 fields that steer engines, 60 last known shares and what fades, 50 sizes per key, 50 salts
# and usage of what is passed on, 40 trailers and the rest. 960 for streams that move: 380 the seam of both
# parts' events, 190 the way to the next worker, 160 the record, 60 in Attempt, 50 their settings, 50 what
# shows a move and what both parts count together. 350 for frames that C hears: 110 the messages of a read,
# 60 the reader's position, 180 the inbox, reader and index. 320 for placement over NATS (190, 40 of these who
# may) and its bodies that are read in steps (90). 100 for what a placement call costs: 50 hashes read in C,
# 40 heads that differ in the path only, 10 frames that are spaced. 60 for depths of a prompt in columns, 50
# for heartbeats without news, 40 for what is loaded late, 15 for odd events of streams that move, 32
# for bodies of calls that are no JSON or name what is not there. 326 for what mockers make up: JSON that fits
# a schema, arguments of tools, reasoning, embeddings. 29 for reads of several chunks and an adapter's check.
# 22 that spare a start 55 ms: cyclopts knows only settings that may have been given. 60 for what both halves
# of a pair cost and show, and for what is left out of a choice, in a module of its own. 25 for errors that
# only the name of an event tells, and bodies that end amid an event. 53 that keep a step of 128,000 tokens
# short: 36 blocks that prompts share, by bisection, 17 caches that shrink in slices, 5 a turn of the loop
# between hashing and routing. 170 for registrations that all replicas take over, with their modules'
# heads (150), last reads of streams that may move, failures that must not look whole, and islands. 10 so that
# a key takes a third of what it took: rows of today for tenants. 60 for files of --worker-tls-* that change.
LINES = 79_274
# Of *.pyx and *.pxi, which LINES does not count.
CYTHON_LINES = 2739  # 27 for `event: error`, 19 for hashes of a sample
COMMENTS = 30
# Of docs/, as `wc -w` counts them, without docs/changes. Each fact is said once, and a user acts on it.
# 90 for what a key costs, and registrations that all replicas take over.
DOC_WORDS = 58_990
# Of *.py in scripts/; 12,000 is the aim. A bench whose number is written down, and that holds no promise that
# is measured again, goes.
SCRIPT_LINES = 12_904
# Of tests/: a test asks what users and operators can ask, and waits for a state. These may only go down.
SHORTCUTS = {"private reads": 113, "patches": 180, "sleeps": 44}
_IMPORT = re.compile(r"^\s*from kvrouter\.core\.(\w+)", re.MULTILINE)
_PATCH = re.compile(r"\.(setattr|setitem)$|\bpatch(\.object|\.dict)?$")
_FOR_TOOLS = ("noqa", "type:", "pragma", "fmt:", "cython:")


@cache
def comments(source: str) -> int:
    """How many comments are written for people."""
    if "#" not in source:
        return 0
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT]
    return sum(1 for text in texts if text and not text.startswith(_FOR_TOOLS))


@cache
def sizes(source: str) -> tuple[list[int], list[tuple[str, int]]]:
    """The length of each function; the name and the length of each class."""
    functions, classes = [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
        elif isinstance(node, ast.ClassDef):
            classes.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
    return functions, classes


@cache
def shortcuts(source: str) -> Counter[str]:
    """How often a test reads a private attribute of others, patches, or sleeps for longer than a turn."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            found["private reads"] += ast.unparse(node.value) not in {"self", "cls"}
        elif isinstance(node, ast.Call):
            called, first = ast.unparse(node.func), [ast.unparse(one) for one in node.args[:1]]
            found["patches"] += bool(_PATCH.search(called))
            found["sleeps"] += called.endswith("sleep") and first != ["0"]
    return found


def above(sources: dict[Path, str], cython: int) -> Iterator[str]:
    """What is above its limit; a class that has shrunk below its own is, too. `cython`: lines of that."""
    for path, source in sources.items():
        functions, classes = sizes(source)
        longest = max(functions, default=0)
        if longest > FUNCTION_LINES:
            yield f"{path}: a function of {longest} lines, more than {FUNCTION_LINES}"
        for name, length in classes:
            most = LARGER.get(name, CLASS_LINES)
            if length > most or (most > CLASS_LINES and length < most):
                yield f"{path}: {name} has {length} lines, and the limit is {most}"
    named = Counter(name for source in sources.values() for name in {name for name, _ in sizes(source)[1]})
    for name in sorted(name for name, modules in named.items() if modules > 1 and name not in TWICE):
        yield f"class {name}: in {named[name]} modules"
    for folder, files in Counter(path.parent for path in sources).items():
        if files > FILES:
            yield f"{folder}: {files} files, more than {FILES}"
    lines = sum(source.count("\n") for source in sources.values())
    if lines > LINES:
        yield f"{lines} lines, more than {LINES}"
    if cython > CYTHON_LINES:
        yield f"{cython} lines of Cython, more than {CYTHON_LINES}"
    share = 1000 * sum(map(comments, sources.values())) / lines
    if share < COMMENTS:
        yield f"{share:.1f} comments per 1,000 lines, fewer than {COMMENTS}"


def doc_words(root: Path) -> int:
    pages = [page for page in (root / "docs").rglob("*.md") if page.parent.name != "changes"]
    return sum(len(page.read_text().split()) for page in pages)


def core_arrows(sources: dict[Path, str]) -> set[tuple[str, str]]:
    """Which folder of core/ imports from which. Files directly in core/ count as a folder each."""
    core = {path.relative_to("kvrouter/core"): text for path, text in sources.items() if "core" in path.parts}
    arrows = {
        (path.parts[0].removesuffix(".py"), to) for path, text in core.items() for to in _IMPORT.findall(text)
    }
    return {(here, to) for here, to in arrows if here != to}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.kit.house", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to read")
    root: Path = parser.parse_args(arguments).root.resolve()
    sources = {path.relative_to(root): path.read_text() for path in (root / "kvrouter").rglob("*.py")}
    lines = sum(source.count("\n") for source in sources.values())
    written = sum(map(comments, sources.values()))
    (folder, files), *_ = Counter(path.parent for path in sources).most_common(1)
    lengths = sorted(length for source in sources.values() for length in sizes(source)[0]) or [0]
    small = [
        path
        for path, text in sources.items()
        if text.count("\n") <= SMALL_LINES and path.name != "__init__.py"
    ]
    median, p90, longest = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10], lengths[-1]
    print(f"Python files of kvrouter         {len(sources)}")
    print(f"lines                            {lines}")
    print(f"fullest folder                   {folder}, {files} files")
    print(f"files of {SMALL_LINES} lines or fewer       {len(small)}, without __init__.py")
    print(f"lines of a function              median {median}, p90 {p90}, longest {longest}")
    print(f"arrows between folders of core/  {len(core_arrows(sources))}")
    print(f"lines with a comment per 1,000   {1000 * written / lines:.1f}")
    words = doc_words(root)
    scripts = sum(path.read_text().count("\n") for path in (root / "scripts").rglob("*.py"))
    print(f"words of docs/                   {words}")
    print(f"lines of scripts/                {scripts}")
    native = [path for kind in ("*.pyx", "*.pxi") for path in (root / "kvrouter").rglob(kind)]
    cython = sum(path.read_text().count("\n") for path in native)
    print(f"lines of Cython                  {cython}")
    found = list(above(sources, cython))
    tests = [shortcuts(path.read_text()) for path in (root / "tests").rglob("*.py")]
    for what, most in SHORTCUTS.items():
        count = sum(one[what] for one in tests)
        print(f"{f'{what} of tests':<31}  {count}")
        if count > most:
            found.append(f"tests: {count} {what}, more than {most}")
    if words > DOC_WORDS:
        found.append(f"docs: {words} words, more than {DOC_WORDS}")
    if scripts > SCRIPT_LINES:
        found.append(f"scripts: {scripts} lines, more than {SCRIPT_LINES}")
    for one in found:
        print(one, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
