"""A Docker daemon of a few lines on a Unix socket: its containers are bundled NATS servers on this host.

It answers what docker-py asks to pull, create, start, inspect and remove one container. It shows that the
tests' fixture asks for the right thing and uses the answers. Only Docker can show that the image exists, that
its server starts, and that published ports can be reached.
"""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol

ID = "c0ffee" * 10
LOG = b"Server is ready\n"


class Server(Protocol):
    """What a started container runs."""

    port: int

    def start(self) -> None: ...

    def stop(self) -> None: ...


class FakeDocker(socketserver.ThreadingUnixStreamServer):
    """`asked` has the method and path of each request; `created` the bodies of the containers."""

    daemon_threads = True

    def __init__(self, path: Path, server: Server) -> None:
        self.url = f"unix://{path}"
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.server = server
        super().__init__(str(path), _Answer)

    def answer(self, request: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON, or bytes, of a request without its version and query."""
        self.asked.append(request)
        status = 200
        content: Any = b""
        match request.split("/"):
            case ["GET ", "_ping"]:
                content = b"OK"
            case ["GET ", "version"]:
                content = {"ApiVersion": "1.44", "MinAPIVersion": "1.24", "Version": "27.0"}
            case ["GET ", "info"]:
                content = {"ServerVersion": "27.0"}
            case ["POST ", "containers", "create"]:
                self.created.append(json.loads(body))
                status, content = 201, {"Id": ID, "Warnings": []}
            case ["POST ", "containers", _, "start"]:
                self.server.start()
                status = 204
            case ["GET ", "containers", _, "json"]:
                bound = [{"HostIp": "127.0.0.1", "HostPort": str(self.server.port)}]
                ports = {"4222/tcp": bound, "8222/tcp": bound}
                state = {"Status": "running", "Running": True}
                tty = {"Image": self.created[0]["Image"], "Tty": True}
                content = {"Id": ID, "State": state, "Config": tty, "NetworkSettings": {"Ports": ports}}
            case ["GET ", "containers", _, "logs"]:
                content = LOG
            case ["DELETE ", "containers", _]:
                self.server.stop()
                status = 204
            case ["GET ", "images", *_] | ["POST ", "images", *_]:
                content = {"Id": "sha256:1", "RepoTags": []}
            case _:
                status, content = 404, {"message": f"{request}: not in this fake"}
        return status, content


class _Answer(BaseHTTPRequestHandler):
    server: FakeDocker

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        if path.startswith("/v1."):
            path = "/" + path.split("/", 2)[2]
        status, content = self.server.answer(f"{self.command} {path}", body)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if isinstance(content, bytes) else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # docker-py does not read every body
            self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _any  # noqa: N815  # names of http.server

    def address_string(self) -> str:
        return "a Unix socket"  # which has no address

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def fake_docker(path: Path, new_server: Callable[[], Server]) -> Iterator[FakeDocker]:
    """A daemon on the socket `path`."""
    with FakeDocker(path, new_server()) as daemon:
        threading.Thread(target=daemon.serve_forever, args=(0.01,), daemon=True).start()
        yield daemon
        daemon.shutdown()
