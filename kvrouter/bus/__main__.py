"""`kvrouter nats`: the embedded server, until stopped. `kvrouter nats accounts`: see bus/accounts.py."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from kvrouter.bus import accounts
from kvrouter.bus.embedded import embedded_server
from kvrouter.bus.options import NatsOptions
from kvrouter.bus.settings import COMMAND, EmbeddedOptions
from kvrouter.processes.signals import outlive
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["accounts"]:
        return accounts.main(words[1:])
    return run(COMMAND, words, _main)


def _main(loaded: Loaded[EmbeddedOptions]) -> int:
    set_up_logs()
    asyncio.run(_run(loaded.settings))
    return 0


async def _run(settings: EmbeddedOptions) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    outlive(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    async with embedded_server(NatsOptions(is_open=settings.is_open), settings.url):
        await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())
