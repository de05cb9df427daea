"""`--processes N`: N replicas on one port, each a process. They share bookings through the sync feed only.

    parent: binds and listens, never accepts ── the socket ──> process-1 … process-N accept from one queue
       │  embedded NATS, if configured                           │
       └─ restarts processes that end; one signal drains all     └─ an admin listener each

Connections wait in the queue of the socket, which exists until its last holder closes it. When a process
ends, the others accept the connections that it did not. With SO_REUSEPORT each process would have its own
queue, and the kernel would reset the connections in it when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence

import structlog
import uvloop

from kvrouter.bus.embedded import embedded_server
from kvrouter.errors import KvRouterError, leaves
from kvrouter.frontend.server.sockets import listen, url
from kvrouter.frontend.settings import FrontendOptions
from kvrouter.processes.children import Child, first_of
from kvrouter.processes.output import LabelledText, Output
from kvrouter.processes.reloading import reload_forever
from kvrouter.processes.signals import Signals
from kvrouter.settings.declare import INTERRUPTED
from kvrouter.settings.read import Loaded
from kvrouter.telemetry.logs import set_up_logs

log = structlog.get_logger()

NAME = "parent"
# The exit code of a process whose flags are wrong.
WRONG_FLAGS = 2
# What a process gets on top of --drain-timeout-s before it is killed: it cuts its requests off by itself.
_CUT_OFF_S = 10.0
# Exit codes of a process that is signalled before it has installed its signal handlers.
_NOT_UP_YET = (INTERRUPTED, -signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


class Processes:
    """The N processes of one parent. `command` contains the flags that all of them have."""

    def __init__(
        self,
        options: FrontendOptions,
        command: Sequence[str],
        listener: socket.socket,
        siblings_fd: int,
        output: Output,
    ) -> None:
        self._options = options
        self._listener = listener
        self._command = [*command, f"--listen-fd={listener.fileno()}", f"--siblings-fd={siblings_fd}"]
        self._failed = asyncio.Event()
        self._code = 0
        self._children = [
            Child(f"process-{number}", (), output, pass_fds=(listener.fileno(), siblings_fd))
            for number in range(1, options.process.processes + 1)
        ]

    async def run(self, signals: Signals, loaded: Loaded[FrontendOptions]) -> int:
        """Serve until a signal, then drain; the second signal ends the draining. Returns the exit code."""
        async with asyncio.TaskGroup() as tasks:
            for number, child in enumerate(self._children, 1):
                tasks.create_task(self._keep(child, number), name=child.name)
            reloading = tasks.create_task(reload_forever(signals.reloads, loaded, lambda: self._children))
            await first_of(signals.stopped, self._failed)
            reloading.cancel()
            hurrying = tasks.create_task(self._hurry(signals.hurried), name="hurry")
            await self._drain(signals)
            hurrying.cancel()
        return self._code

    async def _keep(self, child: Child, number: int) -> None:
        """Restart a process whenever it ends. Wrong flags at its first start end the service."""
        while not child.is_ending:
            child.command = self._command_of(number, is_first=child.starts == 0)
            code = await child.run()
            if code == WRONG_FLAGS and child.starts == 1:
                log.error("frontend.process_cannot_start", name=child.name)
                self._code = code
                self._failed.set()
                return
            self._note(child, code)
            await child.pause()

    def _note(self, child: Child, code: int) -> None:
        """The first bad exit code during the drain becomes the parent's."""
        if child.is_ending and code not in _NOT_UP_YET:
            # A negative code is a signal (asyncio); a process cannot exit with one.
            self._code = self._code or (code if code >= 0 else 1)

    def _command_of(self, number: int, *, is_first: bool) -> list[str]:
        """A restarted process does not accept until it is ready, if others accept meanwhile."""
        others_accept = any(child.is_running for child in self._children)
        waits = ["--waits-until-ready"] if others_accept and not is_first else []
        return [*self._command, f"--process-number={number}", *waits]

    async def _drain(self, signals: Signals) -> None:
        """/ready becomes 503 and they still serve for the grace. Then they finish their requests."""
        options = self._options
        patience_s = options.drain_timeout_s + _CUT_OFF_S
        grace_s = signals.grace_s(options.drain_grace_s)
        log.info("frontend.draining", processes=len(self._children), grace_s=grace_s)
        for child in self._children:
            child.stop_restarting()
            child.send_signal(signal.SIGUSR1)
        if not self._failed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await signals.hurried.wait()
        self._listener.close()  # else connections would queue that no process accepts
        await asyncio.gather(*(child.end(patience_s) for child in self._children))
        log.info("frontend.stopped")

    async def _hurry(self, hurried: asyncio.Event) -> None:
        """Send two signals, as for a single frontend. Two of the same kind may arrive as one."""
        await hurried.wait()
        for child in self._children:
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGINT)


def run(loaded: Loaded[FrontendOptions]) -> int:
    """Run the parent until SIGTERM or SIGINT; returns the exit code."""
    options = loaded.settings
    is_json = options.log_format == "json"
    width = len(f"process-{options.process.processes}")
    output = Output(sys.stdout.buffer, sys.stderr.buffer, width=width, is_json=is_json)
    with contextlib.closing(output), contextlib.redirect_stderr(LabelledText(output, NAME)):
        set_up_logs(options.log_level, options.log_format)
        failures: Sequence[BaseException] = ()
        code = WRONG_FLAGS
        try:
            code = uvloop.run(_run(loaded, output))
        except* KvRouterError as group:
            failures = leaves(group)
        for failure in failures:
            output.line(NAME, f"kvrouter frontend: {failure}".encode(), is_error=True)
        return code


async def _run(loaded: Loaded[FrontendOptions], output: Output) -> int:
    signals, options = Signals(), loaded.settings
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port))
        nats = []
        if options.nats.is_embedded:
            nats = [f"--nats={await stack.enter_async_context(embedded_server(options.nats))}"]
        siblings = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack closes it)
        log.info(
            "frontend.processes",
            url=url(listener, is_tls=options.tls.files is not None),
            processes=options.process.processes,
            admin_ports=_admin_ports(options),
            replica_sync="on: processes that share a port share their bookings",
        )
        command = [
            sys.executable,
            "-m",
            "kvrouter.frontend",
            *loaded.words,
            *_own_flags(options),
            *nats,
        ]
        return await Processes(options, command, listener, siblings.fileno(), output).run(signals, loaded)


def _own_flags(options: FrontendOptions) -> list[str]:
    """Flags that override the parent's: of several the last one counts."""
    return [
        "--processes=1",
        "--router-replica-sync",
        "--drain-grace-s=0",  # the parent waits for the grace
        f"--admin-port={options.process.admin_port}",
    ]


def _admin_ports(options: FrontendOptions) -> str:
    base = options.process.admin_port
    if not base:
        return "free ones: see each process's frontend.listening"
    return f"{options.process.admin_host}:{base + 1} to {base + options.process.processes}"
