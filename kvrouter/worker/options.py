"""The settings of an agent, and the flags that set them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvrouter.bus import NatsOptions
from kvrouter.config import (
    add_common_flags,
    identifier,
    nats_options,
    not_negative,
    positive,
    positive_int,
    read_key,
)
from kvrouter.errors import ConfigError
from kvrouter.tls import trusting
from kvrouter.worker.zmq.sockets import EventEndpoints

# Every heartbeat carries them.
MOST_METRICS = 16
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
    labels: Mapping[str, str] = field(default_factory=dict)
    # Additional series of the engine's /metrics to report: report name -> series.
    metrics: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    # Trusted in addition to the system's authorities, if the engine speaks HTTPS.
    tls_ca: Path | None = None
    flush_s: float = 0.010
    heartbeat_s: float = 1.0
    probe_s: float = 1.0
    state_file: Path | None = None
    state_every_s: float = 10.0
    kv_repair: bool = True
    drain_timeout_s: float = 300.0


def worker_id_of(url: str) -> str:
    """The default worker id: host and port in allowed characters, `127-0-0-1-25100`."""
    address = urlsplit(url)
    if address.scheme not in {"http", "https"} or not address.hostname:
        raise ConfigError(f"--engine-url {url!r}: use http://HOST:PORT")
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"--engine-url {url!r}: {error}") from None
    # the end, not the beginning: the port distinguishes engines of one host
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{address.hostname}-{port}")[-64:]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m kvrouter.worker`."""
    add_common_flags(parser)
    _add_engine_flags(parser)
    _add_event_flags(parser)
    _add_worker_flags(parser)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine-url", metavar="URL", help="the engine's HTTP server, as the agent reaches it")
    add(
        "--engines",
        type=Path,
        metavar="FILE",
        help="run agents for several engines in this process, listed in a TOML or JSON file: [[engine]] "
        'entries with these flags as keys (engine-url = "http://…"); --kv-topic then filters for all',
    )
    add("--advertise-url", metavar="URL", help="the engine as frontends reach it (default: --engine-url)")
    add("--engine-api-key-file", type=Path, metavar="FILE", help="bearer token for the engine")
    add(
        "--worker-tls-ca",
        type=Path,
        metavar="FILE",
        help="authorities of the engine's certificate (https:// URL), trusted in addition to the system's",
    )


def _add_event_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kv-events", metavar="ENDPOINT[,…]", help="ZMQ endpoint of the engine's KV events; one per rank")
    add("--kv-replay", metavar="ENDPOINT[,…]", help="ZMQ endpoint of its replay; one per rank")
    add("--kv-topic", default="", help="subscribe only to topics with this prefix (default: all)")
    add(
        "--dp-size",
        type=positive_int,
        help="ranks, if the engine does not report them; with one endpoint, rank r's port is r higher",
    )
    add(
        "--kv-flush-ms",
        type=not_negative,
        default=10.0,
        help="milliseconds between two frames of a rank",
    )
    add(
        "--kv-cache-block-size",
        type=positive_int,
        help="block size in tokens, instead of the engine's metrics",
    )


def _add_worker_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--worker-id", type=identifier, help="keep it across restarts (default: host and port of the engine)")
    add("--model", help="name of the base model, which names the pool (default: the engine's first model)")
    add(
        "--max-num-batched-tokens",
        type=positive_int,
        default=0,
        help="the engine's setting, for the card; 0: unknown",
    )
    add("--max-num-seqs", type=positive_int, default=0, help="the engine's setting, for the card; 0: unknown")
    add("--label", action="append", default=[], metavar="KEY=VALUE", help="zone, node, group …; repeatable")
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=SERIES",
        help="report one more series of the engine's /metrics, for custom policies; repeatable",
    )
    add("--state-file", type=Path, metavar="FILE", help="keep the table of blocks here across restarts")
    add(
        "--kv-repair",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="after lost history, requests ask the engine to announce the blocks that they reuse "
        "(vLLM 0.24 and later)",
    )
    add(
        "--drain-timeout",
        type=not_negative,
        default=300.0,
        metavar="S",
        help="seconds after SIGTERM that the engine's requests get to finish; 0: leave at once",
    )
    add("--probe-s", type=positive, default=1.0, help="seconds between health probes; 3 misses mean down")


def read_options(arguments: argparse.Namespace) -> AgentOptions:
    """The settings in the flags. Raises ConfigError, also where flags do not fit together."""
    if not arguments.engine_url:
        raise ConfigError("--engine-url is missing: give the engine's URL, or list several in --engines FILE")
    endpoints = read_endpoints(
        arguments.kv_events, arguments.kv_replay, arguments.kv_topic, arguments.dp_size
    )
    default_id = worker_id_of(arguments.engine_url)
    return AgentOptions(
        engine_url=arguments.engine_url,
        worker_id=arguments.worker_id or default_id,
        nats=nats_options(arguments),
        namespace=arguments.namespace,
        endpoints=endpoints,
        topic=arguments.kv_topic or "",
        ranks=arguments.dp_size or len(endpoints) or 1,
        model=arguments.model,
        advertise_url=arguments.advertise_url,
        block_size=arguments.kv_cache_block_size,
        max_batched_tokens=arguments.max_num_batched_tokens,
        max_sequences=arguments.max_num_seqs,
        labels=dict(_read_label(text) for text in arguments.label),
        metrics=read_metric_flags(arguments.metric),
        api_key=read_key("--engine-api-key-file", arguments.engine_api_key_file),
        tls_ca=_read_tls_ca(arguments.worker_tls_ca),
        flush_s=arguments.kv_flush_ms / 1000,
        heartbeat_s=arguments.heartbeat_s,
        probe_s=arguments.probe_s,
        state_file=_read_state_file(arguments.state_file),
        kv_repair=arguments.kv_repair,
        drain_timeout_s=arguments.drain_timeout,
    )


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


def _read_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--label {text!r}: use KEY=VALUE")
    return key, value


def read_metric_flags(texts: Sequence[str]) -> dict[str, str]:
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


def _read_state_file(path: Path | None) -> Path | None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--state-file {path}: give a file in a directory that exists")
    return path


def _read_tls_ca(path: Path | None) -> Path | None:
    if path is not None:
        trusting(path)
    return path
