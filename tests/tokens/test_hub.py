"""A model directory from a hub, for which a local server stands in."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.tokens.hub import model_directory
from kvrouter.tokens.prompt import PromptEncoder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves one repository, org/tiny, from a directory, to clients with the token."""

    directory: Path
    asked: list[str]


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if self.headers["authorization"] != "Bearer secret":
            self._send(401, b"{}")
        elif path.startswith("/api/models/org/tiny"):
            files = list(self.server.directory.iterdir())
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
            about = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]}
            self._send(200, json.dumps(tree if "/tree/" in path else about).encode())
        else:
            file = self.server.directory / path.rpartition("/")[2]
            found = path.startswith("/org/tiny/resolve/") and file.is_file()
            self._send(*((200, file.read_bytes()) if found else (404, b"")))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny model."""
    with Hub(("127.0.0.1", 0), Answer) as server:
        server.directory, server.asked = tiny, []
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "secret")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_from_a_hub(hub: Hub, tmp_path: Path) -> None:
    """org/name is fetched, without weights, and kept in --tokenizer-cache-dir."""
    found = model_directory("org/tiny", tmp_path)

    assert tmp_path in found.parents
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} == {
        file.name for file in found.iterdir()
    }
    with PromptEncoder.load(found) as encoder:
        assert encoder.can_encode_chats


def test_refused(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the hub rejects the token or lacks the model, start-up fails with the hub's reason."""
    with pytest.raises(ConfigError, match=r"--model-path org/other .*downloading it failed: .*404"):
        model_directory("org/other", tmp_path)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ConfigError, match=r"downloading it failed: .*401"):
        model_directory("org/tiny", tmp_path)


def test_a_directory(tiny: Path, hub: Hub) -> None:
    """A directory is used as it is; for a missing path the loader reports the error."""
    assert tiny == model_directory(str(tiny))
    assert Path("/no/such/place") == model_directory("/no/such/place")
    assert [] == hub.asked
