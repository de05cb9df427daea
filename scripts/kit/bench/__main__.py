"""`python -m scripts.kit.bench SUBCOMMAND`: the measurements, one module each."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

_USAGE = """\
usage: scripts/bench SUBCOMMAND [flags]

  policies   cost of a decision, for each mode and 8, 64, 512 targets
  decisions  how far each mode's decisions are from an oracle's, in simulated fleets
  newcomer   requests to an engine without a cache, while the others hold nearly everything
  sync       cost of replica sync, and delay until a booking is visible at the other replicas
  herding    number of requests of a burst that all replicas send to the one idle worker
  lag        delay of the event loop while a large fleet publishes KV events
  tokens     cost of tokenizing a prompt whose beginning is known
  hashes     cost of hashing a prompt's blocks, in Python and in C
  index      cost of the block index: look-ups, events, memory, a decision; in Python and in C
  ghosts     cost of counting a prompt in the ghost caches, and what their sampling misjudges
  churn      a long random history of one table, checked against a simple model
  growth     cost of hashes, index and decisions by targets, tokens and blocks: plots in docs/plots
  long       whether a booking costs the same after a long run: each mode and index, in virtual time
  request    cost of a short request and of a streamed event in kvrouter's code, without sockets; can profile
  relay      cost of a request and of a streamed event at one frontend
  instructions  the same in instructions, which other work on the machine does not change; needs valgrind
  overload   goodput and rejections at twice the load that the engines can serve
  live       weight `auto`, fixed weights and least-loaded over real frontends, at 70 % of saturation
  simulator  the same requests through real frontends and mockers, and through the simulator
  simulating seconds and memory of a simulated run, by requests and engines
  walks      how many files a chat, a KV event and a booking run through: pictures in docs/concepts
  nats       messages, bytes and cores of one NATS server, by workers and replicas
  peers      comparison with nginx, vllm-router, sglang-router and Dynamo's frontend

`scripts/bench SUBCOMMAND --help` lists a sub-command's flags.
"""

_COMMANDS = (
    "policies", "decisions", "newcomer", "sync", "herding", "lag", "tokens", "hashes", "index", "ghosts",
    "churn", "growth", "long", "request", "relay", "instructions", "overload", "live", "simulator",
    "simulating", "walks", "peers", "nats",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    match words:
        case [command, *flags] if command in _COMMANDS:
            return int(importlib.import_module(f"scripts.kit.bench.{command}").main(flags))
        case [] | ["-h" | "--help", *_]:
            print(_USAGE, end="")
            return 0
        case [unknown, *_]:
            print(f"bench: no sub-command {unknown!r}\n\n{_USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load nothing runs yet
    sys.exit(main())
