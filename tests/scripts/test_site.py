"""The site of the docs: links, what it loads, its pages, and those that are made from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvrouter.frontend.requests import engine_routes
from scripts.kit import reference_pages, site

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("link", "here"),
    [
        ("[a](docs/results.md#the-demo)", "[a](results.md#the-demo)"),
        ("![a](docs/plots/demo-ttft.svg)", "![a](plots/demo-ttft.svg)"),
        ("[`a`](CONTRIBUTING.md)", "[`a`](CONTRIBUTING.md)"),
        ("[results.md](docs/results.md#the-demo)", "[What was measured](results.md#the-demo)"),
        ("[a](docs/changes/README.md)", "a"),
        ("[a](kvrouter/errors.py)", "a"),
        ("[a](https://example.com/b.md)", "[a](https://example.com/b.md)"),
        ("[a](#run-it)", "[a](#run-it)"),
    ],
)
def test_links_of_readme(link: str, here: str) -> None:
    """What is right in the repository is right in the site; a file that is not in it is text."""
    assert f"see {here}." == site.site_links(f"see {link}.", source="README.md", page="index.md")


def test_links_to_the_top_folder() -> None:
    """A page below docs/ reaches the pages of the top folder, and keeps links to its neighbours."""
    text = "[a](../../README.md) [b](../engines.md) [c](design.md#wire)"

    found = site.site_links(text, source="docs/concepts/decide.md", page="concepts/decide.md")

    assert found == "[a](../index.md) [b](../engines.md) [c](design.md#wire)"


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/a.js"></script>',
        "<script defer src=//cdn.example/a.js></script>",
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<img alt="x" src="http://host/x.png">',
    ],
)
def test_other_hosts_are_found(html: str) -> None:
    """The build fails for whatever a browser would fetch from elsewhere."""
    assert 1 == len(site.loaded_from_elsewhere(html))


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://github.com/a/b">b</a>',
        '<script src="assets/a.js"></script>',
        '<link rel="icon" href="assets/a.png">',
        '<img src="plots/a.svg">',
    ],
)
def test_own_files_and_links_may_stay(html: str) -> None:
    """A link loads nothing until somebody clicks it."""
    assert [] == site.loaded_from_elsewhere(html)


@pytest.mark.parametrize("path", reference_pages.pages(), ids=lambda path: str(path.name))
def test_pages_from_the_code_are_current(path: Path) -> None:
    """`python -m scripts.kit.reference_pages` would change nothing."""
    assert reference_pages.pages()[path] == path.read_text()


def test_the_page_of_routes_has_those_of_clients() -> None:
    """Each route that the clients' port relays is in docs/reference/http.md."""
    page = (ROOT / "docs/reference/http.md").read_text()

    assert [] == [route for route in engine_routes.PATHS if f"{route}`" not in page]


def test_the_page_of_routes_has_those_of_operators() -> None:
    """Each route that a replica adds to its admin listener is there, too."""
    page = (ROOT / "docs/reference/http.md").read_text()
    source = (ROOT / "kvrouter/frontend/run.py").read_text()
    added = re.findall(r'\("(?:GET|POST)", "(/[\w/]+)"', source)

    assert "/workers" in added
    assert [] == [route for route in added if f"{route}`" not in page]


def test_every_page_begins_with_a_title_and_a_text() -> None:
    """A reader sees first what the page is for: no table, list, code block or further heading."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "changes" not in page.parts]
    texts = {page: re.sub(r"<!--.*?-->\n*", "", page.read_text(), flags=re.DOTALL) for page in pages}

    assert [] == [
        page for page, text in texts.items() if not re.match(r"# \S.*\n\n(?![#|*-] |\||    |```)\S", text)
    ]


def test_nothing_comes_from_a_cdn() -> None:
    """Fonts are the reader's own, and the script for search without a server is in docs/site."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)

    assert "false" == config["theme"]["font"]
    assert all((ROOT / "docs" / script).is_file() for script in config["extra"]["polyfills"])
