"""`python -m kvrouter.frontend`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrouter.config import use_core
from kvrouter.core.native import versions
from kvrouter.frontend.settings import COMMAND, FrontendOptions
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one replica, or several on one port; returns the exit code."""
    return run(COMMAND, arguments, _run)


def _run(loaded: Loaded[FrontendOptions]) -> int:
    # only now: --help and wrong settings are answered without loading what serves
    import uvloop

    from kvrouter.frontend.run import serve
    from kvrouter.frontend.server import processes

    options = loaded.settings
    versions.choose(options.core)
    if options.process.processes > 1:
        return processes.run(loaded)
    set_up_logs(options.log_level, options.log_format)
    use_core(options.core)
    uvloop.run(serve(loaded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
