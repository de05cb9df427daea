"""Settings that change while a frontend runs, in a real process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.kit.ports import free_ports
from tests.certificates import Authority
from tests.frontend.clients import connected
from tests.frontend.fleet import BODY
from tests.frontend.test_run import Process, running
from tests.frontend.workers import OK

PATIENCE_S = 30.0


@dataclass
class Reloading:
    """A frontend with a file of settings and a file with the operators' key."""

    process: Process
    admin_url: str
    file: Path
    key: Path
    tls: ssl.SSLContext | None = None

    async def reload(self, url: str = "", key: str = "") -> tuple[int, Any]:
        """POST /config/reload: status and body."""
        async with connected(url or self.admin_url, self.tls) as client:
            response = await client.ask(None, f"authorization: Bearer {key}", path="/config/reload")
        return response.status, response.json

    async def cost(self) -> float:
        """Of a prompt of 4 blocks on the idle worker: 4 × weight + 4."""
        async with connected(self.admin_url, self.tls) as client:
            (row,) = (await client.ask(BODY, path="/v1/route")).json["candidates"]
        cost: float = row["terms"]["cost"]
        return cost

    async def hang_up(self, cost: float) -> None:
        """SIGHUP, and wait until the cost is this one."""
        self.process.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            while await self.cost() != cost:
                pass


@contextlib.asynccontextmanager
async def reloading(
    nats_url: str, directory: Path, *flags: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Reloading]:
    file, key = directory / "kvrouter.toml", directory / "key"
    file.write_text("[frontend]\nkv-overlap-score-weight = 1\n")
    key.write_text("first")
    port, admin_port = free_ports(2)
    own = (f"--config={file}", f"--admin-key-file={key}", f"--admin-port={admin_port}", *flags)
    async with running(nats_url, port, OK, *own, tls=tls) as process:
        scheme = "https" if tls else "http"
        try:
            yield Reloading(process, f"{scheme}://127.0.0.1:{admin_port}", file, key, tls)
        finally:
            if process.process.returncode is None:
                process.process.kill()
                await process.process.communicate()


async def test_while_it_runs(nats_url: str, tmp_path: Path) -> None:
    """One frontend through all changes, the last of which are in its log."""
    async with reloading(nats_url, tmp_path) as frontend:
        await at_once_and_often(frontend)
        await thresholds(frontend)
        await rotated_key(frontend)
        await weights_and_log_level(frontend)
        frontend.process.process.send_signal(signal.SIGINT)
        code, said = await frontend.process.ended(PATIENCE_S)

    assert 0 == code
    assert "kv-overlap-score-weight: 1 → 3" in said
    assert "settings.needs_restart" in said
    assert "settings.not_reloaded" in said
    assert "second" not in said
    assert "frontend.draining" not in said  # an info


async def at_once_and_often(frontend: Reloading) -> None:
    """Requests that come while settings change are all served, and the last file counts."""
    async with connected(frontend.process.url) as client:
        for weight in range(1, 6):
            frontend.file.write_text(f"[frontend]\nkv-overlap-score-weight = {weight}\n")
            frontend.process.process.send_signal(signal.SIGHUP)
            assert 200 == (await client.ask(BODY)).status
        await frontend.hang_up(cost=24.0)


async def thresholds(frontend: Reloading) -> None:
    """Thresholds of the file replace those that were set at run time, but only if they differ."""
    async with connected(frontend.admin_url) as client:
        wanted = {"model": "m", "active_prefill_tokens_threshold": 5}
        await client.ask(wanted, path="/busy_threshold")
        frontend.file.write_text("[frontend]\nretries = 1\n")
        await frontend.reload()
        kept = (await client.get("/busy_threshold")).json["thresholds"][0]
        frontend.file.write_text("[frontend]\nactive-prefill-tokens-threshold = 7\n")
        await frontend.reload()
        replaced = (await client.get("/busy_threshold")).json["thresholds"][0]

    assert (5, 7) == tuple(one["active_prefill_tokens_threshold"] for one in (kept, replaced))


async def rotated_key(frontend: Reloading) -> None:
    """A new admin key opens the clients' port, and the former one does not; neither is logged."""
    clients = frontend.process.url
    frontend.key.write_text("second")
    changed = await frontend.reload(clients, "first")
    statuses = [(await frontend.reload(clients, key))[0] for key in ("first", "second")]
    frontend.key.write_text("")
    empty = await frontend.reload()
    still = await frontend.reload(clients, "second")
    frontend.key.write_text("second")

    assert (200, {"admin-key-file": "changed"}) == (changed[0], changed[1]["changed"])
    assert [401, 200] == statuses
    assert (400, 400) == (empty[0], still[0])
    assert "it is empty" in empty[1]["error"]["message"]


async def weights_and_log_level(frontend: Reloading) -> None:
    """SIGHUP and POST apply what can change, and name the rest. A wrong file changes nothing."""
    frontend.file.write_text("[frontend]\nkv-overlap-score-weight = 1\n")
    await frontend.hang_up(cost=8.0)
    frontend.file.write_text("[frontend]\nkv-overlap-score-weight = 3\n")
    await frontend.hang_up(cost=16.0)

    frontend.file.write_text('[frontend]\nkv-overlap-score-weight = 1\nlease-s = 9\nlog-level = "error"\n')
    posted = await frontend.reload()
    after = await frontend.cost()

    frontend.file.write_text("[frontend]\nkv-overlap-score-weight = -1\n")
    status, wrong = await frontend.reload()
    after_wrong = await frontend.cost()

    assert (8.0, 8.0) == (after, after_wrong)
    changed = {"kv-overlap-score-weight": "3 → 1", "log-level": "info → error"}
    assert (200, {"changed": changed, "needs_restart": {"lease-s": "5 → 9"}}) == posted
    assert 400 == status
    assert "nothing was changed" in wrong["error"]["message"]
    assert "kv-overlap-score-weight" in wrong["error"]["message"], wrong


async def test_rotated_certificate(nats_url: str, tmp_path: Path) -> None:
    """New connections get a new certificate at once; a wrong one changes nothing."""
    first, second = Authority(tmp_path), Authority(tmp_path)
    files = first.sign()
    flags = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")
    async with reloading(nats_url, tmp_path, *flags, tls=first.trusted()) as frontend:
        second.sign()
        _, changed = await frontend.reload()
        with pytest.raises(ssl.SSLCertVerificationError):
            await frontend.cost()
        frontend.tls = second.trusted()
        cost = await frontend.cost()
        files.cert.write_text("no certificate")
        wrong, _ = await frontend.reload()
        still = await frontend.cost()

    assert {"tls-cert": "changed"} == changed["changed"]
    assert (8.0, 400, 8.0) == (cost, wrong, still)
