"""The routers between the load generator and the fake workers: kvrouter and the installed peers."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.kit.bench.wire.build import binary
from scripts.kit.bench.wire.load import Load, run_load
from scripts.kit.bench.wire.targets import HAPROXY
from scripts.kit.bench.wire.works import MODEL, SHORT_BODIES
from scripts.kit.fleet import Fleet, FleetError, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Router:
    """A running router. `process` leads a group with all processes of the router."""

    name: str
    port: int
    process: Process

    @property
    def group(self) -> int:
        """The process group whose CPU time counts."""
        return self.process.pid


@dataclass(frozen=True, slots=True)
class Workers:
    """Fake workers: one process, several ports."""

    process: Process
    ports: Sequence[int]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]


async def start_workers(
    fleet: Fleet, client: Client, *, pace_ms: float, count: int = 4, more: Sequence[str] = ()
) -> Workers:
    """Start fake workers in one process with one thread. A router sees separate ones. `more`: flags."""
    ports = free_ports(count)
    words = [word for port in ports for word in ("--port", str(port))]
    command = [str(binary("worker")), *words, "--model", MODEL, "--pace-ms", str(pace_ms), *more]
    process = await fleet.start(f"fake-workers-{pace_ms:g}", command)
    await wait_until_ok(client, process, f"http://127.0.0.1:{ports[0]}/health")
    return Workers(process, ports)


async def start_announcer(
    fleet: Fleet, workers: Workers, nats_url: str, namespace: str, *, connector: str, vllm: str
) -> None:
    """Announce the workers in `namespace`. `connector`: of pairs of two; `vllm`: its version."""
    words = [word for url in workers.urls for word in ("--url", url)]
    command = [
        sys.executable, "-m", "scripts.kit.bench.wire.announce", f"--nats={nats_url}",
        f"--namespace={namespace}", f"--model={MODEL}", *words,
        f"--connector={connector}", f"--engine-version={vllm}",
    ]  # fmt: skip
    await fleet.start(f"announcer-{namespace}", command)


# The operators' key of frontends whose clients have keys.
OPERATORS = "operators"


async def start_kvrouter(
    fleet: Fleet,
    client: Client,
    name: str,
    flags: Sequence[str],
    *,
    count: int,
    checkout: Path | None = None,
    under: Sequence[str] = (),
    timeout_s: float = READY_TIMEOUT_S,
) -> Router:
    """Start a frontend with `flags`; returns when it knows `count` workers.

    `checkout` is another directory with kvrouter's source, and perhaps a .venv. Without -P Python would
    import the source in the working directory, which is this checkout. `under`: the command line of a program
    that runs the frontend in its own process, as valgrind does.
    """
    (port,) = free_ports(1)
    python = checkout / ".venv" / "bin" / "python" if checkout else Path(sys.executable)
    process = await fleet.start(
        f"{name}-{port}".replace(" ", "-"),
        [
            *under, str(python if python.exists() else sys.executable), "-P", "-m", "kvrouter.frontend",
            "--host=127.0.0.1", f"--port={port}", "--admin-port=0", "--drain-grace=0", *flags,
        ],
        env={"PYTHONPATH": str(checkout)} if checkout else None,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    await wait_until_ok(client, process, f"{url}/ready", timeout_s)
    seen = 0.0
    try:
        async with asyncio.timeout(timeout_s):
            while (seen := await _workers_seen(client, url)) < count:
                process.check()
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise FleetError(f"{name} knows {seen:g} of {count} workers: {process.tail()}") from None
    return Router(name, port, process)


async def _workers_seen(client: Client, url: str) -> float:
    """The number of workers by the metrics, which every version has on this port."""
    _, body = await client.get(f"{url}/metrics", {"authorization": f"Bearer {OPERATORS}"})
    lines = [line for line in body.decode().splitlines() if line.startswith("kvrouter_workers{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def start_nginx(fleet: Fleet, program: Path, workers: Workers) -> Router:
    """One worker process, upstream connections kept, no buffering of answers, no access log."""
    (port,) = free_ports(1)
    directory = fleet.directory / f"nginx-{port}"
    directory.mkdir()
    config = directory / "nginx.conf"
    config.write_text(nginx_config(port, workers.ports, directory))
    process = await fleet.start(f"nginx-{port}", [str(program), "-c", str(config), "-p", str(directory)])
    return await _answering(fleet, Router("nginx", port, process))


def nginx_config(port: int, workers: Sequence[int], directory: Path) -> str:
    """A configuration for streams, as an operator would write it."""
    servers = " ".join(f"server 127.0.0.1:{worker};" for worker in workers)
    user = "user root;" if os.geteuid() == 0 else ""
    return textwrap.dedent(f"""\
        {user} daemon off; worker_processes 1; worker_rlimit_nofile 20000;
        pid {directory}/pid; error_log stderr warn;
        events {{ worker_connections 20000; }}
        http {{
          access_log off;
          client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
          fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
          client_max_body_size 64m; client_body_buffer_size 256k;
          keepalive_requests 100000000; tcp_nodelay on;
          upstream workers {{ {servers} keepalive 512; keepalive_requests 100000000; }}
          server {{
            listen 127.0.0.1:{port} backlog=4096;
            location / {{
              proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
              proxy_buffering off; proxy_read_timeout 600s;
            }}
          }}
        }}
        """)


EXAMPLE = Path(__file__).parents[4] / "docs/examples/haproxy"


async def start_haproxy(fleet: Fleet, program: Path, flags: Sequence[str]) -> Router:
    """The example of docs/placement.md, with one thread, and its `kvrouter router`, in one group.

    Nobody frees what a closed loop reserves: a short lease keeps the bound of a caller away.
    """
    port, calls, admin = free_ports(3)
    directory = fleet.directory / f"haproxy-{port}"
    shutil.copytree(EXAMPLE, directory)
    config = directory / "haproxy.cfg"
    text = config.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}").replace(":8092", f":{calls}")
    config.write_text(text.replace("\nglobal\n", "\nglobal\n    nbthread 1\n"))
    router = [
        sys.executable, "-m", "kvrouter", "router", f"--port={calls}", f"--admin-port={admin}", "--lease-s=1",
        "--reservations-per-caller=65536", *flags,
    ]  # fmt: skip
    script = f"cd {directory}; {program} -f haproxy.cfg & exec {shlex.join(router)}"
    return await _start(fleet, HAPROXY, port, ["sh", "-c", script])


async def start_vllm_router(fleet: Fleet, program: Path, workers: Workers, policy: str) -> Router:
    """vllm-router, without a log line for each request."""
    port, metrics = free_ports(2)
    command = [
        str(program), "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
        "--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1", "--log-level", "warning",
        "--worker-urls", *workers.urls,
    ]  # fmt: skip
    return await _start(fleet, f"vllm-router {policy}", port, command)


async def start_sglang_router(fleet: Fleet, program: Path, workers: Workers, policy: str) -> Router:
    """sglang-router, without a log line for each request."""
    port, metrics = free_ports(2)
    command = [
        str(program), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
        "--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1", "--log-level", "warn",
        "--worker-urls", *workers.urls,
    ]  # fmt: skip
    return await _start(fleet, f"sglang-router {policy}", port, command)


async def _start(
    fleet: Fleet, name: str, port: int, command: Sequence[str], env: Mapping[str, str] | None = None
) -> Router:
    process = await fleet.start(f"{name.replace(' ', '-')}-{port}", command, env)
    return await _answering(fleet, Router(name, port, process))


async def _answering(fleet: Fleet, router: Router) -> Router:
    await answering(fleet, router.name, router.process, Load(router.port, SHORT_BODIES, requests=1))
    return router


async def answering(fleet: Fleet, name: str, process: Process, load: Load) -> None:
    """Return when a request has been answered. Raises FleetError after READY_TIMEOUT_S."""
    reason = ""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                process.check()
                report = await run_load(replace(load, requests=1, limit_s=5), fleet.directory)
                if report.requests == 1:
                    return
                reason = report.first_error
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise FleetError(
            f"{name} answers no request after {READY_TIMEOUT_S:g} s: {reason}; log:\n{process.tail()}"
        ) from None


def find_nginx(named: Path | None) -> Path | None:
    """The program that the flag names, or the one on PATH or in /usr/sbin, where Debian has it."""
    if named is not None:
        if not os.access(named, os.X_OK):
            raise FleetError(f"--nginx {named}: no such program")
        return named
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    return Path(found) if found else None
