"""The version of tests/upgrade/PREVIOUS and this one together: a rolling upgrade and a rollback lose nothing.

Real processes under load. Those of the version before run from its files in git's history, in this
environment: what it needs is installed here, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvrouter.bus import accounts
from kvrouter.bus.embedded import server_binary
from kvrouter.bus.server_info import read_info
from kvrouter.observe.verify import VerifyError, compare
from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.fleet import Fleet, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.load import SteadyLoad
from scripts.kit.ports import free_ports
from scripts.kit.replicas import settled
from scripts.kit.workload import MODEL, load_requests
from tests.frontend.workers import until_found
from tests.long import needs_long

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = Path(__file__).with_name("PREVIOUS").read_text().strip()
EQUAL_WITHIN_S = 20.0
RATE = 10.0


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the version before."""
    directory = tmp_path_factory.mktemp("previous")
    archive = directory / "tree.zip"
    command = ["git", "-C", str(ROOT), "archive", f"--output={archive}", PREVIOUS, "kvrouter"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"git has no {PREVIOUS[:12]}, the version before: {ended.stderr.strip()}")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(directory)
    return directory


class MixedFleet(Fleet):
    """A fleet whose processes named in `old` are of the version before, from their next start on."""

    def __init__(self, directory: Path, previous: Path) -> None:
        super().__init__(directory)
        self.old: set[str] = set()
        self._previous = previous

    async def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        if command[0] == sys.executable:
            tree = self._previous if name in self.old else ROOT
            # -P: without it the current directory, which is this checkout, is searched first
            words = [word for word in command[1:] if word != "-P"]
            command, env = [sys.executable, "-P", *words], {"PYTHONPATH": str(tree)}
        return await super().start(name, command, env)


async def start_embedded(fleet: MixedFleet, url: str, *flags: str) -> None:
    """Start `kvrouter nats` of this version, in place of one that runs; returns when it answers."""
    if "nats" in fleet.processes:
        assert 0 == await fleet.processes["nats"].stop(10.0)
    await fleet.start("nats", [*deployment.python("kvrouter"), "nats", url, *flags])

    async def answers() -> bool:
        with contextlib.suppress(OSError):
            await read_info(url)
            return True
        return False

    await until_found(answers, within_s=EQUAL_WITHIN_S)


async def is_guarded(url: str) -> bool:
    """Whether NATS wants a user."""
    return (await read_info(url)).auth_required


async def until_equal(deployed: Deployment) -> None:
    """Return when both replicas see both workers, and hold the same blocks and bookings."""
    until_s, found = time.monotonic() + EQUAL_WITHIN_S, ["never compared"]
    while found:
        assert time.monotonic() < until_s, found
        try:
            urls = [replica.admin_url for replica in deployed.replicas]
            found = (await compare(urls, timeout_s=1.0)).differences
            views = [await replica.view() for replica in deployed.replicas]
            found += [f"{view.live_targets} workers" for view in views if view.live_targets < 2]
            found += ["no peer" for view in views if not view.peers]
        except VerifyError as error:
            found = [str(error)]


async def replace(
    fleet: MixedFleet, client: Client, load: SteadyLoad, deployed: Deployment, name: str
) -> None:
    """End a process in order, and start it again in the other version, as a supervisor would."""
    kind, _, number = name.partition("-")
    url = deployed.replicas[int(number)].url if kind == "frontend" else ""
    load.left_out.add(url)
    assert 0 == await fleet.processes[name].stop(60.0)
    process = await fleet.start_again(name)
    if url:
        await wait_until_ok(client, process, f"{url}/ready")
    load.left_out.discard(url)
    await until_equal(deployed)


@needs_long("a minute")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", ["frontend", "agent"])
async def test_upgrade_and_rollback(previous: Path, tmp_path: Path, first: str) -> None:
    """All processes to this version one by one, and back: no request fails, replicas agree at each step.

    Then NATS gets its users, which the version before does not know: it is open while versions are mixed.
    """
    build_tiny_model(tmp_path / "model")
    second = "agent" if first == "frontend" else "frontend"
    names = [f"{kind}-{number}" for kind in (first, second) for number in range(2)]
    client = Client()
    async with MixedFleet(tmp_path, previous) as fleet:
        fleet.old = {*names}
        (nats_port,) = free_ports(1)
        nats_url = f"nats://127.0.0.1:{nats_port}"
        await start_embedded(fleet, nats_url, "--nats-open")
        plan = Plan("kv", tmp_path / "model", engines=2, namespace="upgrade")
        deployed = await deployment.deploy(fleet, client, plan, nats_url)
        urls = [replica.url for replica in deployed.replicas]
        async with SteadyLoad(load_requests(200, output_divisor=8), urls, rate=RATE) as load:
            for name in names:
                fleet.old.discard(name)
                await replace(fleet, client, load, deployed, name)
            await start_embedded(fleet, nats_url)
            assert await is_guarded(nats_url)
            await until_equal(deployed)
            await start_embedded(fleet, nats_url, "--nats-open")
            await until_equal(deployed)
            for name in reversed(names):
                fleet.old.add(name)
                await replace(fleet, client, load, deployed, name)
            await load.stop()
        assert [] == [one.error for one in load.outcomes if one.error]
        assert len(load.outcomes) > 100
    await client.close()


@needs_long("ten seconds")
async def test_an_older_agent_beside_a_group(previous: Path, tmp_path: Path) -> None:
    """An older agent, and one of this version in a group, each with a user of NATS: both are served.

    A replica that comes later gets the blocks of both.
    """
    flags = ["--namespace", "mixed", "--agent", "old", "--agent", "gpus=gpus.*"]
    assert 0 == accounts.main([str(tmp_path), *flags])
    build_tiny_model(tmp_path / "model")
    (port,) = free_ports(1)
    (tmp_path / "nats.conf").write_text(f"host: 127.0.0.1\nport: {port}\ninclude accounts.conf\n")
    url, ids = f"nats://127.0.0.1:{port}", ["old", "gpus.w1"]
    users = {"agent-0": "old", "agent-1": "gpus", "frontend-0": "frontend", "frontend-1": "frontend"}
    plan = Plan(
        "kv", tmp_path / "model", engines=2, replicas=1, namespace="mixed",
        agent_flags={number: [f"--worker-id={worker_id}"] for number, worker_id in enumerate(ids)},
        nats_flags={name: [f"--nats={url}", f"--nats-nkey={tmp_path}/{of}.nk"] for name, of in users.items()},
    )  # fmt: skip
    async with Client() as client, MixedFleet(tmp_path, previous) as fleet:
        fleet.old = {"agent-0"}
        await fleet.start("nats", [str(server_binary()), "--config", str(tmp_path / "nats.conf")])
        (first,) = (await deployment.deploy(fleet, client, plan, url)).replicas
        body = json.dumps({"model": MODEL, "prompt": [*range(100, 200)], "max_tokens": 1}).encode()
        for worker_id in ids:
            to, answer = {"x-kvrouter-mode": "direct", "x-kvrouter-target": worker_id}, bytearray()
            head = await client.send("POST", f"{first.url}/v1/completions", answer.extend, body, to)
            assert 200 == head.status, answer
        process, second = await deployment.start_frontend(fleet, client, plan, url, 1)
        await wait_until_ok(client, process, f"{second.url}/ready")
        views = await settled([first, second])

    assert views[0].index == views[1].index
    assert {f"{worker_id}/0": 6 for worker_id in ids} == {
        name: held for name, (held, _) in views[1].index.items()
    }


async def test_versions_differ(previous: Path, tmp_path: Path) -> None:
    """A process named in `old` runs the files of the version before, the others run this checkout."""
    async with MixedFleet(tmp_path, previous) as fleet:
        fleet.old = {"old"}
        for name in ("old", "new"):
            code = "import kvrouter; print(kvrouter.__file__)"
            process = await fleet.start(name, [sys.executable, "-c", code])
            assert 0 == await asyncio.wait_for(process.wait(), 30)
        shown = [fleet.processes[name].tail() for name in ("old", "new")]

    assert [str(tree / "kvrouter" / "__init__.py") for tree in (previous, ROOT)] == shown
