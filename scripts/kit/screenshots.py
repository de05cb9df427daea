"""Pictures of the dashboard, for its page of the docs.

    python -m scripts.kit.screenshots DIRECTORY

Starts a small fleet and takes VIEW-light.png and VIEW-dark.png of each view, then fleet-60.png and
fleet-1000.png of as many targets, with a real browser: Playwright (pip install playwright) and Debian's
chromium. Prints how long the page needs for these. Two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
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
_WIDTH, _HEIGHT = 1180, 620
# The page's figures are of the last minute, and differences of two looks, one a second.
_LOOKS_MS = 4_000
_ENGINES = 4
_REQUESTS_A_SECOND = 6.0
_SEEN_S = 40.0
# Workers, ranks of each, hosts: of the large fleets.
_LARGE = {60: (60, 1, 15), 1_000: (1_000, 1, 125)}
_UPDATES = 20
_DRAWN_WITHIN_S = 60.0

# Notes of each snapshot that the page has drawn the milliseconds of its script, and those with the layout.
# `painted`: the milliseconds from the opening of the page until the first one was on the screen.
COUNTING = """
    window.drawn = [];
    document.addEventListener("drawn", ({ detail }) => {
        const began = performance.now();
        document.body.offsetHeight;
        drawn.push([detail, detail + performance.now() - began]);
        if (drawn.length === 1)
            requestAnimationFrame(() => setTimeout(() => (window.painted = performance.now())));
    });
"""


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
            if view == "traffic":
                await page.select_option("#span", "300")  # the fleet is young
            if view == "decisions" and (newest := await page.query_selector("#list tbody button")):
                await newest.click()
                await page.wait_for_selector("#candidates td")
            await page.screenshot(path=directory / f"{view}-{scheme}.png")
    return wrong


class Snapshots:
    """Events of a fleet in which the numbers change, sent as fast as the page takes them.

    `plain`: a snapshot as the stream has it, with a target to copy.
    """

    def __init__(self, plain: dict[str, Any], workers: int, ranks: int = 8, hosts: int = 1) -> None:
        self._plain = plain
        self._workers, self._ranks, self._hosts = workers, ranks, hosts
        self.sent = 0
        self.bytes = 0

    async def serve_at(self, page: Any, events: int) -> None:
        async def serve(route: Any) -> None:
            body = b"".join(self._events(events))
            await route.fulfill(body=body, content_type="text/event-stream")

        await page.add_init_script(COUNTING)
        await page.route("**/fleet/stream", serve)

    def _events(self, number: int) -> Iterator[bytes]:
        columns, (first, *_) = self._plain["targets"]["columns"], self._plain["targets"]["rows"]
        template = dict(zip(columns, first, strict=True))
        for _ in range(number):
            self.sent += 1
            numbered = [(worker, rank) for worker in range(self._workers) for rank in range(self._ranks)]
            rows = [list((template | self._target(*one)).values()) for one in numbered]
            changed = later(self._plain, self.sent, requests=self.sent)
            table = {"columns": columns, "rows": rows}
            data = json.dumps(self._plain | changed | {"targets": table}).encode()
            self.bytes = len(data)
            yield b"data: " + data + b"\n\n"

    def _target(self, worker: int, rank: int) -> dict[str, Any]:
        """What differs from the target that is copied."""
        load = (worker * 7 + rank * 3 + self.sent * (1 + worker % 3)) % 9
        return {
            "worker": f"w{worker}",
            "rank": rank,
            "url": f"http://10.0.0.{worker % self._hosts}:8000",
            "requests": load,
            "kv_usage": load / 10,
            "prompt_tokens": 1_000 * self.sent,
            "overlap_tokens": 100 * (worker % 10) * self.sent,
            "ttft_sum_s": 0.01 * (1 + worker % 7) * self.sent,
            "ttft_count": self.sent,
            "eligible": worker % 50 != 17,
            "problems": ["its engine reports no KV events"] if worker % 50 == 23 else [],
        }


def later(sample: dict[str, Any], seconds: float, **counters: int) -> dict[str, Any]:
    """What of a snapshot differs some seconds later."""
    traffic = sample["fleet_traffic"] | counters
    return sample | {"time": sample["time"] + seconds, "fleet_traffic": traffic}


async def _measure(admin_url: str, plain: dict[str, Any], directory: Path, targets: int) -> list[str]:
    """Print what the page needs for so many targets, and take a picture of them."""
    snapshots, said, wrong = Snapshots(plain, *_LARGE[targets]), [], []
    for events in (1, _UPDATES):
        async with open_page() as (page, found):
            tools = await page.context.new_cdp_session(page)
            await snapshots.serve_at(page, events)
            await tools.send("Performance.enable", {"timeDomain": "threadTicks"})
            await page.goto(f"{admin_url}/")
            async with asyncio.timeout(_DRAWN_WITHIN_S):
                while not await page.evaluate(f"drawn.length >= {events} && window.painted"):
                    await page.wait_for_timeout(100)
            said.append(await _spent(page, tools, events))
            await page.screenshot(path=directory / f"fleet-{targets}.png")
            wrong += found
    print(f"{targets} targets, {snapshots.bytes / 1000:.0f} KB; the first: {said[0]}; an update: {said[1]}")
    return wrong


async def _spent(page: Any, tools: Any, events: int) -> str:
    """What a snapshot took: by the clock, and of the processor, as other programs may run here, too."""
    metrics = (await tools.send("Performance.getMetrics"))["metrics"]
    busy_ms = {one["name"]: 1000 * one["value"] / events for one in metrics}
    script_ms = statistics.median(script for script, _ in await page.evaluate("drawn"))
    layout_ms = busy_ms["LayoutDuration"] + busy_ms["RecalcStyleDuration"]
    shown = f"on the screen after {await page.evaluate('painted'):.0f} ms, " if events == 1 else ""
    return (
        f"{shown}script {script_ms:.0f} ms; of the processor {busy_ms['TaskDuration']:.0f} ms, "
        f"{layout_ms:.0f} of them style and layout"
    )


async def _plain(running: Running) -> dict[str, Any]:
    """The newest snapshot, as the stream sends it."""
    fleet: dict[str, Any] = await running.client.get_json(f"{running.deployed.replicas[0].admin_url}/fleet")
    columns = list(fleet["targets"][0])
    rows = [list(row.values()) for row in fleet["targets"]]
    return fleet | {"targets": {"columns": columns, "rows": rows}}


async def _take_all(directory: Path) -> int:
    with tempfile.TemporaryDirectory() as work:
        async with small_fleet(Path(work)) as running:
            await asyncio.sleep(_SEEN_S)
            admin_url = running.deployed.replicas[0].admin_url
            wrong = [text for scheme in SCHEMES for text in await take(admin_url, directory, scheme=scheme)]
            plain = await _plain(running)
            for targets in _LARGE:
                wrong += await _measure(admin_url, plain, directory, targets)
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
