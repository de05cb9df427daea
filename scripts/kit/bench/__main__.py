"""`python -m scripts.kit.bench SUBCOMMAND`: the measurements, one module each."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

_USAGE = """\
usage: scripts/bench SUBCOMMAND [flags]

  policies   what a decision costs, for each mode and 8, 64, 512 targets
  sync       what replica sync costs, and how soon a booking is visible at the other replicas
  herding    how many of a burst all replicas send to the one idle worker
  lag        how long the event loop keeps things waiting while KV events of a large fleet come
  tokens     what a prompt costs to tokenize when its beginning is known
  hashes     what naming a prompt's blocks costs, in Python and in C
  index      what the block index costs: look-ups, events, memory, a decision; in Python and in C
  churn      a long random history of one table, checked against a simple model
  growth     how hashes, index and decisions grow with targets, tokens and blocks: plots in docs/plots
  long       whether a booking costs the same after a long time: each mode and index, in virtual time
  request    what a short request and a streamed event cost our own code: sockets faked, profile if wanted
  relay      what a request and a streamed event cost at one frontend
  overload   what is answered, and how the rest is refused, at twice the load that the engines carry
  walks      how many files a chat, a KV event and a booking run through: pictures in docs/concepts
  peers      the same work beside nginx, vllm-router, sglang-router and Dynamo's frontend

`scripts/bench SUBCOMMAND --help` lists a sub-command's flags.
"""

_COMMANDS = (
    "policies", "sync", "herding", "lag", "tokens", "hashes", "index", "churn", "growth", "long",
    "request", "relay", "overload", "walks", "peers",
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
