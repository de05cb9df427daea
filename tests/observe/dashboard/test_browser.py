"""The page in a real Chromium, in front of a real fleet. Long: KVROUTER_TEST_LONG=1, Playwright, chromium."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvrouter.observe.dashboard.stream import event
from scripts.kit.screenshots import VIEWS, Running, has_browser, open_page, small_fleet
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.workers import until_found
from tests.long import needs_long
from tests.observe.test_document import view_of

pytestmark = [
    needs_long("a minute"),
    pytest.mark.skipif(not has_browser(), reason="needs Playwright and chromium"),
]
ENGINES = 3
# Counts the snapshots that the page has drawn, with the milliseconds of each, layout included.
COUNTING = """
    window.drawn = [];
    document.addEventListener("drawn", ({ detail }) => {
        const began = performance.now();
        document.body.offsetHeight;
        drawn.push(detail + performance.now() - began);
    });
"""
DEATH_MS = 5_000
# The page keeps the last quarter of an hour.
QUARTER_S = 900
LEAKED_BYTES = 1_000_000


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with small_fleet(tmp_path, ENGINES) as running:
        yield running


@pytest.fixture
async def page() -> AsyncIterator[Any]:
    """A page that remembers in `said` what is wrong by its console."""
    async with open_page() as (page, wrong):
        page.said = wrong
        yield page


async def test_in_front_of_a_fleet(running: Running, page: Any) -> None:
    """Numbers of /workers, every view, the keyboard, a narrow screen, and a death within 5 s."""
    admin = running.deployed.replicas[0].admin_url
    await page.goto(f"{admin}/")
    await page.wait_for_selector("#targets td")

    async def both() -> tuple[Any, Any]:  # which change all the time
        known = (await running.client.get_json(f"{admin}/workers"))["targets"]
        return sorted(map(_numbers_of, known)), sorted(await _shown_numbers(page))

    await until_found(both, lambda found: found[0] == found[1], "what is known is shown")

    await page.focus("#tab-fleet")
    for view in VIEWS[1:]:
        await page.keyboard.press("ArrowRight")
        assert await page.get_attribute(f"#{view}", "hidden") is None
        assert 1 == len(await page.query_selector_all("[role=tabpanel]:not([hidden])"))
    await page.click("#tab-traffic")
    await page.wait_for_selector("#plots canvas")
    await page.click("#tab-decisions")
    await page.click("#list td button")
    await page.wait_for_selector("#candidates tr.chosen")
    assert ENGINES == len(await page.query_selector_all("#candidates tr:has(td)"))
    why = [await one.text_content() for one in await page.query_selector_all("#candidates td.reason")]
    assert not why[0]
    assert all(why[1:])
    await page.reload()  # the URL names the decision
    await page.wait_for_selector("#candidates tr.chosen")
    await page.goto("about:blank")  # a link that was cut shows its text, and that there is no such request
    await page.goto(f"{admin}/#decisions/%E")
    await page.wait_for_selector("#status.good")
    assert "%E" in await page.text_content("#why")
    page.said.clear()

    await page.set_viewport_size({"width": 375, "height": 700})
    await page.click("#tab-fleet")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 375

    began = time.perf_counter()
    await running.fleet.processes["mocker-1"].kill()
    await page.wait_for_selector("#targets tr.ill", timeout=DEATH_MS)
    print(f"the death was shown after {time.perf_counter() - began:.1f} s")  # noqa: T201
    assert [] == page.said


async def test_agreement(running: Running, page: Any) -> None:
    """Each replica hears the other, and follows the caches of all engines; one that dies is missing."""
    await page.goto(f"{running.deployed.replicas[0].admin_url}/#agreement")
    await page.wait_for_selector("#peers td >> nth=5")
    assert "all hear each other" in await page.text_content("#agreed")
    assert 2 == (await page.text_content("#matrix")).count("1 of 1 in step")
    assert 2 == (await page.text_content("#peers")).count(f"{ENGINES} of {ENGINES} in step")

    await running.fleet.processes["frontend-1"].kill()
    await _until(page, "document.querySelectorAll('#peers tr:has(td)').length === 1")
    assert "this replica: replicas 1, workers 0." in await page.text_content("#lost")
    assert [] == page.said


async def test_after_a_restart_of_the_replica(running: Running, page: Any) -> None:
    """The page says that there is no answer, and goes on by itself."""
    await page.goto(f"{running.deployed.replicas[0].admin_url}/")
    await page.wait_for_selector("#status.good")
    await running.fleet.processes["frontend-0"].kill()
    await page.wait_for_selector("#status.bad", timeout=10_000)
    await running.fleet.start_again("frontend-0")

    await page.wait_for_selector("#status.good", timeout=20_000)


async def test_colours(fleet_of: FleetOf, page: Any) -> None:
    """As the browser is set, or as chosen, also after a reload."""
    async with fleet_of() as fleet:
        await page.goto(f"{fleet.frontend.admin_url}/")
        assert "rgb(255, 255, 255)" == await _background(page)
        await page.select_option("#theme", "dark")
        assert "rgb(20, 23, 26)" == await _background(page)
        await page.reload()
        assert "rgb(20, 23, 26)" == await _background(page)
        assert [] == page.said


async def test_with_a_key_below_a_path_of_a_proxy(fleet_of: FleetOf, page: Any, tmp_path: Path) -> None:
    """The clients' port asks the browser for the key; all URLs are relative, and the stream passes."""
    (tmp_path / "key").write_text("s3cret")
    async with fleet_of("--admin-key-file", str(tmp_path / "key")) as fleet:
        runner = web.AppRunner(_proxy(fleet.url), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/ops/kvrouter/"
            credentials = {"username": "any", "password": "s3cret"}
            context = await page.context.browser.new_context(http_credentials=credentials)
            opened = await context.new_page()
            assert 200 == (await opened.goto(url)).status
            await opened.wait_for_selector("#status.good")
            await opened.click("#tab-prefixes")
            await _until(opened, "document.getElementById('sample').textContent")
            await context.close()
        finally:
            await runner.cleanup()


async def test_a_thousand_targets(fleet_of: FleetOf, page: Any) -> None:
    """A square each, the first 200 as rows, and any by the filter. Prints how long a snapshot takes."""
    async with fleet_of(ranks=8) as fleet:
        snapshots = _Snapshots(await _plain(fleet), workers=125)
        await snapshots.serve_at(page, 20)
        await page.goto(f"{fleet.frontend.admin_url}/")
        await _until(page, "document.querySelectorAll('#squares span').length === 1000")
        assert 200 == len(await page.query_selector_all("#targets tr:has(td)"))
        await page.fill("#filter", "w99/7")
        assert 1 == len(await page.query_selector_all("#targets tr:has(td)"))
        await page.fill("#filter", "")

        drawing_ms = statistics.median(await page.evaluate("drawn"))
        print(f"a snapshot of 1,000 targets: {snapshots.bytes / 1000:.0f} KB, {drawing_ms:.0f} ms")  # noqa: T201


async def test_what_was_before_the_page_was_opened(fleet_of: FleetOf, page: Any) -> None:
    """The figures of the last minute and the plots begin with the samples that the replica has kept."""
    async with fleet_of() as fleet:
        plain = await _plain(fleet)
        fields = ("time", "started_s", "fleet_traffic")
        now = {name: plain[name] for name in fields}
        kept = [_later(now, seconds, requests=3 * seconds) for seconds in range(-3600, 0, 10)]
        body = f"event: history\ndata: {json.dumps(kept)}\n\ndata: {json.dumps(plain)}\n\n"
        await page.route("**/fleet/stream", lambda route: _fulfill(route, body))
        await page.goto(f"{fleet.frontend.admin_url}/#traffic")
        await page.select_option("#span", "3600")

        await page.wait_for_selector("#plot-rate canvas")
        seen = "import('./dashboard/traffic.js').then(traffic => traffic.shown().map(point => point[3]))"
        assert [3.0] * 360 == [round(one, 6) for one in await page.evaluate(seen)]
        await page.click("#tab-fleet")
        assert "Requests a second3.0" in await page.text_content("#figures")
        assert [] == page.said


async def test_an_hour_leaks_nothing(fleet_of: FleetOf, page: Any) -> None:
    """Once every live view was open, 3,600 snapshots more change neither the heap nor the number of nodes."""
    async with fleet_of(ranks=8) as fleet:
        snapshots = _Snapshots(await _plain(fleet), workers=2)
        tools = await page.context.new_cdp_session(page)
        await snapshots.serve_at(page, QUARTER_S)
        live = ("fleet", "traffic", "agreement")
        sizes: list[tuple[int, int]] = []
        for view in (*live, *live, "fleet"):
            await page.goto(f"{fleet.frontend.admin_url}/#{view}")
            quarters = len(sizes) + 1
            await _until(page, f"drawn.length >= {quarters * QUARTER_S}", within_s=120)
            sizes.append(await _sizes(tools))
        print(f"heap and nodes after each quarter: {sizes}")  # noqa: T201
        first, last = sizes[len(live) - 1], sizes[-1]
        assert last[0] - first[0] < LEAKED_BYTES
        assert last[1] <= first[1] * 1.1


class _Snapshots:
    """Events of a fleet in which the numbers change, sent as fast as the page takes them."""

    def __init__(self, plain: dict[str, Any], workers: int) -> None:
        self._plain = plain
        self._workers = workers
        self.sent = 0
        self.bytes = 0

    async def serve_at(self, page: Any, events: int) -> None:
        async def serve(route: Any) -> None:
            body = b"".join(self._events(events))
            await route.fulfill(body=body, content_type="text/event-stream")

        await page.add_init_script(COUNTING)
        await page.route("**/fleet/stream", serve)

    def _events(self, number: int) -> Iterator[bytes]:
        table = self._plain["targets"]
        columns = table["columns"]
        worker, requests = columns.index("worker"), columns.index("requests")
        for _ in range(number):
            self.sent += 1
            rows = []
            for one in range(self._workers):
                for row in table["rows"]:
                    row[worker], row[requests] = f"w{one}", (one * 7 + self.sent) % 9
                    rows.append(list(row))
            changed = _later(self._plain, self.sent, requests=self.sent)
            data = json.dumps(self._plain | changed | {"targets": table | {"rows": rows}}).encode()
            self.bytes = len(data)
            yield b"data: " + data + b"\n\n"


def _later(sample: dict[str, Any], seconds: float, **counters: int) -> dict[str, Any]:
    traffic = sample["fleet_traffic"] | counters
    return sample | {"time": sample["time"] + seconds, "fleet_traffic": traffic}


async def _fulfill(route: Any, body: str) -> None:
    await route.fulfill(body=body, content_type="text/event-stream")


def _numbers_of(row: dict[str, Any]) -> list[str]:
    name = f"{row['worker_id']}/{row['rank']}"
    return [name, *[str(row[key]) for key in ("requests_in_flight", "active_blocks", "blocks")]]


async def _shown_numbers(page: Any) -> list[list[str]]:
    """The same, as the page shows them."""
    columns = {(await one.text_content()): at for at, one in enumerate(await page.query_selector_all("th"))}
    wanted = [columns[title] for title in ("Target", "In flight", "Active blocks", "Cached blocks")]
    rows = "[...document.querySelectorAll('#targets tr:has(td)')]"
    cells = await page.evaluate(f"{rows}.map(row => [...row.cells].map(cell => cell.innerText))")
    return [[row[at] for at in wanted] for row in cells]


async def _plain(fleet: Fleet) -> dict[str, Any]:
    encoded = event(await view_of(fleet).snapshot())
    return dict(json.loads(encoded.removeprefix(b"data: ")))


async def _until(page: Any, expression: str, within_s: float = 20) -> None:
    """Playwright's own way needs `eval`, which the page's policy forbids."""
    await until_found(lambda: page.evaluate(expression), what=expression, within_s=within_s)


async def _background(page: Any) -> str:
    return str(await page.evaluate("getComputedStyle(document.body).backgroundColor"))


async def _sizes(tools: Any) -> tuple[int, int]:
    """Bytes of the heap, and nodes of the document, that are still referred to."""
    await tools.send("HeapProfiler.collectGarbage")
    heap, counters = await tools.send("Runtime.getHeapUsage"), await tools.send("Memory.getDOMCounters")
    return heap["usedSize"], counters["nodes"]


def _proxy(url: str) -> web.Application:
    """Passes on what is below /ops/kvrouter/, without that part, as it arrives."""

    async def pass_on(http: web.Request) -> web.StreamResponse:
        headers = {name: http.headers[name] for name in ("authorization",) if name in http.headers}
        path = http.raw_path.removeprefix("/ops/kvrouter")
        async with aiohttp.ClientSession() as session, session.get(url + path, headers=headers) as answer:
            kept = ("content-type", "content-security-policy", "www-authenticate")
            passed = {name: answer.headers[name] for name in kept if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(http)
            async for piece in answer.content.iter_any():
                await response.write(piece)
        return response

    app = web.Application()
    app.router.add_get("/ops/kvrouter/{path:.*}", pass_on)
    return app
