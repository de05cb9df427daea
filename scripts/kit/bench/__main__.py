"""`python -m scripts.kit.bench SUBCOMMAND`: the measurements, one module each."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.kit import script

COMMANDS = {
    "policies": "cost of a decision, for each mode and 8, 64, 512 targets",
    "decisions": "how far each mode's decisions are from an oracle's, in simulated fleets",
    "simulator": "the same requests through real frontends and mockers, and simulated",
    "lag": "delay of the event loop while a large fleet publishes KV events",
    "tokens": "cost of tokenizing: the reference library, the prefix cache, fastokens, and in a frontend",
    "steps": "longest step of the event loop, in instructions, for requests up to the limits; needs valgrind",
    "request": "cost of a short request and of a streamed event in kvrouter's code, without sockets",
    "relay": "cost of a request and of a streamed event at one frontend",
    "instructions": "the same in instructions, which other work does not change; needs valgrind",
    "placement": "a router next to Dynamo's selection service: CPU of a decision, p99, how soon peers know",
    "neighbour": "what a tenant that floods the fleet does to another one's time to first byte",
    "walks": "how many files a chat, a KV event and a booking run through: pictures in docs/concepts",
    "peers": "comparison with nginx, vllm-router, sglang-router and Dynamo's frontend",
}
_USAGE = "\n".join([
    "usage: scripts/bench SUBCOMMAND [flags]\n",
    *(f"  {name:13}{text}" for name, text in COMMANDS.items()),
    "\n`scripts/bench SUBCOMMAND --help` lists a sub-command's flags.\n",
])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    match words:
        case [command, *rest] if command in COMMANDS:
            bench = importlib.import_module(f"scripts.kit.bench.{command}")
            parser = argparse.ArgumentParser(prog=f"scripts/bench {command}", description=bench.__doc__)
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            bench.add_flags(parser)
            parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
            result = bench.run(parser.parse_args(rest))
            return script.run("bench", result) if asyncio.iscoroutine(result) else int(result)
        case [] | ["-h" | "--help", *_]:
            print(_USAGE, end="")
            return 0
        case [unknown, *_]:
            print(f"bench: no sub-command {unknown!r}\n\n{_USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load nothing runs yet
    sys.exit(main())
