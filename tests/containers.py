"""The NATS server of the tests as a container, where a Docker daemon answers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

IMAGE = "nats:2-alpine"
PORT = 4222
_SOCKET = "unix:///var/run/docker.sock"


def docker_answers() -> bool:
    """Whether the daemon answers that `nats_container` would ask."""
    host = os.environ.get("DOCKER_HOST", _SOCKET)
    if host.startswith("unix://") and not Path(host.removeprefix("unix://")).exists():
        return False  # docker (7.2) takes a third of a second to import, and would leave a socket open
    import docker

    try:
        client = docker.from_env(timeout=5)
    except docker.errors.DockerException:
        return False
    with contextlib.closing(client):
        try:
            return bool(client.ping())
        except (docker.errors.DockerException, OSError):
            return False


def container_url(stack: contextlib.ExitStack) -> str:
    """Start a container for as long as the stack; returns the server's URL."""
    # not NatsContainer: importing it warns of what it uses (testcontainers 4.15), and warnings are errors
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    container = DockerContainer(IMAGE).with_exposed_ports(PORT)
    stack.callback(container.get_docker_client().client.close)  # testcontainers leaves it open
    container = stack.enter_context(container.waiting_for(LogMessageWaitStrategy("Server is ready")))
    return f"nats://{container.get_container_host_ip()}:{container.get_exposed_port(PORT)}"
