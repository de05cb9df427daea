"""Hooks of mkdocs.yml: pages of the top folder are pages of the site, and nothing loads from other hosts."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
"""Page of the site: file of the top folder."""
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
)
log = logging.getLogger("mkdocs.hooks.site")  # below mkdocs', so that a warning fails a strict build
_IN_SITE = {source: page for page, source in TOP_PAGES.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[\w-]+)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the top folder."""
    from mkdocs.structure.files import File

    for page, source in TOP_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make links that are right in the repository right in the site."""
    uri = page.file.src_uri
    source = TOP_PAGES.get(uri, f"docs/{uri}")
    return site_links(markdown, source=source, page=uri)


def on_post_page(output: str, page: Any, config: Any) -> None:
    """Warn of what a browser would load from another host."""
    for address in loaded_from_elsewhere(output):
        log.warning("%s loads %s from another host", page.file.src_uri, address)


def loaded_from_elsewhere(html: str) -> list[str]:
    """Return the addresses of scripts, styles and pictures on other hosts. Links to click are fine."""
    return [script or link for script, link in _LOADED.findall(html)]


def site_links(markdown: str, *, source: str, page: str) -> str:
    """Return the text with links relative to `page`, of a file at `source` in the repository."""
    # A file outside docs/ is not in the site: its link keeps the text only.
    folder, own = posixpath.dirname(source), posixpath.dirname(page)

    def replaced(match: re.Match[str]) -> str:
        mark, text, path, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        if (inside := _site_path(target)) is None:
            return text
        shown = _title(target) if path.endswith(text) and text.endswith(".md") else text
        return f"{mark}[{shown}]({posixpath.relpath(inside, own or '.')}{anchor or ''})"

    return _LINK.sub(replaced, markdown)


def _title(target: str) -> str:
    """Return the heading of a page: in the site its file has no name."""
    return (ROOT / target).read_text().partition("\n")[0].removeprefix("# ")


def _site_path(target: str) -> str | None:
    """Return the path in the site of a file of the repository, None if it is not there."""
    if target in _IN_SITE:
        return _IN_SITE[target]
    if target.startswith("docs/changes") or not (ROOT / target).is_file():
        return None
    return target.removeprefix("docs/") if target.startswith("docs/") else None
