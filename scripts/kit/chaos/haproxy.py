"""HAProxy in front of the replicas, configured as in docs/operations.md: it only checks /ready."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from urllib.parse import urlsplit

from scripts.kit.fleet import Fleet, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports

HOW_TO_GET = "HAProxy is not installed: apt-get install haproxy (only this row needs it)"
CHECK_S = 0.5

_CONFIG = """\
defaults
    mode http
    option httpchk GET /ready
    http-check expect status 200
    option redispatch 1
    retries 3
    timeout connect 1s
    timeout client 75s
    timeout server 600s
    default-server check inter {check_ms} fall 1 rise 1

frontend clients
    bind 127.0.0.1:{port}
    default_backend replicas

backend replicas
    balance roundrobin
{servers}
frontend state
    bind 127.0.0.1:{state_port}
    monitor-uri /alive
"""


def find() -> str | None:
    """The binary. Debian's is in /usr/sbin, which is not in every user's PATH."""
    return shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")


def config(port: int, state_port: int, urls: Sequence[str]) -> str:
    """The whole configuration file."""
    servers = "".join(
        f"    server replica{number} {urlsplit(url).netloc}\n" for number, url in enumerate(urls)
    )
    return _CONFIG.format(
        port=port, state_port=state_port, servers=servers, check_ms=f"{1000 * CHECK_S:.0f}ms"
    )


async def start(fleet: Fleet, client: Client, binary: str, urls: Sequence[str]) -> str:
    """Start it; returns its URL when it serves."""
    port, state_port = free_ports(2)
    file = fleet.directory / "haproxy.cfg"
    file.write_text(config(port, state_port, urls))
    process = await fleet.start("haproxy", [binary, "-db", "-f", str(file)])
    await wait_until_ok(client, process, f"http://127.0.0.1:{state_port}/alive")
    url = f"http://127.0.0.1:{port}"
    await wait_until_ok(client, process, f"{url}/ready")
    return url
