"""`kvrouter serve`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial

import uvloop

from kvrouter.bus.embedded import embedded_server
from kvrouter.errors import KvRouterError, leaves
from kvrouter.frontend.server.sockets import listen
from kvrouter.processes.output import LabelledText, Output
from kvrouter.processes.signals import Signals
from kvrouter.serve.deployment import Deployment
from kvrouter.serve.report import NAME, Voice
from kvrouter.serve.settings import COMMAND, ServeOptions, with_flags
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a deployment until SIGTERM or SIGINT and return the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[ServeOptions]) -> int:
    options = with_flags(loaded)
    width = len(f"frontend-{max(len(options.engines), options.replicas)}")
    is_json = options.frontend.log_format == "json"
    voice = Voice(is_json=is_json)
    output = Output(sys.stdout.buffer, sys.stderr.buffer, width=width, is_json=is_json, on_line=voice.hear)
    voice.speak_to(output)
    with contextlib.closing(output), contextlib.redirect_stderr(LabelledText(output, NAME)):
        set_up_logs(options.frontend.log_level, options.frontend.log_format)
        return _serve(loaded, options, output, voice)


def _serve(loaded: Loaded[ServeOptions], options: ServeOptions, output: Output, voice: Voice) -> int:
    failures: Sequence[BaseException] = ()
    code = 2
    try:
        code = uvloop.run(_run(loaded, options, output, voice))
    except* KvRouterError as group:  # task groups raise groups
        failures = leaves(group)
    for failure in failures:
        voice.failed(str(failure))
    return code


async def _run(loaded: Loaded[ServeOptions], options: ServeOptions, output: Output, voice: Voice) -> int:
    ports = _free_ports(options)
    signals = Signals()  # the first one drains, the second one kills
    async with contextlib.AsyncExitStack() as stack:
        nats = ",".join(options.nats.servers)
        if options.nats.is_embedded:
            found = partial(_say_found, voice, options.frontend.namespace)
            own = embedded_server(options.nats, f"nats://127.0.0.1:{options.nats_port}", found)
            nats = await stack.enter_async_context(own)
        else:
            joins = f"NATS at {options.nats.shown()} (--nats): {_joins(options.frontend.namespace)}"
            voice.note("serve.nats", joins)
        return await Deployment(options, ports, nats, output, voice).run(signals, loaded)


def _say_found(voice: Voice, namespace: str, url: str) -> None:
    remedy = "if that is not meant, give another --nats-port or --namespace"
    voice.warn("serve.nats_found", f"NATS at {url} was already running: {_joins(namespace)}; {remedy}")


def _joins(namespace: str) -> str:
    return f"joins the fleet of namespace {namespace!r} there, with all its workers and replicas"


def _free_ports(options: ServeOptions) -> list[tuple[int, int]]:
    """The ports of each frontend, for 0 one that the system chooses now. Raises ConfigError.

    Checked first: in a second deployment by mistake, the agents would take over the first one's engines
    before a frontend found its port in use.
    """
    frontend = options.frontend
    with contextlib.ExitStack() as stack:

        def port_of(host: str, port: int, flag: str) -> int:
            listener = stack.enter_context(listen(host, port, flag))
            number: int = listener.getsockname()[1]
            return number

        return [
            (
                port_of(frontend.host, port, "--port"),
                port_of(frontend.process.admin_host, admin, "--admin-port"),
            )
            for port, admin in options.ports()
        ]


if __name__ == "__main__":
    sys.exit(main())
