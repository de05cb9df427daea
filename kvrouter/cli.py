"""`kvrouter COMMAND …`: one sub-command for each process and tool."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import signal
import sys
from collections.abc import Callable, Sequence

from kvrouter.version import __version__

_USAGE = """\
usage: kvrouter COMMAND [flags]

  serve      a whole deployment: NATS, an agent for each engine, the frontends
  frontend   one replica: OpenAI-compatible HTTP frontend with the router inside
  worker     the agent of an engine: announces it, forwards its KV events, reports its load
  mocker     a simulated engine with vLLM's HTTP surface and KV-event wire
  simulate   a trace replayed on simulated engines in virtual time, once per routing mode
  nats       the embedded NATS server on 127.0.0.1, until stopped
  verify     compares the state of live replicas: whether they agree on blocks and bookings

`kvrouter COMMAND --help` lists a command's flags. `kvrouter --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help"}:
        print(_USAGE, end="")  # noqa: T201
        return 0
    if words[0] == "--version":
        print(__version__)  # noqa: T201
        return 0
    command = _COMMANDS.get(words[0])
    if command is None:
        print(f"kvrouter: {_unknown(words[0])}", file=sys.stderr)  # noqa: T201
        return 2
    return command(words[1:])


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, _COMMANDS, 1)
    suggestion = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
    return f"no command {word!r}; {suggestion}"


# Each command imports its modules when it runs: `kvrouter nats` needs neither tokenizers nor aiohttp.


def _serve(arguments: Sequence[str]) -> int:
    from kvrouter.serve.__main__ import main as run

    return run(arguments)


def _frontend(arguments: Sequence[str]) -> int:
    from kvrouter.frontend.__main__ import main as run

    return run(arguments)


def _worker(arguments: Sequence[str]) -> int:
    from kvrouter.worker.__main__ import main as run

    return run(arguments)


def _mocker(arguments: Sequence[str]) -> int:
    from kvrouter.mocker.__main__ import main as run

    return run(arguments)


def _simulate(arguments: Sequence[str]) -> int:
    from kvrouter.simulate.__main__ import main as run

    return run(arguments)


def _nats(arguments: Sequence[str]) -> int:
    from kvrouter.bus.settings import COMMAND, EmbeddedOptions
    from kvrouter.settings.read import Loaded, run
    from kvrouter.telemetry.logs import set_up_logs

    def main(loaded: Loaded[EmbeddedOptions]) -> int:
        set_up_logs()
        asyncio.run(_run_nats(loaded.settings.url))
        return 0

    return run(COMMAND, arguments, main)


def _verify(arguments: Sequence[str]) -> int:
    from kvrouter.telemetry.logs import set_up_logs
    from kvrouter.verify import main as run

    set_up_logs("error")  # the printed result already contains what warnings would report
    return run(arguments)


async def _run_nats(url: str) -> None:
    from kvrouter.bus.embedded import embedded_server

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(embedded_server(url))
        await stopped.wait()


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "frontend": _frontend,
    "worker": _worker,
    "mocker": _mocker,
    "simulate": _simulate,
    "nats": _nats,
    "verify": _verify,
}
