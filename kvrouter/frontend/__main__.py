"""`python -m kvrouter.frontend`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from kvrouter.config import use_core
from kvrouter.core.native import versions
from kvrouter.errors import ConfigError
from kvrouter.frontend import processes
from kvrouter.frontend.flags.options import parse_options
from kvrouter.frontend.run import serve
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one replica, or several on one port; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options = parse_options(words)
        versions.choose(options.core)
        if options.process.processes > 1:
            return processes.run(options, words)
        set_up_logs(options.log_level, options.log_format)
        use_core(options.core)
        uvloop.run(serve(options))
    except ConfigError as error:
        print(f"kvrouter.frontend: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
