"""The fixture that runs NATS in a container, with a fake daemon behind the Docker socket."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import nats
import pytest
from testcontainers.core.config import ConnectionMode, testcontainers_config

from tests.conftest import NatsServer
from tests.containers import IMAGE, container_url, docker_answers
from tests.fake_docker import FakeDocker, fake_docker


@pytest.fixture
def daemon(
    new_nats_server: Callable[[], NatsServer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDocker]:
    """A daemon that $DOCKER_HOST names; containers are on this host, and nothing else reaps them."""
    monkeypatch.setattr(testcontainers_config, "connection_mode_override", ConnectionMode.docker_host)
    monkeypatch.setattr(testcontainers_config, "tc_host_override", "127.0.0.1")
    monkeypatch.setattr(testcontainers_config, "_ryuk_disabled", True)
    # not tmp_path: a socket's path has at most 107 bytes
    with (
        tempfile.TemporaryDirectory() as directory,
        fake_docker(Path(directory) / "docker.sock", new_nats_server) as fake,
    ):
        monkeypatch.setenv("DOCKER_HOST", fake.url)
        yield fake


async def test_nats_in_a_container(daemon: FakeDocker) -> None:
    """The image is created, started and removed at the end; the URL is that of its published port."""
    assert docker_answers()
    with contextlib.ExitStack() as stack:
        url = container_url(stack)
        client = await nats.connect(url)
        inbox = await client.subscribe("a")
        await client.publish("a", b"through it")
        assert b"through it" == (await inbox.next_msg()).data
        await client.close()
        assert not [request for request in daemon.asked if request.startswith("DELETE")]

    (created,) = daemon.created
    assert (IMAGE, {}) == (created["Image"], created["ExposedPorts"]["4222/tcp"])
    assert f"nats://127.0.0.1:{daemon.server.port}" == url
    assert [request for request in daemon.asked if request.startswith("DELETE")]


@pytest.mark.parametrize("host", ["unix:///no/such/docker.sock", "tcp://127.0.0.1:1"])
def test_without_a_daemon(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error: the tests take the bundled server."""
    monkeypatch.setenv("DOCKER_HOST", host)

    assert not docker_answers()
