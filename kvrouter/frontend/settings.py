"""The settings of a frontend. Names are NVIDIA Dynamo's where it has one."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from kvrouter.bodies.aliases import read_alias, resolved
from kvrouter.config import CommonOptions, read_key
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import ReplicaSettings
from kvrouter.core.routing.admission import AdmissionSettings
from kvrouter.core.routing.breaker import BreakerSettings
from kvrouter.core.routing.filters import FilterSettings
from kvrouter.core.routing.policy import AUTO
from kvrouter.core.tables.deadly_prompts import DEADLY_TTL_S
from kvrouter.core.tables.sessions import DEFAULT_TTL_S
from kvrouter.core.tables.text_index import TextIndexSettings
from kvrouter.core.wire.addresses import Network
from kvrouter.core.wire.values import url_error
from kvrouter.errors import ConfigError
from kvrouter.frontend.dynamo_flags import DynamoOptions
from kvrouter.frontend.keys.keys_file import Keys, read_keys
from kvrouter.frontend.requests.overrides import DIRECT
from kvrouter.policies import CUSTOM, SERVED_MODES, PolicySettings
from kvrouter.policies.files import PolicyFiles
from kvrouter.policies.two_stage import read_header_name
from kvrouter.prompts.settings import TokenOptions
from kvrouter.relay.outcomes import Limits
from kvrouter.settings.declare import MIB, Command, Settings, mib, read_mib, setting
from kvrouter.settings.read import load
from kvrouter.telemetry.metrics_port import MetricsPortOptions
from kvrouter.tls import CertificateFiles, own_certificate, server_context, trusting

FIFO, PRIORITY = "fifo", "priority"
MOST_PROCESSES = 256
# The default of --admin-port is --port plus this.
ADMIN_OFFSET = 100
FROM_PORT = -1
"""`admin_port` before it is worked out."""
MOST_DECISIONS = 100_000
EXPOSABLE = frozenset({"headers", "metrics"})
_LIMITS = Limits()
# without . and ..: clients and proxies resolve them
_ROOT_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[\w.~-]{1,64}){1,8}", re.ASCII)


def _read_host(text: str) -> str:
    host = text.removeprefix("[").removesuffix("]")
    if url_error(f"http://[{host}]:1" if ":" in host else f"http://{host}:1"):
        raise ValueError("must be a host name or an address")
    return host


def _read_root_path(text: str) -> str:
    path = text.rstrip("/")
    if path and not _ROOT_PATH.fullmatch(path):
        raise ValueError("must be a path of plain segments, as in /api/llm")
    return path


def _read_collector(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be a URL, as in http://collector:4318")
    return text


def _read_network(text: str) -> str:
    return str(ip_network(text, strict=False))


AccessMode = Literal["off", "sampled", "all"]


@dataclass(frozen=True, slots=True)
class AccessOptions(Settings):
    """The access log."""

    heading = "Logs and core"

    mode: AccessMode = setting(
        "off",
        "log requests that were served: none, one in a hundred, or all; failed ones are always logged",
        name="access-log",
        is_top=True,
        reloadable=True,
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "addresses of proxies in front, whose X-Forwarded-For names the client in the access log",
        metavar="ADDRESS[/BITS]",
        read=_read_network,
        is_repeated=True,
        reloadable=True,
    )


@dataclass(frozen=True, slots=True)
class MigrationOptions(Settings):
    heading = "Streams that move"

    limit: int = setting(
        0,
        "times that a stream may go on at another worker if its own is lost; 0: its client gets an error",
        name="migration-limit",
        least=0,
        most=16,
    )
    max_tokens: int = setting(
        131_072,
        "most tokens of prompt and answer with which a stream moves",
        name="migration-max-tokens",
        old=("--migration-max-seq-len",),
        least=1,
    )
    strip: bool = setting(
        False,
        "take the token ids out again that engines send for this; each event is parsed then",
        name="migration-strip",
    )
    inexact: bool = setting(
        False,
        "also move streams with a seed: the rest is sampled anew",
        name="migration-inexact",
    )


@dataclass(frozen=True, slots=True)
class TraceOptions(Settings):
    heading = "Traces"

    endpoint: str | None = setting(
        None,
        "send traces of requests to this OpenTelemetry collector, over OTLP/HTTP; needs the extra `otel`",
        name="otlp-endpoint",
        metavar="URL",
        default_text="OTEL_EXPORTER_OTLP_ENDPOINT; without it no traces",
        read=_read_collector,
    )
    ratio: float | None = setting(
        None,
        "share of requests to trace, from 0 to 1, of those whose client does not say it by traceparent",
        name="trace-sample-ratio",
        least=0,
        most=1,
        default_text="as OTEL_TRACES_SAMPLER says; without it all",
    )


@dataclass(frozen=True, slots=True)
class RuleOptions(Settings):
    heading = "Which workers may be chosen"

    filters: FilterSettings = field(default_factory=FilterSettings)
    session_header: str = setting(
        "x-session-id", "header that names the session", metavar="NAME", read=read_header_name
    )
    session_ttl_s: float = setting(
        DEFAULT_TTL_S, "seconds without a request after which a session expires", above=0
    )
    has_breaker: bool = setting(
        False, "skip a worker that keeps failing, for --circuit-breaker-open-s", name="circuit-breaker"
    )
    circuit: BreakerSettings = field(default_factory=BreakerSettings)
    decisions: int = setting(
        1000,
        "decisions kept for GET /decisions/REQUEST_ID, in at most 64 MiB; 0: none",
        least=0,
        most=MOST_DECISIONS,
        heading="Operators",
    )
    log_decisions: bool = setting(
        False, "log each decision with the terms of every candidate", heading="Operators"
    )

    @property
    def breaker(self) -> BreakerSettings | None:
        """None: no circuits."""
        return self.circuit if self.has_breaker else None


@dataclass(frozen=True, slots=True)
class ProcessOptions(Settings):
    """The processes on one port, and the admin listener of each."""

    heading = "Operators"

    processes: int = setting(
        1,
        "replicas on this one port, each a process; above 1 they share bookings (--router-replica-sync)",
        least=1,
        most=MOST_PROCESSES,
        is_top=True,
    )
    admin_port: int = setting(
        FROM_PORT,
        "port of the admin listener, with the routes for operators; process i of --processes listens on "
        "PORT+i; 0: a free port",
        metavar="PORT",
        least=0,
        most=65535,
        default_text=f"--port + {ADMIN_OFFSET}",
        is_top=True,
    )
    """Process i listens on this plus i; 0: on a free port."""
    admin_host: str = setting(
        "127.0.0.1",
        "address of the admin listener; peers that are not on loopback need the key of --admin-key-file",
        metavar="ADDRESS",
    )
    admin_allowed_host: tuple[str, ...] = setting(
        (),
        "a further host name or address by which the admin listener may be asked",
        metavar="NAME",
        read=_read_host,
        is_repeated=True,
    )
    advertise: str | None = setting(
        None,
        "host name or address by which others reach the admin listener",
        metavar="HOST",
        default_text="--admin-host, or this host's address on the way to NATS if that is 0.0.0.0 or ::",
        read=_read_host,
    )
    admin_key_file: Path | None = setting(
        None,
        "the operators' key, for the admin listener from any address, and operators' routes on --port",
        reloadable=True,
    )
    number: int = setting(0, "", name="process-number", is_hidden=True)
    """Of this process, from 1; 0: the only process."""
    listen_fd: int | None = setting(None, "", is_hidden=True)
    """The listening socket that the parent opened; None: this process opens its own."""
    siblings_fd: int | None = setting(None, "", is_hidden=True)
    """The file in which the processes on one port name their admin listeners."""
    waits_until_ready: bool = setting(False, "", is_hidden=True)
    """Whether other processes accept all connections until this one is ready."""

    def checked(self) -> Self:
        if self.admin_key_file is not None and self.admin_key is None:
            raise ConfigError(
                f"--admin-key-file {self.admin_key_file}: it is empty; write the operators' key into it"
            )
        return self

    @property
    def admin_key(self) -> str | None:
        """Opens the admin listener to all addresses, and the operators' routes on the clients' port."""
        return read_key("--admin-key-file", self.admin_key_file)

    @property
    def admin_names(self) -> tuple[str, ...]:
        """By which the admin listener may be asked."""
        return (self.admin_host, self.advertise or "", *self.admin_allowed_host)

    @property
    def own_admin_port(self) -> int:
        """The admin port of the process with this number; 0: a free one."""
        return self.admin_port and self.admin_port + self.number

    def with_admin_port(self, port: int) -> ProcessOptions:
        """The admin port of process 0, if clients' is `port`. Raises ConfigError if the last has none."""
        admin = self.admin_port
        if admin == FROM_PORT:
            admin = port and port + ADMIN_OFFSET  # with --port 0 both ports are free ones
        last = self.processes if self.processes > 1 else self.number
        if admin and admin + last > 65535:
            given = f"is --port + {ADMIN_OFFSET} by default" if self.admin_port == FROM_PORT else f"{admin}"
            raise ConfigError(
                f"--admin-port {given}: there is no port {admin + last}; give a lower one, or 0"
            )
        return replace(self, admin_port=admin)


def _read_exposed(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.lower().split(",")))))
    if names == ("none",):
        return ()
    if not names or not EXPOSABLE.issuperset(names):
        raise ValueError("must be headers, metrics, headers,metrics or none")
    return names


def _exposed_text(names: tuple[str, ...]) -> str:
    return ",".join(names) or "none"


@dataclass(frozen=True, slots=True)
class ClientsOptions(Settings):
    """What clients may see and do on --port. The operators' key lets its holder see and do all."""

    heading = "Clients"

    expose: tuple[str, ...] = setting(
        tuple(sorted(EXPOSABLE)),
        "what --port shows: headers that name the worker of an answer and its overlap, and /metrics; none: "
        "neither",
        metavar="headers,metrics|none",
        read=_read_exposed,
        text=_exposed_text,
    )
    client_overrides: Literal["on", "off"] = setting(
        "on",
        "off: requests cannot choose worker, mode, weights or priority",
    )
    keys_file: Path | None = setting(
        None,
        "the keys of clients, as `kvrouter keys` writes them (TOML)",
        reloadable=True,
    )
    api_key: str | None = setting(
        None,
        "one key for all clients, which may do all; as a flag other users of the machine can see it",
        is_secret=True,
        reloadable=True,
    )

    tenant_cache_salt: bool = setting(
        False,
        "keep the prefixes of keys apart, by `cache_salt`",
    )

    def checked(self) -> Self:
        if self.keys(None) is None and self.tenant_cache_salt:
            raise ConfigError(
                "--tenant-cache-salt without --keys-file: there are no tenants; drop it, or give keys"
            )
        return self

    def keys(self, engine_key: str | None) -> Keys | None:
        """All keys; None: clients need none. `engine_key`: what engines get. Raises ConfigError."""
        if self.keys_file is None and self.api_key is None:
            return None
        found = read_keys(self.keys_file) if self.keys_file is not None else {}
        return Keys(found, self.api_key or "", engine_key)


@dataclass(frozen=True, slots=True)
class TlsOptions(Settings):
    heading = "TLS"

    cert: Path | None = setting(
        None,
        "serve HTTPS with this certificate: PEM, followed by the intermediate certificates",
        name="tls-cert",
        old=("--tls-cert-path",),
        reloadable=True,
    )
    key: Path | None = setting(
        None,
        "key of --tls-cert: PEM, without a password",
        name="tls-key",
        old=("--tls-key-path",),
        reloadable=True,
    )
    worker_ca: Path | None = setting(
        None,
        "authorities of the workers' certificates (https:// URLs), in addition to the system's",
        name="worker-tls-ca",
    )
    client_ca: Path | None = setting(
        None,
        "clients of --port need a certificate that one of these authorities has signed",
        name="tls-client-ca",
    )
    worker_cert: Path | None = setting(
        None, "shown to workers that ask for a certificate: PEM, with its chain", name="worker-tls-cert"
    )
    worker_key: Path | None = setting(
        None, "key of --worker-tls-cert: PEM, without a password", name="worker-tls-key"
    )

    def checked(self) -> Self:
        """Load the files once: a broken one ends the start, not the first handshake."""
        if self.files is not None:
            server_context(self.files, self.client_ca)
        elif self.client_ca is not None:
            raise ConfigError("--tls-client-ca without --tls-cert: plain HTTP has no certificates")
        self.to_workers()
        return self

    def to_workers(self) -> ssl.SSLContext:
        """For calls to workers with https:// URLs. Raises ConfigError."""
        flags = "--worker-tls"
        return trusting(self.worker_ca, own=own_certificate(self.worker_cert, self.worker_key, flags))

    @property
    def files(self) -> CertificateFiles | None:
        """None: plain HTTP."""
        return own_certificate(self.cert, self.key, "--tls")


@dataclass(frozen=True, slots=True)
class FrontendOptions(CommonOptions):
    """All settings of a frontend."""

    heading = "Requests"

    host: str = setting(
        "0.0.0.0",
        "address to listen on",
        metavar="ADDRESS",
        old=("--http-host",),
        heading="Listening",
        is_top=True,
    )
    port: int = setting(
        8000,
        "port; 0 picks a free one",
        metavar="PORT",
        least=0,
        most=65535,
        old=("--http-port",),
        heading="Listening",
        is_top=True,
    )
    root_path: str = setting(
        "",
        "path of a proxy under which clients reach this port; requests are served with it and without it",
        metavar="/PATH",
        default_text="none",
        read=_read_root_path,
        heading="Listening",
    )
    router_mode: str = setting(
        "kv",
        f"how a worker is chosen: {', '.join(SERVED_MODES)}",
        metavar="MODE",
        choices=SERVED_MODES,
        heading="Routing",
        is_top=True,
    )
    router_replica_sync: bool | None = setting(
        None,
        "share bookings with the other replicas",
        default_text="on if this command runs several, else off",
        heading="Routing",
        is_top=True,
    )
    pool: PoolSettings = field(default_factory=PoolSettings)
    track_output_blocks: bool = setting(
        True, "book the blocks that answers fill", name="router-track-output-blocks", heading="Routing"
    )
    lease_s: float = setting(
        5.0,
        "seconds without a heartbeat before a worker or replica is considered lost",
        above=0,
        heading="Routing",
    )
    policy: PolicySettings = field(default_factory=PolicySettings)
    policy_files: PolicyFiles = field(default_factory=PolicyFiles)
    policy_notes: tuple[str, ...] = ()
    """Notes about parts of --router-config that have no effect."""
    texts: TextIndexSettings = field(default_factory=TextIndexSettings)
    tokens: TokenOptions = field(default_factory=TokenOptions)
    index_metrics: bool = setting(
        True,
        "metrics of the index: bytes, stores, removes, rejected blocks, time of look-ups",
        heading="Block index",
    )
    rules: RuleOptions = field(default_factory=RuleOptions)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    queue_policy: str = setting(
        FIFO,
        "priority: by the header x-kvrouter-priority or `priority` in the body, lower first as in vLLM",
        name="router-queue-policy",
        choices=(FIFO, PRIORITY),
        heading=AdmissionSettings.heading,
    )
    migration: MigrationOptions = field(default_factory=MigrationOptions)
    retries: int = setting(
        _LIMITS.retries, "other workers to try before the first byte of an answer", least=0, reloadable=True
    )
    retries_after_death: int = setting(
        _LIMITS.retries_after_death,
        "other workers to try after one was lost with the request in hand",
        least=0,
        reloadable=True,
    )
    deadly_prompt_ttl_s: float = setting(
        DEADLY_TTL_S,
        "seconds for which all replicas refuse a prompt with which two workers were lost; 0: they do not",
        least=0,
        reloadable=True,
    )
    first_byte_timeout_s: float = setting(
        _LIMITS.first_byte_s,
        "seconds until a worker's first output; then the client gets 504",
        above=0,
        old=("--first-byte-timeout",),
        reloadable=True,
    )
    idle_timeout_s: float = setting(
        _LIMITS.idle_s,
        "seconds without data of a running answer, or without its client reading; then it is aborted",
        above=0,
        old=("--idle-timeout",),
        reloadable=True,
    )
    sse_keep_alive_s: float = setting(
        _LIMITS.keep_alive_s,
        "seconds between comments for a client that waits; the first one sends status 200; 0: none",
        least=0,
        reloadable=True,
    )
    max_body_bytes: int = setting(
        64 * MIB,
        "largest request body, in MiB",
        name="max-body-mib",
        metavar="MIB",
        old=("--max-body-mb",),
        read=read_mib,
        text=mib,
    )
    ready_timeout_s: float = setting(
        60.0,
        "seconds after which /ready is 200 even if some workers or feeds are missing",
        least=0,
        old=("--ready-timeout",),
    )
    wait_for_workers_s: float = setting(
        0.0,
        "seconds that a request waits for a first worker; above 0, /ready is 200 without one once NATS is "
        "reached; 0: a request is refused at once with 503",
        least=0,
    )
    drain_grace_s: float = setting(
        5.0,
        "seconds after SIGTERM with new requests still accepted, while /ready is 503 for load balancers",
        least=0,
        old=("--drain-grace",),
    )
    drain_timeout_s: float = setting(
        300.0,
        "seconds that running requests get to finish after the grace; then they are aborted",
        least=0,
        old=("--drain-timeout",),
    )
    model_aliases: tuple[tuple[str, str], ...] = setting(
        (),
        "another name for a model or adapter that workers serve; it goes before a model of that name",
        name="model-alias",
        metavar="NAME=MODEL",
        read=read_alias,
        text="=".join,
        is_repeated=True,
        reloadable=True,
    )
    allowed_workers: tuple[str, ...] = setting(
        (),
        "networks in which workers may be",
        name="worker-networks",
        metavar="ADDRESS[/BITS]",
        default_text="all",
        read=_read_network,
        is_repeated=True,
    )
    process: ProcessOptions = field(default_factory=ProcessOptions)
    clients: ClientsOptions = field(default_factory=ClientsOptions)
    metrics: MetricsPortOptions = field(default_factory=MetricsPortOptions)
    tls: TlsOptions = field(default_factory=TlsOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    traces: TraceOptions = field(default_factory=TraceOptions)
    dynamo: DynamoOptions = field(default_factory=DynamoOptions)

    def checked(self) -> Self:
        resolved(self.model_aliases)
        # One late heartbeat must not look like a lost worker.
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"--lease-s {self.silence_s:g} is less than two heartbeats of {self.heartbeat_s:g} s: "
                f"give at least {2 * self.heartbeat_s:g}, or a shorter --heartbeat-s"
            )
        # Each process would count its own bookings only, and all of them would choose the same idle worker.
        if self.process.processes > 1 and self.router_replica_sync is False:
            raise ConfigError(
                f"--processes {self.process.processes} with --no-router-replica-sync: processes on one port "
                "must share their bookings, else they overload workers; drop one of the two flags"
            )
        if self.router_mode == DIRECT and self.clients.client_overrides == "off":
            raise ConfigError(
                "--router-mode direct with --client-overrides off: no request could name its worker; give "
                "another mode, or --client-overrides on"
            )
        if self.pool.kv_from_peers and self.policy.overlap_weight not in {None, AUTO}:
            raise ConfigError(
                f"--kv-from-peers with --kv-overlap-score-weight {self.policy.overlap_weight:g}: it compares "
                "seconds; give weight auto, or drop the flag"
            )
        policy, notes = self.policy_files.loaded(self.policy, self.router_mode)
        # 0: all priorities are equal, so requests are served in the order of their arrival
        ageing_s = self.admission.ageing_s if self.queue_policy == PRIORITY else 0.0
        return replace(
            self,
            router_mode=self.router_mode if policy.custom is None else CUSTOM,
            policy=policy,
            policy_notes=notes,
            pool=replace(
                self.pool,
                # Hashes of text match no engine's events.
                use_kv_events=self.pool.use_kv_events and self.tokens.way != "none",
                lora_multiplex=self.rules.filters.multiplex,
                # The queue compares charged prompt tokens, so it needs tokens in every mode.
                counts_tokens=self.admission.threshold > 0,
            ),
            admission=replace(self.admission, ageing_s=ageing_s),
            process=self.process.with_admin_port(self.port),
        )

    @property
    def replica(self) -> ReplicaSettings:
        synced = bool(self.router_replica_sync) or self.process.processes > 1
        rounds = round(self.silence_s / self.heartbeat_s)  # it counts in own heartbeats, see lease_s
        return ReplicaSettings(self.pool, synced, rounds, self.heartbeat_s, self.worker_networks)

    @property
    def silence_s(self) -> float:
        """After which a worker or replica is considered lost."""
        return self.lease_s

    @property
    def worker_networks(self) -> tuple[Network, ...]:
        """The networks to which workers are limited; empty: they are not."""
        return tuple(map(ip_network, self.allowed_workers))

    @property
    def keys(self) -> Keys | None:
        """Of clients, and what engines get in their place."""
        return self.clients.keys(self.tokens.engine_api_key)

    @property
    def aliases(self) -> dict[str, str]:
        """The model of each alias."""
        return resolved(self.model_aliases)

    @property
    def limits(self) -> Limits:
        return Limits(
            first_byte_s=self.first_byte_timeout_s,
            idle_s=self.idle_timeout_s,
            keep_alive_s=self.sse_keep_alive_s,
            retries=self.retries,
            retries_after_death=self.retries_after_death,
        )


REMOVED = {
    "circuit-breaker-successes": "removed; a worker takes all requests again after 3 successes",
    "prefix-store-block-chars": "removed; a piece of the prefix cache has 256 characters",
    "text-block-chars": "removed; texts are compared by characters",
}
COMMAND = Command(
    "frontend",
    FrontendOptions,
    "One replica, or several on one port: an OpenAI-compatible frontend with a KV-cache-aware router inside.",
    removed=REMOVED,
)


def parse_options(arguments: Sequence[str] | None = None) -> FrontendOptions:
    """The settings of flags, environment and file. Raises ConfigError."""
    return load(COMMAND, arguments).settings
