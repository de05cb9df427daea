"""`python -m scripts.kit.bench SUBCOMMAND`: the measurements, one module each."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

_USAGE = """\
usage: scripts/bench SUBCOMMAND [flags]

  policies   what a decision costs, for each mode and 8, 64, 512 targets
  sync       what replica sync costs, and how soon a booking is visible at the other replicas
  herding    how many of a burst all replicas send to the one idle worker
  tokens     what a prompt costs to tokenize when its beginning is known

`scripts/bench SUBCOMMAND --help` lists a sub-command's flags.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    match words:
        case ["sync", *flags]:
            from scripts.kit.bench.sync import main as run

            return run(flags)
        case ["herding", *flags]:
            from scripts.kit.bench.herding import main as run

            return run(flags)
        case ["tokens", *flags]:
            from scripts.kit.bench.tokens import main as run

            return run(flags)
        case ["policies", *flags]:
            from scripts.kit.bench.policies import main as run_policies

            return run_policies(flags)
        case [] | ["-h" | "--help", *_]:
            print(_USAGE, end="")
            return 0
        case [unknown, *_]:
            print(f"bench: no sub-command {unknown!r}\n\n{_USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load nothing runs yet
    sys.exit(main())
