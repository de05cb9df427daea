"""Two engines, and `kvrouter serve` with two replicas in front of them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.kit.engine_tests.adapters import write_adapter
from scripts.kit.engine_tests.engines import Engine, EngineTest, Kind, start_engine, wait_until_up
from scripts.kit.fleet import Fleet, FleetError, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.replicas import Replica

ENGINES, REPLICAS = 2, 2
# An engine publishes events within its next step after an answer, and an agent forwards them within 10 ms.
SETTLE_S = 0.05
SEEN_TIMEOUT_S = 60.0
_SENT_IDS = re.compile(r"^kvrouter_token_ids_sent_total\{[^}]*\} (\S+)", re.MULTILINE)

# Prints all that a request may have: a difference in any of it is a difference in the ids.
_CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\\n' }}
{%- if message.reasoning %}{{ '<think>' + message.reasoning + '</think>\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '\\n' + call.id + call.function | tojson }}{% endfor %}
{{- '\\n' + message.tool_call_id if message.tool_call_id else '' }}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclass(frozen=True, slots=True)
class Stage:
    fleet: Fleet
    client: Client
    engines: Sequence[Engine]
    serve: Process
    replicas: Sequence[Replica]

    async def until_equal(self) -> None:
        """Wait until the last answer's events are in every index: all are equal and stay so for a moment."""
        former: list[Any] = []
        async with asyncio.timeout(SEEN_TIMEOUT_S):
            while True:
                await asyncio.sleep(SETTLE_S)
                indexes = [(await replica.view()).index for replica in self.replicas]
                if indexes == former and all(index == indexes[0] for index in indexes):
                    return
                former = indexes

    async def until_live(self) -> None:
        """Wait until every replica receives the events of every engine."""
        live = [0]
        try:
            async with asyncio.timeout(SEEN_TIMEOUT_S):
                while set(live) != {len(self.engines)}:
                    await asyncio.sleep(SETTLE_S)
                    live = [(await replica.view()).live_targets for replica in self.replicas]
        except TimeoutError:
            raise FleetError(
                f"the replicas see {live} live targets of {len(self.engines)}; output of kvrouter serve:\n"
                f"{self.serve.tail(20)}"
            ) from None

    async def chats_with_ids(self) -> int:
        """How many chats the engines got with the token ids that a replica computed."""
        return round(await self.client.total(_SENT_IDS, [replica.url for replica in self.replicas]))

    async def start_again(self, engine: Engine) -> None:
        """Restart a killed engine, and wait until every replica receives its events."""
        await self.fleet.start_again(engine.name)
        await wait_until_up(self.client, self.fleet, [engine])
        await self.until_live()


def prepare(directory: Path, kind: Kind, program: Path, num_blocks: int) -> EngineTest:
    """Complete the tiny model in `directory`, and write two adapters for vLLM."""
    model = directory / "model"
    (model / "chat_template.jinja").write_text(_CHAT_TEMPLATE, "utf-8")
    adapters = {name: directory / name for name in (("lora-a", "lora-b") if kind == "vllm" else ())}
    for seed, path in enumerate(adapters.values()):
        write_adapter(path, model, seed)
    return EngineTest(kind, program, model, adapters, num_blocks)


async def set_up(fleet: Fleet, client: Client, test: EngineTest) -> Stage:
    """Start everything; returns when every replica receives the events of every engine."""
    engines = [await start_engine(fleet, test, number) for number in range(ENGINES)]
    await wait_until_up(client, fleet, engines)
    first, *others = engines
    # only the first engine has its event sockets: `serve` must find the others'
    named = [first.named(), *(engine.url for engine in others)]
    return await serve_engines(fleet, client, engines, named)


async def serve_engines(
    fleet: Fleet, client: Client, engines: Sequence[Engine], named: Sequence[str], flags: Sequence[str] = ()
) -> Stage:
    """Start `kvrouter serve`. `named`: the engines in the words of its --engine."""
    ports, admin_ports = free_ports(REPLICAS), free_ports(REPLICAS)
    serve = await fleet.start("serve", [*_serve_command(named, ports[0], admin_ports[0]), *flags])
    replicas = [Replica(*pair, client) for pair in zip(ports, admin_ports, strict=True)]
    for replica in replicas:
        await wait_until_ok(client, serve, f"{replica.url}/ready")
    stage = Stage(fleet, client, engines, serve, replicas)
    await stage.until_live()
    return stage


def _serve_command(named: Sequence[str], port: int, admin_port: int) -> list[str]:
    """No flag about tokens."""
    return [
        sys.executable, "-m", "kvrouter", "serve",
        *(word for engine in named for word in ("--engine", engine)),
        f"--replicas={REPLICAS}", "--host=127.0.0.1", f"--port={port}", f"--admin-port={admin_port}",
        f"--nats-port={free_ports(1)[0]}", "--drain-grace-s=0",
    ]  # fmt: skip
