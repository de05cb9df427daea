"""Pictures of the dashboard, for its page of the docs.

    python -m scripts.kit.screenshots DIRECTORY

Starts a small fleet and takes VIEW-light.png and VIEW-dark.png of each view, with a real browser: Playwright
(pip install playwright) and Debian's chromium. A minute.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scripts.kit.deployment import Deployment, Plan, open_stage
from scripts.kit.fleet import Fleet
from scripts.kit.http_client import Client
from scripts.kit.load import SteadyLoad
from scripts.kit.workload import Documents

VIEWS = ("fleet", "traffic", "decisions", "agreement", "prefixes", "clients")
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
_WRONG = {"error", "warning"}
_WIDTH, _HEIGHT = 1180, 560
# The page's figures are of the last minute, and differences of two looks, one a second.
_LOOKS_MS = 4_000
_ENGINES = 4
_REQUESTS_A_SECOND = 6.0
_SEEN_S = 40.0


def has_browser() -> bool:
    return shutil.which("chromium") is not None and importlib.util.find_spec("playwright") is not None


class Running(NamedTuple):
    fleet: Fleet
    client: Client
    deployed: Deployment


@asynccontextmanager
async def small_fleet(directory: Path, engines: int = _ENGINES) -> AsyncIterator[Running]:
    """Two replicas, some engines, and some chats a second."""
    async with open_stage(directory) as stage:
        deployed = await stage.deploy(Plan("kv", stage.model_path, engines=engines))
        urls = [replica.url for replica in deployed.replicas]
        async with SteadyLoad(Documents(tokens=300).chats(2000), urls, rate=_REQUESTS_A_SECOND):
            yield Running(stage.fleet, stage.client, deployed)


@asynccontextmanager
async def open_page(scheme: Scheme = "light") -> AsyncIterator[tuple[Any, list[str]]]:
    """A page of a browser, and what its console has said that is wrong."""
    from playwright.async_api import async_playwright

    wrong: list[str] = []
    async with async_playwright() as browsers:
        chromium = shutil.which("chromium")
        browser = await browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": _WIDTH, "height": _HEIGHT}
        page = await browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type, unused-ignore]
        page.on("console", lambda said: wrong.append(said.text) if said.type in _WRONG else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield page, wrong
        await browser.close()


async def take(
    admin_url: str, directory: Path, *, scheme: Scheme = "light", wait_ms: int = _LOOKS_MS
) -> list[str]:
    """Write VIEW-SCHEME.png of each view; returns what the browser's console said that is wrong."""
    async with open_page(scheme) as (page, wrong):
        await page.goto(f"{admin_url}/")
        await page.wait_for_selector("#figures dd")
        await page.wait_for_timeout(wait_ms)
        for view in VIEWS:
            await page.click(f"#tab-{view}")
            await page.wait_for_timeout(500)
            if view == "decisions" and (newest := await page.query_selector("#list td button")):
                await newest.click()
                await page.wait_for_selector("#candidates td")
            await page.screenshot(path=directory / f"{view}-{scheme}.png")
    return wrong


async def _take_all(directory: Path) -> int:
    with tempfile.TemporaryDirectory() as work:
        async with small_fleet(Path(work)) as running:
            await asyncio.sleep(_SEEN_S)
            admin_url = running.deployed.replicas[0].admin_url
            wrong = [text for scheme in SCHEMES for text in await take(admin_url, directory, scheme=scheme)]
    for text in wrong:
        print(f"the browser said: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    given = parser.parse_args().directory
    given.mkdir(parents=True, exist_ok=True)
    raise SystemExit(asyncio.run(_take_all(given)))
