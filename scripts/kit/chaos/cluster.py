"""Three NATS servers and a leaf node: the files of deploy/nats, with users of `kvrouter nats-accounts`.

frontends 0, 1 · agents 0 … n-2 ──> nats-0 ─ nats-1 ─ nats-2
                                       └──── Link ────┘
                                               │
frontend 2 · agent n-1 ────────────────────> leaf
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvrouter.bus import NatsOptions, accounts
from kvrouter.bus.embedded import server_binary
from kvrouter.worker.options import worker_id_of
from scripts.kit.deployment import Plan
from scripts.kit.fleet import Fleet, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports
from scripts.kit.proxies import DEPLOY

SERVERS = ("nats-0", "nats-1", "nats-2")
LEAF = "leaf"
_READ_BYTES = 1 << 16


class Link:
    """The leaf node's connections to the cluster, which `cut` ends and refuses."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self.is_cut = False
        self._to: Sequence[int] = ()
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Link]:
        """Listen on one port for each server."""
        link = cls()
        async with contextlib.AsyncExitStack() as stack:
            for number in range(len(SERVERS)):
                server = await asyncio.start_server(partial(link._serve, number), "127.0.0.1", 0)
                stack.callback(server.close)
                link.ports.append(server.sockets[0].getsockname()[1])
            stack.callback(link._close)
            yield link

    def lead_to(self, ports: Sequence[int]) -> None:
        self._to = ports

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """No connection while inside."""
        self.is_cut = True
        self._close()
        try:
            yield
        finally:
            self.is_cut = False

    def _close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        try:
            onward, to = await asyncio.open_connection("127.0.0.1", self._to[number])
        except OSError:  # this server is down
            writer.close()
            return
        self._writers |= {writer, to}
        await asyncio.gather(_pump(reader, to), _pump(onward, writer))
        self._writers -= {writer, to}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def start_cluster(fleet: Fleet, client: Client, plan: Plan, link: Link) -> tuple[Plan, NatsOptions]:
    """Start the servers; returns the plan with each process's server and user, and the user `verify`."""
    directory = fleet.directory / "nats"
    ports = [free_ports(3)[0] for _ in range(plan.engines)]
    ids = [worker_id_of(f"http://127.0.0.1:{port}") for port in ports]
    accounts.main([str(directory), f"--namespace={plan.namespace}", *(f"--agent={one}" for one in ids)])
    places = {name: free_ports(4) for name in (*SERVERS, LEAF)}
    link.lead_to([places[name][3] for name in SERVERS])
    for name, own in places.items():
        file = directory / f"{name}.conf"
        template = (DEPLOY / "nats" / ("leaf.conf" if name == LEAF else "cluster.conf")).read_text()
        file.write_text(on_this_host(template, own, [places[one][2] for one in SERVERS], link.ports))
        env = {"NATS_NAME": name, "NATS_LEAF_SEED": (directory / "leaf.nk").read_text().strip()}
        process = await fleet.start(name, [str(server_binary()), "--config", str(file)], env)
        await wait_until_ok(client, process, f"http://127.0.0.1:{own[1]}/healthz")
    urls = {name: f"nats://127.0.0.1:{own[0]}" for name, own in places.items()}
    cluster, leaf = ",".join(urls[name] for name in SERVERS), urls[LEAF]
    flags = {
        f"agent-{number}": _flags(leaf if number == plan.engines - 1 else cluster, directory, worker_id)
        for number, worker_id in enumerate(ids)
    } | {
        f"frontend-{number}": _flags(leaf if number == plan.replicas - 1 else cluster, directory, "frontend")
        for number in range(plan.replicas)
    }
    options = NatsOptions(tuple(urls[name] for name in SERVERS), nkey_file=directory / "verify.nk")
    return replace(plan, engine_ports=ports, nats_flags=flags), options


def on_this_host(text: str, own: Sequence[int], routes: Sequence[int], links: Sequence[int]) -> str:
    """A file of deploy/nats with ports of 127.0.0.1: for clients, HTTP, servers, leaf nodes."""
    for port, ours in zip((4222, 8222, 6222, 7422), own, strict=True):
        text = re.sub(rf"(0\.0\.0\.0|127\.0\.0\.1):{port}\b", f"127.0.0.1:{ours}", text)
    for number in range(len(SERVERS)):
        text = text.replace(f"nats-leaf://nats-{number}:7422", f"nats-leaf://127.0.0.1:{links[number]}")
        text = text.replace(f"nats://nats-{number}:6222", f"nats://127.0.0.1:{routes[number]}")
    return text


async def busiest(client: Client, directory: Path) -> str:
    """The server of the cluster with the most clients."""
    found = {}
    for name in SERVERS:
        (port,) = re.findall(
            r"^http: 127\.0\.0\.1:(\d+)$", (directory / f"{name}.conf").read_text(), re.MULTILINE
        )
        _, body = await client.get(f"http://127.0.0.1:{port}/varz")
        found[name] = json.loads(body)["connections"]
    return max(found, key=lambda name: found[name])


def _flags(url: str, directory: Path, user: str) -> list[str]:
    return [f"--nats={url}", f"--nats-nkey={directory / user}.nk"]
