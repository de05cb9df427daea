"""A running deployment: an agent for each engine once that answers, then the frontends.

engine answers ──> report ──> agent-N, until it ends ──> query the engine again …
     └── all engines, or those known after OTHERS_S ──> frontend-1 … frontend-N
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence

import structlog

from kvrouter.errors import ConfigError
from kvrouter.policies import POLICIES
from kvrouter.processes.children import Child, first_of
from kvrouter.processes.output import Output
from kvrouter.processes.reloading import reload_forever
from kvrouter.processes.signals import Signals
from kvrouter.serve import own_replica
from kvrouter.serve.engines import EngineSpec
from kvrouter.serve.own_replica import OwnReplica, Place
from kvrouter.serve.report import EngineReport, Ready, Voice, curl, report
from kvrouter.serve.settings import ServeOptions
from kvrouter.serve.tokenizers import Tokenizers, model_of
from kvrouter.settings.read import Loaded
from kvrouter.worker.engines.discovery import learn_patiently, with_cached_tokens
from kvrouter.worker.engines.facts import EngineFacts, with_discovered
from kvrouter.worker.engines.http import EngineHttp
from kvrouter.worker.options import AgentOptions

log = structlog.get_logger()

# Time that the frontends wait for further engines once the first one is known: their flags depend on what all
# engines report, and do not change later.
OTHERS_S = 10.0
AGENT_PATIENCE_S = 10.0
# Time for a frontend to end its remaining streams after the drain, before it is killed.
_CUT_OFF_S = 10.0
# Exit code of a frontend with wrong flags or a port that is in use: a restart would fail in the same way.
_WRONG_FLAGS = 2


class Deployment:
    """The child processes of one `kvrouter serve`."""

    def __init__(
        self,
        options: ServeOptions,
        ports: Sequence[tuple[int, int]],
        nats: str,
        output: Output,
        voice: Voice,
    ) -> None:
        """`ports`: those of clients and of operators for each frontend."""
        self._options = options
        self._ports = ports
        self._voice = voice
        self._output = output
        self._facts: dict[str, EngineFacts] = {}
        self._reported: dict[str, EngineReport] = {}
        self._ready: Ready | None = None
        self._tokenizers = Tokenizers(options.frontend.tokens)
        self._one_known, self._all_known = asyncio.Event(), asyncio.Event()
        self._stopping, self._failed = asyncio.Event(), asyncio.Event()
        self._approximate = False
        self._agents = {
            engine.worker_id: Child(
                f"agent-{number}",
                [*_python("worker"), *options.agent_flags(engine), f"--nats={nats}"],
                output,
            )
            for number, engine in enumerate(options.engines, 1)
        }
        self._nats = nats
        self._frontends: list[Child] = []

    async def run(self, signals: Signals, loaded: Loaded[ServeOptions]) -> int:
        """Serve until a signal, then end in order; the second one kills all. Returns the exit code."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._options.engines:
                tasks.create_task(self._attend(engine), name=engine.worker_id)
            serving = tasks.create_task(self._serve(), name="frontends")
            killer = tasks.create_task(self._kill_on(signals.hurried), name="killer")
            reloading = tasks.create_task(
                reload_forever(signals.reloads, loaded, self._children, fixed="serve"), name="reload"
            )
            await first_of(signals.stopped, self._failed)
            reloading.cancel()
            if not self._frontends:
                serving.cancel()  # it still waits for engines
            await self._wind_down(signals)
            killer.cancel()
        if self._failed.is_set():
            return _WRONG_FLAGS
        return 1 if signals.hurried.is_set() else 0

    def _children(self) -> list[Child]:
        return [*self._frontends, *self._agents.values()]

    async def _attend(self, engine: EngineSpec) -> None:
        """Query the engine, report it, run its agent; again each time the agent ends."""
        agent, options = self._agents[engine.worker_id], self._options.agent(engine)
        async with EngineHttp.open(options.engine_url, options.api_key, options.tls) as http:
            while not agent.is_ending:
                facts = await learn_patiently(http, options, self._stopping)
                if facts is None:
                    return
                self._note(engine, await with_cached_tokens(http, facts))
                await agent.run()
                await agent.pause()

    def _note(self, engine: EngineSpec, facts: EngineFacts) -> None:
        self._facts[engine.worker_id] = facts
        self._tokenizers.learn(self._options.agent(engine), facts)
        self._report()
        if self._approximate and facts.endpoints:
            self._voice.warn(
                "serve.events_not_used",
                "this engine now publishes KV events: restart kvrouter serve to route by them",
            )
        if self._ready is not None:
            self._say_ready(self._ready.url, self._ready.admin)
        self._one_known.set()
        if len(self._facts) == len(self._options.engines):
            self._all_known.set()

    def _report(self) -> None:
        """Publish the report of each known engine whose report has changed."""
        # all engines: the tokenizer found for one of them may complete the report of another
        for engine in self._options.engines:
            facts, agent = self._facts.get(engine.worker_id), self._options.agent(engine)
            if facts is None:
                continue
            tokenizer = self._tokenizers.of(agent, facts)
            found = report(agent, facts, tokenizer, no_events=self._options.no_events())
            if found != self._reported.get(engine.worker_id):
                self._reported[engine.worker_id] = found
                self._voice.engine(found)

    async def _serve(self) -> None:
        """Run the frontends once their flags are known."""
        await self._one_known.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_S):
                await self._all_known.wait()
        flags = self._discovered_flags()
        self._frontends = [
            Child(f"frontend-{number}", [*self._frontend_command(*ports, metrics), *flags], self._output)
            for number, (ports, metrics) in enumerate(
                zip(self._ports, self._options.metrics_ports(), strict=True), 1
            )
        ]
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(self._announce_ready(), name="ready")
            tasks.create_task(self._cancel_at_the_end(announcing), name="not ready")
            for child in self._frontends:
                tasks.create_task(self._keep(child))

    async def _keep(self, child: Child) -> None:
        code = await child.run()
        if code == _WRONG_FLAGS:  # only at its first start: later, a restart may free the port
            log.error("serve.frontend_cannot_start", name=child.name)
            self._failed.set()
            return
        await child.pause()
        await child.keep_running()

    def _frontend_command(self, port: int, admin_port: int, metrics_port: int) -> list[str]:
        sync = ["--router-replica-sync"] if self._options.replicas > 1 else []
        options = self._options
        # the last value of a flag counts: --no-router-replica-sync among `frontend_flags` replaces
        # `sync`, and this replica's ports replace --port and --admin-port.
        return [
            *_python("frontend"), *sync, *options.frontend_flags,
            f"--port={port}", f"--admin-port={admin_port}", f"--metrics-port={metrics_port}",
            f"--nats={self._nats}",
        ]  # fmt: skip

    def _discovered_flags(self) -> list[str]:
        """Flags of the frontends that follow from what the engines reported."""
        flags = self._tokenizers.flags()
        if not self._has_events() and not self._options.chooses_events():
            self._approximate = True
            flags.append("--no-use-kv-events")
            self._voice.warn(
                "serve.approximate",
                "no engine publishes KV events: routing by past requests, which is approximate",
            )
        return flags

    def _has_events(self) -> bool:
        return any(
            with_discovered(self._options.agent(engine), facts).endpoints
            for engine in self._options.engines
            if (facts := self._facts.get(engine.worker_id))
        )

    async def _wind_down(self, signals: Signals) -> None:
        """End the frontends, then the agents: requests that drain still need these.

        NATS ends after this has returned, as all of them publish until they end.
        """
        self._stopping.set()  # ends the queries of engines that do not answer yet
        frontend = self._options.frontend
        patience_s = frontend.drain_grace_s + frontend.drain_timeout_s + _CUT_OFF_S
        log.info("serve.stopping", frontends=len(self._frontends), drain_timeout_s=frontend.drain_timeout_s)
        number = signal.SIGINT if signals.is_interrupt else signal.SIGTERM
        await asyncio.gather(*(child.end(patience_s, number) for child in self._frontends))
        await asyncio.gather(*(child.end(AGENT_PATIENCE_S) for child in self._agents.values()))

    async def _kill_on(self, hurried: asyncio.Event) -> None:
        await hurried.wait()
        log.warning("serve.killing")
        for child in self._children():
            child.kill()

    async def _announce_ready(self) -> None:
        """Say it when the first frontend is ready, and meanwhile what each of them lacks."""
        async with own_replica.session() as http, asyncio.TaskGroup() as tasks:
            for number, child in enumerate(self._frontends):
                admin, clients = self._places(number)
                tasks.create_task(
                    self._announce(OwnReplica(http, child, (admin, clients)), is_first=number == 0)
                )

    async def _announce(self, replica: OwnReplica, *, is_first: bool) -> None:
        try:
            await replica.until_ready()
        except ConfigError as error:
            self._voice.failed(str(error))
            self._failed.set()
            return
        if is_first:
            admin, clients = self._places(0)
            self._say_ready(clients.url, admin.url)

    def _places(self, number: int) -> tuple[Place, Place]:
        """Where a frontend listens for operators and for clients."""
        frontend = self._options.frontend
        scheme = "https" if frontend.tls.files is not None else "http"
        port, admin_port = self._ports[number]
        admin_host = frontend.process.admin_host
        return (
            Place(f"{scheme}://{_reachable(admin_host)}:{admin_port}", "--admin-port"),
            Place(f"{scheme}://{_reachable(frontend.host)}:{port}", "--port"),
        )

    async def _cancel_at_the_end(self, announcing: asyncio.Task[None]) -> None:
        """A deployment that ends, or cannot start, will not be ready."""
        await first_of(self._stopping, self._failed)
        announcing.cancel()

    def _say_ready(self, url: str, admin: str) -> None:
        """Say how it serves, unless that was said already."""
        models = {model_of(self._agent(worker), facts): facts for worker, facts in self._facts.items()}
        model, facts = next(iter(models.items()))
        ready = Ready(
            url=url,
            admin=admin,
            models=tuple(models),
            engines=len(self._facts),
            configured=len(self._options.engines),
            routing=self._routing(),
            curl=curl(url, model, "Hello" if facts.takes_text else [1, 2, 3]),
        )
        if ready != self._ready:
            self._ready = ready
            self._voice.ready(ready)

    def _routing(self) -> str:
        """How requests are routed: the mode, and what it knows."""
        frontend = self._options.frontend
        mode = frontend.policy.custom.name if frontend.policy.custom is not None else frontend.router_mode
        policy = POLICIES.get(frontend.router_mode)
        if policy is None or not policy.needs_tokens:
            return mode
        if frontend.tokens.way == "none":
            return f"{mode} by texts of past requests"
        by = "KV events" if not self._approximate and frontend.replica.pool.use_kv_events else "past requests"
        lacks = any(self._tokenizers.of(self._agent(one), facts).lack for one, facts in self._facts.items())
        return f"{mode} by {by}{', texts by load: no tokenizer' if lacks else ''}"

    def _agent(self, worker: str) -> AgentOptions:
        return next(self._options.agent(one) for one in self._options.engines if one.worker_id == worker)


def _reachable(host: str) -> str:
    """A host for URLs: that of this machine, if it listens on all addresses."""
    if host in {"", "0.0.0.0", "::"}:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _python(part: str) -> list[str]:
    return [sys.executable, "-m", "kvrouter", part]
