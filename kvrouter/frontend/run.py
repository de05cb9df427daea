"""One replica as a process: everything is opened here, in order, and closed by indentation."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace

import structlog
from aiohttp import web

from kvrouter.bus import Subjects
from kvrouter.config import open_bus
from kvrouter.core.audit.watch import Watch
from kvrouter.core.fleet.pool import NewIndex
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.routing.policy import Policy, PolicyState
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.tables.text_index import TextIndex
from kvrouter.core.wire.ids import RouterId
from kvrouter.frontend.accept import Accept
from kvrouter.frontend.admin import Admin
from kvrouter.frontend.admission_queue import WaitingRoom
from kvrouter.frontend.aiohttp_connection import invite_body
from kvrouter.frontend.busy import BusyThresholds
from kvrouter.frontend.completions import Completions
from kvrouter.frontend.decision_views import DecisionViews
from kvrouter.frontend.dry_route import DryRoute
from kvrouter.frontend.flags.options import FrontendOptions
from kvrouter.frontend.flags.policies import SERVED_MODES, bucket_header
from kvrouter.frontend.http_server import Site, http_server, wait_for_any
from kvrouter.frontend.hung_engines import probing
from kvrouter.frontend.overrides import Dialect
from kvrouter.frontend.rules import Rules
from kvrouter.frontend.sockets import Doors, open_doors, raise_limit, streams_within
from kvrouter.frontend.state_metrics import index_maker, index_samples
from kvrouter.frontend.text_eviction import texts_evicted
from kvrouter.frontend.tokenizing import Tokens, open_tokens
from kvrouter.policies import POLICIES
from kvrouter.policies import new_policy as policy_of
from kvrouter.policies.guarded import Own
from kvrouter.relay.certificate import DoorCertificate
from kvrouter.relay.upstream import Upstream
from kvrouter.replica.loop import ReplicaLoop
from kvrouter.replica.policy_upkeep import PolicyUpkeep
from kvrouter.telemetry.exposition import Registry
from kvrouter.telemetry.garbage import Pauses, set_aside_for_ever, thresholds_raised
from kvrouter.telemetry.loop_lag import LoopLag
from kvrouter.telemetry.metrics import QueueMetrics, RequestMetrics, Sample, StateCollector
from kvrouter.tls import trusting
from kvrouter.tokens.prompt import PromptEncoder

log = structlog.get_logger()

WATCH_S = 1.0
"""Between two looks for problems."""


@dataclass(frozen=True, slots=True)
class RunningFrontend:
    """A replica that serves."""

    url: str
    admin_url: str
    replica: Replica
    replica_loop: ReplicaLoop
    watch: Watch
    admin: Admin
    completions: Completions
    waiting_room: WaitingRoom
    tokens: Tokens

    def drain(self) -> None:
        """Say so in /ready and to the peers, and let no connection stay."""
        self.replica_loop.publishing.drain()
        self.admin.is_draining = self.completions.is_draining = True


async def serve(options: FrontendOptions) -> None:
    """Serve until SIGTERM or SIGINT, then drain and leave. A second signal ends the draining."""
    stopped, hurried = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurried if stopped.is_set() else stopped).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    descriptors = raise_limit()
    log.info("frontend.descriptors", limit=descriptors, streams=streams_within(descriptors))
    async with running_frontend(options, hurried) as frontend:
        if options.process.listen_fd is not None:  # the parent says so before it ends the others and us
            loop.add_signal_handler(signal.SIGUSR1, frontend.drain)
        await stopped.wait()
        frontend.drain()
        log.info("frontend.draining", grace_s=options.drain_grace_s)
        await wait_for_any(hurried.wait(), timeout_s=options.drain_grace_s)
    log.info("frontend.stopped")


@contextlib.asynccontextmanager
async def running_frontend(
    options: FrontendOptions, hurried: asyncio.Event | None = None
) -> AsyncIterator[RunningFrontend]:
    """A frontend that serves while inside; leaving drains what runs and says goodbye.

    `hurried` ends the draining early.
    """
    async with contextlib.AsyncExitStack() as stack:
        registry = Registry()
        rules = new_rules(options)
        replica = new_replica(options, rules, index_maker(registry, is_on=options.index_metrics))
        tls = trusting(options.tls.worker_ca)
        tokens = await stack.enter_async_context(open_tokens(options.tokens, replica, tls))
        doors = stack.enter_context(open_doors(options.host, options.port, options.process, options.tls))
        bus = await stack.enter_async_context(open_bus(options.nats, name=f"frontend-{replica.router_id}"))
        waiting_room = WaitingRoom(replica, options.admission, QueueMetrics(registry), random.random)
        replica_loop = ReplicaLoop(
            replica,
            bus,
            Subjects(options.namespace),
            heartbeat_s=options.heartbeat_s,
            address=doors.admin_url,
            on_change=waiting_room.wake,
        )
        upstream = Upstream(tls)
        stack.callback(upstream.close)
        metrics = RequestMetrics(registry)
        upkeep = PolicyUpkeep(replica)
        stack.callback(upkeep.close)
        watch = Watch(replica, tokens.compared)
        accept = Accept(replica, tokens.blocks, metrics, _dialect(options))
        views = DecisionViews(rules.decisions, options.router_mode, logs=options.rules.log_decisions)
        completions = Completions(
            replica,
            replica_loop.publishing,
            watch,
            accept,
            views,
            upstream=upstream,
            probe=await stack.enter_async_context(probing(tls)),
            waiting_room=waiting_room,
            metrics=metrics,
            limits=options.limits,
            retries=options.retries,
        )
        parts = (tokens.samples, waiting_room.samples, completions.samples, upkeep.samples)
        _register_state(registry, replica, rules, parts, of_index=options.index_metrics)
        admin = Admin(
            replica,
            replica_loop,
            watch,
            bus,
            registry,
            tokens=tokens.shown,
            queue=waiting_room.shown,
            doors=doors,
            ready_timeout_s=options.ready_timeout_s,
        )
        await replica_loop.subscribe()
        await stack.enter_async_context(
            _background(
                replica_loop,
                watch,
                completions,
                tokens,
                upkeep,
                certificate=doors.certificate,
                options=options,
            )
        )
        await stack.enter_async_context(texts_evicted(replica))
        stack.enter_context(LoopLag(registry).watched())
        stack.enter_context(Pauses(registry).watched())
        stack.enter_context(thresholds_raised())
        stack.callback(replica_loop.publishing.leave)
        for_operators = _operators_routes(replica, rules, accept, views, admin)
        site = Site(completions, admin, for_operators, options)
        await stack.enter_async_context(http_server(site, doors, hurried=hurried, options=options))
        _tell(options, tokens, doors, replica.router_id)
        frontend = RunningFrontend(
            doors.url, doors.admin_url, replica, replica_loop, watch, admin, completions, waiting_room, tokens
        )
        try:
            yield frontend
        finally:
            frontend.drain()


def _register_state(
    registry: Registry,
    replica: Replica,
    rules: Rules,
    parts: Iterable[Callable[[], Iterable[Sample]]],
    *,
    of_index: bool,
) -> None:
    """What is read off the state when somebody asks for metrics."""
    for samples in parts:
        registry.register(StateCollector(samples))
    registry.register(StateCollector(lambda: rules.samples(replica.routers)))
    if of_index:
        registry.register(StateCollector(lambda: index_samples(replica)))


def _tell(options: FrontendOptions, tokens: Tokens, doors: Doors, router_id: RouterId) -> None:
    """What a person should know of a replica that has begun to listen."""
    for model, encoder in (tokens.encoders.by_name or {"": tokens.encoders.default}).items():
        path = options.tokens.model_paths.get(model, options.tokens.model_path)
        _warn_of_missing_tokenizer(options, encoder, path)
    for note in options.policy_notes:
        log.info("frontend.router_config", note=note)
    mode = options.policy.own.name if options.policy.own is not None else options.router_mode
    log.info("frontend.listening", url=doors.url, admin=doors.admin_url, mode=mode, id=router_id)


def new_rules(options: FrontendOptions) -> Rules:
    """What the flags say about every router."""
    return Rules(options.rules, options.router_mode, options.policy)


def new_replica(
    options: FrontendOptions, rules: Rules | None = None, new_index: NewIndex = BlockIndex
) -> Replica:
    """The replica's state, empty, with a random id. Raises ConfigError if an own policy cannot be made."""
    if options.policy.own is not None:
        options.policy.own.begin()
    rules = rules or new_rules(options)
    pool = replace(options.replica.pool, new_index=new_index, placement_secret=secrets.randbits(64))

    def new_policy() -> tuple[Policy, PolicyState]:
        policy = policy_of(options.router_mode, options.policy)
        turn = random.randrange(1_000_000)  # so that replicas do not all begin with the same worker
        state = PolicyState(
            random.random,
            options.overlap_weight,
            options.temperature,
            turn,
            texts=TextIndex(options.texts),
            sessions=rules.new_sessions(),
        )
        return policy, state

    return Replica(
        replace(options.replica, pool=pool),
        RouterId(uuid.uuid4().hex[:12]),
        int(time.time() * 1_000_000),
        new_policy,
        chance=random.random,
        new_rules=rules.of_pool,
    )


def _dialect(options: FrontendOptions) -> Dialect:
    """What requests may say about their routing."""
    header, bucket = options.rules.session_header, bucket_header(options.policy)
    return Dialect(SERVED_MODES, options.router_mode, header, bucket.lower())


def _operators_routes(
    replica: Replica, rules: Rules, accept: Accept, views: DecisionViews, admin: Admin
) -> list[web.RouteDef]:
    """What operators ask about workers and routing, and may change of it."""
    busy = BusyThresholds(replica, rules)
    return [
        web.get("/workers", admin.workers),
        web.post("/v1/route", DryRoute(accept, views).route, expect_handler=invite_body),
        web.get("/decisions", views.last),
        web.get("/decisions/{request_id:.+}", views.one),
        web.get("/busy_threshold", busy.show),
        web.post("/busy_threshold", busy.change, expect_handler=invite_body),
    ]


@contextlib.asynccontextmanager
async def _background(
    replica_loop: ReplicaLoop,
    watch: Watch,
    completions: Completions,
    tokens: Tokens,
    upkeep: PolicyUpkeep,
    *,
    certificate: DoorCertificate | None,
    options: FrontendOptions,
) -> AsyncIterator[None]:
    """The replica's own tasks. One that fails stops the service."""
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(replica_loop.run(), name="replica"),
            tasks.create_task(_keep_watch(watch), name="watch"),
            tasks.create_task(tokens.run(), name="tokens"),
            tasks.create_task(upkeep.run(), name="policies"),
            tasks.create_task(completions.hung_engines.run(), name="hung engines"),
        ]
        if certificate is not None:
            running.append(tasks.create_task(certificate.run(), name="certificate"))
        if options.track_output_blocks:
            running.append(tasks.create_task(_report_progress(completions), name="progress"))
        running.append(tasks.create_task(set_aside_for_ever(), name="garbage"))
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def _keep_watch(watch: Watch) -> None:
    """Say once of each problem that it has begun, and once that it is over."""
    while True:
        steps = watch.steps()
        look = watch.looking(steps)
        for _ in range(steps):
            await asyncio.sleep(WATCH_S / steps)
            watch.settle(asyncio.get_running_loop().time())
            next(look, None)
        begun, over = watch.told()
        for told in begun:
            log.warning("worker.problem", worker=told.worker, pool=told.pool, problem=told.problem.text)
        for told in over:
            log.info("worker.problem_over", worker=told.worker, pool=told.pool, was=told.problem.text)


async def _report_progress(completions: Completions) -> None:
    while True:
        await asyncio.sleep(1.0)
        await completions.report_progress()


def _warn_of_missing_tokenizer(options: FrontendOptions, encoder: PromptEncoder, path: str | None) -> None:
    if not POLICIES.get(options.router_mode, Own).needs_tokens or options.tokens.way != "local":
        return
    if not encoder.can_encode_text:
        log.warning(
            "frontend.no_tokenizer",
            effect="texts and chats go where the fewest requests are; prompts as token ids by KV overlap",
            remedy="give --model-path DIR, or --tokenizer remote",
        )
    elif not encoder.can_encode_chats:
        log.warning(
            "frontend.no_chat_template",
            effect="chats go where the fewest requests are",
            remedy=f"add chat_template.jinja to {path}, or give --chat-template FILE",
        )
