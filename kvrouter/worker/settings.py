"""The settings of `python -m kvrouter.worker`, and the options of an agent that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from kvrouter.config import CommonOptions, read_identifier, read_key
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Command, Setting, Settings
from kvrouter.settings.read import load
from kvrouter.tls import trusting
from kvrouter.worker.options import (
    AgentOptions,
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

    engine_url: Annotated[
        str, Setting("the engine's HTTP server, as the agent reaches it", metavar="URL", is_top=True)
    ] = ""
    engines: Annotated[
        Path | None,
        Setting(
            "run agents for several engines in this process, listed in a TOML or JSON file: [[engine]] "
            'entries with these settings as keys (engine-url = "http://…"); --kv-topic then filters for all',
            is_top=True,
        ),
    ] = None
    advertise_url: Annotated[
        str | None,
        Setting("the engine as frontends reach it", metavar="URL", default_text="--engine-url", is_top=True),
    ] = None
    engine_api_key_file: Annotated[Path | None, Setting("bearer token for the engine", is_top=True)] = None
    worker_tls_ca: Annotated[
        Path | None,
        Setting(
            "authorities of the engine's certificate (https:// URL), trusted in addition to the system's"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class EventSettings(Settings):
    heading = "KV events"

    kv_events: Annotated[
        str | None,
        Setting("ZMQ endpoint of the engine's KV events; one per rank", metavar="ENDPOINT[,…]", is_top=True),
    ] = None
    kv_replay: Annotated[
        str | None, Setting("ZMQ endpoint of its replay; one per rank", metavar="ENDPOINT[,…]", is_top=True)
    ] = None
    kv_topic: Annotated[
        str, Setting("subscribe only to topics with this prefix", metavar="PREFIX", default_text="all")
    ] = ""
    dp_size: Annotated[
        int | None,
        Setting(
            "ranks, if the engine does not report them; with one endpoint, rank r's port is r higher", least=1
        ),
    ] = None
    kv_flush_ms: Annotated[float, Setting("milliseconds between two frames of a rank", least=0)] = 10.0
    kv_cache_block_size: Annotated[
        int | None, Setting("block size in tokens, instead of the engine's metrics", least=1)
    ] = None


@dataclass(frozen=True, slots=True)
class CardSettings(Settings):
    heading = "Worker"

    worker_id: Annotated[
        str | None,
        Setting(
            "keep it across restarts",
            metavar="ID",
            read=read_identifier,
            default_text="host and port of the engine",
            is_top=True,
        ),
    ] = None
    model: Annotated[
        str | None,
        Setting(
            "name of the base model, which names the pool",
            metavar="NAME",
            default_text="the engine's first model",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int, Setting("the engine's setting, for the card; 0: unknown", least=0)
    ] = 0
    max_num_seqs: Annotated[int, Setting("the engine's setting, for the card; 0: unknown", least=0)] = 0
    label: Annotated[
        tuple[tuple[str, str], ...],
        Setting(
            "zone, node, group …",
            metavar="KEY=VALUE",
            read=_label,
            text="=".join,
            is_repeated=True,
        ),
    ] = ()
    metric: Annotated[
        tuple[str, ...],
        Setting(
            "report one more series of the engine's /metrics, for custom policies",
            metavar="NAME=SERIES",
        ),
    ] = ()
    state_file: Annotated[
        Path | None, Setting("keep the table of blocks here across restarts", is_top=True)
    ] = None
    kv_repair: Annotated[
        bool,
        Setting(
            "after lost history, requests ask the engine to announce the blocks that they reuse "
            "(vLLM 0.24 and later)"
        ),
    ] = True
    drain_timeout_s: Annotated[
        float,
        Setting(
            "seconds after SIGTERM that the engine's requests get to finish; 0: leave at once",
            least=0,
            old=("--drain-timeout",),
        ),
    ] = 300.0
    probe_s: Annotated[float, Setting("seconds between health probes; 3 misses mean down", above=0)] = 1.0


@dataclass(frozen=True, slots=True)
class WorkerSettings(CommonOptions):
    engine: EngineSettings = field(default_factory=EngineSettings)
    events: EventSettings = field(default_factory=EventSettings)
    card: CardSettings = field(default_factory=CardSettings)

    def agent(self, topic: str | None = None) -> AgentOptions:
        """The options of one engine's agent. `topic`: instead of --kv-topic. Raises ConfigError."""
        engine, events, card = self.engine, self.events, self.card
        if not engine.engine_url:
            raise ConfigError(
                "--engine-url is missing: give the engine's URL, or list several in --engines FILE"
            )
        topic = events.kv_topic if topic is None else topic
        endpoints = read_endpoints(events.kv_events, events.kv_replay, topic, events.dp_size)
        default_id = worker_id_of(engine.engine_url)
        if engine.worker_tls_ca is not None:
            trusting(engine.worker_tls_ca)
        return AgentOptions(
            engine_url=engine.engine_url,
            worker_id=card.worker_id or default_id,
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
            labels=dict(card.label),
            metrics=read_metrics(card.metric),
            api_key=read_key("--engine-api-key-file", engine.engine_api_key_file),
            tls_ca=engine.worker_tls_ca,
            flush_s=events.kv_flush_ms / 1000,
            heartbeat_s=self.heartbeat_s,
            probe_s=card.probe_s,
            state_file=_writable(card.state_file),
            kv_repair=card.kv_repair,
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


def agent_options(words: Sequence[str]) -> AgentOptions:
    """The options of the agent with this command line, without the environment. Raises ConfigError."""
    return load(COMMAND, words, {}).settings.agent()
