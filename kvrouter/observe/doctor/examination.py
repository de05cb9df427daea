"""One examination: connect, listen, ask engines and replicas, compare, then check what was seen.

    NATS servers ──INFO, connection──┐
    namespace ────5 s of messages────┤
    engines ──────HTTP, twice────────┼──> checks ──> Report
    replicas ─────HTTP, twice────────┤
    replicas, agents ──compared──────┘

A part that fails, or lacks time, is itself a finding; the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import aiohttp
import zmq.asyncio

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.bus.embedded import DEFAULT_URL
from kvrouter.bus.rights import VERIFY
from kvrouter.config import read_key
from kvrouter.errors import counted
from kvrouter.observe.doctor import fleet_checks, machine, nats_servers, replica_checks
from kvrouter.observe.doctor.engine_checks import check_engines
from kvrouter.observe.doctor.findings import DoctorReport, Finding, clean, differing, listed
from kvrouter.observe.doctor.nats_servers import Server
from kvrouter.observe.doctor.replicas import ExaminedReplicas
from kvrouter.observe.doctor.settings import DoctorSettings
from kvrouter.observe.doctor.slow_workers import check_slow_workers
from kvrouter.observe.engine import EngineAccess, Engines
from kvrouter.observe.listening import Listener
from kvrouter.observe.replica import open_http
from kvrouter.observe.verify.agents import Agents
from kvrouter.observe.verify.command import compare
from kvrouter.observe.verify.comparison import Report as Compared
from kvrouter.observe.verify.comparison import VerifyError
from kvrouter.observe.verify.engines import EngineReplays
from kvrouter.observe.verify.owners import Owners
from kvrouter.version import __version__

# Agents and replicas answer a hello within 50 ms.
HELLO_S = 0.4
# Other namespaces are listened to for so long, if the given one is silent: heartbeats come once a second.
OTHERS_S = 2.0
# Kept for the comparison and the checks.
RESERVE_S = 2.0
MOST_COMPARE_S = 5.0
# Without --owners: their snapshots are read, some MB each.
MOST_RANKS, MOST_BLOCKS = 64, 2_000_000
# A look at large replicas takes them milliseconds: they rest this many times as long.
REST = 9.0


class Examination:
    """The facts gathered so far, and the findings."""

    def __init__(self, settings: DoctorSettings) -> None:
        self.findings: list[Finding] = []
        self.servers: list[Server] = []
        self.listener = Listener(Subjects(settings.bus.namespace))
        self.other_namespaces: set[str] = set()
        self.reconnects = 0
        self.is_cut_off = False
        """NATS answered at first, and not at the end of the listening."""
        self.listened_s = 0.0
        self.listened_until = 0.0
        self.compared: Compared | None = None
        self.agents: Agents | None = None
        self._settings = settings
        self._nats = _to_connect(settings.bus.nats)
        self._subjects = Subjects(settings.bus.namespace)
        self._started = time.monotonic()
        self._engines: Engines
        self._replicas: ExaminedReplicas

    @property
    def _is_whole(self) -> bool:
        """Whether the connection to NATS was never lost."""
        return not (self.reconnects or self.is_cut_off)

    @property
    def _left_s(self) -> float:
        return self._settings.timeout_s - (time.monotonic() - self._started)

    async def run(self) -> DoctorReport:
        """Gather and check everything. Raises ConfigError for files that cannot be read."""
        settings = self._settings
        key = read_key("--admin-key-file", settings.admin_key_file)
        engine_key = read_key("--engine-api-key-file", settings.engine_api_key_file)
        async with (
            open_http(settings.worker_tls_ca, "--worker-tls-ca") as engine_http,
            open_http(settings.tls_ca, "--tls-ca") as replica_http,
        ):
            self._engines = Engines(engine_http, engine_key)
            self._replicas = ExaminedReplicas(replica_http, key, settings.tls_name, machine.own_addresses())
            await self._part("NATS and the namespace", self._look_around(engine_key))
            if not self._replicas.met:  # NATS is away
                await self._part("given replicas", self._meet())
            if not self.listener.peers:
                await self._part("ports", self._ports(engine_http))
        self._check()
        return self._report()

    async def _part(self, name: str, work: Awaitable[None], most_s: float | None = None) -> None:
        """One part of the work; what it raises is a finding."""
        left_s = max(0.1, self._left_s if most_s is None else min(most_s, self._left_s))
        try:
            async with asyncio.timeout(left_s):
                await work
        except TimeoutError:
            self.findings.append(Finding("doctor.unfinished", name, f"not done after {left_s:.1f} s"))
        except Exception as error:  # a check that fails must not hide what the others find
            self._failed(name, error)

    # gather

    async def _look_around(self, engine_key: str | None) -> None:
        urls = self._nats.servers[: nats_servers.MOST_SERVERS]
        self.servers = list(await asyncio.gather(*map(nats_servers.meet, urls)))
        usable = [url for url, server in zip(urls, self.servers, strict=True) if not server.kind]
        if not usable:
            return
        async with contextlib.AsyncExitStack() as stack:
            for url, server in zip(urls, self.servers, strict=True):
                if not server.kind and len(urls) > 1:
                    hearing = nats_servers.hearing(self._nats, server, url, self._subjects)
                    await stack.enter_async_context(hearing)
            opening = Bus.open(replace(self._nats, servers=tuple(usable)), name="doctor", user=VERIFY)
            bus = await stack.enter_async_context(opening)
            first = next(server for server in self.servers if not server.kind or len(urls) == 1)
            if await nats_servers.connect(bus, first):
                await self._listen(bus)
                if not self.is_cut_off:
                    await self._part("comparison", self._compare(bus, engine_key))

    async def _listen(self, bus: Bus) -> None:
        loop = asyncio.get_running_loop()
        if len(self.servers) == 1:
            await nats_servers.measure(bus, self.servers[0])
        connections = bus.counters.connections
        await bus.subscribe(
            self._subjects.live, lambda subject, data, _: self.listener.receive(subject, data, loop.time())
        )
        self.agents = Agents(bus, self._subjects, self.listener)
        await self.agents.begin()  # it says hello
        began = loop.time()
        end = began + self._settings.listen_s
        await asyncio.sleep(HELLO_S)
        await self._part("engines and replicas", self._meet(), self._left_s - RESERVE_S)
        await asyncio.sleep(max(0.0, end - HELLO_S - loop.time()))
        await self._part("engines and replicas again", self._meet_again(), self._left_s - RESERVE_S)
        await asyncio.sleep(max(HELLO_S, end - loop.time()))  # events of what engines have counted
        self.listened_s, self.listened_until = loop.time() - began, loop.time()
        self.reconnects = bus.counters.connections - connections
        if not await nats_servers.answers(bus):
            self.is_cut_off = True
        for server in self.servers[:1] if len(self.servers) == 1 else ():
            server.reconnects = self.reconnects
            server.denied = bus.last_error if bus.connected else ""
        if not (self.listener.senders or self.is_cut_off):
            await self._part("other namespaces", self._hear_others(bus), 2 * OTHERS_S)

    async def _meet(self) -> None:
        """Ask all engines and replicas that are known by now, and not asked yet."""
        settings = self._settings
        peers = {peer.beat.address: router_id for router_id, peer in self.listener.peers.items()}
        await asyncio.gather(
            self._engines.meet(self.listener.cards().values()),
            *(
                self._replicas.meet(url, is_given=True, announced=peers.get(url, ""))
                for url in settings.replica
            ),
            *(
                self._replicas.meet(url.rstrip("/"), is_given=False, announced=router_id)
                for url, router_id in peers.items()
                if url and url not in settings.replica
            ),
        )

    async def _meet_again(self) -> None:
        await asyncio.gather(self._meet(), self._engines.look_again(), self._replicas.look_again())

    async def _hear_others(self, bus: Bus) -> None:
        """Which other namespaces there are. It stays empty where NATS denies that subject."""

        def note(subject: str, _data: bytes, _reply: str) -> None:
            if len(self.other_namespaces) < 1000:
                self.other_namespaces.add(clean(subject.split(".")[1], 64))

        await bus.subscribe("kvrouter.*.live.worker.*", note)
        await bus.subscribe("kvrouter.*.live.router.*", note)
        await asyncio.sleep(OTHERS_S)

    async def _ports(self, http: aiohttp.ClientSession) -> None:
        self.findings += await machine.check_ports(http, self._settings.frontend_port)

    async def _compare(self, bus: Bus, engine_key: str | None) -> None:
        """Replicas with each other and with the agents, as `kvrouter verify --owners` does."""
        settings, known = self._settings, {*map(str, self.listener.peers)}
        urls = replica_checks.compared_urls([*self._replicas.met.values()], known)
        with contextlib.ExitStack() as stack:
            owners = None
            if self.agents is not None and self._may_ask_agents():
                replays = None
                if settings.owners:
                    context = stack.enter_context(zmq.asyncio.Context())
                    replays = EngineReplays(EngineAccess(engine_key, settings.worker_tls_ca), context)
                owners = Owners(self.agents, replays)
            if not urls or (len(urls) == 1 and owners is None):
                return
            timeout_s = max(0.5, min(MOST_COMPARE_S, self._left_s - RESERVE_S / 2))
            try:
                self.compared = await compare(
                    urls, timeout_s=timeout_s, access=settings, owners=owners, rest=REST
                )
            except VerifyError as error:
                self.findings.append(Finding("replica.not_compared", "replicas", str(error)))

    def _may_ask_agents(self) -> bool:
        """Whether to read what agents publish: their snapshots are large in a large fleet."""
        if self._settings.owners:
            return True
        ranks = sum(len(one.beat.ranks) for one in self.listener.workers.values())
        shown = [one.workers for one in self._replicas.met.values() if one.workers is not None]
        blocks = max((sum(row.blocks for row in workers.targets) for workers in shown), default=0)
        return 0 < ranks <= MOST_RANKS and blocks <= MOST_BLOCKS

    # check

    def _check(self) -> None:
        """Every check by itself: one that fails is a finding, and the others go on."""
        namespace, listener, is_whole = self._settings.bus.namespace, self.listener, self._is_whole
        replicas, heard_s = [*self._replicas.met.values()], self.listened_s
        checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
            ("NATS", partial(nats_servers.check_servers, self.servers, namespace)),
            ("the connection", self._connection),
            ("descriptors", machine.check_descriptors),
            ("clocks", partial(machine.check_clocks, self._skews(), listener.cards())),
            ("versions", self._versions),
            ("speeds", partial(check_slow_workers, replicas)),
        ]
        if heard_s:
            around, until = (namespace, heard_s, self.other_namespaces), self.listened_until
            checks += [
                ("presence", partial(fleet_checks.check_presence, listener, *around)),
                ("agents", partial(fleet_checks.check_agents, listener, until, is_whole=is_whole)),
                ("frames", partial(fleet_checks.check_frames, listener, is_whole=is_whole)),
                ("engines", partial(check_engines, listener, self._engines, self._held())),
                ("fleet", partial(replica_checks.check_together, replicas, listener, heard_s)),
            ]
        checks += [(one.url, partial(replica_checks.check_replica, one, listener)) for one in replicas]
        if self.compared is not None:
            checks.append(("comparison", partial(replica_checks.check_compared, self.compared)))
        for name, check in checks:
            try:
                self.findings += check()
            except Exception as error:  # facts of other processes
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self.findings.append(Finding("doctor.failed", name, f"{type(error).__name__}: {error}"))

    def _connection(self) -> list[Finding]:
        seen = "it answered at first; the connection was lost while listening and did not come back"
        return [Finding("nats.unreachable", self._nats.shown(), seen)] if self.is_cut_off else []

    def _held(self) -> dict[str, int]:
        """The blocks that a replica knows of each worker: of the replicas, the most."""
        held: dict[str, int] = {}
        for one in self._replicas.met.values():
            here: Counter[str] = Counter()
            for row in one.later.targets if one.later is not None else ():
                here[row.worker_id] += row.blocks
            for worker_id, blocks in here.items():
                held[worker_id] = max(blocks, held.get(worker_id, 0))
        return held

    def _skews(self) -> dict[str, float]:
        engines = {one.url: one.models.skew_s for one in self._engines.met.values()}
        replicas = {one.url: one.skew_s for one in self._replicas.met.values()}
        return {url: skew_s for url, skew_s in (engines | replicas).items() if skew_s is not None}

    def _versions(self) -> Iterator[Finding]:
        versions: dict[str, list[str]] = {__version__: ["kvrouter doctor"]}
        for one in self._replicas.met.values():
            if one.health is not None and one.health.version:
                versions.setdefault(one.health.version, []).append(one.url)
        for worker_id, card in self.listener.cards().items():
            if card.agent_version:
                versions.setdefault(card.agent_version, []).append(f"agent {worker_id}")
        return differing("fleet.versions", "kvrouter", versions)

    # report

    def _report(self) -> DoctorReport:
        ignored = set(self._settings.ignore)
        kept = [finding for finding in self.findings if finding.code not in ignored]
        left_out = sorted({finding.code for finding in self.findings} & ignored)
        troubled = {finding.kind.area for finding in kept if finding.kind.severity != "note"}
        good = {area: text for area, text in self._good().items() if area not in troubled and text}
        listener = self.listener
        fleet = (
            f"namespace {self._settings.bus.namespace} at {self._nats.shown()}: "
            f"{counted(len(listener.peers), 'replica')}, {counted(len(listener.workers), 'worker')}"
        )
        return DoctorReport(clean(fleet), kept, good, time.monotonic() - self._started, left_out)

    def _good(self) -> dict[str, str]:
        listener, engines = self.listener, self._engines.met
        replicas = [one for one in self._replicas.met.values() if one.health is not None]
        frames = counted(sum(feed.frames for feed in listener.feeds.values()), "frame")
        good = {"nats": nats_servers.described(self.servers) if self.servers else ""}
        if listener.workers:
            intervals = {one.sender.interval_s for one in listener.workers.values()}
            every = listed(f"{interval:g}" for interval in intervals)
            good["agent"] = (
                f"{counted(len(listener.workers), 'agent')}, heartbeats every {every} s, all ranks whole"
            )
            roles = Counter(card.role for card in listener.cards().values())
            parts = "".join(f", {roles[role]} {role}" for role in ("prefill", "decode") if roles[role])
            good["engine"] = f"{counted(len(engines), 'engine')} met, serving the models of the cards{parts}"
            feeds = counted(len(listener.feeds), "feed")
            good["events"] = f"{frames} of {feeds} while listening, none missing"
        if replicas:
            good["replica"] = f"{counted(len(replicas), 'replica')} ready{self._equality()}"
            good["clock"] = (
                f"{counted(len(self._skews()), 'server')} within {machine.MOST_SKEW_S:g} s of this one"
            )
        good["machine"] = "file descriptors suffice"
        return good

    def _equality(self) -> str:
        if self.compared is None or not self.compared.is_equal:
            return ""
        agents = any(row.agent is not None for row in self.compared.rows)
        what = f"{counted(len(self.compared.rows), 'feed')} equal" + (
            " in replicas and agents" if agents else ""
        )
        left_out = "" if self._settings.owners else "; engines not compared: --owners"
        return f", {what} ({counted(self.compared.looks, 'look')}{left_out})"


def _to_connect(options: NatsOptions) -> NatsOptions:
    """Without starting a server."""
    return replace(options, servers=(DEFAULT_URL,)) if options.is_embedded else options


async def examine(settings: DoctorSettings) -> DoctorReport:
    """Examine the fleet. Raises ConfigError."""
    return await Examination(settings).run()
