"""The options of an agent, and the texts in them that have a form of their own."""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvrouter.bus import NatsOptions
from kvrouter.core.wire.heartbeats import CONNECTORS, PEER
from kvrouter.core.wire.values import url_error
from kvrouter.errors import ConfigError
from kvrouter.tls import CertificateFiles, trusting
from kvrouter.worker.zmq.sockets import EventEndpoints

# Every heartbeat carries them.
MOST_METRICS = 16
_MOST_ID_CHARACTERS = 64
# Why other ways to hand KV blocks over than these are not served.
_NOT_SERVED = {
    "nixl-push": "not served: a second use of its parameters hangs both engines (vLLM 0.33)",
    **dict.fromkeys(("lmcache", "moriio"), "not served yet"),
}
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")
_METRIC = re.compile(r"([A-Za-z_]\w{0,63})=([A-Za-z_:][\w:]{0,199})", re.ASCII)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Settings of an agent. `endpoints` has one entry per rank; empty: no KV events. Times in seconds."""

    engine_url: str
    worker_id: str
    nats: NatsOptions | str = "embedded"
    namespace: str = "default"
    endpoints: Sequence[EventEndpoints] = ()
    # The topic of the flags, also for endpoints that the engine reports.
    topic: str = ""
    ranks: int = 1
    model: str | None = None
    advertise_url: str | None = None
    block_size: int | None = None
    max_batched_tokens: int = 0
    max_sequences: int = 0
    prefill_tokens_per_s: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    # Additional series of the engine's /metrics to report: report name -> series.
    metrics: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    # Trusted in addition to the system's authorities, if the engine speaks HTTPS.
    tls_ca: Path | None = None
    tls_own: CertificateFiles | None = None
    flush_s: float = 0.010
    heartbeat_s: float = 1.0
    probe_s: float = 1.0
    state_file: Path | None = None
    state_every_s: float = 10.0
    # Which part of a request the engine computes; None: as it says itself. See Card for these five.
    role: str | None = None
    kv_connector: str = ""
    bootstrap_port: int = 0
    kv_address: str = ""
    kv_hash: str = ""
    # Whether the role is `both` where the engine does not tell; False: half of a pair, which is not used.
    whole: bool | None = None
    drain_timeout_s: float = 300.0

    @property
    def tls(self) -> ssl.SSLContext:
        """For calls to engines with https:// URLs. Raises ConfigError."""
        return trusting(self.tls_ca, own=self.tls_own)


def check_url(flag: str, url: str) -> None:
    """Raise ConfigError unless agents and frontends can put the paths of requests behind this URL."""
    if problem := url_error(url):
        raise ConfigError(f"{flag}: {problem}")
    if url.rstrip("/").endswith("/v1"):  # the base URL of an OpenAI client: /v1 is in each request's path
        raise ConfigError(f"{flag} {url!r}: give the server's URL without /v1")


def read_connector(text: str) -> str:
    """The name of a connector that is served. Raises ConfigError."""
    known = " or ".join((*CONNECTORS, PEER))
    if text in {*CONNECTORS, PEER}:
        return text
    if reason := _NOT_SERVED.get(text):
        raise ConfigError(f"connector {text!r} is {reason}; use {known}")
    raise ConfigError(f"connector {text[:64]!r} is unknown; use {known}")


def read_address(text: str) -> str:
    """HOST:PORT. Raises ValueError."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[1]) <= 65535:
        raise ValueError("must be HOST:PORT")
    return text


def worker_id_of(url: str) -> str:
    """The default worker id: host, port and path in allowed characters, `127-0-0-1-25100`."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    path = address.path.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9_-]", "-", f"{address.hostname}-{port}{path}")
    if path and len(name) > _MOST_ID_CHARACTERS:
        # host and port of a gateway may be equal, and paths may end alike
        return f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name[9 - _MOST_ID_CHARACTERS :]}"
    # the end, not the beginning: the port distinguishes engines of one host
    return name[-_MOST_ID_CHARACTERS:]


def read_endpoints(
    events: str | None, replay: str | None, topic: str, ranks: int | None
) -> list[EventEndpoints]:
    """The endpoints of each rank, from one for every rank or from the first rank's. Raises ConfigError."""
    if not events:
        if replay:
            raise ConfigError("--kv-replay without --kv-events: give both")
        return []
    event_endpoints = _endpoints("--kv-events", events, ranks)
    replay_endpoints = _endpoints("--kv-replay", replay, len(event_endpoints)) if replay else []
    return [
        EventEndpoints(endpoint, replay_endpoints[rank] if replay_endpoints else None, topic)
        for rank, endpoint in enumerate(event_endpoints)
    ]


def _endpoints(flag: str, text: str, ranks: int | None) -> list[str]:
    endpoints = [endpoint.strip() for endpoint in text.split(",") if endpoint.strip()]
    if len(endpoints) == 1 and ranks is not None:
        return [offset_port(flag, endpoints[0], rank) for rank in range(ranks)]
    if not endpoints or len(endpoints) != (ranks or len(endpoints)):
        raise ConfigError(f"{flag} {text!r}: give one endpoint per rank ({ranks or 1}), or the first only")
    return endpoints


def offset_port(flag: str, endpoint: str, rank: int) -> str:
    """The endpoint of a rank as vLLM derives it: the port plus the rank. Raises ConfigError."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"{flag} {endpoint!r} has no port to count ranks from: give one endpoint per rank")
    return f"{address}:{int(port) + rank}"


def read_metrics(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=SERIES` of each flag. Raises ConfigError, also if a name is given twice."""
    found: dict[str, str] = {}
    for text in texts:
        match = _METRIC.fullmatch(text)
        if match is None:
            raise ConfigError(f"--metric {text!r}: use NAME=SERIES, as in queue=vllm:num_requests_waiting")
        if match[1] in found:
            raise ConfigError(f"--metric {text!r}: the name {match[1]!r} is given twice")
        found[match[1]] = match[2]
    if len(found) > MOST_METRICS:
        raise ConfigError(f"--metric is given {len(found)} times: a heartbeat carries {MOST_METRICS} at most")
    return found
