"""The settings of `python -m kvrouter.worker`, and the options of an agent that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from typing import Literal

from kvrouter.bus.addresses import reachable
from kvrouter.config import CommonOptions, read_key, read_worker_id
from kvrouter.core.wire.heartbeats import BOTH, PEER
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Command, Settings, setting
from kvrouter.telemetry.metrics_port import MetricsPortOptions
from kvrouter.tls import own_certificate, trusting
from kvrouter.worker.options import (
    AgentOptions,
    check_url,
    read_address,
    read_connector,
    read_endpoints,
    read_metrics,
    worker_id_of,
)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError("must be KEY=VALUE")
    return key, value


@dataclass(frozen=True, slots=True)
class EngineSettings(Settings):
    heading = "Engine"

    engine_url: str = setting(
        "", "the engine's HTTP server, as the agent reaches it", metavar="URL", is_top=True
    )
    engines: Path | None = setting(
        None,
        "run agents for the engines in this TOML or JSON file: [[engine]] "
        'entries with these settings as keys (engine-url = "http://…"); --kv-topic then filters for all',
        is_top=True,
    )
    advertise_url: str | None = setting(
        None,
        "the engine as frontends reach it",
        metavar="URL",
        default_text="--engine-url, with this host's address on the way to NATS for 0.0.0.0 or ::",
        is_top=True,
    )
    engine_api_key_file: Path | None = setting(None, "bearer token for the engine", is_top=True)
    role: Literal["both", "prefill", "decode"] | None = setting(
        None, "which part of a request the engine computes", default_text="as the engine says, else both"
    )
    kv_connector: str | None = setting(
        None,
        "how it hands over KV blocks: nixl, mooncake, example or sglang; p2p: whole engines to each other",
        metavar="NAME",
        read=read_connector,
        default_text="as the engine says",
    )
    bootstrap_port: int = setting(
        0,
        "port of a prefill engine's bootstrap server (mooncake, sglang)",
        metavar="PORT",
        least=0,
        most=65535,
        default_text="as SGLang says, else 8998",
    )
    kv_address: str | None = setting(
        None,
        "that server, or the p2p tier, as others reach it",
        metavar="HOST:PORT",
        read=read_address,
    )
    kv_hash: str = setting("", "hands over only to engines with the same text", metavar="TEXT")
    whole: bool | None = setting(
        None,
        "former --role: on is both; off: half of a pair, not used",
        old=("--whole-requests", "--no-whole-requests"),
        variable="KVROUTER_WHOLE_REQUESTS",
        default_text="--role",
    )
    worker_tls_ca: Path | None = setting(
        None, "authorities of the engine's certificate (https:// URL), trusted in addition to the system's"
    )
    worker_tls_cert: Path | None = setting(None, "shown to an engine that asks for a certificate: PEM")
    worker_tls_key: Path | None = setting(None, "key of --worker-tls-cert: PEM, without a password")


@dataclass(frozen=True, slots=True)
class EventSettings(Settings):
    heading = "KV events"

    kv_events: str | None = setting(
        None, "ZMQ endpoint of the engine's KV events; one per rank", metavar="ENDPOINT[,…]", is_top=True
    )
    kv_replay: str | None = setting(
        None, "ZMQ endpoint of its replay; one per rank", metavar="ENDPOINT[,…]", is_top=True
    )
    kv_topic: str = setting(
        "", "subscribe only to topics with this prefix", metavar="PREFIX", default_text="all"
    )
    dp_size: int | None = setting(
        None,
        "ranks, if the engine does not report them; with one endpoint, rank r's port is r higher",
        least=1,
    )
    kv_flush_ms: float = setting(10.0, "milliseconds between two frames of a rank", least=0)
    kv_cache_block_size: int | None = setting(
        None, "block size in tokens, instead of the engine's metrics", least=1
    )


@dataclass(frozen=True, slots=True)
class CardSettings(Settings):
    heading = "Worker"

    worker_id: str | None = setting(
        None,
        "keep it across restarts; GROUP.NAME: in a group, whose agents may share a user of NATS",
        metavar="ID",
        read=read_worker_id,
        default_text="host, port and path of the engine as frontends reach it",
        is_top=True,
    )
    model: str | None = setting(
        None,
        "name of the base model, which names the pool",
        metavar="NAME",
        default_text="the engine's first model",
    )
    max_num_batched_tokens: int = setting(0, "the engine's setting, for the card; 0: unknown", least=0)
    max_num_seqs: int = setting(0, "the engine's setting, for the card; 0: unknown", least=0)
    prefill_tokens_per_s: int = setting(
        0,
        "prompt tokens that one rank computes in a second, until frontends have measured it; 0: unknown",
        least=0,
    )
    label: tuple[tuple[str, str], ...] = setting(
        (), "zone, node, group …", metavar="KEY=VALUE", read=_label, text="=".join, is_repeated=True
    )
    metric: tuple[str, ...] = setting(
        (), "report one more series of the engine's /metrics, for custom policies", metavar="NAME=SERIES"
    )
    state_file: Path | None = setting(None, "keep the table of blocks here across restarts", is_top=True)
    kv_repair: bool | None = setting(
        None,
        "does nothing; the next release does not know this flag",
        retired="requests do not ask engines for reports any more. Give each agent a --state-file: it keeps "
        "history across restarts",
    )
    drain_timeout_s: float = setting(
        300.0,
        "seconds after SIGTERM that the engine's requests get to finish; 0: leave at once",
        least=0,
        old=("--drain-timeout",),
    )
    probe_s: float = setting(1.0, "seconds between health probes; 3 misses mean down", above=0)


@dataclass(frozen=True, slots=True)
class WorkerSettings(CommonOptions):
    engine: EngineSettings = field(default_factory=EngineSettings)
    events: EventSettings = field(default_factory=EventSettings)
    card: CardSettings = field(default_factory=CardSettings)
    metrics: MetricsPortOptions = field(default_factory=MetricsPortOptions)

    def agent(self, topic: str | None = None) -> AgentOptions:
        """The options of one engine's agent. `topic`: instead of --kv-topic. Raises ConfigError."""
        engine, events, card = self.engine, self.events, self.card
        if not engine.engine_url:
            raise ConfigError(
                "--engine-url is missing: give the engine's URL, here or as KVROUTER_ENGINE_URL, "
                "or list several in --engines FILE"
            )
        topic = events.kv_topic if topic is None else topic
        endpoints = read_endpoints(events.kv_events, events.kv_replay, topic, events.dp_size)
        check_url("--engine-url", engine.engine_url)
        # Agents on several hosts may all have their engine on 127.0.0.1 or 0.0.0.0, and must not take each
        # other's id. What replaces 0.0.0.0 in the URL is known only later, when NATS is reached.
        advertised = engine.advertise_url or engine.engine_url
        check_url("--advertise-url" if engine.advertise_url else "--engine-url", advertised)
        if engine.kv_connector == PEER and (not engine.kv_address or engine.role not in {None, BOTH}):
            raise ConfigError(
                f"--kv-connector {PEER} is for engines of whole requests: give no other --role, and "
                "--kv-address HOST:PORT (the engine's VLLM_P2P_SIDE_CHANNEL_HOST and _PORT, as other engines "
                "reach it)"
            )
        own = own_certificate(engine.worker_tls_cert, engine.worker_tls_key, "--worker-tls")
        if engine.worker_tls_ca is not None or own is not None:
            trusting(engine.worker_tls_ca, own=own)  # read now: a broken file ends the start
        return AgentOptions(
            engine_url=engine.engine_url,
            worker_id=card.worker_id or worker_id_of(reachable(advertised, gethostname())),
            nats=self.nats,
            namespace=self.namespace,
            endpoints=endpoints,
            topic=topic,
            ranks=events.dp_size or len(endpoints) or 1,
            model=card.model,
            advertise_url=engine.advertise_url,
            block_size=events.kv_cache_block_size,
            max_batched_tokens=card.max_num_batched_tokens,
            max_sequences=card.max_num_seqs,
            prefill_tokens_per_s=card.prefill_tokens_per_s,
            labels=dict(card.label),
            metrics=read_metrics(card.metric),
            api_key=read_key("--engine-api-key-file", engine.engine_api_key_file),
            tls_ca=engine.worker_tls_ca,
            tls_own=own,
            flush_s=events.kv_flush_ms / 1000,
            heartbeat_s=self.heartbeat_s,
            probe_s=card.probe_s,
            state_file=_writable(card.state_file),
            role=engine.role,
            kv_connector=engine.kv_connector or "",
            bootstrap_port=engine.bootstrap_port,
            kv_address=engine.kv_address or "",
            kv_hash=engine.kv_hash,
            whole=engine.whole,
            drain_timeout_s=card.drain_timeout_s,
        )


def _writable(path: Path | None) -> Path | None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--state-file {path}: give a file in a directory that exists")
    return path


COMMAND = Command(
    "worker",
    WorkerSettings,
    "The agent of an engine: announces it to the frontends, forwards its KV events, reports its load.\n"
    "SIGTERM or SIGINT: take no new requests and leave when the running ones have ended; the second signal: "
    "leave now. SIGUSR1: take no new requests until the next SIGUSR1.",
)
