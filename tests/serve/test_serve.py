"""`kvrouter serve` as a user runs it: one command, real processes, mockers as engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrouter.cli import main
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from scripts.kit.ports import free_ports
from tests.serve.serving import (
    PATIENCE_S,
    all_gone,
    bound,
    is_alive,
    serving,
    until_known,
    until_ready,
)
from tests.worker.fake_engine import EngineServer

FAST = MockerConfig(engine=EngineConfig(num_blocks=2048 + 1), model_name="tiny", speedup=50.0)


@pytest.fixture
async def mockers(tiny: Path) -> AsyncIterator[list[Mocker]]:
    """Two engines that know where their model is."""
    config = MockerConfig(engine=FAST.engine, model_name="tiny", model_path=tiny, speedup=50.0)
    async with running_mocker(config) as first, running_mocker(config) as second:
        yield [first, second]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(http: aiohttp.ClientSession, url: str, prompt: str | list[int]) -> aiohttp.ClientResponse:
    """One completion."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        await response.read()
    assert response.status == 200
    return response


async def test_the_one_command(
    mockers: list[Mocker], tiny: Path, http: aiohttp.ClientSession, free_port: Callable[[], int]
) -> None:
    """Two engines, two replicas, an embedded NATS: a killed agent is restarted, SIGTERM leaves nothing."""
    ports = free_ports(4)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    engines = [f"--engine={mocker.url}" for mocker in mockers]
    flags = ["--replicas=2", f"--port={ports[0]}", f"--admin-port={ports[2]}", f"--nats-port={free_port()}"]
    async with serving(*engines, *flags, backend="auto") as served:
        await until_ready(served, http, urls)

        prompt = "the same words again and again " * 20
        warm = await ask(http, urls[0], prompt)
        chosen = warm.headers["x-kvrouter-worker"]
        await until_known(served, http, urls[3], chosen)
        found = await ask(http, urls[1], prompt)
        await served.until_said(r"ready: ")
        answer = await paste(served.text())

        (victim, *_) = before = served.agents()
        os.kill(victim, signal.SIGKILL)
        await served.until_said(r"child.ended .*exit_code=-9.*")
        await served.until(lambda: len(set(served.agents()) - set(before)) == 1, "another agent")
        await served.until_said(r"^agent-\d +\| .*worker\.up", 3)

        pids = list(served.children())
        code = await served.end()
        await served.until(lambda: all_gone(pids), "an end of all children")

    assert chosen == found.headers["x-kvrouter-worker"]
    assert int(found.headers["x-kvrouter-overlap-blocks"]) > 5
    assert 0 == code
    said = served.text()
    line = f"ready: {urls[0]} (tiny, 2 workers, kv by KV events) · admin {urls[2]} · try: curl "
    assert line in said
    assert "tiny" == answer["model"]
    assert f"tokenizer   {tiny}" in said
    assert f"events      {mockers[0].kv_events}" in said
    assert len(pids) == 5
    assert said.index("frontend.stopped") > said.index("serve.stopping")
    assert all(re.match(r"(serve|agent-\d|frontend-\d) +\| ", line) for line in served.said), said
    assert "\033[" not in said


async def paste(said: str) -> dict[str, Any]:
    """The answer to the command at the end of the start."""
    (command,) = re.findall(r"· try: (curl .*)", said)
    shell = await asyncio.create_subprocess_shell(f"{command} --silent", stdout=asyncio.subprocess.PIPE)
    output, _ = await shell.communicate()
    answer: dict[str, Any] = json.loads(output)
    return answer


async def test_engine_that_comes_later(
    nats_url: str, http: aiohttp.ClientSession, free_port: Callable[[], int]
) -> None:
    """An engine that is not up yet is awaited; its report appears when it answers."""
    engine_port, port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    flags = [f"--engine=http://127.0.0.1:{engine_port}", f"--port={port}", f"--nats={nats_url}"]
    async with serving(*flags, f"--namespace=later-{port}") as served:
        await served.until_said(r"engine.awaited .*reason='/v1/models: connection refused'")
        assert f"NATS at {nats_url} (--nats): joins the fleet of namespace 'later-{port}'" in served.text()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):  # they mean nothing, and end nothing
            served.process.send_signal(number)
        await served.until_said(r"signal\.ignored", 3)
        assert not served.children()

        async with running_mocker(MockerConfig(engine=FAST.engine, model_name="tiny", port=engine_port)):
            await until_ready(served, http, [url])
            await ask(http, url, [1, 2, 3])

            assert 0 == await served.end(signal.SIGINT)

    assert "tokenizer   the engine's own /tokenize" in served.text()


async def test_engine_with_another_model(
    nats_url: str, tiny: Path, http: aiohttp.ClientSession, free_port: Callable[[], int]
) -> None:
    """An engine returns with another model: the frontends use the tokenizer on its card."""
    port, engine_port = free_port(), free_port()
    flags = [f"--engine=http://127.0.0.1:{engine_port}", f"--port={port}", f"--nats={nats_url}"]
    config = MockerConfig(engine=FAST.engine, model_name="tiny", model_path=tiny, port=engine_port)
    async with serving(*flags, f"--namespace=another-{port}") as served:
        async with running_mocker(config):
            await until_ready(served, http, [f"http://127.0.0.1:{port}"])
            (frontend,) = [command for command in served.children().values() if "frontend" in command]
        await served.until_said(r"engine\.down")
        async with running_mocker(replace(config, model_name="other")):
            await served.until_said(r"model       other")
            await served.until_said(r"tokenizer\.way .*pool=other-\S+ prompt=text way=card")

            assert 0 == await served.end()

    assert "--tokenizer-root=/" in frontend
    assert served.text().count(f"tokenizer   {tiny}") == 2


async def test_no_events(nats_url: str, http: aiohttp.ClientSession, free_port: Callable[[], int]) -> None:
    """For engines without events, routing by past requests is reported and used. JSON logs are events."""
    port = free_port()
    async with EngineServer.open(free_port()) as engine:
        engine.sources = {}
        flags = [f"--engine={engine.url}", f"--port={port}", f"--nats={nats_url}"]
        async with serving(
            *flags, f"--namespace=off-{port}", "--log-format=json", "--drain-grace=60"
        ) as served:
            await until_ready(served, http, [f"http://127.0.0.1:{port}"])
            (frontend,) = [command for command in served.children().values() if "frontend" in command]
            await served.until_said(r"serve\.ready")

            assert 0 == await served.end(signal.SIGINT)

    assert "--no-use-kv-events" in frontend
    said = [json.loads(line) for line in served.said]
    assert all({"process", "event", "level", "timestamp"} <= line.keys() for line in said)
    events = {line["event"]: line for line in said if line["process"] == "serve"}
    assert ("warning", "info") == (events["serve.engine_lacks"]["level"], events["serve.ready"]["level"])
    assert all("timestamp" in line for line in events.values())
    assert any("events off: start vLLM with" in warning for warning in events["serve.ready"]["warnings"])
    assert "no engine publishes KV events" in events["serve.approximate"]["text"]
    assert "kv by past requests" == events["serve.ready"]["routing"]
    assert {0.0} == {line["grace_s"] for line in said if line["event"] == "frontend.draining"}


async def test_reload(
    nats_url: str, http: aiohttp.ClientSession, free_port: Callable[[], int], tmp_path: Path
) -> None:
    """SIGHUP reaches frontends and agents; their flags need a restart. kill -9 leaves no orphan."""
    port, file = free_port(), tmp_path / "kvrouter.toml"
    file.write_text("[serve]\nretries = 1\n")
    async with running_mocker(FAST) as mocker:
        flags = [f"--engine={mocker.url}", f"--port={port}", f"--nats={nats_url}", f"--config={file}"]
        async with serving(*flags, f"--namespace=reload-{port}") as served:
            await until_ready(served, http, [f"http://127.0.0.1:{port}"])
            await served.until_said(r"^serve .*ready: ")
            file.write_text('[serve]\nretries = 4\n[shared]\nlog-level = "debug"\n')
            served.process.send_signal(signal.SIGHUP)
            for name in ("serve", "agent-1", "frontend-1"):
                await served.until_said(rf"^{name} .*settings\.reloaded .*log-level: info → debug")
            await served.until_said(r"^serve .*settings\.needs_restart .*retries: 1 → 4")
            pids = list(served.children())

            await served.end(signal.SIGKILL)

            await served.until(lambda: all_gone(pids), "an end of all children")

    assert 2 == len(pids)
    assert 0 == sum("child.ended" in line for line in served.said)


async def test_second_signal(
    nats_url: str, http: aiohttp.ClientSession, free_port: Callable[[], int]
) -> None:
    """A second signal ends everything at once."""
    port = free_port()
    config = MockerConfig(engine=FAST.engine, model_name="tiny", speedup=0.05)
    async with running_mocker(config) as mocker:
        flags = [f"--engine={mocker.url}", f"--port={port}", f"--nats={nats_url}"]
        async with serving(*flags, f"--namespace=second-{port}") as served:
            await until_ready(served, http, [f"http://127.0.0.1:{port}"])
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2000, "stream": True}
            async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as stream:
                await stream.content.readany()
                pids = list(served.children())
                served.process.send_signal(signal.SIGTERM)
                await served.until_said(r"^frontend-1 .*frontend\.draining")
                await stream.content.readany()
                assert all(is_alive(pid) for pid in pids)  # agents stay while frontends drain

                assert 1 == await served.end()

            await served.until(lambda: all_gone(pids), "an end of all children")


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
async def test_port_taken(nats_url: str, flag: str) -> None:
    """If a frontend's port is in use, nothing starts, and the process on the port is not disturbed."""
    with bound(0) as taken:
        port = taken.getsockname()[1]
        async with running_mocker(FAST) as mocker:
            flags = [f"--engine={mocker.url}", "--port=0", f"{flag}={port}", f"--nats={nats_url}"]
            async with serving(*flags, f"--namespace=taken-{port}") as served, asyncio.timeout(PATIENCE_S):
                code = await served.process.wait()

    assert 2 == code
    assert re.search(rf"cannot listen on 127.0.0.1:{port}: .* \({flag}\)", served.text())
    assert "agent-1" not in served.text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine", "127.0.0.1:1"], "begin with the engine's URL"),
        (["--engine", "http://e:1,foo=1"], "unknown key 'foo'"),
        ([], "kvrouter serve: --engine is missing: give"),
    ],
)
def test_wrong_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong flags end the command before any process starts."""
    assert 2 == main(["serve", *flags])

    assert said in capsys.readouterr().err
