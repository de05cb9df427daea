"""deploy/compose: each command line is accepted by its binary, and the same set runs without Docker.

Without Docker every service has an address of its own in 127.0.0.0/8, so all keep their ports.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrouter.bus import accounts
from kvrouter.bus.embedded import server_binary
from kvrouter.observe.verify import VerifyError, compare
from kvrouter.settings.commands import command_named
from kvrouter.settings.read import load
from scripts.kit.deployment import python
from scripts.kit.fleet import Fleet, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.load import SteadyLoad
from scripts.kit.prometheus import RULES
from scripts.kit.proxies import DEPLOY, HAPROXY
from scripts.kit.workload import load_requests
from tests.long import needs_long

COMPOSE = DEPLOY / "compose"
SERVICES: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
MODULES = {"frontend": "frontend", "agent": "worker", "mocker": "mocker"}
OURS = {name: MODULES[service["build"]["target"]] for name, service in SERVICES.items() if "build" in service}
SECRETS = "/var/lib/kvrouter"
USERS = SERVICES["users"]["command"]


@pytest.mark.parametrize("name", [name for name in OURS if name != "users"])
def test_ours(name: str, tmp_path: Path) -> None:
    """The command takes its line; each seed that it names is made by the service `users`."""
    assert 0 == accounts.main([str(tmp_path), *USERS[1:]])
    words = [word.replace(SECRETS, str(tmp_path)) for word in SERVICES[name]["command"]]

    assert load(command_named(OURS[name]), words, {}).settings


def test_set() -> None:
    """Three NATS servers, two frontends, four mockers with agents, one of each other; ours are confined."""
    kinds = [re.sub(r"-\d$", "", name) for name in SERVICES]
    several = {"nats": 3, "frontend": 2, "mocker": 4, "agent": 4}

    assert several | dict.fromkeys(["users", "haproxy", "prometheus", "grafana"], 1) == {
        kind: kinds.count(kind) for kind in kinds
    }
    for name in OURS:
        assert SERVICES[name]["read_only"]
        assert ["ALL"] == SERVICES[name]["cap_drop"]


def test_haproxy_is_that_of_the_hosts() -> None:
    """The file differs from deploy/proxies/haproxy.cfg in names and their resolution alone."""
    names = re.compile(r"init-addr libc,none resolvers docker |(127\.0\.0\.1|frontend-\d):800\d")

    def lines(path: Path) -> list[str]:
        text = names.sub("", path.read_text())
        return [line for line in text.splitlines() if "#" not in line]

    assert lines(DEPLOY / "proxies" / "haproxy.cfg") == lines(COMPOSE / "haproxy.cfg")[3:]


def test_haproxy_accepts() -> None:
    """HAProxy's own check finds no fault."""
    binary = HAPROXY.find()
    if binary is None:
        pytest.skip(f"haproxy is not installed: {HAPROXY.how_to_get}")
    command = [binary, "-c", "-q", "-f", str(COMPOSE / "haproxy.cfg")]

    assert 0 == subprocess.run(command, capture_output=True, check=False).returncode


def test_prometheus_accepts(tmp_path: Path) -> None:
    """Promtool finds no fault, and each target is a service."""
    text = (COMPOSE / "prometheus.yml").read_text()
    assert {"frontend-0", "frontend-1"} == set(re.findall(r"([\w-]+):8000", text))
    assert {name for name in OURS if OURS[name] == "worker"} == set(re.findall(r"([\w-]+):9100", text))
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    for file in (COMPOSE / "prometheus.yml", RULES):
        shutil.copy(file, tmp_path)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]

    assert 0 == subprocess.run(command, capture_output=True, check=False).returncode


@dataclass(frozen=True, slots=True)
class Hosts:
    """An address for each service, and the commands with these addresses."""

    directory: Path
    net: str

    def address(self, name: str) -> str:
        return f"{self.net}.{1 + list(SERVICES).index(name)}"

    def here(self, name: str, text: str) -> str:
        """A text of the service `name`: other services by address, its own interfaces its own address."""
        text = re.sub(
            r"\b((?:nats|frontend|mocker|agent)-\d)(?=:\d)", lambda found: self.address(found[1]), text
        )
        text = re.sub(r"0\.0\.0\.0|127\.0\.0\.1(?=:8222)", self.address(name), text)
        return text.replace(SECRETS, str(self.directory)).replace("127.0.0.11", "127.0.0.1")

    def file(self, name: str, path: Path) -> Path:
        """A copy of a configuration, next to the seeds."""
        made = self.directory / f"{name}-{path.name}"
        made.write_text(self.here(name, path.read_text()))
        return made

    def command(self, name: str) -> list[str]:
        """What a container of this service would run."""
        if name == "haproxy":
            return [HAPROXY.find() or "", "-db", "-f", str(self.file(name, COMPOSE / "haproxy.cfg"))]
        if name == "prometheus":
            file = self.file(name, COMPOSE / "prometheus.yml")
            shutil.copy(RULES, self.directory)
            listen = f"--web.listen-address={self.address(name)}:9090"
            return [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={self.directory}/tsdb",
                listen,
            ]
        if name.startswith("nats-"):
            return [str(server_binary()), "--config", str(self.file(name, DEPLOY / "nats" / "cluster.conf"))]
        words = [self.here(name, word) for word in SERVICES[name]["command"]]
        own = [f"--host={self.address(name)}", f"--admin-host={self.address(name)}", "--drain-grace-s=0"]
        return [*python(f"kvrouter.{OURS[name]}"), *words, *(own if OURS[name] == "frontend" else [])]


async def equal(urls: list[str]) -> list[str]:
    """The differences that are left, if any, after some seconds."""
    until_s, found = time.monotonic() + 20, ["never compared"]
    while found and time.monotonic() < until_s:
        try:
            found = (await compare(urls, timeout_s=1.0)).differences
        except VerifyError as error:
            found = [str(error)]
    return found


@needs_long("half a minute")
@pytest.mark.timeout(180)
async def test_without_docker(tmp_path: Path) -> None:
    """All services as processes, requests through HAProxy, the death of one NATS server: none fails."""
    if HAPROXY.find() is None:
        pytest.skip(f"haproxy is not installed: {HAPROXY.how_to_get}")
    assert 0 == accounts.main([str(tmp_path), *USERS[1:]])
    hosts = Hosts(tmp_path, f"127.{random.randrange(20, 250)}.{random.randrange(1, 250)}")
    url = f"http://{hosts.address('haproxy')}:8080"
    admins = [f"http://{hosts.address(name)}:8100" for name in ("frontend-0", "frontend-1")]
    client = Client()
    async with Fleet(tmp_path) as fleet:
        for name, service in SERVICES.items():
            if name not in {"users", "grafana"} and (name != "prometheus" or shutil.which(name)):
                await fleet.start(name, hosts.command(name), service.get("environment"))
        await wait_until_ok(client, fleet.processes["haproxy"], f"{url}/ready")
        async with asyncio.timeout(30):
            for admin in admins:
                while len((await client.get_json(f"{admin}/workers"))["targets"]) < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        async with SteadyLoad(load_requests(200, output_divisor=8), [url], rate=20.0) as load:
            await asyncio.sleep(3)
            await fleet.processes["nats-0"].kill()
            await asyncio.sleep(8)
            await load.stop()
        assert [] == [one.error for one in load.outcomes if one.error]
        assert len(load.outcomes) > 200
        assert {"mocker-0", "mocker-1", "mocker-2", "mocker-3"} == {one.worker for one in load.outcomes}
        assert [] == await equal(admins)
        if "prometheus" in fleet.processes:
            shown = await client.get_json(f"http://{hosts.address('prometheus')}:9090/api/v1/targets")
            assert ["up"] * 6 == [target["health"] for target in shown["data"]["activeTargets"]]
    await client.close()
