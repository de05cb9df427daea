"""`scripts/release`: what a version changes, and what it refuses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kvrouter.version import __version__
from scripts.kit.release import ROOT, ReleaseError, bill, is_newer, merged, write

CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n### A\n\n- one\n\n### B\n\n- two\n\n## 0.1.0, 2026-01-01\n\n- old\n"
)
CHANGED = (
    "kvrouter/version.py",
    "CHANGELOG.md",
    "deploy/helm/kvrouter/Chart.yaml",
    "deploy/helm/kvrouter/values.yaml",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that a release changes, and a fragment."""
    for name in (*CHANGED, "tests/upgrade/PREVIOUS", "docs/changes/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "changes" / "x.md").write_text("### Deployment\n\n- from a fragment\n")
    return tmp_path


def test_fragments_join_their_sections() -> None:
    """Lines of a known heading go to the end of its section, others make a new one; older versions stay."""
    made = merged(CHANGELOG, ["### A\n\n- three\n", "### C\n\n- four\n"], "0.2.0", "2026-02-02")

    wanted = "### A\n\n- one\n- three\n\n### B\n\n- two\n\n### C\n\n- four\n\n## 0.1.0, 2026-01-01\n\n- old\n"
    assert f"# Changelog\n\n## Unreleased\n\n## 0.2.0, 2026-02-02\n\n{wanted}" == made


@pytest.mark.parametrize("text", ["# Changelog\n", "# Changelog\n\n## Unreleased\n\n## 0.1.0\n\n- old\n"])
def test_nothing_to_release(text: str) -> None:
    """Without the section, or with nothing in it, there is no release."""
    with pytest.raises(ReleaseError):
        merged(text, [], "0.2.0", "2026-02-02")


def test_versions() -> None:
    """Numbers are compared as numbers; another form is refused."""
    assert is_newer("0.10.0", "0.9.9")
    assert not is_newer("0.1.0", "0.1.0")
    with pytest.raises(ReleaseError, match=r"give X\.Y\.Z"):
        is_newer("1.0", "0.1.0")


def test_written(checkout: Path) -> None:
    """Version, chart, images, changelog, and what the next one is compared with; fragments are gone."""
    write(checkout, "9.8.7", "2026-02-02", "c0ffee", {"command b", "command a"})

    assert '__version__ = "9.8.7"' in (checkout / "kvrouter/version.py").read_text()
    chart, values = ((checkout / name).read_text() for name in CHANGED[2:])
    assert ["9.8.7", "9.8.7"] == re.findall(r"^(?:version|appVersion): (.*)$", chart, re.MULTILINE)
    assert ["9.8.7", "9.8.7"] == re.findall(r"image: kvrouter-\w+:(.*)$", values, re.MULTILINE)
    changelog = (checkout / "CHANGELOG.md").read_text()
    assert "## Unreleased\n\n## 9.8.7, 2026-02-02\n" in changelog
    assert changelog.index("- from a fragment") < changelog.index(
        "\n### ", changelog.index("### Deployment") + 1
    )
    assert "c0ffee\n" == (checkout / "tests/upgrade/PREVIOUS").read_text()
    names = (checkout / "tests/upgrade/public_names.txt").read_text()
    assert "c0ffee\ncommand a\ncommand b\n" == names
    assert ["README.md"] == [path.name for path in (checkout / "docs/changes").iterdir()]


def test_an_older_version_changes_nothing(checkout: Path) -> None:
    """It is refused before a file is written."""
    before = {name: (checkout / name).read_text() for name in CHANGED}

    with pytest.raises(ReleaseError, match=f"not newer than {__version__}"):
        write(checkout, "0.0.1", "2026-02-02", "c0ffee", ())

    assert before == {name: (checkout / name).read_text() for name in CHANGED}


def test_bill() -> None:
    """It names what an installation brings, also indirectly, and nothing of development."""
    made = bill(version="1.2.3")

    purls = {one["name"]: one["purl"] for one in made["components"]}
    assert {"aiohttp", "nats-py", "nkeys", "multidict", "tokenizers"} <= purls.keys()
    assert not {"pytest", "mypy", "kvrouter"} & purls.keys()
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", purl) for purl in purls.values())
    assert "pkg:pypi/kvrouter@1.2.3" == made["metadata"]["component"]["purl"]
    assert any("licenses" in one for one in made["components"])
