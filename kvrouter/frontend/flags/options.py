"""The flags of `python -m kvrouter.frontend`. Names are NVIDIA Dynamo's where it has one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.bus import NatsOptions
from kvrouter.config import (
    FlagHelp,
    add_common_flags,
    nats_options,
    not_negative,
    not_negative_int,
    positive,
    positive_int,
)
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import ReplicaSettings
from kvrouter.core.routing.admission import AdmissionSettings
from kvrouter.core.tables.approx import DEFAULT_TTL_S
from kvrouter.core.tables.block_index import IndexBounds
from kvrouter.core.tables.text_index import TextIndexSettings
from kvrouter.errors import ConfigError
from kvrouter.frontend.flags.policies import SERVED_MODES, add_policy_flags, policy_settings, text_settings
from kvrouter.frontend.flags.processes import (
    ProcessOptions,
    add_admin_flags,
    add_process_flags,
    port_number,
    process_options,
    syncs,
)
from kvrouter.frontend.flags.queue import add_queue_flags, admission_settings
from kvrouter.frontend.flags.rules import RuleOptions, add_rule_flags, rule_options
from kvrouter.frontend.flags.tls import TlsOptions, add_tls_flags, tls_options
from kvrouter.frontend.flags.tokens import TokenOptions, add_token_flags, token_options
from kvrouter.policies import CUSTOM, PolicySettings
from kvrouter.relay.exchange import Limits


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """All settings of a frontend."""

    host: str
    port: int
    process: ProcessOptions
    tls: TlsOptions
    nats: NatsOptions
    namespace: str
    router_mode: str
    policy: PolicySettings
    policy_notes: tuple[str, ...]
    """Notes about parts of --router-config that have no effect."""
    texts: TextIndexSettings
    rules: RuleOptions
    replica: ReplicaSettings
    index_metrics: bool
    heartbeat_s: float
    tokens: TokenOptions
    admission: AdmissionSettings
    limits: Limits
    retries: int
    max_body_bytes: int
    ready_timeout_s: float
    drain_grace_s: float
    drain_timeout_s: float
    track_output_blocks: bool
    core: str | None
    """None: native if it is built."""
    log_level: str
    log_format: str


def parse_options(arguments: Sequence[str] | None = None) -> FrontendOptions:
    """Read the command line. A wrong flag ends the process with a message. Raises ConfigError."""
    flags = _parser().parse_args(arguments)
    pool = PoolSettings(
        # Hashes of text match no engine's events.
        use_kv_events=flags.use_kv_events and flags.tokenizer != "none",
        ttl_s=flags.router_ttl_secs,
        approx_capacity_blocks=flags.router_approx_capacity_blocks,
        inflight_overlap=flags.router_inflight_overlap,
        block_size=flags.kv_cache_block_size,
        lora_multiplex=flags.lora_multiplex,
        # The queue compares charged prompt tokens, so it needs tokens in every mode.
        counts_tokens=flags.router_queue_threshold > 0,
        index_bounds=IndexBounds(flags.index_max_blocks, flags.index_max_holders),
    )
    policy, policy_notes = policy_settings(flags)
    return FrontendOptions(
        host=flags.host,
        port=flags.port,
        process=process_options(flags),
        tls=tls_options(flags),
        nats=nats_options(flags),
        namespace=flags.namespace,
        router_mode=flags.router_mode if policy.custom is None else CUSTOM,
        policy=policy,
        policy_notes=policy_notes,
        texts=text_settings(flags),
        rules=rule_options(flags),
        replica=ReplicaSettings(pool, syncs(flags), _lease_rounds(flags), flags.heartbeat_s),
        index_metrics=flags.index_metrics,
        heartbeat_s=flags.heartbeat_s,
        tokens=token_options(flags),
        admission=admission_settings(flags),
        limits=Limits(flags.first_byte_timeout, flags.idle_timeout),
        retries=flags.retries,
        max_body_bytes=flags.max_body_mb * 1024 * 1024,
        ready_timeout_s=flags.ready_timeout,
        drain_grace_s=flags.drain_grace,
        drain_timeout_s=flags.drain_timeout,
        track_output_blocks=flags.router_track_output_blocks,
        core=flags.core,
        log_level=flags.log_level,
        log_format=flags.log_format,
    )


def _lease_rounds(flags: argparse.Namespace) -> int:
    # One late heartbeat must not look like a lost worker.
    if flags.lease_s < 2 * flags.heartbeat_s:
        raise ConfigError(
            f"--lease-s {flags.lease_s:g} is less than two heartbeats of {flags.heartbeat_s:g} s: "
            f"give at least {2 * flags.heartbeat_s:g}, or a shorter --heartbeat-s"
        )
    rounds: int = round(flags.lease_s / flags.heartbeat_s)
    return rounds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvrouter.frontend",
        description="One replica, or several on one port: an OpenAI-compatible frontend with a "
        "KV-cache-aware router inside.",
        formatter_class=FlagHelp,
    )
    add_common_flags(parser)
    add_flags(parser)
    add_process_flags(parser.add_argument_group("processes"))
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that only a frontend has."""
    add = parser.add_argument
    add("--host", default="0.0.0.0", help="address to listen on")
    add("--port", "--http-port", type=port_number, default=8000, help="port; 0 picks a free one")
    _add_router_flags(parser.add_argument_group("routing"))
    add_token_flags(parser.add_argument_group("tokens"))
    _add_index_flags(parser.add_argument_group("block index"))
    add_policy_flags(parser.add_argument_group("routing modes"))
    add_rule_flags(parser.add_argument_group("which workers may be chosen"))
    add_queue_flags(parser.add_argument_group("waiting for a worker"))
    _add_http_flags(parser.add_argument_group("requests"))
    add_admin_flags(parser.add_argument_group("operators"))
    add_tls_flags(parser.add_argument_group("TLS"))


def _add_router_flags(group: argparse._ArgumentGroup) -> None:
    switch = argparse.BooleanOptionalAction
    group.add_argument("--router-mode", choices=SERVED_MODES, default="kv", help="how a worker is chosen")
    group.add_argument(
        "--router-replica-sync",
        action=switch,
        default=argparse.SUPPRESS,  # absent: `syncs` decides by --processes
        help="share bookings with the other replicas; default: on if this command runs several, else off",
    )
    group.add_argument(
        "--kv-overlap-score-weight",
        type=not_negative,
        default=None,
        help="w in cost = w*prefill + decode; default: 1 (kv-score: 2)",
    )
    group.add_argument(
        "--router-temperature",
        type=not_negative,
        default=0.0,
        help="0: lowest cost; above: softmax over costs",
    )
    group.add_argument(
        "--use-kv-events",
        action=switch,
        default=True,
        help="index the engines' KV events; without: assume that prompts stay cached for --router-ttl-secs",
    )
    group.add_argument(
        "--no-kv-events",
        dest="use_kv_events",
        action="store_false",
        default=argparse.SUPPRESS,
        help="the same as --no-use-kv-events",
    )
    group.add_argument(
        "--router-ttl-secs",
        type=not_negative,
        default=DEFAULT_TTL_S,
        help="without KV events: seconds that a prompt is assumed to stay cached where it was sent; "
        "0: until the worker's cache is full",
    )
    group.add_argument(
        "--router-approx-capacity-blocks",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="without KV events: most blocks that a worker is assumed to hold; 0: the capacity on its card",
    )
    _add_state_flags(group)


def _add_state_flags(group: argparse._ArgumentGroup) -> None:
    switch = argparse.BooleanOptionalAction
    group.add_argument(
        "--router-inflight-overlap",
        action=switch,
        default=True,
        help="count blocks of requests in flight as cached",
    )
    group.add_argument(
        "--router-track-output-blocks", action=switch, default=True, help="book the blocks that answers fill"
    )
    group.add_argument(
        "--kv-cache-block-size",
        type=positive_int,
        default=None,
        help="tokens of one block in prompts' hashes; default: the block size of most workers",
    )
    group.add_argument(
        "--lease-s",
        type=positive,
        default=5.0,
        help="seconds without a heartbeat before a worker or replica is considered lost; they are counted in "
        "own heartbeats that come back through NATS, so a replica without NATS loses no worker",
    )


def _add_index_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--index-max-blocks",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="most distinct blocks in the index of a model; 0: no limit",
    )
    group.add_argument(
        "--index-max-holders",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="most workers in the index per block; 0: no limit",
    )
    group.add_argument(
        "--index-metrics",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="metrics of the index: holders, bytes, stores, removes, rejected blocks, time of look-ups",
    )


def _add_http_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--retries",
        type=not_negative_int,
        default=2,
        help="other workers to try before the first byte of an answer",
    )
    group.add_argument(
        "--first-byte-timeout",
        type=positive,
        default=600.0,
        help="seconds until a worker's first byte; then the client gets 504",
    )
    group.add_argument(
        "--idle-timeout",
        type=positive,
        default=300.0,
        help="seconds without a byte of a running answer, or without its client reading; then it is aborted",
    )
    group.add_argument("--max-body-mb", type=positive_int, default=64, help="largest request body, in MiB")
    group.add_argument(
        "--ready-timeout",
        type=not_negative,
        default=60.0,
        help="seconds after which /ready is 200 even if workers or feeds are missing; its body names them",
    )
    group.add_argument(
        "--drain-grace",
        type=not_negative,
        default=5.0,
        help="seconds after SIGTERM with new requests still accepted, while /ready is 503 for load balancers",
    )
    group.add_argument(
        "--drain-timeout",
        type=not_negative,
        default=300.0,
        help="seconds that running requests get to finish after the grace; then they are aborted",
    )
