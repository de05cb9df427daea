"""The page in a real Chromium, in front of a real fleet. Long: KVROUTER_TEST_LONG=1, Playwright, chromium."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.fleet import Fleet
from scripts.kit.http_client import Client
from scripts.kit.incidents.traffic import Documents
from scripts.kit.screenshots import has_browser
from scripts.kit.steady import SteadyLoad

pytestmark = [
    pytest.mark.skipif("KVROUTER_TEST_LONG" not in os.environ, reason="takes a minute: KVROUTER_TEST_LONG=1"),
    pytest.mark.skipif(not has_browser(), reason="needs Playwright and chromium"),
]
ENGINES = 3
DEATH_MS = 5_000


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Fleet, Client, Deployment]]:
    """Two replicas, three engines, and some chats a second."""
    build_tiny_model(tmp_path / "model")
    async with AsyncExitStack() as stack:
        client = Client()
        stack.callback(client.close)
        fleet = await stack.enter_async_context(Fleet(tmp_path))
        nats_url = await deployment.start_nats(fleet, client)
        plan = Plan("kv", tmp_path / "model", engines=ENGINES)
        deployed = await deployment.deploy(fleet, client, plan, nats_url)
        urls = [replica.url for replica in deployed.replicas]
        await stack.enter_async_context(SteadyLoad(Documents(tokens=300).chats(500), urls, rate=6.0))
        yield fleet, client, deployed


@pytest.fixture
async def page() -> AsyncIterator[Any]:
    """A page that remembers what the console says."""
    from playwright.async_api import async_playwright

    async with async_playwright() as browsers:
        chromium = shutil.which("chromium")
        browser = await browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page: Any = await browser.new_page(viewport={"width": 1180, "height": 560})
        page.said = []
        page.on("console", lambda said: page.said.append(said.text) if said.type != "log" else None)
        page.on("pageerror", lambda error: page.said.append(str(error)))
        yield page
        await browser.close()


async def test_in_front_of_a_fleet(running: tuple[Fleet, Client, Deployment], page: Any) -> None:
    """Numbers of /workers, every view, the keyboard, a narrow screen, and a death within 5 s."""
    fleet, client, deployed = running
    admin = deployed.replicas[0].admin_url
    await page.goto(f"{admin}/")
    await page.wait_for_selector("#targets td")

    shown = {
        (await row.text_content()).strip() for row in await page.query_selector_all("#targets td:first-child")
    }
    known = (await client.get_json(f"{admin}/workers"))["targets"]
    assert {f"{row['worker_id']}/{row['rank']}" for row in known} == shown

    await page.focus("#tab-fleet")
    for view in ("traffic", "decisions", "prefixes", "replicas"):
        await page.keyboard.press("ArrowRight")
        assert await page.get_attribute(f"#{view}", "hidden") is None
        assert 1 == len(await page.query_selector_all("[role=tabpanel]:not([hidden])"))
    await page.wait_for_selector("#peers td")
    assert 2 == len(await page.query_selector_all("#peers tr:has(td)"))
    await page.click("#tab-traffic")
    await page.wait_for_selector("#plots canvas")
    await page.click("#tab-decisions")
    await page.wait_for_selector("#list td button")
    await page.click("#list td button")
    await page.wait_for_selector("#candidates tr.chosen")
    assert ENGINES == len(await page.query_selector_all("#candidates tr:has(td)"))

    await page.set_viewport_size({"width": 375, "height": 700})
    await page.click("#tab-fleet")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 375

    began = time.perf_counter()
    await fleet.processes["mocker-1"].kill()
    await page.wait_for_selector("#targets tr.ill", timeout=DEATH_MS)
    print(f"the death was shown after {time.perf_counter() - began:.1f} s")  # noqa: T201
    assert [] == page.said


async def test_after_a_restart_of_the_replica(running: tuple[Fleet, Client, Deployment], page: Any) -> None:
    """The page says that there is no answer, and goes on by itself."""
    fleet, _, deployed = running
    await page.goto(f"{deployed.replicas[0].admin_url}/")
    await page.wait_for_selector("#status.good")
    await fleet.processes["frontend-0"].kill()
    await page.wait_for_selector("#status.bad", timeout=10_000)
    await fleet.start_again("frontend-0")

    await page.wait_for_selector("#status.good", timeout=20_000)
