"""deploy/proxies: each load balancer accepts its file, and loses no request when replicas are replaced."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment, proxies
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.fleet import Fleet, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.load import SteadyLoad
from scripts.kit.ports import free_ports
from scripts.kit.proxies import HAPROXY, PROXIES, Proxy, with_addresses
from scripts.kit.replicas import Replica
from scripts.kit.workload import load_requests
from tests.frontend.workers import until_found
from tests.long import needs_long

RATE = 20.0
GRACE_S = 4
# Requests in a row that a replica must not receive to count as left out.
IN_A_ROW = 20


def binary_of(proxy: Proxy) -> str:
    """Its path; skips the test without the program."""
    binary = proxy.find()
    if binary is None:
        pytest.skip(f"{proxy.name} is not installed: {proxy.how_to_get}")
    return binary


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
def test_file_is_accepted(proxy: Proxy, tmp_path: Path) -> None:
    """The proxy's own check finds no fault, but does find a planted one."""
    binary = binary_of(proxy)
    file = proxy.write(tmp_path, 8080, ["http://127.0.0.1:8000", "http://127.0.0.1:8001"])

    def check() -> subprocess.CompletedProcess[str]:
        command = proxy.command(binary, proxy.check, file)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == (good := check()).returncode, good.stderr
    file.write_text(file.read_text().replace("127.0.0.1:", "127.0.0.1:x").replace("127.0.0.1,", "nowhere,"))
    assert 0 != check().returncode


def test_addresses() -> None:
    """There is one line for each replica, and clients have a port of their own."""
    text = with_addresses(
        (proxies.DEPLOY / "proxies" / HAPROXY.file).read_text(),
        1,
        [f"http://127.0.0.1:{n}" for n in (2, 3, 4)],
    )

    assert "bind 0.0.0.0:1\n" in text
    assert ["2", "3", "4"] == re.findall(r"server replica-\d 127.0.0.1:(\d+)\n", text)


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
async def test_headers(proxy: Proxy, tmp_path: Path) -> None:
    """A client's own request id and session reach the replica."""
    binary, (port,) = binary_of(proxy), free_ports(1)
    seen: dict[str, str] = {}

    async def replica(request: web.Request) -> web.Response:
        seen.update({name.lower(): value for name, value in request.headers.items()})
        return web.Response()

    app, client = web.Application(), Client()
    app.router.add_route("*", "/{path:.*}", replica)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with Fleet(tmp_path) as fleet:
        url = await proxies.start(proxy, binary, fleet, client, [f"http://127.0.0.1:{port}"])
        sent = {"x-request-id": "mine-1", "x-session-id": "s", "thread-id": "t"}
        async with ClientSession(headers=sent) as session, session.post(f"{url}/v1/completions", json={}):
            pass
    await client.close()
    await runner.cleanup()
    assert sent.items() <= seen.items()


@needs_long("half a minute")
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
async def test_all_replicas_are_slow(proxy: Proxy, tmp_path: Path) -> None:
    """Both get no CPU for longer than the checks' interval: nothing fails. Clients keep their addresses."""
    binary = binary_of(proxy)
    build_tiny_model(tmp_path / "model")
    flags = ("--trusted-proxies=127.0.0.1", "--access-log=all")
    plan = Plan("kv", tmp_path / "model", engines=2, frontend_flags=flags)
    client = Client()
    async with Fleet(tmp_path) as fleet:
        nats_url = await deployment.start_nats(fleet, client)
        deployed = await deployment.deploy(fleet, client, plan, nats_url)
        url = await proxies.start(proxy, binary, fleet, client, [one.url for one in deployed.replicas])
        first, second = (fleet.processes[f"frontend-{number}"] for number in range(2))
        async with SteadyLoad(load_requests(200, output_divisor=8), [url], rate=RATE) as load:
            for stopped_s in (2.5, 0.5, 8.0):
                await asyncio.sleep(1.0)
                with first.paused(), second.paused():
                    await asyncio.sleep(stopped_s)
            await asyncio.sleep(1.0)
            await load.stop()
        assert [] == [one.error for one in load.outcomes if one.error]
        assert len(load.outcomes) > 4 * IN_A_ROW
        assert b" 404 " in await ask_from("127.0.0.2", url)
    await client.close()
    assert re.search(r"client\W+127\.0\.0\.2\b", first.log.read_text() + second.log.read_text())


async def ask_from(address: str, url: str) -> bytes:
    """The status line of a request for an unknown model that comes from another address of this host."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
    body = b'{"model": "unknown", "prompt": ""}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
    writer.write(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n")[0]


async def requests_at(client: Client, replica: Replica) -> int:
    """How many requests it has answered."""
    _, body = await client.get(f"{replica.admin_url}/metrics")
    found = re.findall(r"^kvrouter_requests_total\{.*\} (\S+)$", body.decode(), re.MULTILINE)
    return int(sum(map(float, found)))


async def until_left_out(client: Client, draining: Replica, other: Replica) -> None:
    """Return when a replica gets no more requests, although it would still serve them."""
    async with asyncio.timeout(GRACE_S):
        here, there = await requests_at(client, draining), await requests_at(client, other)
        while (served := await requests_at(client, other)) < there + IN_A_ROW:
            if (received := await requests_at(client, draining)) != here:
                here, there = received, served
            await asyncio.sleep(0.02)
    status, _ = await client.get(f"{draining.url}/ready")
    assert 503 == status


async def replace(
    proxy: Proxy, fleet: Fleet, client: Client, deployed: Deployment, load: SteadyLoad, number: int
) -> None:
    """SIGTERM to one replica, its end, its start; no request is lost meanwhile."""
    replica, other = deployed.replicas[number], deployed.replicas[1 - number]
    stopping = asyncio.create_task(fleet.processes[f"frontend-{number}"].stop(60.0))
    if proxy.has_health_checks:
        await until_left_out(client, replica, other)
    assert 0 == await stopping
    process = await fleet.start_again(f"frontend-{number}")
    await wait_until_ok(client, process, f"{replica.url}/ready")
    await until_found(lambda: requests_at(client, replica), lambda count: count >= IN_A_ROW, within_s=30)
    assert [] == [one for one in load.outcomes if one.error and one.ended_at_s]


@needs_long("half a minute")
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
async def test_replicas_are_replaced(proxy: Proxy, tmp_path: Path) -> None:
    """One replica after the other is restarted under load: nothing fails, and both serve again."""
    binary = binary_of(proxy)
    build_tiny_model(tmp_path / "model")
    plan = Plan("kv", tmp_path / "model", engines=2, frontend_flags=(f"--drain-grace-s={GRACE_S}",))
    client = Client()
    async with Fleet(tmp_path) as fleet:
        nats_url = await deployment.start_nats(fleet, client)
        deployed = await deployment.deploy(fleet, client, plan, nats_url)
        urls = [replica.url for replica in deployed.replicas]
        url = await proxies.start(proxy, binary, fleet, client, urls)
        async with SteadyLoad(load_requests(200, output_divisor=8), [url], rate=RATE) as load:
            for number in range(len(urls)):
                await replace(proxy, fleet, client, deployed, load, number)
            await load.stop()
        assert [] == [one.error for one in load.outcomes if one.error]
        assert len(load.outcomes) > 4 * IN_A_ROW
    await client.close()
