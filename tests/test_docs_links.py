"""Links in README and docs, and citations of docs in code, lead to a page and a heading that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
INVENTED = ROOT / "tests" / "scripts" / "test_words.py"  # writes pages of its own
CODE = [
    path
    for room in ("kvrouter", "scripts", "tests")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path != INVENTED
]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
CITATION = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
CITED_FILE = re.compile(r"(?<![\w/.])(?:kvrouter|scripts|docs|core)/[\w/]+\.[a-z]{1,3}\b")
CITED_TEST = re.compile(r"(?<=[` ])((?:tests/[\w/]*)?test_[\w{},]+\.py)(?:::(\w+))?")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(links: list[str], page: Path, base: Path) -> Iterator[str]:
    """The links, relative to `base`, without a file or a heading."""
    for link in links:
        path, _, anchor = link.partition("#")
        target = (base / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


def test_links_lead_somewhere() -> None:
    """A page that moves takes its links along."""
    found = {page: list(broken(LINK.findall(page.read_text()), page, page.parent)) for page in PAGES}
    assert {} == {page: links for page, links in found.items() if links}


def test_code_cites_pages_that_exist() -> None:
    """A comment names the page from the root of the repository, and a heading by its anchor."""
    found = {path: list(broken(CITATION.findall(path.read_text()), path, ROOT)) for path in CODE}
    assert {} == {path: links for path, links in found.items() if links}


def test_no_code_cites_a_page_outside_the_repository() -> None:
    """A reader has the repository only."""
    outside = re.compile("design " + "§|facts" + r"/\w+[.]md")
    assert [] == [path for path in [*PAGES, *CODE] if outside.search(path.read_text())]


def without_braces(path: str) -> list[str]:
    """`test_{a,b}.py` as the shell expands it."""
    braces = re.search(r"\{(.*?)\}", path)
    return [path.replace(braces[0], part) for part in braces[1].split(",")] if braces else [path]


def test_cited_tests_exist() -> None:
    """A test that a page names as evidence can be run."""
    missing = [
        f"{page}: {path}::{name}"
        for page in PAGES
        for citation, name in CITED_TEST.findall(page.read_text())
        for path in without_braces(citation)
        if not any(str(file).endswith(f"/{path}") and f"def {name}" in file.read_text() for file in TESTS)
    ]

    assert [] == missing


def test_cited_files_exist() -> None:
    """A page names files from the root of the repository, files of the core also from kvrouter/."""
    assert [] == [
        f"{page}: {file}"
        for page in PAGES
        for file in CITED_FILE.findall(page.read_text())
        if not any((base / file).exists() for base in (ROOT, ROOT / "kvrouter"))
    ]


def test_the_glossary_names_modules_that_exist() -> None:
    """Its column "where" has a room, then modules or folders of the room: `core/tables` block_index."""
    page = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
    named = [
        (ROOT / "kvrouter" / room, name)
        for room, names in re.findall(r"`([\w/]+?)/?`((?: \w+,?)*)", page)
        for name in re.findall(r"\w+", names)
    ]
    modules = [room / name for room, name in named if room.is_dir()]

    assert modules
    assert [] == [path for path in modules if not path.is_dir() and not path.with_suffix(".py").exists()]
