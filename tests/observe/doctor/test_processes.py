"""`kvrouter doctor` on real processes: a fleet that is well, then with dead and stopped parts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit.ports import free_ports
from tests.e2e.engine_process import EngineProcess
from tests.long import needs_long
from tests.serve.serving import command_of, serving

Groups = dict[str, list[str]]


async def doctor(*flags: str) -> tuple[int, Groups]:
    """The exit code, and what the findings are about, by code."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter", "doctor", "--json", *flags, stdout=asyncio.subprocess.PIPE
    )
    text, _ = await process.communicate()
    body = msgspec.json.decode(text, type=dict[str, Any])
    return body["exit_code"], {
        one["code"]: [each["about"] for each in one["findings"]] for one in body["groups"]
    }


@needs_long("half a minute")
async def test_processes(tmp_path: Path) -> None:
    """A killed engine, a stopped agent and a stopped replica are found; before, nothing is."""
    build_tiny_model(tmp_path / "tiny")
    ports = free_ports(12)
    engines = [EngineProcess(f"w{n}", (ports[3 * n], ports[3 * n + 1], ports[3 * n + 2])) for n in range(3)]
    for engine in engines:
        await engine.start(model_path=tmp_path / "tiny")
    flags = [f"--engine={engine.url},id={engine.worker_id}" for engine in engines]
    nats, port = ports[9], ports[10]
    try:
        async with serving(*flags, f"--nats-port={nats}", f"--port={port}", "--replicas=2") as served:
            await served.until_said("ready: ")
            at = ("--nats", f"nats://127.0.0.1:{nats}")
            await served.until_said("replica.joined", 2)
            assert (0, {}) == await doctor(*at, "--owners")

            await engines[0].kill()
            (agent,) = [pid for pid in served.agents() if "--worker-id=w1" in command_of(pid)]
            replicas = [pid for pid, command in served.children().items() if "kvrouter frontend" in command]
            os.kill(agent, signal.SIGSTOP)
            code, found = await doctor(*at)
            os.kill(replicas[0], signal.SIGSTOP)
            _, later = await doctor(*at)
            for stopped in (agent, replicas[0]):
                os.kill(stopped, signal.SIGCONT)
    finally:
        for engine in engines:
            await engine.kill()

    assert 2 == code
    # the agent reports it after three probes
    assert ["w0"] == (found.get("engine.down") or found["engine.unreachable"])
    assert ["w1"] == found["agent.lost"]
    assert 1 == len(later["replica.lost"])
