"""The page in a real Chromium, in front of a real fleet. Long: KVROUTER_TEST_LONG=1, Playwright, chromium."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvrouter.observe.dashboard.stream import event
from kvrouter.replica.awaited import NO_WORKER
from scripts.kit.screenshots import (
    SCHEMES,
    VIEWS,
    Running,
    Scheme,
    Snapshots,
    has_browser,
    later,
    open_page,
    small_fleet,
)
from tests.frontend.fleet import BODY, Fleet, FleetOf
from tests.frontend.workers import OK, until_found
from tests.long import needs_long
from tests.observe.test_document import view_of

pytestmark = [
    needs_long("a minute"),
    pytest.mark.skipif(not has_browser(), reason="needs Playwright and chromium"),
]
ENGINES = 3
DEATH_MS = 5_000
# The page keeps the last quarter of an hour.
QUARTER_S = 900
LEAKED_BYTES = 1_000_000
# What can be used in a view; of tabs and squares, which arrows lead to, one.
CONTROLS = """[...document.querySelectorAll("button, input, select, summary, [tabindex]")].filter(
    (one) => one.tabIndex >= 0 && one.checkVisibility({ visibilityProperty: true }))"""
# Texts with less contrast than WCAG's AA asks for.
TOO_FAINT = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgb = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const light = (colour) => {
        const parts = [...rgb(colour)].slice(0, 3).map((part) => part / 255);
        const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        const [red, green, blue] = parts.map(linear);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const behind = (one) => {
        const colour = getComputedStyle(one).backgroundColor;
        return rgb(colour)[3] || one === document.body ? colour : behind(one.parentElement);
    };
    const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const texts = [...document.body.querySelectorAll("*")].filter(hasText);
    return texts.filter((one) => one.checkVisibility()).filter((one) => {
        const [high, low] = [light(getComputedStyle(one).color), light(behind(one))].sort((a, b) => b - a);
        return (high + 0.05) / (low + 0.05) < 4.5;
    }).map((one) => one.outerHTML.slice(0, 200));
})()"""
# Where the line of the requests begins, as a share of the plot's width.
LEFTMOST = """(() => {
    const plot = document.querySelector("#plot-rate canvas");
    const over = document.querySelector("#plot-rate .u-over");
    const scale = plot.width / plot.clientWidth;
    const [left, width] = [over.offsetLeft * scale, over.offsetWidth * scale];
    const { data } = plot.getContext("2d").getImageData(left, 0, width, plot.height);
    const isBlue = (at) => data[at + 3] > 128 && data[at + 2] - data[at] > 60;
    for (let x = 0; x < Math.floor(width); x += 1)
        for (let y = 0; y < plot.height; y += 1)
            if (isBlue(4 * (y * Math.floor(width) + x))) return x / width;
    return 1;
})()"""


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
    await page.check("#all-columns")

    async def both() -> tuple[Any, Any]:  # which change all the time
        known = (await running.client.get_json(f"{admin}/workers"))["targets"]
        return sorted(map(_numbers_of, known)), sorted(await _shown_numbers(page))

    await until_found(both, lambda found: found[0] == found[1], "what is known is shown", within_s=30)

    await page.focus("#tab-fleet")
    for view in VIEWS[1:]:
        await page.keyboard.press("ArrowRight")
        assert await page.get_attribute(f"#{view}", "hidden") is None
        assert 1 == len(await page.query_selector_all("[role=tabpanel]:not([hidden])"))
    await page.click("#tab-traffic")
    await page.wait_for_selector("#plots canvas")
    await page.click("#tab-decisions")
    await page.click("#list tbody button")
    await page.wait_for_selector("#candidates tr.chosen")
    assert ENGINES == len(await page.query_selector_all("#candidates tr:has(td)"))
    why = [await one.text_content() for one in await page.query_selector_all("#candidates td.reason")]
    assert "chosen" == why[0]
    assert all("against" in one or "equal" in one for one in why[1:])
    parts = re.search(
        r"first token in (\S+) ms: (\S+) waiting \+ (\S+) own; ", await page.text_content("#why")
    )
    assert parts
    first, waiting, own = map(float, parts.groups())
    assert waiting + own == pytest.approx(first)
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
    """A square each, the first 200 as rows, and any by the search."""
    async with fleet_of(ranks=8) as fleet:
        snapshots = Snapshots(await _plain(fleet), workers=500, ranks=2)
        await snapshots.serve_at(page, 20)
        await page.goto(f"{fleet.frontend.admin_url}/")
        await _until(page, "document.querySelectorAll('#squares button').length === 1000")
        assert 200 == len(await page.query_selector_all("#targets tr:has(td)"))
        await page.fill("#search", "w99/1")
        assert 1 == len(await page.query_selector_all("#targets tr:has(td)"))
        await page.fill("#search", "")
        await page.focus("#squares button")  # Tab leads to one of them, the arrows to the others
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("Enter")
        assert "w0/1" == await page.input_value("#search")


async def test_what_was_before_the_page_was_opened(fleet_of: FleetOf, page: Any) -> None:
    """The figures of the last minute and the plots begin with the samples that the replica has kept."""
    async with fleet_of() as fleet:
        plain = await _plain(fleet)
        fields = ("time", "started_s", "fleet_traffic")
        now = {name: plain[name] for name in fields}
        kept = [later(now, seconds, requests=3 * seconds) for seconds in range(-3600, 0, 10)]
        await _show(page, plain, kept)
        await page.goto(f"{fleet.frontend.admin_url}/#traffic")
        await page.select_option("#span", "3600")

        await page.wait_for_selector("#plot-rate canvas")
        seen = "import('./dashboard/traffic.js').then(traffic => traffic.shown().map(point => point[3]))"
        assert [3.0] * 360 == [round(one, 6) for one in await page.evaluate(seen)]
        await page.click("#tab-fleet")
        assert "Requests a second3.0" in await page.text_content("#figures")
        assert [] == page.said


async def test_a_decision_in_blocks(fleet_of: FleetOf, page: Any) -> None:
    """With a number as the weight the sentence is about the cost; the formula is shown on request."""
    weight = ("--router-mode", "kv", "--kv-overlap-score-weight", "2")
    async with fleet_of(*weight, scripts=(OK, OK)) as fleet:
        await fleet.ask(BODY, "x-request-id: r1")
        await page.goto(f"{fleet.frontend.admin_url}/#decisions/r1")
        await page.wait_for_selector("#candidates tr.chosen")

        said = await page.text_content("#why")
        assert re.search(r"^w./0: cost 12 blocks: 2 \* 4 prefill \+ 4 decode; next best 12 \(w./0\)\.$", said)
        assert not await page.is_visible("text=equivalent_weight")
        await page.focus("#formula summary")
        await page.keyboard.press("Enter")
        assert await page.is_visible("text=cost = w * prefill_blocks + decode_blocks")
        assert [] == page.said


async def test_a_decision_of_two_workers(fleet_of: FleetOf, page: Any) -> None:
    """Each half has its sentence and its candidates; what decided is within a narrow window."""

    def candidate(worker: str, **terms: Any) -> dict[str, Any]:
        load = {"overlap_blocks": 1, "requests": 0}
        return {"worker_id": worker, "dp_rank": 0, "why_not": "slower", "terms": terms} | load

    def timed(worker: str, *parts: float) -> dict[str, Any]:
        names = ("waiting", "own_prefill", "congestion")
        seconds = dict(zip(names, parts, strict=True)) | {"total": sum(parts)}
        return candidate(worker, seconds=seconds, cost=3, equivalent_weight=-448)

    prefill = [timed("p0", 0.003, 0.009, 0.002), timed("p1", 0.02, 0.011, 0.0)]
    decode = [candidate("d0", decode_blocks=4, overlap_blocks=1, cost=3)]
    half = {"winner": "d0/0", "order": ["d0/0"], "removed": [], "candidates": decode, "mode": "kv"}
    decision = half | {"prefill": {"winner": "p0/0", "candidates": prefill}}
    body = json.dumps({"decisions": [decision]})
    async with fleet_of() as fleet:
        await page.route("**/decisions/r1", lambda route: route.fulfill(body=body))
        await page.set_viewport_size({"width": 420, "height": 700})
        await page.goto(f"{fleet.frontend.admin_url}/#decisions/r1")
        await page.wait_for_selector("#prefill-candidates tr.chosen")

        compared = (
            "first token in 12 ms: 3 waiting + 9 own; compared 14 with 2 congestion; next best 31 (p1/0)"
        )
        answers = "cost 3 blocks: 4 decode - 1 cached; no other candidate"
        assert f"Prefill at p0/0: {compared}. Decode at d0/0: {answers}." == await page.text_content("#why")
        number = await page.query_selector("#prefill-candidates tr.chosen td")
        box = await number.bounding_box()
        assert "14" == (await number.inner_text()).strip()
        assert box["x"] + box["width"] <= 420


async def test_without_targets(fleet_of: FleetOf, page: Any) -> None:
    """What to do next: the commands that /ready names, too."""
    async with fleet_of(scripts=()) as fleet:
        await page.goto(f"{fleet.frontend.admin_url}/")
        await page.wait_for_selector("#empty pre")
        commands = [await one.text_content() for one in await page.query_selector_all("#empty pre")]

        assert ["kvrouter worker --engine-url URL", "kvrouter doctor"] == commands
        assert all(command in NO_WORKER for command in commands)
        assert NO_WORKER in await page.text_content("#reasons")
        assert not await page.is_visible("#targets")


async def test_groups(fleet_of: FleetOf, page: Any) -> None:
    """Workers by host, ranks by worker; they open, close and sort by keys, and updates keep the focus."""
    async with fleet_of() as fleet:
        await Snapshots(await _plain(fleet), workers=60, ranks=2, hosts=15).serve_at(page, 5)
        await page.set_viewport_size({"width": 1400, "height": 800})
        await page.goto(f"{fleet.frontend.admin_url}/")
        await _until(page, "document.querySelectorAll('#targets tbody tr').length === 75")
        assert await page.evaluate("document.getElementById('targets').scrollWidth") <= 1400

        await page.focus("#targets tbody button >> nth=0")
        await page.keyboard.press("Enter")
        assert "10.0.0.0, 4 workers" == await page.evaluate("document.activeElement.textContent")
        assert "false" == await page.evaluate("document.activeElement.ariaExpanded")
        assert 71 == len(await page.query_selector_all("#targets tbody tr"))
        before = await page.evaluate("drawn.length")
        await _until(page, f"drawn.length > {before}")  # the page asks again
        assert "10.0.0.0, 4 workers" == await page.evaluate("document.activeElement.textContent")

        await page.click("#targets button:has-text('In flight')")
        await page.click("#targets button:has-text('In flight')")
        assert "In flight" == await page.text_content("#targets [aria-sort=descending]")
        hosts = "[...document.querySelectorAll('#targets tr.level-0')]"
        loads = await page.evaluate(f"{hosts}.map(row => parseInt(row.cells[2].innerText))")
        assert loads == sorted(loads, reverse=True)

        await page.fill("#search", "w7/1")
        assert "1 of 120 targets" == await page.text_content("#shown")


async def test_roles(fleet_of: FleetOf, page: Any) -> None:
    """Prefill and decode workers are told apart where there are any."""
    async with fleet_of() as fleet:
        plain = await _plain(fleet)
        columns, (row,) = plain["targets"]["columns"], plain["targets"]["rows"]
        rows = [
            list((dict(zip(columns, row, strict=True)) | {"worker": role, "role": role}).values())
            for role in ("prefill", "decode")
        ]
        await _show(page, plain | {"targets": {"columns": columns, "rows": rows}})
        await page.goto(f"{fleet.frontend.admin_url}/")
        await page.wait_for_selector("#targets td")

        assert "decode 1 of 1, prefill 1 of 1" in await page.text_content("#figures")
        assert "Role" in await page.text_content("#targets thead")


async def test_names_are_not_trusted(fleet_of: FleetOf, page: Any) -> None:
    """Whatever a worker or a client sends is shown as text."""
    evil = "<img src=x onerror=alert(1)>"
    async with fleet_of() as fleet:
        plain = await _plain(fleet)
        columns, (row,) = plain["targets"]["columns"], plain["targets"]["rows"]
        facts = {"worker": evil, "pool": evil, "state": evil, "engine": evil, "url": evil, "problems": [evil]}
        rows = [
            list((dict(zip(columns, row, strict=True)) | facts | {"rank": one}).values()) for one in range(14)
        ]
        changed = {"reasons": [evil], "router_id": evil, "targets": {"columns": columns, "rows": rows}}
        await _show(page, plain | changed)
        await fleet.ask(BODY, f"x-request-id: {evil}")
        await page.goto(f"{fleet.frontend.admin_url}/")
        await page.wait_for_selector("#targets td")
        await page.check("#all-columns")
        for view in VIEWS:
            await page.click(f"#tab-{view}")
        await page.click("#tab-fleet")

        assert evil in await page.text_content("#targets")
        assert evil in await page.text_content("#reasons")
        assert 0 == len(await page.query_selector_all("img"))
        assert [] == page.said


async def test_every_control_by_keyboard(fleet_of: FleetOf, page: Any) -> None:
    """Tab leads to every control of every view, and the one with the focus has an outline."""
    async with fleet_of() as fleet:
        await Snapshots(await _plain(fleet), workers=20, ranks=2, hosts=4).serve_at(page, 3)
        await fleet.ask(BODY, "x-request-id: r1")
        for view in ("fleet", "traffic", "decisions/r1", "agreement"):
            await page.goto("about:blank")
            await page.goto(f"{fleet.frontend.admin_url}/#{view}")
            ready = "#candidates td" if "/" in view else f"#{view} :is(td, canvas)"
            await page.wait_for_selector(ready)
            wanted = await page.evaluate(f"window.controls = {CONTROLS}; controls.length")
            reached = set()
            for _ in range(wanted + 2):
                await page.keyboard.press("Tab")
                at = await page.evaluate("controls.indexOf(document.activeElement)")
                outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                if at >= 0:
                    reached.add(at)
                    assert "solid" == outline
            assert wanted == len(reached), view


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_contrast(fleet_of: FleetOf, scheme: Scheme) -> None:
    """Text has a contrast of 4.5 or more with what is behind it, in every view."""
    async with fleet_of() as fleet, open_page(scheme) as (page, _):
        await Snapshots(await _plain(fleet), workers=60, hosts=4).serve_at(page, 3)
        await fleet.ask(BODY, "x-request-id: r1")
        await page.goto(f"{fleet.frontend.admin_url}/#decisions/r1")
        await page.wait_for_selector("#candidates td")
        for view in VIEWS:
            await page.click(f"#tab-{view}")
            assert [] == await page.evaluate(TOO_FAINT), view


async def test_plots_over_the_chosen_range(fleet_of: FleetOf, page: Any) -> None:
    """A line of the last minutes fills only their part of the hour that was chosen."""
    async with fleet_of() as fleet:
        plain = await _plain(fleet)
        now = {name: plain[name] for name in ("time", "started_s", "fleet_traffic")}
        kept = [later(now, seconds, requests=3 * seconds) for seconds in range(-600, 0, 10)]
        await _show(page, plain, kept)
        await page.goto(f"{fleet.frontend.admin_url}/#traffic")
        await page.wait_for_selector("#plot-rate canvas")
        parts = {}
        for span in ("300", "3600"):
            await page.select_option("#span", span)
            parts[span] = await page.evaluate(LEFTMOST)

        assert parts["300"] < 0.2
        assert 0.75 < parts["3600"] < 0.95


async def test_an_hour_leaks_nothing(fleet_of: FleetOf, page: Any) -> None:
    """Once every live view was open, 3,600 snapshots more change neither the heap nor the number of nodes."""
    async with fleet_of(ranks=8) as fleet:
        snapshots = Snapshots(await _plain(fleet), workers=2, ranks=8)
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


async def _show(page: Any, snapshot: dict[str, Any], history: Sequence[Any] = ()) -> None:
    """Make this the stream that the page gets."""
    body = f"event: history\ndata: {json.dumps(history)}\n\ndata: {json.dumps(snapshot)}\n\n"
    await page.route(
        "**/fleet/stream", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )


def _numbers_of(row: dict[str, Any]) -> list[str]:
    name = f"{row['worker_id']}/{row['rank']}"
    return [name, *[str(row[key]) for key in ("requests_in_flight", "active_blocks", "blocks")]]


async def _shown_numbers(page: Any) -> list[list[str]]:
    """The same, as the page shows them."""
    lines = (
        "[...document.querySelectorAll('#targets tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )
    titles, *rows = await page.evaluate(lines)  # at once, as the numbers change
    wanted = [titles.index(title) for title in ("Target", "In flight", "Active blocks", "Cached blocks")]
    return [[row[at].strip() for at in wanted] for row in rows]


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
