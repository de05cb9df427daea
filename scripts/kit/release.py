"""Writes a version into the checkout: version.py, CHANGELOG with its fragments, chart, SBOM.

Nothing is committed, tagged or published: the commands for it are printed. tests/upgrade/PREVIOUS becomes the
commit that is released, and public_names.txt beside it its public names, so that the next version is tested
against them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from scripts.kit.public_names import all_names

ROOT = Path(__file__).resolve().parents[2]
UNRELEASED = "## Unreleased\n"
_NEXT = """\
Written. Look at `git diff`, then:
  scripts/check && scripts/test --long && scripts/wheels dist
  git commit --all --message "Version {version}" && git tag v{version}"""


class ReleaseError(Exception):
    """The version cannot be written; nothing was changed."""


def merged(changelog: str, fragments: Sequence[str], version: str, date: str) -> str:
    """The changelog with a section of this version, made of what is unreleased and of the fragments.

    Lines of a fragment go to the end of the section with the same heading. Raises ReleaseError.
    """
    if changelog.count(UNRELEASED) != 1:
        raise ReleaseError("CHANGELOG.md has no section, or several, with the heading Unreleased")
    before, _, rest = changelog.partition(UNRELEASED)
    own, heading, older = rest.partition("\n## ")
    sections = _sections(own)
    for fragment in fragments:
        for title, lines in _sections(fragment).items():
            if lines:
                sections[title] = "\n".join(filter(None, (sections.get(title), lines)))
    if not any(sections.values()):
        raise ReleaseError("nothing is unreleased")
    body = "\n\n".join(f"{title}\n\n{lines}".strip() for title, lines in sections.items() if lines)
    return f"{before}{UNRELEASED}\n## {version}, {date}\n\n{body}\n{heading}{older}"


def _sections(text: str) -> dict[str, str]:
    """Heading -> lines; the empty heading for lines before the first one."""
    parts = re.split(r"^(### .*)$", text, flags=re.MULTILINE)
    return {"": parts[0].strip()} | {
        title: lines.strip() for title, lines in zip(parts[1::2], parts[2::2], strict=True)
    }


def is_newer(version: str, than: str) -> bool:
    """Whether both have the form X.Y.Z, and the first is the greater. Raises ReleaseError."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"{version}: give X.Y.Z")
    return [*map(int, version.split("."))] > [*map(int, than.split("."))]


def bill(name: str = "kvrouter", version: str | None = None) -> dict[str, Any]:
    """The software bill of materials in CycloneDX 1.5: what an installation of the package brings with it."""
    found = sorted(_closure(name, set()))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": _component(name, version)},
        "components": [_component(one) for one in found if one != name],
    }


def _closure(name: str, extras: set[str]) -> set[str]:
    """The package and everything that it needs in this environment."""
    seen: dict[str, set[str]] = {}

    def visit(name: str, extras: set[str]) -> None:
        if name in seen and extras <= seen[name]:
            return
        seen[name] = seen.get(name, set()) | extras
        for needed in _needed(name, extras):
            visit(re.sub(r"[-_.]+", "-", needed.name).lower(), needed.extras)

    visit(name, extras)
    return set(seen)


def _needed(name: str, extras: set[str]) -> Iterator[Requirement]:
    for text in importlib.metadata.requires(name) or []:
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield needed


def _component(name: str, version: str | None = None) -> dict[str, Any]:
    about = importlib.metadata.metadata(name)
    version = version or about["Version"]
    found = [about[field] for field in ("License-Expression", "License") if field in about]
    licence = next(filter(None, found), "")
    made = {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    return made | ({"licenses": [{"license": {"name": licence.splitlines()[0]}}]} if licence else {})


def write(root: Path, version: str, date: str, commit: str, names: Collection[str]) -> None:
    """Write the version into the files below `root`. Raises ReleaseError before any is changed.

    `names`: the public names of the commit.
    """
    module = root / "kvrouter" / "version.py"
    current = re.findall(r'__version__ = "(.*)"', module.read_text())[0]
    if not is_newer(version, current):
        raise ReleaseError(f"{version} is not newer than {current}")
    fragments = sorted(path for path in (root / "docs" / "changes").glob("*.md") if path.name != "README.md")
    changelog = root / "CHANGELOG.md"
    text = merged(changelog.read_text(), [path.read_text() for path in fragments], version, date)
    changelog.write_text(text)
    for path in fragments:
        path.unlink()
    chart = root / "deploy" / "helm" / "kvrouter"
    for file in (module, chart / "Chart.yaml", chart / "values.yaml"):
        pattern = (
            rf'(?m)(__version__ = "|^version: |^appVersion: |image: kvrouter-\w+:){re.escape(current)}\b'
        )
        file.write_text(re.sub(pattern, rf"\g<1>{version}", file.read_text()))
    (root / "tests" / "upgrade" / "PREVIOUS").write_text(f"{commit}\n")
    (root / "tests" / "upgrade" / "public_names.txt").write_text("\n".join([commit, *sorted(names), ""]))


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("version", help="X.Y.Z")
    parser.add_argument(
        "--bill", type=Path, default=ROOT / "dist", metavar="DIR", help="where the SBOM goes (dist)"
    )
    flags = parser.parse_args(arguments)
    try:
        if _git("status", "--porcelain"):
            raise ReleaseError("the checkout has changes that are not committed")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        names = asyncio.run(all_names())
        write(ROOT, flags.version, today, _git("rev-parse", "HEAD"), names)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    flags.bill.mkdir(parents=True, exist_ok=True)
    file = flags.bill / f"kvrouter-{flags.version}.cdx.json"
    file.write_text(json.dumps(bill(version=flags.version), indent=2) + "\n")
    print(f"{file}\n{_NEXT.format(version=flags.version)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
