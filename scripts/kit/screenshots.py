"""Pictures of the dashboard, by a real browser: Playwright (pip install playwright) and Debian's chromium."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Literal

VIEWS = ("fleet", "traffic", "decisions", "prefixes", "replicas")
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
_WRONG = {"error", "warning"}
_WIDTH, _HEIGHT = 1180, 560
# The page's figures are of the last minute, and differences of two looks, one a second.
_LOOKS_MS = 4_000


def has_browser() -> bool:
    return shutil.which("chromium") is not None and importlib.util.find_spec("playwright") is not None


async def take(
    admin_url: str, directory: Path, *, scheme: Scheme = "light", wait_ms: int = _LOOKS_MS
) -> list[str]:
    """Write VIEW-SCHEME.png of each view; returns what the browser's console said that is wrong."""
    from playwright.async_api import async_playwright

    wrong: list[str] = []
    async with async_playwright() as browsers:
        chromium = shutil.which("chromium")
        browser = await browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": _WIDTH, "height": _HEIGHT}
        page = await browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type, unused-ignore]
        page.on("console", lambda said: wrong.append(said.text) if said.type in _WRONG else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        await page.goto(f"{admin_url}/")
        await page.wait_for_selector("#targets td")
        await page.wait_for_timeout(wait_ms)
        for view in VIEWS:
            await page.click(f"#tab-{view}")
            if view == "decisions":
                await page.wait_for_selector("#list td button")
                await page.click("#list td button")
                await page.wait_for_selector("#candidates td")
            await page.wait_for_timeout(500)
            await page.screenshot(path=directory / f"{view}-{scheme}.png")
        await browser.close()
    return wrong
