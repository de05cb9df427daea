"""One replica as a process: everything is opened here, in order, and closed by indentation."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from socket import gethostname
from typing import Any

import structlog

from kvrouter.bus import Bus, Subjects
from kvrouter.bus.addresses import reachable, with_host
from kvrouter.bus.rights import FRONTEND
from kvrouter.config import open_bus
from kvrouter.core.audit.findings import Audit
from kvrouter.core.fleet.pool import NewIndex
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.native import versions
from kvrouter.core.routing.policy import AUTO
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.errors import ConfigError
from kvrouter.frontend.keys.clients import ClientKeys
from kvrouter.frontend.keys.limits import TenantLimits
from kvrouter.frontend.operators.admin import Admin
from kvrouter.frontend.operators.busy_threshold import BusyThresholds
from kvrouter.frontend.operators.deadly_prompts import PROMPT_PATH, PROMPTS_PATH, DeadlyPromptViews
from kvrouter.frontend.operators.decision_views import DECISION_PATH, DecisionViews
from kvrouter.frontend.operators.dry_route import DryRoute
from kvrouter.frontend.operators.openapi import check_root_path
from kvrouter.frontend.operators.rights import AdminGate, AdminKey, KeyGate, is_loopback
from kvrouter.frontend.operators.routing_change import RoutingChanges
from kvrouter.frontend.operators.state_metrics import index_maker, index_samples
from kvrouter.frontend.operators.views import View
from kvrouter.frontend.operators.worker_blocks import WORKER_PATH, WorkerBlocks
from kvrouter.frontend.records.access_log import AccessLog
from kvrouter.frontend.records.client_totals import ClientTotals
from kvrouter.frontend.records.readers import Readers
from kvrouter.frontend.records.tenant_totals import TenantTotals
from kvrouter.frontend.reload import Reload, RunningSettings
from kvrouter.frontend.requests.accept import Accept
from kvrouter.frontend.requests.admission_queue import WaitingRoom
from kvrouter.frontend.requests.completions import Completions
from kvrouter.frontend.requests.hung_engines import HungEngines, probing
from kvrouter.frontend.requests.lost_requests import LostRequests
from kvrouter.frontend.requests.moves import Moves
from kvrouter.frontend.requests.overrides import AcceptedOverrides
from kvrouter.frontend.requests.rules import Rules
from kvrouter.frontend.server.background import audit_forever, evict_texts, report_progress, running
from kvrouter.frontend.server.http_server import Site, http_server, wait_for_any
from kvrouter.frontend.server.peer_questions import ask_peers
from kvrouter.frontend.server.sockets import Listeners, open_listeners, streams_within
from kvrouter.frontend.settings import COMMAND, FrontendOptions
from kvrouter.observe.dashboard.page import FILES_PATH, PAGE_PATH, Page
from kvrouter.observe.dashboard.prefixes import Prefixes
from kvrouter.observe.dashboard.stream import FleetStream
from kvrouter.observe.dashboard.traffic import FleetTraffic, served
from kvrouter.observe.document import FleetView
from kvrouter.policies import POLICIES, SERVED_MODES, new_policy
from kvrouter.policies.guarded import GuardedPolicy
from kvrouter.policies.kv import Kv
from kvrouter.policies.two_stage import TwoStage
from kvrouter.processes.descriptors import raise_limit
from kvrouter.processes.signals import Signals
from kvrouter.prompts.opening import Tokens, open_tokens
from kvrouter.relay.upstream import Upstream
from kvrouter.replica.loop import ReplicaLoop, empty_replica
from kvrouter.replica.policy_upkeep import PolicyUpkeep
from kvrouter.settings.read import Loaded
from kvrouter.telemetry.build import config_collector, register_build
from kvrouter.telemetry.exposition import Registry
from kvrouter.telemetry.garbage import Pauses, collect_and_freeze, thresholds_raised
from kvrouter.telemetry.loop_lag import LoopLag
from kvrouter.telemetry.metrics import RequestMetrics, StateCollector
from kvrouter.telemetry.metrics_port import metrics_port
from kvrouter.telemetry.tracing import open_tracing
from kvrouter.tokens.prompt import PromptEncoder

log = structlog.get_logger()

# After this time a thread that waits for Python's lock (the GIL) gets it. Python's default is 5 ms. A busy
# event loop releases the lock more often than that, wakes the thread that writes logs each time, and takes it
# again first: these vain attempts went on for 80 ms and more, and took 0.13 ms of CPU for each line. Not so
# where prompts are tokenized: those threads would interrupt each other, and 36 KB prompts cost 19 % more.
SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class RunningFrontend:
    """A replica that serves, as callers of `running_frontend` see it."""

    url: str
    admin_url: str
    replica: Replica
    replica_loop: ReplicaLoop
    audit: Audit
    admin: Admin
    completions: Completions
    hung_engines: HungEngines
    waiting_room: WaitingRoom
    tokens: Tokens
    reload: Reload | None

    def drain(self) -> None:
        """Report it in /ready and to the peers, and close each connection after its next answer."""
        self.replica_loop.publishing.drain()
        self.admin.drain()
        self.completions.in_flight.is_draining = True


OpenSite = Callable[[Site], contextlib.AbstractAsyncContextManager[Site]]
"""What the ports serve: a frontend's routes, or others with tasks of their own (kvrouter/router)."""


async def serve(loaded: Loaded[Any], open_site: OpenSite = contextlib.nullcontext) -> None:
    """Serve until SIGTERM or SIGINT, then drain and leave. A second signal ends the draining."""
    signals, options = Signals(), loaded.settings
    descriptors = raise_limit()
    log.info("frontend.descriptors", limit=descriptors, streams=streams_within(descriptors))
    async with (
        running_frontend(options, signals.hurried, loaded, open_site) as frontend,
        running({"reload": _reload_on_signals(signals, frontend)}),
    ):
        # One of --processes: the parent sends SIGUSR1 to all of them before it ends the first.
        if options.process.listen_fd is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, frontend.drain)
        await signals.stopped.wait()
        frontend.drain()
        grace_s = signals.grace_s(options.drain_grace_s)
        log.info("frontend.draining", grace_s=grace_s)
        await wait_for_any(signals.hurried.wait(), timeout_s=grace_s)
        requests = frontend.completions.in_flight.count
        if requests and not signals.hurried.is_set():
            timeout_s, remedy = options.drain_timeout_s, "a second signal ends them now"
            log.info("frontend.waiting", requests=requests, timeout_s=timeout_s, remedy=remedy)
    log.info("frontend.stopped")


async def _reload_on_signals(signals: Signals, frontend: RunningFrontend) -> None:
    while True:
        await signals.reloads.next()
        with contextlib.suppress(ConfigError):  # logged
            assert frontend.reload is not None
            await frontend.reload.reload()


@dataclass(frozen=True, slots=True)
class _Member:
    """The replica, and what makes it a member of its namespace."""

    rules: Rules
    replica: Replica
    tokens: Tokens
    listeners: Listeners
    bus: Bus
    waiting_room: WaitingRoom
    keys: ClientKeys
    metrics: RequestMetrics
    traffic: FleetTraffic
    replica_loop: ReplicaLoop
    audit: Audit


@dataclass(frozen=True, slots=True)
class _RequestPath:
    """What serves requests."""

    accept: Accept
    completions: Completions
    hung_engines: HungEngines


@contextlib.asynccontextmanager
async def running_frontend(
    options: FrontendOptions,
    hurried: asyncio.Event | None = None,
    loaded: Loaded[FrontendOptions] | None = None,
    open_site: OpenSite = contextlib.nullcontext,
) -> AsyncIterator[RunningFrontend]:
    """A frontend that serves while inside. Leaving it drains, then leaves the namespace.

    `hurried` ends the draining early. `loaded`: where the options come from, if they can be read again.
    """
    check_root_path(options.root_path)
    registry = Registry()
    register_build(registry)
    tls = options.tls.to_workers()
    async with (
        _open_member(options, registry, tls) as member,
        _open_request_path(options, registry, member, tls) as path,
        _run_tasks(options, registry, member, path),
        _left_at_the_end(member.replica_loop),  # entered last: it needs the tasks and the bus
    ):
        admin = _new_admin(options, registry, member, path.accept)
        key = AdminKey(options.process.admin_key)
        gates = KeyGate(key), AdminGate(key, options.process.admin_names)
        reload = Reload(loaded, _changeable(member, path, key)) if loaded is not None else None
        settings = (lambda: reload.configured.settings) if reload is not None else (lambda: options)
        registry.register(config_collector(COMMAND.declared(), settings))
        changes = _routing_changes(registry, member, reload) if reload is not None else None
        for_operators = _operators_routes(member, path, admin, reload, changes)
        async with (
            open_site(Site(path.completions, admin, for_operators, options, member.keys)) as site,
            metrics_port(options.metrics, admin.all_metrics, is_shared=member.listeners.siblings is not None),
            http_server(site, member.listeners, *gates, hurried=hurried, options=options),
        ):
            _log_start(options, member)
            frontend = RunningFrontend(
                url=member.listeners.url,
                admin_url=member.listeners.admin_url,
                replica=member.replica,
                replica_loop=member.replica_loop,
                audit=member.audit,
                admin=admin,
                completions=path.completions,
                hung_engines=path.hung_engines,
                waiting_room=member.waiting_room,
                tokens=member.tokens,
                reload=reload,
            )
            try:
                yield frontend
            finally:
                frontend.drain()  # `serve` has done so already, other callers have not


@contextlib.asynccontextmanager
async def _open_member(
    options: FrontendOptions, registry: Registry, tls: ssl.SSLContext | None
) -> AsyncIterator[_Member]:
    """Read the models, listen on the ports, connect to NATS: errors of flags come before the namespace."""
    rules = new_rules(options)
    metrics = RequestMetrics(registry)
    replica = new_replica(options, rules, index_maker(metrics.steps, is_on=options.index_metrics))
    keys = ClientKeys(options.keys)
    waiting_room = WaitingRoom(replica, options.admission, metrics.queue_wait, random.random, keys)
    traffic = FleetTraffic(replica, lambda: served(replica, metrics, waiting_room.waiting()))
    registry.register(StateCollector(lambda: rules.samples(replica.routers)))
    registry.register(StateCollector(waiting_room.samples))
    if options.index_metrics:
        registry.register(StateCollector(lambda: index_samples(replica)))
    async with contextlib.AsyncExitStack() as stack:
        tokens = await stack.enter_async_context(open_tokens(options.tokens, replica, tls))
        registry.register(StateCollector(tokens.samples))
        listeners = stack.enter_context(
            open_listeners(options.host, options.port, options.process, options.tls)
        )
        bus = await stack.enter_async_context(
            open_bus(options.nats, name=f"frontend-{replica.router_id}", user=FRONTEND)
        )
        replica_loop = ReplicaLoop(
            replica,
            bus,
            Subjects(options.namespace),
            heartbeat_s=options.heartbeat_s,
            address=_address(options, listeners),
            clients_url=reachable(listeners.url, options.process.advertise or ""),
            own_urls=_own_urls(options, listeners),
            on_change=waiting_room.wake if waiting_room.is_on else None,
            traffic=traffic.own,
        )
        yield _Member(
            rules=rules,
            replica=replica,
            tokens=tokens,
            listeners=listeners,
            bus=bus,
            waiting_room=waiting_room,
            keys=keys,
            metrics=metrics,
            traffic=traffic,
            replica_loop=replica_loop,
            audit=Audit(replica, tokens.compared, has_queue=waiting_room.is_on),
        )


@contextlib.asynccontextmanager
async def _open_request_path(
    options: FrontendOptions, registry: Registry, member: _Member, tls: ssl.SSLContext | None
) -> AsyncIterator[_RequestPath]:
    """`tls`: which workers are trusted."""
    replica, metrics, publishing = member.replica, member.metrics, member.replica_loop.publishing
    limits = TenantLimits(
        replica, member.keys, lambda: member.bus.connected, has_queue=member.waiting_room.is_on
    )
    accept = Accept(
        replica.pools,
        member.tokens.blocks,
        metrics,
        _dialect(options),
        options.aliases,
        wait_for_workers_s=options.wait_for_workers_s,
        limits=limits,
        salts=options.clients.tenant_cache_salt,
    )
    views = DecisionViews(member.rules.decisions, logs=options.rules.log_decisions)
    now, networks = asyncio.get_running_loop().time, options.worker_networks
    async with (
        open_tracing(options.traces.endpoint, options.traces.ratio, str(replica.router_id)) as tracing,
        probing(tls, networks) as probe,
    ):
        if tracing is not None:
            registry.register(StateCollector(tracing.samples))
        access = AccessLog(options.access, views, random.random, tracing)
        clients = ClientTotals(access.addresses, now)
        tenants = TenantTotals(time.time)
        registry.register(StateCollector(tenants.samples))
        readers = Readers(
            metrics,
            clients=clients,
            audit=member.audit,
            access=access,
            decisions=views,
            tenants=tenants,
        )
        lost = LostRequests(replica, publishing, probe, now=now)
        upstream = Upstream(tls, networks, is_native=versions.in_use() == versions.NATIVE)
        with contextlib.closing(upstream), contextlib.ExitStack() as at_end:
            at_end.callback(access.flush)  # lines of served requests wait to be written together
            completions = Completions(
                publishing,
                accept,
                waiting_room=member.waiting_room,
                upstream=upstream,
                lost=lost,
                readers=readers,
                moves=Moves(options.migration, accept, metrics, member.tokens.decoder),
                limits=options.limits,
            )
            registry.register(StateCollector(completions.samples))
            hung_engines = HungEngines(completions.in_flight.running, replica.silent_workers, probe, now)
            yield _RequestPath(accept, completions, hung_engines)


@contextlib.asynccontextmanager
async def _run_tasks(
    options: FrontendOptions, registry: Registry, member: _Member, path: _RequestPath
) -> AsyncIterator[None]:
    """Follow the namespace, and run every other task of the replica."""
    await member.replica_loop.subscribe()
    certificate = member.listeners.certificate
    with contextlib.closing(PolicyUpkeep(member.replica)) as upkeep:
        registry.register(StateCollector(upkeep.samples))
        tasks = {
            "replica": member.replica_loop.run(),
            "peers": ask_peers(member.replica),
            "audit": audit_forever(member.audit),
            "traffic": member.traffic.run(),
            "tokens": member.tokens.run(),
            "policies": upkeep.run(),
            "texts": evict_texts(member.replica),
            "hung engines": path.hung_engines.run(),
            "lost requests": path.completions.lost.run(),
            "garbage": collect_and_freeze(),
        }
        if certificate is not None:
            tasks["certificate"] = certificate.run()
        if options.track_output_blocks:
            tasks["progress"] = report_progress(path.completions.in_flight, member.replica_loop.publishing)
        with (
            LoopLag(registry).watched(),
            Pauses(registry).watched(),
            thresholds_raised(),
            contextlib.nullcontext() if _needs_tokens(options) else _turns_of(SWITCH_S),
        ):
            async with running(tasks):
                yield


@contextlib.contextmanager
def _turns_of(seconds: float) -> Iterator[None]:
    """While inside, a thread that waits for Python's lock gets it after this time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.asynccontextmanager
async def _left_at_the_end(replica_loop: ReplicaLoop) -> AsyncIterator[None]:
    """Publish that this replica leaves, once it serves nothing more and while its tasks still run."""
    try:
        yield
    finally:
        replica_loop.publishing.leave()


def _new_admin(options: FrontendOptions, registry: Registry, member: _Member, accept: Accept) -> Admin:
    return Admin(
        member.replica,
        member.replica_loop,
        member.audit,
        member.bus,
        registry,
        tokens=member.tokens.view,
        untokenized=member.tokens.reports.degraded,
        queue=member.waiting_room.view,
        aliases=lambda: accept.aliases,
        listeners=member.listeners,
        ready_timeout_s=options.ready_timeout_s,
        wait_for_workers_s=options.wait_for_workers_s,
    )


def _address(options: FrontendOptions, listeners: Listeners) -> str:
    """The admin listener's URL, as peers show it."""
    host = options.process.advertise
    return with_host(listeners.admin_url, host) if host else listeners.admin_url


def _own_urls(options: FrontendOptions, listeners: Listeners) -> frozenset[str]:
    """Both listeners by every name that is known here."""
    hosts = ("", options.process.advertise or "", gethostname())
    # a worker at one of these would be this replica itself: one request would become thousands
    return frozenset(reachable(url, host) for url in (listeners.url, listeners.admin_url) for host in hosts)


def _log_start(options: FrontendOptions, member: _Member) -> None:
    """Log where the replica listens, and what its tokenizers lack."""
    encoders, listeners = member.tokens.encoders, member.listeners
    for model, encoder in (encoders.by_name or {"": encoders.default}).items():
        path = options.tokens.model_paths.get(model, options.tokens.model_path)
        _warn_of_missing_tokenizer(options, encoder, path)
    for note in options.dynamo.notes():
        log.info("compat.not_needed", why=note)
    for note in options.policy_notes:
        log.info("frontend.router_config", note=note)
    # a custom policy is not made here: its constructor runs once for each pool
    is_custom = options.policy.custom is not None
    policy = None if is_custom else new_policy(options.router_mode, options.policy)
    kv = policy.within if isinstance(policy, TwoStage) else policy
    if isinstance(kv, Kv) and (flags := kv.flags_without_effect()):
        remedy = "weight auto does not use them; give --kv-overlap-score-weight a number"
        log.warning("frontend.flags_without_effect", flags=flags, remedy=remedy)
    admin_host, _ = listeners.admin.getsockname()[:2]
    if not options.process.admin_key and not is_loopback(admin_host):
        log.warning(
            "frontend.admin_without_key",
            admin=listeners.admin_url,
            effect="peers that are not on loopback get 403, but for /live, /ready and /metrics",
            remedy="give --admin-key-file FILE",
        )
    mode = options.policy.custom.name if options.policy.custom is not None else options.router_mode
    facts = {"mode": mode, **(_weight(kv) if isinstance(kv, Kv) else {}), "tokenizer": options.tokens.way}
    log.info(
        "frontend.listening",
        url=listeners.url,
        admin=listeners.admin_url,
        id=member.replica.router_id,
        **facts,
    )


def _weight(policy: Kv) -> dict[str, str]:
    """The weight of overlap that mode kv uses, and how to get the published one."""
    if policy.overlap_weight != AUTO:
        return {"weight": f"{policy.overlap_weight:g}"}
    return {"weight": "auto", "published_weight": "--kv-overlap-score-weight 1"}


def _changeable(member: _Member, path: _RequestPath, key: AdminKey) -> RunningSettings:
    return RunningSettings(
        replica=member.replica,
        rules=member.rules,
        accept=path.accept,
        completions=path.completions,
        waiting_room=member.waiting_room,
        key=key,
        clients_keys=member.keys,
        engines=member.tokens.engines,
        certificate=member.listeners.certificate,
    )


def new_rules(options: FrontendOptions) -> Rules:
    return Rules(options.rules, options.router_mode, options.policy, options.texts)


def new_replica(
    options: FrontendOptions, rules: Rules | None = None, new_index: NewIndex = BlockIndex
) -> Replica:
    """An empty replica with a random id. Raises ConfigError if a custom policy cannot be made."""
    # The first policy is made now: a constructor that raises ends the start, not the first request.
    if options.policy.custom is not None:
        options.policy.custom.begin()
    rules = rules or new_rules(options)

    settings = replace(options.replica, pool=replace(options.replica.pool, new_index=new_index))
    replica = empty_replica(settings, rules.of_pool)
    replica.deadly.ttl_s = options.deadly_prompt_ttl_s
    return replica


def _dialect(options: FrontendOptions) -> AcceptedOverrides:
    """Which overrides requests may bring."""
    header, bucket = options.rules.session_header, TwoStage(options.policy.stage_one).header
    return AcceptedOverrides(
        SERVED_MODES,
        options.router_mode,
        header,
        agent_sessions=options.rules.filters.agent_sessions,
        bucket_header=bucket.lower(),
    )


def _operators_routes(
    member: _Member,
    path: _RequestPath,
    admin: Admin,
    reload: Reload | None,
    changes: RoutingChanges | None,
) -> list[tuple[str, str, View]]:
    """Method, path and view of each."""
    thresholds, readers = BusyThresholds(member.replica, member.rules), path.completions.readers
    views = readers.decisions
    fleet, page = _fleet_view(member, admin), Page()
    deadly = DeadlyPromptViews(member.replica, member.replica_loop.publishing)
    return [
        ("GET", "/workers", admin.workers),
        ("GET", "/fleet", fleet.view),
        ("GET", "/fleet/stream", FleetStream(fleet.snapshot, member.traffic.history).view),
        ("GET", PAGE_PATH, page.page),
        ("GET", FILES_PATH, page.file),
        ("GET", "/prefixes", Prefixes(member.rules.decisions).view),
        ("GET", "/clients", partial(readers.clients.view, path.completions.in_flight.requests)),
        ("GET", "/tenants", readers.tenants.view),
        ("GET", WORKER_PATH, WorkerBlocks(member.replica).view),
        ("POST", "/v1/route", DryRoute(path.accept, views).route),
        ("GET", "/decisions", views.last),
        ("GET", DECISION_PATH, views.one),
        ("GET", "/busy_threshold", thresholds.show),
        ("POST", "/busy_threshold", thresholds.change),
        ("GET", PROMPTS_PATH, deadly.show),
        ("DELETE", PROMPTS_PATH, deadly.pardon_all),
        ("DELETE", PROMPT_PATH, deadly.pardon),
        *([("POST", "/config/reload", reload.view)] if reload is not None else []),
        *([("GET", "/routing", changes.show)] if changes is not None else []),
        *([("POST", "/routing", changes.change)] if changes is not None else []),
    ]


def _fleet_view(member: _Member, admin: Admin) -> FleetView:
    return FleetView(
        member.replica,
        member.replica_loop,
        member.audit,
        member.metrics,
        member.traffic,
        address=member.listeners.admin_url,
        readiness=admin.readiness,
        queue=member.waiting_room.view,
    )


def _routing_changes(registry: Registry, member: _Member, reload: Reload) -> RoutingChanges:
    """Applies what operators change here or at a peer."""
    changes = RoutingChanges(member.replica, member.replica_loop.publishing, reload)
    member.replica_loop.inbox.on_routing = changes.apply
    registry.register(StateCollector(changes.samples))
    if member.replica.routing is not None:  # heard since the subscription
        changes.apply()
    return changes


def _needs_tokens(options: FrontendOptions) -> bool:
    return POLICIES.get(options.router_mode, GuardedPolicy).needs_tokens


def _warn_of_missing_tokenizer(options: FrontendOptions, encoder: PromptEncoder, path: str | None) -> None:
    if not _needs_tokens(options) or options.tokens.way != "local":
        return
    if not encoder.can_encode_text:
        log.warning(
            "frontend.no_tokenizer",
            effect="texts and chats are placed by load; prompts of token ids by KV overlap",
            remedy="leave out --tokenizer local, or give --model-path DIR",
        )
    elif not encoder.can_encode_chats:
        log.warning(
            "frontend.no_chat_template",
            effect="chats are placed by load",
            reason=encoder.why_no_chats,
            remedy=f"add chat_template.jinja to {path}, or give --chat-template FILE",
        )
