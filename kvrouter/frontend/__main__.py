"""`python -m kvrouter.frontend`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from kvrouter.errors import ConfigError
from kvrouter.frontend.options import parse_options
from kvrouter.frontend.serve import serve
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one replica; returns the exit code."""
    try:
        options = parse_options(arguments)
        set_up_logs(options.log_level, options.log_format)
        uvloop.run(serve(options))
    except ConfigError as error:
        print(f"kvrouter.frontend: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
